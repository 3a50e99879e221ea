"""keepleft completion: scripts for bash, zsh and fish.

A script holds every command and option, and the names of the models that are installed. The shell completes
from it alone, at once: Python does not run again. What a value is completed with follows from the word that
stands for it in the help: FILE, FOLDER, MODEL, LANGUAGE, or the choices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from textwrap import shorten
from typing import Literal, NamedTuple

from keepleft import __version__
from keepleft.cli.command_table import COMMANDS, Command
from keepleft.cli.option_table import Option, command_options
from keepleft.cli.paths import installed_weights
from keepleft.cli.translate import SHIPPED_LANGUAGES

KINDS = {"FILE": "file", "PATH": "file", "DATA": "file", "FOLDER": "folder", "MODEL": "model"}
DESCRIPTION_WIDTH = 72
HELP_OPTIONS = (
    Option("help", "", "", (), "", "show examples and common options"),
    Option("help_all", "", "", (), "", "show every option"),
)


def print_completion(shell: Literal["bash", "zsh", "fish"]) -> int:
    """Print a script that completes commands, options, choices and files at the Tab key.

    Store it where your shell looks for completions, and open a new shell.

    Print it again after updating keepleft or installing another model: the names of installed
    models are part of it. In bash, eval "$(keepleft completion bash)" in ~/.bashrc works without a file.

    Args:
        shell: the shell to write for
    """
    models = list(installed_weights())
    if sys.stdout.isatty():
        print(f"keepleft: this is the script; to use it now: {USE_NOW[shell]}", file=sys.stderr)
    print(SCRIPTS[shell](models))
    return 0


class CompletionValue(NamedTuple):
    """What a value is completed with."""

    kind: str  # file, folder, model, choice or text
    choices: tuple[str, ...] = ()


def option_value(option: Option) -> CompletionValue | None:
    """What the value of an option is completed with; None for a switch."""
    if not option.metavar:
        return None
    if option.choices:
        return CompletionValue("choice", option.choices)
    if option.metavar == "LANGUAGE":  # another model may write others
        return CompletionValue("choice", SHIPPED_LANGUAGES)
    return CompletionValue(next((KINDS[word] for word in option.metavar.split("|") if word in KINDS), "text"))


def argument_words(command: Command) -> list[str]:
    """What the usage line calls each positional argument: MODEL, TEXT."""
    return command.arguments.replace("[", " ").replace("]", " ").replace("...", " ").split()


def argument_values(command: Command) -> list[CompletionValue]:
    """What each positional argument is completed with."""
    choices = [
        option.choices for option in command_options(command) if option.is_positional and option.choices
    ]
    words = argument_words(command)
    return [
        CompletionValue("choice", choices[0]) if choices else CompletionValue(KINDS.get(word, "text"))
        for word in words
    ]


def options_with_help(command: Command) -> list[Option]:
    """The options of a command and of its help, without positional arguments."""
    return [*(option for option in command_options(command) if not option.is_positional), *HELP_OPTIONS]


def bash_script(models: list[str]) -> str:
    names = " ".join(command.name for command in COMMANDS)
    flags = {row.name: " ".join(option.flag for option in options_with_help(row)) for row in COMMANDS}
    options = "\n".join(f'        {name}) options="{flags[name]}" ;;' for name in flags)
    return f"""\
# Tab completion of keepleft {__version__} for bash; made by: keepleft completion bash

# Sets kind and values: what the option $2 of the command $1 takes; @1 is its first positional argument.
_keepleft_value() {{
    kind= values=
    case $1 in
{chr(10).join(map(_bash_values, COMMANDS))}
    esac
}}

_keepleft() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}}
    local command=${{COMP_WORDS[1]}} options= kind= values= word i=2 argument=1 IFS=$' \\t\\n'
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W "{names} help --help --version" -- "$current"))
        return
    fi
    if [[ $current == = ]]; then  # --size=
        current=
    elif [[ $previous == = ]]; then  # --size=ti
        previous=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    case $command in
        help) COMPREPLY=($(compgen -W "{names}" -- "$current")); return ;;
{options}
        *) return ;;
    esac
    _keepleft_value "$command" "$previous"
    if [[ -z $kind && $current == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$current"))
        return
    fi
    if [[ -z $kind ]]; then  # a positional argument; which one?
        while (( i < COMP_CWORD )); do
            word=${{COMP_WORDS[i]}}
            if [[ $word == -* ]]; then
                _keepleft_value "$command" "$word"
                [[ -n $kind ]] && (( i++ ))
                [[ ${{COMP_WORDS[i]}} == = ]] && (( i++ ))
            else
                (( argument++ ))
            fi
            (( i++ ))
        done
        _keepleft_value "$command" "@$argument"
    fi
    if [[ $kind == model ]]; then
        values="{" ".join(models)} $(compgen -G 'runs/*/model')"
        kind=file
    fi
    [[ -n $values ]] && COMPREPLY=($(compgen -W "$values" -- "$current"))
    IFS=$'\\n'
    case $kind in
        file) compopt -o filenames 2> /dev/null; COMPREPLY+=($(compgen -f -- "$current")) ;;
        folder) compopt -o filenames 2> /dev/null; COMPREPLY+=($(compgen -d -- "$current")) ;;
    esac
    return 0
}}

