"""What comes with a question, taken field by field: of the right kind and within bounds, or refused in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

CHARACTERS = 200_000  # of a text
TOKENS = 4_096        # of a text
_ABSENT: Any = object()


class ForgottenError(ValueError):
    """What was read is no longer kept: read it again."""

    code = "forgotten"


def told(error: Exception) -> dict[str, Any]:
    """An error as the page takes it: a sentence, and a word where the page can do something about it."""
    code = getattr(error, "code", None)
    return {"error": {"message": str(error), **({"code": code} if isinstance(code, str) else {})}}


class Given:
    """The fields of one question."""

    def __init__(self, question: str, fields: Any, known: Sequence[str]) -> None:
        if not isinstance(fields, Mapping):
            raise ValueError(f"{question} was asked with {short(fields)}: give an object of names and values"
                             + (f", with {', '.join(known)}" if known else ""))
        for name in fields:
            if name not in known:
                raise ValueError(f"{question} takes no {short(name)}: {suggestion(name, known)}")
        self.question, self.fields = question, fields

    def __contains__(self, name: str) -> bool:
        return self.fields.get(name) is not None

    def text(self, name: str, default: str = _ABSENT, most: int = CHARACTERS) -> str:
        value = self._value(name, "a text", default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "it must be a text")
        if len(value) > most:
            raise ValueError(f"{name} has {len(value):,} characters: give at most {most:,}")
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ValueError(f"{name} holds half a character (a lone surrogate): take it out")
        return value

    def whole(self, name: str, least: int, most: int, default: int = _ABSENT) -> int:
        value = self._value(name, f"a whole number from {least} to {most}", default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self._wrong(name, value, f"it must be a whole number from {least} to {most}")
        return value

    def real(self, name: str, least: float, most: float, default: float = _ABSENT) -> float:
        value = self._value(name, f"a number from {least:g} to {most:g}", default)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not least <= value <= most:
            raise self._wrong(name, value, f"it must be a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, name: str, default: bool = _ABSENT) -> bool:
        value = self._value(name, "true or false", default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "it must be true or false")
        return value

    def word(self, name: str, words: Sequence[str]) -> str:
        value = self._value(name, f"one of {', '.join(words)}", _ABSENT)
        if not isinstance(value, str) or value not in words:
            raise ValueError(f"no {name} is called {short(value)}: {suggestion(value, words)}")
        return value

    def numbers(self, name: str, below: int, most: int = TOKENS, default: Sequence[int] = _ABSENT) -> list[int]:
        """Whole numbers from 0, each below a bound: tokens."""
        value = self._value(name, "a list of whole numbers", default)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self._wrong(name, value, "it must be a list of whole numbers")
        if len(value) > most:
            raise ValueError(f"{name} has {len(value):,} numbers: give at most {most:,}")
        for number in value:
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < below:
                raise ValueError(f"{name} holds {short(number)}: each must be a whole number from 0 to {below - 1}")
        return list(value)

    def object(self, name: str, known: Sequence[str]) -> Given:
        value = self._value(name, "an object", {})
        if not isinstance(value, Mapping):
            raise self._wrong(name, value, f"it must be an object with {', '.join(known)}")
        return Given(name, value, known)

    def or_word(self, name: str, count: int, words: Sequence[str]) -> int | str:
        """A number below `count`, or one of a few words."""
        value = self._value(name, f"a number below {count}, or {' or '.join(words)}", _ABSENT)
        if isinstance(value, str):
            return self.word(name, words)
        return self.whole(name, 0, count - 1)

    def _value(self, name: str, kind: str, default: Any) -> Any:
        if self.fields.get(name) is not None:
            return self.fields[name]
        if default is _ABSENT:
            raise ValueError(f"{self.question} needs {name}: give {kind}")
        return default

    def _wrong(self, name: str, value: Any, must: str) -> ValueError:
        return ValueError(f"{name} is {short(value)}: {must}")


def short(value: Any) -> str:
    """A value for a sentence: what came from outside may be long."""
    out = repr(value)
    return out if len(out) <= 60 else f"{out[:57]}…"


def suggestion(name: Any, known: Sequence[str]) -> str:
    close = get_close_matches(str(name)[:60], known, 1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}" if known else "leave it out"
