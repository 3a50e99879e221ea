"""What a wrong use is told: one line that names it, and what was perhaps meant."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any


def explained(message: str, parser: Any) -> str:
    """The parser's message in our words, where we know better ones."""
    options = sorted(_options(parser))
    if found := re.search(r"unrecognized arguments?: (--[\w.-]+)", message, re.I):
        word = found[1]
        meant = [option for option in options if option.endswith("." + word.lstrip("-"))] or get_close_matches(word, options, 3)
        return f"there is no option {word}" + (f": did you mean {' or '.join(meant[:3])}?" if meant else "")
    if found := re.search(r'[Pp]arser key "([^"]+)"', message):
        value = re.search(r"Given value: (.*)", message)
        if (choices := re.search(r"Literal\[(.*?)\]", message)) and value:
            names = re.findall(r"'([^']+)'", choices[1])
            close = get_close_matches(value[1].strip(), names, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
            return f"--{found[1]} is {value[1].strip()!r}: {hint}"
        if nested := re.search(r"NestedArg\(key='([^']+)'", message):
            return f"there is no option --{found[1]}.{nested[1]}: there are path, src, tgt, columns and tag"
        if value:
            return f"--{found[1]} is {value[1].strip()!r}, which it cannot be: --help says what it takes"
    if "subcommand" in message:
        return "say what to do: keepleft --help lists the commands"
    return message


def _options(parser: Any) -> set[str]:
    out = {option for option in parser._option_string_actions if option.startswith("--")}
    for action in parser._actions:
        if isinstance(inner := getattr(action, "choices", None), dict):
            for one in inner.values():
                out |= _options(one)
    return out
