"""Model directories, ours and Hugging Face's: load() and save()."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from keepleft.disk import safetensors
from keepleft.disk.missing_file import missing_file_message
from keepleft.disk.regular_file import exists_in, read_file_in, snapshot_commit
from keepleft.disk.tokenizer_json import TOKENIZER_FILE, read_tokenizer
from keepleft.models.build import build_empty, materialize
from keepleft.models.design import ClassificationHead, Design, PoolingHead, from_json, to_json
from keepleft.models.transformer import Decoder, Encoder, EncoderDecoder
from keepleft.weights.families import families
from keepleft.weights.family import PASSTHROUGH_KEYS, Family
from keepleft.weights.int8_weights import QUANT_METHOD, Int8Source, int8_tensors, is_int8
from keepleft.weights.json_file import read_json
from keepleft.weights.rules import Rule, TensorSource, export_tensors, load_tensors, match_tensors
from keepleft.weights.sentencepiece_files import (
    SENTENCEPIECE_FILES,
    TOKENIZER_CONFIG_FILE,
    read_sentencepiece_files,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

AnyModel = Encoder | Decoder | EncoderDecoder
NATIVE_MODEL_TYPE = "keepleft"  # "model_type" of a design that no published family can express
CHAT_TEMPLATE_FILE = "chat_template.jinja"
GENERATION_CONFIG_FILE = "generation_config.json"
MAX_CHAT_TEMPLATE_BYTES = 1 << 20
HUB_FILE_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "1_Pooling/*", *SENTENCEPIECE_FILES]


def load(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    head: Any = ...,
    ignore: Iterable[str] = (),
    revision: str | None = None,
) -> tuple[AnyModel, Tokenizer | None]:
    """A model in evaluation mode, and its tokenizer if it has one.

    `name_or_path` is a model directory, a GGUF file, or a name on the Hugging Face hub, of which `revision`
    (or NAME@REVISION) pins a branch, tag or commit. Weights are float32 unless `dtype` says otherwise. `head`
    replaces the head by one without weights of its own (None, or PoolingHead("mean")). `ignore` names fields
    of the configuration to ignore.
    """
    folder = resolve_model(name_or_path, revision)
    if folder.suffix == ".gguf" and not folder.is_dir():
        from keepleft.weights import gguf

        return gguf.load(folder, dtype=dtype or torch.float32, device=torch.device(device))
    config = read_json(folder, safetensors.CONFIG_FILE)
    source: TensorSource = safetensors.ShardedDirectory(folder)
    if is_int8(config, str(folder / safetensors.CONFIG_FILE)):
        source = Int8Source(source)
        del config["quantization_config"]
    design, rules, prefix = _resolve_design(config, source, folder, ignore)
    if head is not ...:
        design = design.but(head=head)
        rules = families()[config["model_type"]].rules(design)
    model = load_weights(
        design, rules, source, prefix=prefix, dtype=dtype or torch.float32, device=torch.device(device)
    )
    model.notes = {
        name: value for name, value in config.items() if name in PASSTHROUGH_KEYS or name == "model_type"
    }
    if exists_in(folder, GENERATION_CONFIG_FILE):
        model.notes["generation"] = read_json(folder, GENERATION_CONFIG_FILE)
    if (template := _read_chat_template(folder)) is not None:
        model.notes["chat_template"] = template
    return model, _read_tokenizer(folder, config.get("model_type"), model.design)


def _read_tokenizer(folder: Path, model_type: object, design: Design) -> Tokenizer | None:
    """The tokenizer of a directory, if it has one; of two over one vocabulary that of the source.

    It decodes what the other encodes, and the other way round, but texts are given to the source.
    """
    if exists_in(folder, TOKENIZER_FILE):
        return read_tokenizer(folder)
    pair = read_sentencepiece_files(folder, model_type)
    if pair is None:
        return None
    return pair.tokenizer if pair.source is None or design.source_vocab is not None else pair.source


def is_stored_as_int8(path: Path) -> bool:
    """Whether the weights of a model directory are int8; those of a GGUF file are not asked."""
    return path.is_dir() and is_int8(
        read_json(path, safetensors.CONFIG_FILE), str(path / safetensors.CONFIG_FILE)
    )


def load_weights(
    design: Design,
    rules: list[Rule],
    source: TensorSource,
    *,
    prefix: str,
    dtype: torch.dtype,
    device: torch.device,
) -> AnyModel:
    """A model with the weights of a checkpoint, in evaluation mode.

    Names and shapes are checked before any memory is allocated.
    """
    layers = sum(stack.layers for stack in (design.encoder, design.decoder) if stack)
    tensors = len(source.names())
    if layers > tensors:
        raise ValueError(
            f"the configuration asks for {layers} layers, but the file lacks them: it holds {tensors} tensors"
        )
    try:
        model = build_empty(design, dtype=dtype, device="meta")
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ValueError(f"the configuration asks for sizes that no model can have: {error}") from error
    match_tensors(rules, source, dict(model.state_dict()), prefix=prefix)
    if device.type != "meta":
        materialize(model, device)
        load_tensors(rules, source, dict(model.state_dict()), prefix=prefix)
    return model.eval()


def save(
    model: AnyModel,
    tokenizer: Tokenizer | None,
    folder: str | Path,
    *,
    shard: int = safetensors.MAX_SHARD_BYTES,
    int8: bool = False,
) -> None:
    """Write a model directory for load() and, where a published family has the design, `transformers`.

    Weights come first, config.json last; `shard` is the most bytes of a weight file. With `int8` matrices are
    stored in a quarter of the bytes, rounded, for load() alone.
    """
    folder = Path(folder)
    config, rules, prefix = _export_config(model)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = next(model.parameters()).dtype
    text_files: dict[str, str] = {}
    if tokenizer is not None:
        text_files["tokenizer.json"] = tokenizer.to_str(pretty=True)
    notes = dict(model.notes)
    if (generation := notes.pop("generation", None)) is not None:
        text_files["generation_config.json"] = json.dumps(generation, indent=2) + "\n"
    if (template := notes.pop("chat_template", None)) is not None:
        text_files["chat_template.jinja"] = template
    config = {**notes, **config, "dtype": str(dtype).removeprefix("torch.")}
    config.pop("torch_dtype", None)
    if isinstance(model.design.head, ClassificationHead) and "id2label" in notes:
        config |= {name: notes[name] for name in ("id2label", "label2id") if name in notes}
    tensors = export_tensors(rules, model.state_dict(), prefix=prefix)
    if int8:
        config["quantization_config"] = {"quant_method": QUANT_METHOD}
        tensors = int8_tensors(tensors)
    text_files["config.json"] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    safetensors.save(tensors, folder, text_files, max_shard_bytes=shard)


def _export_config(model: AnyModel) -> tuple[dict[str, Any], list[Rule], str]:
    """Configuration, rules and prefix of a family that can express the design, the model's own first."""
    known_families = families()
    preferred = known_families.get(str(model.notes.get("model_type")))
    for family in ([preferred] if preferred else []) + list(known_families.values()):
        config = family.design_to_config(model.design)
        if config is not None:
            return config, family.rules(model.design), _prefix(family, config)
    config = {
        "model_type": NATIVE_MODEL_TYPE,
        "architectures": [NATIVE_MODEL_TYPE],
        "design": to_json(model.design),
    }
    return config, [Rule(name, name) for name in model.state_dict()], ""


