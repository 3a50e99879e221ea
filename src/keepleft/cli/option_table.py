"""Every option of a command as data, from the signature and the docstring of its function.

Help pages, shell completion, error messages and the reference are made from it. cli/parser.py tells which
parameters have a meaning of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from keepleft.cli.command_table import Command

MORE_OPTIONS = "More options"
BATCH_JOB_OPTIONS = "Batch jobs"
MAX_CHOICES_WIDTH = 16  # more choices are named in the sentence of the option
RESERVED_PARAMETERS = ("inputs", "explicit_options", "flags", "job", "options")
THREADS_HELP = "number of CPU threads (default: one per usable core)"
CONFIG_HELP = "a YAML file with any of these options. Options on the command line take precedence"
CHAT_SEED_HELP = "random seed of the answers"
PRINT_CONFIG_HELP = "print all options as YAML, for a --config file, and stop"

# What stands for the value of an option. Shell completion offers files for FILE, folders for FOLDER, …
METAVARS = {
    "FILE": "input output plot html junit hf_config api_key_file path src tgt train valid source_path load "
    "card",
    "FOLDER": "runs compare phrases out",
    "MODEL": "draft_model init_from",
    "MODEL|FILE": "baseline",
    "NAME": "preset served_model_name metric replica field id_field",
    "NAMES": "checks views track",
    "TEXT": "text source prompt prefix system",
    "KEY": "api_key operator_key",
    "ADDRESS": "host address",
    "HOST": "allow_host",
    "URL": "allow_origin",
    "MASK": "claim",
    "CLASS": "arch",
    "LIBRARY": "zoo with",
    "STRING": "stop_strings",
    "SCHEMA": "json_schema",
    "TYPE": "dtype quantization",
    "FORMAT": "to",
}
# names that mean another thing in one command
COMMAND_METAVARS = {
    ("export", "out"): "PATH",
    **{(name, "to"): "LANGUAGE" for name in ("translate", "eval", "show")},
}
_METAVAR_BY_NAME = {name: metavar for metavar, names in METAVARS.items() for name in names.split()}
_WORDS = {  # what a metavar stands for
    "FILE": "a file",
    "FOLDER": "a folder",
    "PATH": "a file or a folder",
    "MODEL": "a model",
    "MODEL|FILE": "a model or a file",
    "NAMES": "names, separated by commas",
    "SCHEMA": "a JSON schema",
    "MASK": "a mask",
    "CLASS": "the name of a class",
    "NAME": "a name",
    "TEXT": "a text",
    "DEVICE": "cpu or cuda",
    "REVISION": "a branch, tag or commit",
    "TAG": "a token",
    "LANGUAGE": "the code of a language",
    "LIBRARY": "the name of a library",
    "ADDRESS": "an address of this machine",
    "HOST": "the name of a host",
    "URL": "the origin of a web page",
    "KEY": "a key",
}
_COMPOUND_TYPES: dict[Any, tuple[str, str]] = {  # metavar and words
    tuple[int, ...]: ("N ...", "whole numbers, separated by spaces"),
    tuple[int, float]: ("LIST", "two numbers, as in '[30, 1.1]'"),
    tuple[float, float]: ("LIST", "two numbers, as in '[0.9, 0.98]'"),
    list[int]: ("LIST", "whole numbers, as in '[1, 2]'"),
    list[list[int]]: ("LIST", "lists of whole numbers, as in '[[1, 2], [3]]'"),
    list[str | int]: ("LIST", "names or numbers, as in '[text, label]'"),
    dict[int, float]: ("MAP", "whole numbers with values, as in '{50: -1.5}'"),
}
# Fields of the recipe whose default runs/defaults.py chooses.
RECIPE_DEFAULTS = {
    "steps": "chosen by size and data",
    "lr": "chosen by task and size",
    "warmup": "a tenth of the steps",
    "eval_every": "a tenth of the steps",
    "save_every": "a tenth of the steps",
    "label_smoothing": "0.1 for pairs, 0 for others",
    "ema_decay": "0.999; 0.99 up to 3000 steps",
}
# --design takes any field of a Design; these are the ones that are a number, a switch or a name.
DESIGN_OPTIONS: dict[str, tuple[type, str]] = {
    "dim": (int, "the width of the model"),
    "layers": (int, "layers of the encoder and of the decoder"),
    "encoder_layers": (int, "layers of the encoder, if it differs from the decoder"),
    "decoder_layers": (int, "layers of the decoder, if it differs from the encoder"),
    "heads": (int, "attention heads"),
    "kv_heads": (int, "key and value heads, fewer for grouped-query attention (default: as many as heads)"),
    "head_dim": (int, "the width of a head (default: dim / heads)"),
    "width": (int, "the hidden width of the feed-forward layers"),
    "activation": (str, "the activation of the feed-forward layers: relu, gelu, silu, …"),
    "dropout": (float, "dropout of residuals and embeddings"),
    "attention_dropout": (float, "dropout of attention weights"),
    "norm_first": (bool, "norms before attention and feed-forward (pre-norm), not after them"),
    "norm_embedding": (bool, "a norm after the embeddings"),
    "bias": (bool, "biases in linear layers"),
    "bias_qkv": (bool, "biases of queries, keys and values (default: as bias)"),
    "bias_out": (bool, "the bias after attention (default: as bias)"),
    "scale_embedding": (bool, "multiply embeddings by the square root of dim"),
    "scale_scores": (bool, "divide attention scores by the square root of the width of a head"),
    "token_types": (int, "number of token types with an embedding of their own (BERT's sentences A and B)"),
}


class Option(NamedTuple):
    """An option of a command, in words."""

    key: str  # its name in a --config file: recipe.lr
    metavar: str  # what stands for its value; empty for a switch
    takes: str  # what it takes, in words
    choices: tuple[str, ...]
    default: str  # empty where there is nothing to say
    help: str
    group: str = MORE_OPTIONS  # the title that it has unless the row of the command gives another
    is_positional: bool = False
    is_key: bool = True  # whether a --config file may set it

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def summary(self) -> str:
        """The first sentence of the help."""
        return re.split(r"(?<=[^.\s])\. (?=[A-Z\-`'\"])", self.help, maxsplit=1)[0]


def command_options(command: Command) -> list[Option]:
    """Every option of a command, positional arguments first."""
    function = command.load()
    options = list(_function_options(command, function))
    if not any(option.key == "threads" for option in options):
        options.append(Option("threads", "N", "a whole number", (), "", THREADS_HELP, is_key=False))
    if any(option.key == "recipe" for option in options):
        config = Option("config", "FILE", "a file", (), "", CONFIG_HELP, is_key=False)
        print_config = Option("print_config", "", "", (), "", PRINT_CONFIG_HELP, is_key=False)
        options += [config, print_config]
    if command.name == "chat":  # it has one prompt after another
        options = [
            option._replace(takes="a whole number", help=CHAT_SEED_HELP) if option.key == "seed" else option
            for option in options
        ]
    return sorted(options, key=lambda option: not option.is_positional)


def describe_command(command: Command) -> list[str]:
    """The paragraphs that say what a command does, from the docstring of its function."""
    from docstring_parser import parse

    docstring = parse(command.load().__doc__ or "")
    paragraphs = (docstring.long_description or "").split("\n\n")
    return [text for text in (docstring.short_description, *paragraphs) if text]


def group_options(command: Command, options: list[Option], *, common_only: bool) -> dict[str, list[Option]]:
    """Title → options, without positional arguments: those of the command's row, or all of them."""
    by_key = {option.key: option for option in options if not option.is_positional}
    titles = {title: [by_key.pop(name) for name in names.split()] for title, names in command.options.items()}
    if not common_only:
        for option in by_key.values():
            titles.setdefault(option.group, []).append(option)
    return {title: group for title, group in titles.items() if group}


