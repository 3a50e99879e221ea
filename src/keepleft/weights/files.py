"""Model directories: load() and save()."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from keepleft.disk import safetensors
from keepleft.disk.tokenizer import parsed
from keepleft.models.build import empty, housed
from keepleft.models.design import Classes, Design, Pooled
from keepleft.models.wholes import Decoder, Encoder, EncoderDecoder
from keepleft.models.written import read as read_design
from keepleft.models.written import write as write_design
from keepleft.weights.families import families
from keepleft.weights.family import HARMLESS, Family
from keepleft.weights.rules import Rule, Source, give, match, take

if TYPE_CHECKING:
    from tokenizers import Tokenizer

AnyModel = Encoder | Decoder | EncoderDecoder
OWN = "keepleft"  # the "model_type" of a design that no other program knows


def load(place: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", head: Any = ...,
         ignore: Iterable[str] = ()) -> tuple[AnyModel, Tokenizer | None]:
    """A model, ready to run, and its tokenizer, if it has one.

    `place` is a model directory (ours or Hugging Face's), a GGUF file, or a name on the Hugging Face hub. Weights are
    float32 unless `dtype` says otherwise. `head` puts another head without weights of its own on an encoder (None, or
    Pooled("mean")). `ignore` names fields of the configuration to pass over.
    """
    folder = _found(place)
    if folder.suffix == ".gguf" and not folder.is_dir():
        from keepleft.weights import gguf
        return gguf.load(folder, dtype=dtype or torch.float32, device=torch.device(device))
    config = _json(folder / "config.json")
    source = safetensors.Directory(folder)
    design, rules, prefix = _understood(config, source, folder, ignore)
    if head is not ...:
        design = design.but(head=head)
        rules = families()[config["model_type"]].rules(design)
    model = fill(design, rules, source, prefix=prefix, dtype=dtype or torch.float32, device=torch.device(device))
    model.notes = {name: value for name, value in config.items() if name in HARMLESS or name == "model_type"}
    if (folder / "generation_config.json").exists():
        model.notes["generation"] = _json(folder / "generation_config.json")
    if (template := _chat_template(folder)) is not None:
        model.notes["chat_template"] = template
    return model, _tokenizer(folder)


def fill(design: Design, rules: list[Rule], source: Source, *, prefix: str, dtype: torch.dtype,
         device: torch.device) -> AnyModel:
    """A model with the weights of a source, in evaluation mode; an error leaves nothing half-loaded behind.

    Names and shapes are looked at before any memory is asked for.
    """
    layers, tensors = sum(stack.layers for stack in (design.encoder, design.decoder) if stack), len(source.names())
    if layers > tensors:
        raise ValueError(f"the configuration asks for {layers} layers, but the file lacks them: it holds {tensors} tensors")
    try:
        model = empty(design, dtype=dtype, device="meta")
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ValueError(f"the configuration asks for sizes that no model can have: {error}") from error
    match(rules, source, dict(model.state_dict()), prefix=prefix)
    if device.type != "meta":
        housed(model, device)
        take(rules, source, dict(model.state_dict()), prefix=prefix)
    return model.eval()


def save(model: AnyModel, tokenizer: Tokenizer | None, folder: str | Path, *, shard: int = safetensors.SHARD) -> None:
    """Write a directory that load(), and where the design is a known one `transformers`, reads: weights, then config.json."""
    folder = Path(folder)
    config, rules, prefix = _written(model)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = next(model.parameters()).dtype
    texts: dict[str, str] = {}
    if tokenizer is not None:
        texts["tokenizer.json"] = tokenizer.to_str(pretty=True)
    notes = dict(model.notes)
    if (generation := notes.pop("generation", None)) is not None:
        texts["generation_config.json"] = json.dumps(generation, indent=2) + "\n"
    if (template := notes.pop("chat_template", None)) is not None:
        texts["chat_template.jinja"] = template
    config = {**notes, **config, "dtype": str(dtype).removeprefix("torch.")}
    config.pop("torch_dtype", None)
    if isinstance(model.design.head, Classes) and "id2label" in notes:
        config |= {name: notes[name] for name in ("id2label", "label2id") if name in notes}
    texts["config.json"] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    safetensors.save(give(rules, model.state_dict(), prefix=prefix), folder, texts, shard=shard)


def _written(model: AnyModel) -> tuple[dict[str, Any], list[Rule], str]:
    """The configuration under a name that others know, the model's own first; ours where none can say the design."""
    known = families()
    own = known.get(str(model.notes.get("model_type")))
    for family in ([own] if own else []) + list(known.values()):
        config = family.write(model.design)
        if config is not None:
            return config, family.rules(model.design), _prefix(family, config)
    names = list(model.state_dict())
    return {"model_type": OWN, "architectures": [OWN], "design": write_design(model.design)}, [Rule(n, n) for n in names], ""


def _understood(config: dict[str, Any], source: Source, folder: Path,
                ignore: Iterable[str]) -> tuple[Design, list[Rule], str]:
    kind = config.get("model_type")
    try:
        if kind == OWN:
            design = read_design(config.get("design", {}))
            return design, [Rule(name, name) for name in source.names()], ""
        if not isinstance(kind, str) or kind not in families():
            raise ValueError(f"'model_type' is {kind!r}, which is not understood: there are {', '.join(families())}")
        family = families()[kind]
        design = _pooled(family.read(config, source.names(), ignore), folder)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from error
    return design, family.rules(design), _prefix(family, config)


def _prefix(family: Family, config: dict[str, Any]) -> str:
    """Of the base model's tensors. On reading it is optional: published files come with and without."""
    return "" if (config.get("architectures") or [""])[0] in family.bare else family.prefix


def _pooled(design: Design, folder: Path) -> Design:
    """Sentence encoders say beside the model how a text becomes one vector."""
    path = folder / "1_Pooling" / "config.json"
    if not path.exists() or design.decoder is not None or not isinstance(design.head, Pooled | None):
        return design
    said = _json(path)
    ways = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first", "pooling_mode_lasttoken": "last"}
    chosen = [way for name, way in ways.items() if said.get(name)]
    others = sorted(name for name, on in said.items() if name.startswith("pooling_mode_") and on and name not in ways)
    if len(chosen) != 1 or others:
        raise ValueError(f"{path} asks for {chosen + others}: one of mean, first and last token is understood")
    modules = _json(folder / "modules.json", list) if (folder / "modules.json").exists() else []
    unit = any(str(module.get("type", "")).endswith("Normalize") for module in modules)
    return design.but(head=Pooled(chosen[0], unit=unit))  # type: ignore[arg-type]


def _found(place: str | Path) -> Path:
    path = Path(place)
    if path.is_dir() or path.suffix == ".gguf":
        if not path.exists():
            raise FileNotFoundError(f"there is no file {path}")
        return path
    if path.exists():
        if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
            raise ValueError(safetensors.pickled(path))
        raise ValueError(f"{path} is a file: name the directory that holds it and its config.json")
    if str(place).count("/") != 1 or str(place).startswith((".", "/", "~")):
        raise FileNotFoundError(f"there is no model directory {place}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise FileNotFoundError(f"there is no directory {place}, and to fetch a model of that name from the hub you need "
                                "pip install 'keepleft[hub]'") from error
    try:
        return Path(snapshot_download(str(place), allow_patterns=["*.json", "*.safetensors", "*.jinja", "1_Pooling/*"]))
    except Exception as error:  # its own, its HTTP client's or the system's
        raise FileNotFoundError(f"there is no directory {place}, and the hub gives no model of that name: {error}") from error


def _where(path: Path) -> str:
    """Where a file that is missing may be: a run keeps its model in a folder of its own."""
    inner = path.parent / "model"
    return f"did you mean {inner}?" if (inner / path.name).exists() else f"is {path.parent} a model directory?"


def _json(path: Path, kind: type = dict) -> Any:
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} is missing: {_where(path)}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, kind):
        raise ValueError(f"{path} is JSON, but not {'an object' if kind is dict else 'a list'}: copy or download it again")
    return found


def _chat_template(folder: Path) -> str | None:
    """How a chat becomes one text: in a file of its own, or in the tokenizer's configuration as one template or several."""
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text("utf-8")
    if not (folder / "tokenizer_config.json").exists():
        return None
    found = _json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _tokenizer(folder: Path) -> Tokenizer | None:
    if not (folder / "tokenizer.json").exists():
        return None
    return parsed((folder / "tokenizer.json").read_bytes(), folder / "tokenizer.json")
