"""JSON bodies: their values are counted before they are parsed, since parsing costs far more than reading."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

from keepleft.serving.http.errors import APIError
from keepleft.serving.http.limits import Limits

SLICE_BYTES = 1 << 16  # counted at once: other threads run in between


def parse_json(body: bytes, limits: Limits) -> Any:
    """The document. Raises APIError unless it is JSON within the limits, without NaN or lone surrogates."""
    check_counts(body, limits)
    try:
        document = json.loads(body.decode("utf-8"), parse_constant=_reject_constant)
    except UnicodeDecodeError as error:
        raise _invalid_json(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _invalid_json(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _too_deep(limits.depth) from None
    except ValueError:  # NaN, or a number of thousands of digits
        raise _invalid_json("it holds an invalid number") from None
    # What was decoded from UTF-8 has no lone surrogates; an escape sequence may spell one.
    _check_levels(document, limits, check_unicode=b"\\u" in body)
    return document


def check_counts(body: bytes, limits: Limits) -> None:
    """Raise APIError if the body has more values, lists, objects or fields than the limits allow.

    A field counts as two values, its name and what it holds. Counting stops at the first slice that exceeds
    a limit. Up to the first error of syntax the counts are exact.
    """
    lists = 0
    objects = 0
    fields = 0
    separators = 0
    in_string = 0
    start = 0
    while start < len(body):
        piece = body[start : start + SLICE_BYTES]
        backslashes = len(piece) - len(piece.rstrip(b"\\"))
        if backslashes % 2:  # an escape sequence is never split
            piece = body[start : start + SLICE_BYTES + 1]
        start += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[in_string::2])
        in_string ^= (len(parts) - 1) % 2
        lists += outside.count(b"[")
        objects += outside.count(b"{")
        fields += outside.count(b":")
        separators += outside.count(b",")
        if lists + objects > limits.containers:
            raise _too_many(f"the body holds more than {limits.containers:,} lists and objects")
        if lists + objects + fields + separators > limits.elements:
            raise _too_many(f"the body holds more than {limits.elements:,} values")
    if fields > limits.keys * objects:
        raise _too_many(f"an object has more than {limits.keys:,} fields")


def _check_levels(document: Any, limits: Limits, *, check_unicode: bool) -> None:
    """Check depth, keys and strings, one level of nesting after the other."""
    level = [document]
    for depth in count():
        next_level: list[Any] = []
        for value in level:
            if depth >= limits.depth and isinstance(value, dict | list):
                raise _too_deep(limits.depth)
            if isinstance(value, dict):
                if len(value) > limits.keys:
                    raise _too_many(f"an object has more than {limits.keys:,} fields")
                if check_unicode:
                    for key in value:
                        _check_unicode(key)
                next_level.extend(value.values())
            elif isinstance(value, list):
                next_level.extend(value)
            elif check_unicode and isinstance(value, str):
                _check_unicode(value)
        if not next_level:
            return
        level = next_level


def _too_many(reason: str) -> APIError:
    return APIError(400, f"{reason}: send less at once", code="too_many_values")


def _invalid_json(reason: str) -> APIError:
    return APIError(400, f"the body is not JSON: {reason}", code="invalid_json")


def _too_deep(depth: int) -> APIError:
    return APIError(
        400,
        f"the body nests lists and objects more than {depth} levels deep: make it flatter",
        code="too_deep",
    )


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise APIError(
            400, "a string holds half a character (a lone surrogate): remove it", code="invalid_unicode"
        ) from None


def _reject_constant(constant: str) -> Any:
    raise ValueError(constant)