def _resolve_design(
    config: dict[str, Any], source: TensorSource, folder: Path, ignore: Iterable[str]
) -> tuple[Design, list[Rule], str]:
    model_type = config.get("model_type")
    try:
        if model_type == NATIVE_MODEL_TYPE:
            design = from_json(config.get("design", {}))
            return design, [Rule(name, name) for name in source.names()], ""
        if not isinstance(model_type, str) or model_type not in families():
            raise ValueError(
                f"'model_type' is {model_type!r}, which is not understood: there are {', '.join(families())}"
            )
        family = families()[model_type]
        design = _apply_pooling_config(family.config_to_design(config, source.names(), ignore), folder)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from error
    return design, family.rules(design), _prefix(family, config)


def _prefix(family: Family, config: dict[str, Any]) -> str:
    """The prefix of the base model's tensors; optional on reading, as published files come without it too."""
    return "" if (config.get("architectures") or [""])[0] in family.unprefixed_classes else family.prefix


def _apply_pooling_config(design: Design, folder: Path) -> Design:
    """Sentence encoders have their pooling in a file of its own."""
    name = "1_Pooling/config.json"
    if (
        not exists_in(folder, name)
        or design.decoder is not None
        or not isinstance(design.head, PoolingHead | None)
    ):
        return design
    config = read_json(folder, name)
    modes = {
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_cls_token": "first",
        "pooling_mode_lasttoken": "last",
    }
    selected = [mode for name, mode in modes.items() if config.get(name)]
    unsupported = sorted(
        name for name, on in config.items() if name.startswith("pooling_mode_") and on and name not in modes
    )
    if len(selected) != 1 or unsupported:
        raise ValueError(
            f"{folder / name} asks for {selected + unsupported}: one of mean, first and last token is "
            "understood"
        )
    modules = read_json(folder, "modules.json", list) if exists_in(folder, "modules.json") else []
    normalized = any(str(module.get("type", "")).endswith("Normalize") for module in modules)
    return design.but(head=PoolingHead(selected[0], unit=normalized))  # type: ignore[arg-type]


