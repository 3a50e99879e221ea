"""What an audit is of: a model directory, a function in the user's own code, or a class of transformers."""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import reduce
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from operator import or_
from pathlib import Path
from types import ModuleType
from typing import Any

Arguments = dict[str, Any]  # of keepleft.audit

# -- a model directory -------------------------------------------------------------------------


def directory(place: str) -> Arguments:
    """Loaded as load() does, which runs nothing that lies there. What the model is built with is its claim."""
    from keepleft.cli.found import installed_weights
    from keepleft.weights.families import families
    from keepleft.weights.files import OWN, load

    file = Path(place) / "config.json"
    if file.is_file() and (kind := _read(file).get("model_type")) not in (OWN, *families()):
        raise ValueError(f"{file}: 'model_type' is {kind!r}, which is none of ours: --with transformers audits its own class")
    model, _ = load(place if os.path.exists(place) else installed_weights().get(place, place))
    stack = model.design.decoder or model.design.encoder
    assert stack is not None
    return {"target": model, "claim": reduce(or_, dict.fromkeys(stack.mask))}


# -- the user's own code -----------------------------------------------------------------------


def is_code(given: str) -> bool:
    """FILE.py:NAME or MODULE:NAME?"""
    return ":" in given and not os.path.exists(given) and given.rpartition(":")[2].replace(".", "").isidentifier()


def code(given: str) -> Arguments:
    """What the function (or class, or model) of this name gives."""
    place, _, name = given.rpartition(":")
    found: Any = _file(Path(place)) if place.endswith(".py") else _module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            close = get_close_matches(part, dir(found), 1)
            raise ValueError(f"{place} has no {name!r}: " + (f"did you mean {close[0]}?" if close else
                                                            "name a function in it that gives the model"))
        found = getattr(found, part)
    return arguments(_made(found, given), given)


def arguments(made: Any, given: str) -> Arguments:
    """A model, (model, example), (model, example, further arguments) or a dict of all arguments."""
    from keepleft.attention.reading import mask
    from keepleft.auditing.audit import audit

    match made:
        case dict():
            out = dict(made)
        case (target, example):
            out = {"target": target, "example": example}
        case (target, example, dict(further)):
            out = {"target": target, "example": example, **further}
        case _:
            out = {"target": made}
    known = inspect.signature(audit).parameters
    for name in out:
        if name not in known:
            raise ValueError(f"{given} gives {name!r}, which is no argument of keepleft.audit: there are {', '.join(known)}")
    if not callable(out.get("target")):
        raise ValueError(f"{given} gives {_kind(out.get('target', made))}, which is no model: let it give a model, (model, "
                         "example), or a dict of arguments of keepleft.audit with the model under 'target'")
    if isinstance(out.get("claim"), str):
        out["claim"] = mask(out["claim"])
    return out


def _made(found: Any, given: str) -> Any:
    from torch import nn

    if isinstance(found, nn.Module | dict | tuple):
        return found
    if not callable(found):
        raise ValueError(f"{given} is {_kind(found)}: name a function without arguments that gives the model")
    try:
        needed = [one.name for one in inspect.signature(found).parameters.values()
                  if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    except (TypeError, ValueError):  # some things that can be called do not say how
        needed = []
    if needed:
        raise ValueError(f"{given} needs {', '.join(needed)}: name a function without arguments that gives the model")
    with _told(f"{given} could not give the model"):
        return found()


def _module(name: str) -> ModuleType:
    """By its dotted name; the current folder is looked in first."""
    _look_in(Path.cwd())
    try:
        with _told(f"{name} could not be imported", but=ModuleNotFoundError):
            return import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ValueError(f"there is no module {error.name!r}: install it, go to the folder that holds it, or give "
                             "path/to/file.py:function") from error
        raise ValueError(f"{name} could not be imported: {error}") from error


def _file(file: Path) -> ModuleType:
    """By its path: as a part of its package if it is in one."""
    if not file.is_file():
        raise ValueError(f"there is no file {file}: look at its name, or go to the folder that it is named from")
    folder, parts = file.resolve().parent, [file.stem]
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    _look_in(Path.cwd())
    _look_in(folder)
    if len(parts) > 1:
        return _module(".".join(parts))
    name = file.stem if file.stem not in {*sys.modules, *sys.stdlib_module_names} else f"audited_{file.stem}"
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)  # dataclasses look there
    with _told(f"{file} could not be imported"):
        spec.loader.exec_module(module)
    return module


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@contextmanager
def _told(what: str, but: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Whatever the user's code raises, in one line with its place."""
    try:
        yield
    except but:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError):
            where = f"{error.filename}:{error.lineno}"
        else:
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if "site-packages" not in frame.filename and not frame.filename.startswith("<")]
            where = f"{(own or frames)[-1].filename}:{(own or frames)[-1].lineno}"
        said = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
        raise ValueError(f"{what}: {type(error).__name__}: {said} ({where})") from error


