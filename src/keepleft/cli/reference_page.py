"""docs/commands.md: every command, every option, and every key of a --config file.

python -m keepleft.cli.reference_page docs/commands.md writes it; a test compares it with what is committed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from inspect import signature
from itertools import groupby
from pathlib import Path
from textwrap import dedent

from keepleft.cli.command_table import COMMANDS, Command, find_command
from keepleft.cli.generation_flags import generation_options
from keepleft.cli.option_table import Option, command_options, describe_command, group_options
from keepleft.disk import atomic

INTRODUCTION = """\
# Commands

Every command, every option, and every key of a YAML file for `keepleft train`. In a terminal, `keepleft`
alone lists the commands, `keepleft COMMAND --help` shows examples and common options, and
`keepleft COMMAND --help-all` shows all options.

An option and its value are two words, `--size tiny`, or one, `--size=tiny`. MODEL is a folder such as
`runs/lm/model`, a GGUF file, the name of an installed model (`keepleft doctor` lists them) or a name on the
Hugging Face hub. `keepleft completion` prints a script for Tab completion. Exit codes: 0 success, 1 a leak or
a missed quality gate, 2 wrong usage or a failure, 130 stopped by Ctrl-C.

This page is generated from the program: `python -m keepleft.cli.reference_page docs/commands.md`.
"""
GENERATION_INTRODUCTION = """\
Their names are those of Hugging Face's `GenerationConfig`. What is not given is taken from the model; if the
model sets nothing, decoding is greedy."""
YAML_INTRODUCTION = """\
## YAML keys

`keepleft train --config job.yaml` reads options from a file; options on the command line take precedence. A
key is the name of an option with underscores, and a part after a dot is a key one level deeper:
`--recipe.save-every` is `save_every` below `recipe`.

```yaml
task: translate
train: {src: train.en, tgt: train.fr}
valid: {src: valid.en, tgt: valid.fr}
out: runs/en-fr
size: tiny
tokenizer: {kind: bpe, size: 8000}
recipe: {steps: 2000, lr: 1.0e-3}
```

`train` and `valid` take the name of a file, or keys, or a list of such groups of keys. A run stores the keys
that differ from their defaults in its `config.yaml`; `keepleft train --print-config` prints all of them.
"""


def takes_generation_options(command: Command) -> bool:
    return "options" in signature(command.load()).parameters


def reference_page() -> str:
    """The page as Markdown."""
    parts = [INTRODUCTION]
    for title, commands in groupby(COMMANDS, key=lambda command: command.group):
        parts.append(f"## {title}\n")
        parts += [_command_section(command) for command in commands]
    return "\n".join([*parts, _generation_section(), YAML_INTRODUCTION, *_yaml_tables(find_command("train"))])


def _command_section(command: Command) -> str:
    options = command_options(command)
    paragraphs = [
        _markdown(text)
        if text[0] != " "
        else f"```{'python' if 'def ' in text else 'sh'}\n{dedent(text)}\n```"
        for text in describe_command(command)
    ]
    arguments = [
        f"`{option.metavar}`: {_markdown(option.help)}." for option in options if option.is_positional
    ]
    examples = "\n".join(["```sh", *command.examples, "```"])
    parts = [f"### keepleft {command.name}", f"`{command.usage}`", *paragraphs, examples, *arguments]
    shared = set(generation_options()) if takes_generation_options(command) else set()
    common = {name for names in command.options.values() for name in names.split()}
    options = [option for option in options if option.key in common or option not in shared]
    for title, group in group_options(command, options, common_only=False).items():
        parts += [f"**{title}**", _table("option", [(f"`{option.flag}`", option) for option in group])]
    if shared:
        parts.append("And all [generation options](#generation-options).")
    return "\n\n".join(parts) + "\n"


def _generation_section() -> str:
    names = [f"`{command.name}`" for command in COMMANDS if takes_generation_options(command)]
    parts = [
        "## Generation options",
        f"Options of {', '.join(names[:-1])} and {names[-1]}. {GENERATION_INTRODUCTION}",
    ]
    for title, group in groupby(generation_options(), key=lambda option: option.group):
        parts += [f"**{title}**", _table("option", [(f"`{option.flag}`", option) for option in group])]
    return "\n\n".join(parts) + "\n"


def _yaml_tables(command: Command) -> list[str]:
    """A table of the keys on the first level, then one for each group of keys below one of them."""
    options = [option for option in command_options(command) if option.is_key]
    keys = {option.flag: option.key for option in options}
    sections: dict[str, list[tuple[str, Option]]] = {}
    for option in options:
        section, _, name = option.key.rpartition(".")
        if section != "valid":  # the same as train
            has_parts = any(other.key.startswith(f"{option.key}.") for other in options)
            text = option.summary if has_parts else option.help
            if option.takes == "a YAML file":  # in the file itself, the parts stand below the key
                text = option.group.lower()
            text = re.sub(r"--[a-z][\w.-]*\w", lambda match: keys.get(match[0], match[0]), text)
            option = option._replace(help=text, takes="keys, see below" if has_parts else option.takes)
            sections.setdefault(section, []).append((f"`{name}`", option))
    titles = {section: f"### Keys below {section}" for section in sections} | {
        "": "### Keys of the first level",
        "train": "### Keys below train and valid",
    }
    return [f"{titles[section]}\n\n{_table('key', rows)}\n" for section, rows in sections.items()]


def _table(first_column: str, rows: Iterable[tuple[str, Option]]) -> str:
    """A row for each option; no column of defaults where none has one."""
    titles = [first_column, "takes", "default", "meaning"]
    lines = []
    for name, option in rows:
        takes = option.takes or ("true or false" if first_column == "key" else "")
        default = option.default or ("false" if first_column == "key" and not option.metavar else "")
        lines.append([name, *map(_markdown, (takes, default, option.help))])
    shown = [n for n, title in enumerate(titles) if title == "meaning" or any(line[n] for line in lines)]
    cells = [[line[n] for n in shown] for line in (titles, ["---"] * len(titles), *lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _markdown(text: str) -> str:
    """Text as Markdown for a table: options as code, no characters with a meaning of their own."""
    pieces = " ".join(text.split()).replace("|", "\\|").split("`")
    for n in range(0, len(pieces), 2):  # the others are code
        plain = pieces[n].replace("<", "&lt;").replace("*", "\\*")
        pieces[n] = re.sub(r"(?<![\w-])--[a-z][\w.-]*\w", r"`\g<0>`", plain)
    return "`".join(pieces)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m keepleft.cli.reference_page", description=__doc__)
    parser.add_argument("path", type=Path, help="the file to write")
    atomic.write_text(parser.parse_args().path, reference_page())