def resolve_model(name_or_path: str | Path, revision: str | None = None) -> Path:
    """The directory or GGUF file of a model; a name on the hub is downloaded, or found in the hub's cache.

    `revision`, or what follows an @ in NAME@REVISION, is a branch, a tag or a commit of a name on the hub.
    """
    path = Path(name_or_path)
    if revision is not None and path.exists():
        raise ValueError(
            f"the revision {revision!r} was asked for, but {path} is on this machine: a revision belongs to "
            "a name on the hub; leave it out"
        )
    if path.is_dir() or path.suffix == ".gguf":
        if not path.exists():
            raise FileNotFoundError(missing_file_message(path))
        return path
    if path.exists():
        if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
            raise ValueError(safetensors.pickle_message(path))
        raise ValueError(f"{path} is a file: name the directory that holds it and its config.json")
    name, at_sign, name_revision = str(name_or_path).partition("@")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise FileNotFoundError(
            f"there is no model directory {name_or_path}, and that is no OWNER/NAME on the hub: give a path; "
            "`keepleft doctor` prints those of the installed models"
        )
    if revision is not None and at_sign and revision != name_revision:
        raise ValueError(
            f"{name_or_path} names the revision {name_revision!r}, and {revision!r} was asked for: give one"
        )
    revision = revision or name_revision or None
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise FileNotFoundError(
            f"there is no directory {name_or_path}, and to fetch a model of that name from the hub you need "
            "pip install 'keepleft[hub]'"
        ) from error
    try:
        # none of these files is code; which model to trust is the user's choice
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=HUB_FILE_PATTERNS)  # nosec B615
        )
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"there is no directory {name_or_path}, and the Hugging Face hub could not be reached to look "
            "for a model of that name: check the path, or the connection"
        ) from error
    except Exception as error:  # its own, its HTTP client's or the system's
        with_revision = f" and revision {revision!r}" if revision else ""
        reason = (
            str(error).strip().rpartition("\n\n")[2].partition("\n")[0]
        )  # the status and its id come first
        raise FileNotFoundError(
            f"there is no directory {name_or_path}, and the hub gives no model of that name{with_revision}: "
            f"{reason}"
        ) from error


def pin_revision(name_or_path: str, revision: str | None = None) -> str:
    """NAME@COMMIT for a name on the hub, where the commit is known; a path as it is."""
    folder = resolve_model(name_or_path, revision)
    if Path(name_or_path).exists():
        return name_or_path
    name, _, name_revision = name_or_path.partition("@")
    commit = snapshot_commit(folder) or revision or name_revision
    return f"{name}@{commit}" if commit else name


def _read_chat_template(folder: Path) -> str | None:
    """The chat template: a file of its own, or one or several templates in tokenizer_config.json."""
    if exists_in(folder, CHAT_TEMPLATE_FILE):
        content = read_file_in(folder, CHAT_TEMPLATE_FILE, max_bytes=MAX_CHAT_TEMPLATE_BYTES)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{folder / CHAT_TEMPLATE_FILE} is not UTF-8 text: {error}") from error
    if not exists_in(folder, TOKENIZER_CONFIG_FILE):
        return None
    template = read_json(folder, TOKENIZER_CONFIG_FILE).get("chat_template")
    if isinstance(template, list):
        templates = {
            entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)
        }
        template = templates.get("default")
    if not isinstance(template, str):
        return None
    if len(template) > MAX_CHAT_TEMPLATE_BYTES:
        raise ValueError(
            f"the chat template in {folder / TOKENIZER_CONFIG_FILE} has {len(template):,} characters, and at "
            f"most {MAX_CHAT_TEMPLATE_BYTES:,} are read: copy or download it again"
        )
    return template
