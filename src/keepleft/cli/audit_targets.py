"""The model to audit: a model directory, the result of a function, or a class of transformers."""

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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepleft.auditing.sarif import SourceLocation

AuditArguments = dict[str, Any]  # keyword arguments of keepleft.audit

# -- a model directory -------------------------------------------------------------------------


def from_directory(path: str, revision: str | None = None) -> AuditArguments:
    """A model as load() reads it, which runs no code from the directory. It claims the mask of its design."""
    from keepleft.cli.paths import model_path
    from keepleft.weights.families import families
    from keepleft.weights.model_directory import NATIVE_MODEL_TYPE, load

    file = Path(path) / "config.json"
    model_type = _read_config(file).get("model_type") if file.is_file() else NATIVE_MODEL_TYPE
    if model_type not in (NATIVE_MODEL_TYPE, *families()):
        raise ValueError(
            f"{file}: 'model_type' is {model_type!r}, which is none of ours: --with transformers audits its "
            "own class"
        )
    model, _ = load(model_path(path, revision))
    stack = model.design.decoder or model.design.encoder
    assert stack is not None
    return {"target": model, "claim": reduce(or_, dict.fromkeys(stack.mask))}


# -- the user's own code -----------------------------------------------------------------------


def is_code(reference: str) -> bool:
    """Is it FILE.py:NAME or MODULE:NAME?"""
    return (
        ":" in reference
        and not os.path.exists(reference)
        and reference.rpartition(":")[2].replace(".", "").isidentifier()
    )


def from_code(reference: str) -> AuditArguments:
    """What the function (or class, or model) of this name returns."""
    module_path, _, name = reference.rpartition(":")
    target: Any
    if module_path.endswith(".py"):
        target = _import_file(Path(module_path))
    else:
        target = _import_by_name(module_path)
    for part in name.split("."):
        if not hasattr(target, part):
            suggestions = get_close_matches(part, dir(target), 1)
            hint = (
                f"did you mean {suggestions[0]}?"
                if suggestions
                else "name a function in it that returns the model"
            )
            raise ValueError(f"{module_path} has no {name!r}: {hint}")
        target = getattr(target, part)
    return _audit_arguments(_build_target(target, reference), reference)


def _audit_arguments(built: Any, reference: str) -> AuditArguments:
    """From a model, (model, example), (model, example, further arguments) or a dict of all arguments."""
    from keepleft.attention.masks import parse_mask
    from keepleft.auditing.audit import audit

    match built:
        case dict():
            out = dict(built)
        case (target, example):
            out = {"target": target, "example": example}
        case (target, example, dict(extra)):
            out = {"target": target, "example": example, **extra}
        case _:
            out = {"target": built}
    parameters = inspect.signature(audit).parameters
    for name in out:
        if name not in parameters:
            raise ValueError(
                f"{reference} returns {name!r}, which is no argument of keepleft.audit: there are "
                f"{', '.join(parameters)}"
            )
    if not callable(out.get("target")):
        raise ValueError(
            f"{reference} returns {_describe(out.get('target', built))}, which is no model: let it return a "
            "model, (model, example), or a dict of arguments of keepleft.audit with the model under 'target'"
        )
    if isinstance(out.get("claim"), str):
        out["claim"] = parse_mask(out["claim"])
    return out


def _build_target(factory: Any, reference: str) -> Any:
    """Call a function or class for the model; a model, dict or tuple is taken as it is."""
    from torch import nn

    if isinstance(factory, nn.Module | dict | tuple):
        return factory
    if not callable(factory):
        raise ValueError(
            f"{reference} is {_describe(factory)}: name a function without arguments that returns the model"
        )
    try:
        required = [
            parameter.name
            for parameter in inspect.signature(factory).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):  # some callables have no signature
        required = []
    if required:
        raise ValueError(
            f"{reference} needs {', '.join(required)}: name a function without arguments that returns the "
            "model"
        )
    with _explain_errors(f"{reference} could not build the model"):
        return factory()


