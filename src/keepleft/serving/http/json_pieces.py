"""JSON in pieces: Python's encoder keeps all other threads waiting until it has encoded a whole value."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from typing import Any

MAX_PIECE_VALUES = 1024  # values that are encoded at once, in less than a millisecond
SLICE_LENGTH = 64  # elements of a long list that are encoded together

RESPONSE_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
ASCII_ENCODER = json.JSONEncoder(separators=(",", ":"))


def encode_json(value: Any, encoder: json.JSONEncoder = RESPONSE_ENCODER) -> bytes:
    """The same as `encoder.encode(value)`, in UTF-8; other threads have their turn meanwhile."""
    return "".join(json_pieces(value, encoder)).encode()


def json_pieces(value: Any, encoder: json.JSONEncoder) -> Iterator[str]:
    """The JSON of `value`; each piece holds at most MAX_PIECE_VALUES values.

    A generator is a list whose elements are made when their turn comes, and not kept.
    """
    if _is_small(value):
        yield encoder.encode(value)
    elif isinstance(value, dict):
        for n, (key, item) in enumerate(value.items()):
            yield f"{',' if n else '{'}{encoder.encode(key)}:"
            yield from json_pieces(item, encoder)
        yield "}"
    elif isinstance(value, Generator):
        yield "["
        for n, element in enumerate(value):
            if n:
                yield ","
            yield from json_pieces(element, encoder)
        yield "]"
    else:
        for start in range(0, len(value), SLICE_LENGTH):
            yield "," if start else "["
            elements = value[start : start + SLICE_LENGTH]
            if _is_small(elements):
                yield encoder.encode(elements)[1:-1]
                continue
            for n, element in enumerate(elements):
                if n:
                    yield ","
                yield from json_pieces(element, encoder)
        yield "]"


def _is_small(value: Any) -> bool:
    num_values = 0
    containers = [value]
    while containers:
        container = containers.pop()
        if isinstance(container, dict):
            elements = list(container.values())
        elif isinstance(container, list):
            elements = container
        elif isinstance(container, Generator):
            return False
        else:
            continue
        num_values += len(elements)
        if num_values > MAX_PIECE_VALUES:
            return False
        containers += elements
    return True
