"""Parameters of a question, validated field by field: type and bounds, or a ValueError with the remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

MAX_CHARACTERS = 200_000  # of a text
MAX_TOKENS = 4_096  # of a text
_MISSING: Any = object()


class ExpiredError(ValueError):
    """The key names a text that is no longer cached: ask for its attention again."""

    code = "expired"


def error_payload(error: Exception) -> dict[str, Any]:
    """An error as JSON for the page: a message, and a code where the page can act on it."""
    code = getattr(error, "code", None)
    return {"error": {"message": str(error), **({"code": code} if isinstance(code, str) else {})}}


class Params:
    """The fields of one question; `tenant`: who asks, where several do."""

    def __init__(self, question: str, values: Any, allowed: Sequence[str], tenant: str = "") -> None:
        if not isinstance(values, Mapping):
            raise ValueError(
                f"{question} was asked with {shorten(values)}: give an object of names and values"
                + (f", with {', '.join(allowed)}" if allowed else "")
            )
        for name in values:
            if name not in allowed:
                raise ValueError(f"{question} takes no {shorten(name)}: {suggestion(name, allowed)}")
        self.question = question
        self.values = values
        self.tenant = tenant

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def text(self, name: str, default: str = _MISSING, max_characters: int = MAX_CHARACTERS) -> str:
        value = self._value(name, "a text", default)
        if not isinstance(value, str):
            raise self._error(name, value, "it must be a text")
        if len(value) > max_characters:
            raise ValueError(f"{name} has {len(value):,} characters: give at most {max_characters:,}")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(f"{name} holds half a character (a lone surrogate): take it out")
        return value

    def integer(self, name: str, minimum: int, maximum: int, default: int = _MISSING) -> int:
        value = self._value(name, f"a whole number from {minimum} to {maximum}", default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self._error(name, value, f"it must be a whole number from {minimum} to {maximum}")
        return value

    def number(self, name: str, minimum: float, maximum: float, default: float = _MISSING) -> float:
        value = self._value(name, f"a number from {minimum:g} to {maximum:g}", default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not minimum <= value <= maximum:
            raise self._error(name, value, f"it must be a number from {minimum:g} to {maximum:g}")
        return float(value)

    def flag(self, name: str, default: bool = _MISSING) -> bool:
        value = self._value(name, "true or false", default)
        if not isinstance(value, bool):
            raise self._error(name, value, "it must be true or false")
        return value

    def choice(self, name: str, choices: Sequence[str], default: str = _MISSING) -> str:
        value = self._value(name, f"one of {', '.join(choices)}", default)
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"no {name} is called {shorten(value)}: {suggestion(value, choices)}")
        return value

    def integers(
        self, name: str, below: int, max_length: int = MAX_TOKENS, default: Sequence[int] = _MISSING
    ) -> list[int]:
        """A list of integers, each from 0 to below `below`: tokens."""
        value = self._value(name, "a list of whole numbers", default)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self._error(name, value, "it must be a list of whole numbers")
        if len(value) > max_length:
            raise ValueError(f"{name} has {len(value):,} numbers: give at most {max_length:,}")
        for item in value:
            if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < below:
                raise ValueError(
                    f"{name} holds {shorten(item)}: each must be a whole number from 0 to {below - 1}"
                )
        return list(value)

    def object(self, name: str, allowed: Sequence[str]) -> Params:
        value = self._value(name, "an object", {})
        if not isinstance(value, Mapping):
            raise self._error(name, value, f"it must be an object with {', '.join(allowed)}")
        return Params(name, value, allowed)

    def integer_or_choice(self, name: str, count: int, choices: Sequence[str]) -> int | str:
        """An index below `count`, or one of a few words."""
        value = self._value(name, f"a number below {count}, or {' or '.join(choices)}", _MISSING)
        if isinstance(value, str):
            return self.choice(name, choices)
        return self.integer(name, 0, count - 1)

    def _value(self, name: str, expected: str, default: Any) -> Any:
        if self.values.get(name) is not None:
            return self.values[name]
        if default is _MISSING:
            raise ValueError(f"{self.question} needs {name}: give {expected}")
        return default

    def _error(self, name: str, value: Any, requirement: str) -> ValueError:
        return ValueError(f"{name} is {shorten(value)}: {requirement}")


def shorten(value: Any) -> str:
    """A value for an error message, cut off where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def suggestion(name: Any, allowed: Sequence[str]) -> str:
    """What to write instead of an unknown name."""
    matches = get_close_matches(str(name)[:60], allowed, 1)
    if matches:
        return f"did you mean {matches[0]}?"
    return f"there are {', '.join(allowed)}" if allowed else "leave it out"