def _import_by_name(name: str) -> ModuleType:
    """Import a module by its dotted name, from the current folder first."""
    _add_to_sys_path(Path.cwd())
    try:
        with _explain_errors(f"{name} could not be imported", reraise=ModuleNotFoundError):
            return import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ValueError(
                f"there is no module {error.name!r}: install it, go to the folder that holds it, or give "
                "path/to/file.py:function"
            ) from error
        raise ValueError(f"{name} could not be imported: {error}") from error


def _import_file(file: Path) -> ModuleType:
    """Import a module by its path; as part of its package if it is in one."""
    if not file.is_file():
        from keepleft.disk.missing_file import missing_file_message

        raise ValueError(missing_file_message(file))
    folder, parts = file.resolve().parent, [file.stem]
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    _add_to_sys_path(Path.cwd())
    _add_to_sys_path(folder)
    if len(parts) > 1:
        return _import_by_name(".".join(parts))
    name = file.stem if file.stem not in {*sys.modules, *sys.stdlib_module_names} else f"audited_{file.stem}"
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)  # dataclasses look up their module there
    with _explain_errors(f"{file} could not be imported"):
        spec.loader.exec_module(module)
    return module


def _add_to_sys_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@contextmanager
def _explain_errors(message: str, reraise: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Turn whatever the user's code raises into an error of one line, with the line of code."""
    try:
        yield
    except reraise:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError):
            location = f"{error.filename}:{error.lineno}"
        else:
            frames = traceback.extract_tb(error.__traceback__)
            user_frames = [
                frame
                for frame in frames
                if "site-packages" not in frame.filename and not frame.filename.startswith("<")
            ]
            frame = (user_frames or frames)[-1]
            location = f"{frame.filename}:{frame.lineno}"
        detail = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
        raise ValueError(f"{message}: {type(error).__name__}: {detail} ({location})") from error


def locate(target: Any) -> SourceLocation | None:
    """Where the audited class or function is defined; None where that is no file of the user's."""
    from torch import nn

    from keepleft.auditing.introspect import unwrap
    from keepleft.auditing.sarif import SourceLocation, is_own_code

    definition = type(unwrap(target)) if isinstance(target, nn.Module) else inspect.unwrap(target)
    try:
        file = inspect.getsourcefile(definition)
        line = inspect.getsourcelines(definition)[1]
    except (OSError, TypeError):  # it has no source
        return None
    return SourceLocation(Path(file), line) if file is not None and is_own_code(Path(file)) else None


# -- a class of transformers -------------------------------------------------------------------


def from_config(file: str, arch: str | None) -> AuditArguments:
    """A model of this configuration, with random weights."""
    is_directory = Path(file).is_dir()
    path = Path(file) / "config.json" if is_directory else Path(file)
    config_dict = _read_config(path, in_directory=is_directory)
    model_class = _model_class(arch, config_dict, path)
    config = _make_config(model_class, config_dict, path)
    if hasattr(model_class, "from_config"):
        return {"target": model_class.from_config(config, trust_remote_code=False)}
    return {"target": model_class(config)}


def from_transformers(path: str, arch: str | None) -> AuditArguments:
    """A model directory as transformers loads it, from safetensors only and without running its code."""
    import torch

    from keepleft.disk.regular_file import check_files_in

    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {path}: --with transformers takes a model directory")
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{path} holds an adapter: merge it into its model and save that")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{path} holds no .safetensors: pickled weights can run code when they are read, so save them as "
            "safetensors, or audit random weights with --hf-config"
        )
    check_files_in(folder)
    config = _read_config(folder / "config.json")
    model_class = _model_class(arch, config, folder / "config.json")
    return {
        "target": model_class.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
    }