def _function_options(command: Command, function: Callable[..., int]) -> Iterator[Option]:
    hints = get_type_hints(function)
    texts = help_texts(function)
    for name, parameter in signature(function).parameters.items():
        if name == "inputs":
            yield Option(name, command.arguments, "", (), "", texts[name], is_positional=True)
        elif name in ("flags", "job"):
            title = BATCH_JOB_OPTIONS if name == "job" else MORE_OPTIONS
            yield from _dataclass_options(hints[name], "", title)
        elif name == "options":
            from keepleft.cli.generation_flags import generation_options

            yield from generation_options()
        elif name not in RESERVED_PARAMETERS:
            yield from _parameter_options(command, name.rstrip("_"), hints[name], parameter, texts[name])


def _parameter_options(
    command: Command, name: str, hint: Any, parameter: Parameter, text: str
) -> Iterator[Option]:
    if parameter.default is Parameter.empty:
        yield make_option(name, hint, None, text)._replace(metavar=name.upper(), is_positional=True)
        return
    nested = [part for part in _union_parts(hint) if isinstance(part, type) and is_dataclass(part)]
    if hint == dict[str, Any] | None:
        yield Option(name, "YAML", "names with values, as in '{dim: 256}'", (), "", text, "Design")
        for field, (field_type, sentence) in DESIGN_OPTIONS.items():
            yield make_option(f"{name}.{field}", field_type, None, sentence, "Design")
    elif nested and len(_union_parts(hint)) == 1:
        title = text[0].upper() + text[1:]
        yield Option(name, "FILE", "a YAML file", (), "", f"a YAML file with the parts of --{name}", title)
        yield from _dataclass_options(nested[0], f"{name}.", title)
    elif nested:
        yield Option(name, "FILE", "a file, or its parts", (), "", text, "Data")
        yield from _dataclass_options(nested[0], f"{name}.", "Data")
    else:
        option = make_option(name, hint, parameter.default, text)
        if metavar := COMMAND_METAVARS.get((command.name, name)):
            option = option._replace(metavar=metavar, takes=_WORDS[metavar])
        yield option