complete -F _keepleft keepleft"""


def _bash_values(command: Command) -> str:
    """The case of one command in _keepleft_value, one line for each kind of value."""
    flags: dict[CompletionValue, list[str]] = {}
    for n, value in enumerate(argument_values(command), 1):
        if value.kind != "text":
            flags.setdefault(value, []).append(f"@{n}")
    for option in options_with_help(command):
        if (option_kind := option_value(option)) is not None:
            flags.setdefault(option_kind, []).append(option.flag)
    lines = [
        f"            {'|'.join(names)}) kind={value.kind}"
        + (f' values="{" ".join(value.choices)}"' if value.choices else "")
        + " ;;"
        for value, names in flags.items()
    ]
    return "\n".join([f"        {command.name}) case $2 in", *lines, "        esac ;;"])


def zsh_script(models: list[str]) -> str:
    names = "\n".join(f"        {_zsh_quote(f'{row.name}:{row.summary}')}" for row in COMMANDS)
    cases = "\n".join(_zsh_case(command) for command in COMMANDS)
    return f"""\
#compdef keepleft
# Tab completion of keepleft {__version__} for zsh; made by: keepleft completion zsh

_keepleft_models() {{
    local -a models=({" ".join(models)} runs/*/model(N))
    compadd -a models
    _files
}}

_keepleft() {{
    local context state state_descr line
    typeset -A opt_args
    local -a commands=(
{names}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        _arguments '--help[list the commands]' '--version[print the version]'
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in
        help) _describe command commands ;;
{cases}
    esac
}}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _keepleft "$@"
else
    compdef _keepleft keepleft
fi"""


def _zsh_case(command: Command) -> str:
    specs = []
    for option in options_with_help(command):
        description = _describe(option).replace("\\", "").replace("[", "(").replace("]", ")")
        value = option_value(option)
        action = "" if value is None else f":{option.key.rpartition('.')[2]}:{_zsh_action(value)}"
        specs.append(f"{option.flag}{'' if value is None else '='}[{description}]{action}")
    words = argument_words(command)
    for n, (word, value) in enumerate(zip(words, argument_values(command), strict=True), 1):
        specs.append(f"{n}:{word}:{_zsh_action(value)}")
    lines = [f"            {_zsh_quote(spec)}" for spec in specs]
    return " \\\n".join([f"        {command.name}) _arguments -S :", *lines]) + " ;;"


def _zsh_action(value: CompletionValue) -> str:
    actions = {"file": "_files", "folder": "_files -/", "model": "_keepleft_models", "text": " "}
    return f"({' '.join(value.choices)})" if value.choices else actions[value.kind]


def _zsh_quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def fish_script(models: list[str]) -> str:
    lines = [
        f"# Tab completion of keepleft {__version__} for fish; made by: keepleft completion fish",
        "",
        "function __keepleft_is",
        "    set -l words (commandline -opc)",
        '    test "$words[2]" = "$argv[1]"',
        "end",
        "",
        "function __keepleft_models",
        f"    set -l models {' '.join(models)} runs/*/model",
        "    printf '%s\\n' $models",
        "end",
        "",
        "complete -c keepleft -e",
        "complete -c keepleft -f",
        "complete -c keepleft -n __fish_is_first_token -l help -d 'list the commands'",
        "complete -c keepleft -n __fish_is_first_token -l version -d 'print the version'",
    ]
    names = " ".join(command.name for command in COMMANDS)
    for command in COMMANDS:
        summary = _fish_quote(command.summary)
        lines.append(f"complete -c keepleft -n __fish_is_first_token -a {command.name} -d {summary}")
    lines.append(f"complete -c keepleft -n '__keepleft_is help' -a '{names}'")
    for command in COMMANDS:
        start = f"complete -c keepleft -n '__keepleft_is {command.name}'"
        for value in dict.fromkeys(argument_values(command)):
            if value.kind != "text":
                lines.append(f"{start} {_fish_value(value)}")
        for option in options_with_help(command):
            flag, description = option.flag.removeprefix("--"), _fish_quote(_describe(option))
            lines.append(f"{start} -l {flag}{_fish_takes(option_value(option))} -d {description}")
    return "\n".join(lines)


def _fish_takes(value: CompletionValue | None) -> str:
    if value is None:
        return ""
    return " -x" if value.kind == "text" else f" -r {_fish_value(value)}"


def _fish_value(value: CompletionValue) -> str:
    values = {
        "file": "-F",
        "folder": "-f -a '(__fish_complete_directories)'",
        "model": "-F -a '(__keepleft_models)'",
    }
    return f"-f -a '{' '.join(value.choices)}'" if value.choices else values[value.kind]


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _describe(option: Option) -> str:
    return shorten(option.summary, DESCRIPTION_WIDTH, placeholder=" …")


USE_NOW = {
    "bash": 'eval "$(keepleft completion bash)"',
    "zsh": 'eval "$(keepleft completion zsh)"',
    "fish": "keepleft completion fish | source",
}
SCRIPTS: dict[str, Callable[[list[str]], str]] = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