# -- a class of transformers -------------------------------------------------------------------


def configured(file: str, arch: str | None) -> Arguments:
    """Random weights in the shape that a configuration tells."""
    path = Path(file) / "config.json" if Path(file).is_dir() else Path(file)
    found = _read(path)
    kind = _class(arch, found, path)
    config = _config(kind, found, path)
    return {"target": kind.from_config(config, trust_remote_code=False) if hasattr(kind, "from_config") else kind(config)}


def published(place: str, arch: str | None) -> Arguments:
    """What transformers makes of a model directory: of safetensors alone, and without code that may lie there."""
    import torch

    folder = Path(place)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {place}: --with transformers takes a model directory")
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{place} holds an adapter: merge it into its model and save that")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{place} holds no .safetensors: pickled weights can run code when they are read, so save them as "
                         "safetensors, or audit random weights with --hf-config")
    found = _read(folder / "config.json")
    kind = _class(arch, found, folder / "config.json")
    return {"target": kind.from_pretrained(folder, dtype=torch.float32, use_safetensors=True, local_files_only=True,
                                           trust_remote_code=False)}


def _class(arch: str | None, config: Arguments, file: Path) -> Any:
    """The class that is asked for, or the one that the configuration names."""
    transformers = _transformers()
    named = config.get("architectures")
    name = arch or (named[0] if isinstance(named, list) and named else None)
    if not isinstance(name, str):
        raise ValueError(f"{file} names no class ('architectures' is {named!r}): give one, as in --arch AutoModelForCausalLM")
    kind = getattr(transformers, name, None)
    if not isinstance(kind, type) or not (hasattr(kind, "from_config") or hasattr(kind, "config_class")):
        models = [known for known in dir(transformers) if "For" in known or known.endswith("Model")]
        raise ValueError(f"transformers {transformers.__version__} has no model class {name!r}: {_close(name, models)}")
    return kind


def _config(kind: Any, found: Arguments, file: Path) -> Any:
    """The configuration in the class that this model takes."""
    transformers = _transformers()
    known = transformers.CONFIG_MAPPING
    sort = found.get("model_type")
    if sort is None and getattr(kind, "config_class", None) is None:
        raise ValueError(f"{file} has no 'model_type': add one, or name the class itself, as in --arch LlamaForCausalLM")
    if sort is not None and sort not in known:
        raise ValueError(f"{file}: 'model_type' is {sort!r}, which transformers {transformers.__version__} does not know: "
                         f"{_close(sort, list(known))}")
    left_out = ("auto_map", "dtype", "torch_dtype")  # no code from elsewhere; float32 shows more
    config = (known[sort] if sort else kind.config_class).from_dict({k: v for k, v in found.items() if k not in left_out})
    wanted = getattr(kind, "config_class", None)
    if wanted is None or isinstance(config, wanted):
        return config
    if isinstance(config.get_text_config(), wanted):  # the language model of a larger one
        return config.get_text_config()
    raise ValueError(f"{file} is for {sort}, and {kind.__name__} takes {wanted.model_type}: give --arch a class of {sort}, or "
                     "AutoModelForCausalLM")


def _transformers() -> Any:
    """Offline: what is audited lies on this machine, and nothing is fetched for it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise ImportError("to audit classes of transformers you need pip install transformers") from error
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _read(file: Path) -> Arguments:
    """A configuration that names no code to fetch."""
    try:
        found = json.loads(file.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"there is no file {file}: give a config.json of Hugging Face's") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds {_kind(found)}: a configuration is an object with names and values")
    for name, value in _all(found):
        if name.endswith("_implementation") and isinstance(value, str) and "/" in value:
            raise ValueError(f"{file}: {name!r} is {value!r}, code that would be fetched from elsewhere: take it out")
    return found


def _all(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _all(part, key if isinstance(part, dict | list) or not name.endswith("_implementation") else name)
    elif isinstance(value, list):
        for part in value:
            yield from _all(part, name)
    else:
        yield name, value


def _close(name: str, names: Sequence[str]) -> str:
    close = get_close_matches(name, names, 3)
    return f"did you mean {' or '.join(close)}?" if close else "look at its name, or install another version"


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