def _model_class(arch: str | None, config: dict[str, Any], file: Path) -> Any:
    """The class of transformers called `arch`, or the one that the configuration names."""
    transformers = import_transformers()
    architectures = config.get("architectures")
    name = arch or (architectures[0] if isinstance(architectures, list) and architectures else None)
    if not isinstance(name, str):
        raise ValueError(
            f"{file} names no class ('architectures' is {architectures!r}): give one, as in "
            "--arch AutoModelForCausalLM"
        )
    model_class = getattr(transformers, name, None)
    if not isinstance(model_class, type) or not (
        hasattr(model_class, "from_config") or hasattr(model_class, "config_class")
    ):
        class_names = [
            class_name
            for class_name in dir(transformers)
            if "For" in class_name or class_name.endswith("Model")
        ]
        raise ValueError(
            f"transformers {transformers.__version__} has no model class {name!r}: "
            f"{_suggest(name, class_names)}"
        )
    return model_class


def _make_config(model_class: Any, config_dict: dict[str, Any], file: Path) -> Any:
    """The configuration as an instance of the class that the model takes."""
    transformers = import_transformers()
    config_mapping = transformers.CONFIG_MAPPING
    model_type = config_dict.get("model_type")
    if model_type is None and getattr(model_class, "config_class", None) is None:
        raise ValueError(
            f"{file} has no 'model_type': add one, or name the class itself, as in --arch LlamaForCausalLM"
        )
    if model_type is not None and model_type not in config_mapping:
        raise ValueError(
            f"{file}: 'model_type' is {model_type!r}, which transformers {transformers.__version__} does not "
            f"know: {_suggest(model_type, list(config_mapping))}"
        )
    dropped_keys = ("auto_map", "dtype", "torch_dtype")  # no remote code; float32 shows smaller leaks
    config = (config_mapping[model_type] if model_type else model_class.config_class).from_dict(
        {k: v for k, v in config_dict.items() if k not in dropped_keys}
    )
    expected = getattr(model_class, "config_class", None)
    if expected is None or isinstance(config, expected):
        return config
    if isinstance(config.get_text_config(), expected):  # the language model inside a multimodal one
        return config.get_text_config()
    raise ValueError(
        f"{file} is for {model_type}, and {model_class.__name__} takes {expected.model_type}: give --arch a "
        f"class of {model_type}, or AutoModelForCausalLM"
    )


def import_transformers() -> Any:
    """The library, offline: the model is on this machine, and nothing is downloaded for it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise ImportError(
            "auditing classes of transformers needs transformers: pip install transformers"
        ) from error
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _read_config(file: Path, *, in_directory: bool = True) -> dict[str, Any]:
    """A config.json. Raises ValueError if it is unsafe to open, or names code to download."""
    from keepleft.disk.missing_file import missing_file_message
    from keepleft.disk.regular_file import MAX_JSON_BYTES, read_file_in, read_regular_file

    try:
        if in_directory:
            content = read_file_in(file.parent, file.name, max_bytes=MAX_JSON_BYTES)
        else:
            content = read_regular_file(file, max_bytes=MAX_JSON_BYTES)
        config = json.loads(content.decode())
    except FileNotFoundError as error:
        raise ValueError(missing_file_message(file)) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(
            f"{file} holds {_describe(config)}: a configuration is an object with names and values"
        )
    for name, value in _walk_values(config):
        if name.endswith("_implementation") and isinstance(value, str) and "/" in value:
            raise ValueError(
                f"{file}: {name!r} is {value!r}, code that would be fetched from elsewhere: take it out"
            )
    return config


def _walk_values(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its key; {"attn_implementation": {"text": …}} counts as attn_implementation."""
    if isinstance(value, dict):
        for key, part in value.items():
            keep_name = name.endswith("_implementation") and not isinstance(part, dict | list)
            yield from _walk_values(part, name if keep_name else key)
    elif isinstance(value, list):
        for part in value:
            yield from _walk_values(part, name)
    else:
        yield name, value


def _suggest(name: str, names: Sequence[str]) -> str:
    suggestions = get_close_matches(name, names, 3)
    return (
        f"did you mean {' or '.join(suggestions)}?"
        if suggestions
        else "look at its name, or install another version"
    )


def _describe(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