def _dataclass_options(dataclass: type, prefix: str, group: str) -> Iterator[Option]:
    hints = get_type_hints(dataclass)
    texts = help_texts(dataclass)
    names = {field.name for field in fields(dataclass)}
    for field in fields(dataclass):
        default = field.default if field.default is not MISSING else None
        text = spell_flags(texts[field.name], names, prefix)
        option = make_option(f"{prefix}{field.name}", hints[field.name], default, text, group)
        yield option._replace(default=_recipe_default(field.name)) if prefix == "recipe." else option


def _recipe_default(name: str) -> str:
    from keepleft.training.recipe import Recipe

    default = next(field.default for field in fields(Recipe) if field.name == name)
    return RECIPE_DEFAULTS.get(name) or _default_in_words(default)


def help_texts(source: Callable[..., Any]) -> dict[str, str]:
    """Name → sentence, from the Args of a docstring."""
    from docstring_parser import parse

    return {
        param.arg_name: " ".join((param.description or "").split())
        for param in parse(source.__doc__ or "").params
    }


def spell_flags(text: str, names: Collection[str], prefix: str = "") -> str:
    """A text whose names with an underscore are spelled as options."""
    spell = lambda match: f"--{prefix}{match[0].replace('_', '-')}" if match[0] in names else match[0]
    return re.sub(r"(?<![-\w./'\"])[a-z]+(?:_[a-z]+)+\b", spell, text)


def make_option(key: str, hint: Any, default: Any, text: str, group: str = MORE_OPTIONS) -> Option:
    """The option for a parameter or field of this type."""
    name = key.rpartition(".")[2]
    parts = _union_parts(hint)
    choices = tuple(str(choice) for part in parts if get_origin(part) is Literal for choice in get_args(part))
    if bool in parts:
        choices = ("true", "false", *choices)
    default_text = _default_in_words(default)
    if default is False and hint is bool and "." not in key:
        return Option(key, "", "", (), "", text, group)
    if choices:
        return Option(
            key, _choices_metavar(name, choices), join_words(choices), choices, default_text, text, group
        )
    metavar, takes = _plain_type(name, parts)
    return Option(key, metavar, takes, (), default_text, text, group)


def join_words(words: tuple[str, ...] | list[str]) -> str:
    """The words as one phrase: a, b or c."""
    return " or ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _choices_metavar(name: str, choices: tuple[str, ...]) -> str:
    if len("|".join(choices)) <= MAX_CHOICES_WIDTH:
        return "|".join(choices)
    return _METAVAR_BY_NAME.get(name, name.rpartition("_")[2].upper())


def _plain_type(name: str, parts: list[Any]) -> tuple[str, str]:
    """Metavar and words for a type without choices."""
    if str in parts:
        metavar = _METAVAR_BY_NAME.get(name, name.rpartition("_")[2].upper())
        words = _WORDS.get(metavar, "a text")
        return metavar, f'{words}, or several as in \'["a", "b"]\'' if list[str] in parts else words
    if int in parts:
        return "N", "a whole number" + (", or several as in '[1, 2]'" if list[int] in parts else "")
    if float in parts:
        return "X", "a number"
    main_type = parts[0] if parts else Any
    return _COMPOUND_TYPES.get(main_type) or (_METAVAR_BY_NAME.get(name, "JSON"), "JSON")


def _union_parts(hint: Any) -> list[Any]:
    """The types of a union, without None."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return [part for part in parts if part is not NoneType]


def _default_in_words(default: Any) -> str:
    if default is None or default is False or default == "" or is_dataclass(default):
        return ""
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return "true" if default is True else f"{default:g}" if isinstance(default, float) else str(default)
