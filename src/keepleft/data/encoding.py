"""Text to integers, quickly: what stands between two spaces is broken up once and remembered."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from keepleft.data.tokenizer import PIECES, WORDS, marks

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KNOWN = 1 << 20  # words that are remembered

_RARE, _WORD = re.compile("[\x1c-\x1f]"), re.compile(r"(?:[^\s]|[\x1c-\x1f])+")  # a space to Python, not to the tokenizer

Encode = Callable[[Sequence[str]], list[bytes]]


class Words(dict[str, bytes]):
    """The integers of each word, as bytes; a new word is asked for once."""

    def __init__(self, ask: Callable[[str], list[int]], kind: np.dtype) -> None:
        super().__init__()
        self.ask, self.kind = ask, kind

    def __missing__(self, word: str) -> bytes:
        found = np.array(self.ask(word), self.kind).tobytes()
        if len(self) < KNOWN:
            self[word] = found
        return found


def encoder(tokenizer: Tokenizer, kind: np.dtype, *, before: Sequence[int] = (), after: Sequence[int] = ()) -> Encode:
    """A function from texts to their integers, each text's as bytes; `before` and `after` go around each."""
    head, tail = (np.array(part, kind).tobytes() for part in (before, after))
    row = _row(tokenizer, kind)

    def encode(texts: Sequence[str]) -> list[bytes]:
        if row is not None:
            return [head + row(text) + tail for text in texts]
        found = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [head + np.array(one.ids, kind).tobytes() + tail for one in found]
    return encode


def _row(tokenizer: Tokenizer, kind: np.dtype) -> Callable[[str], bytes] | None:
    """A text's integers by way of its words; None for a tokenizer of which it is not known that words stay apart."""
    said = json.loads(tokenizer.to_str())
    if not tokenizer.encode_special_tokens or any(not token["special"] for token in said["added_tokens"]):
        return None
    before, way = said["normalizer"], said["pre_tokenizer"] or {}
    known = marks(tokenizer)
    special = dict.fromkeys(known.special(), known.unknown) if known.unknown is not None else {}

    def ask(piece: str) -> list[int]:
        """One piece; "</s>" in a text is four signs or an unknown word, never the end."""
        return [special.get(token.id, token.id) for token in tokenizer.model.tokenize(piece)]

    match said["model"]["type"], way.get("type"):
        case "BPE", "Sequence" if before in (None, {"type": "Prepend", "prepend": " "}) and _ours(way):
            return _pieces(ask, kind, prefixed=before is not None)
        case "Unigram", "Metaspace" if before is None and way["replacement"] == "▁" and way["split"]:
            return _spaced(ask, kind, prefixed=way["prepend_scheme"] == "always")
        case "WordLevel", "WhitespaceSplit" if before is None:
            words = Words(ask, kind)
            return lambda text: b"".join(map(words.__getitem__, _WORD.findall(text) if _RARE.search(text) else text.split()))
        case "WordLevel", "Split" if before is None and way["pattern"] == {"Regex": WORDS} and way["invert"]:
            lines, find = Words(ask, kind), re.compile(WORDS).findall
            return lambda text: b"".join(map(lines.__getitem__, find(text)))
        case "WordLevel", "Split" if before is None and way["pattern"] == {"Regex": r"[\s\S]"}:
            signs = Words(ask, kind)
            return lambda text: b"".join(map(signs.__getitem__, text))
    return None


def _ours(way: dict) -> bool:
    parts = way["pretokenizers"]
    return ([part["type"] for part in parts] == ["Split", "ByteLevel"] and parts[0]["pattern"] == {"Regex": PIECES}
            and parts[0]["behavior"] == "Isolated" and not parts[1]["add_prefix_space"] and not parts[1]["use_regex"])


def _pieces(ask: Callable[[str], list[int]], kind: np.dtype, *, prefixed: bool) -> Callable[[str], bytes]:
    """Byte-level BPE with our own pieces: none reaches over a line break, or over a single space but to take it along."""
    from tokenizers import pre_tokenizers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = re.compile(PIECES).findall

    def broken(text: str) -> list[int]:
        return [n for piece in split(text) for n in ask(level.pre_tokenize_str(piece)[0][0])]

    bare, after_space, pieces = Words(broken, kind), Words(lambda word: broken(" " + word), kind), Words(broken, kind)
    spaced, line_break = after_space.__getitem__, bare["\n"]

    def line(text: str) -> bytes:
        if "   " in text or "\t" in text or "\r" in text or text.endswith("  "):
            return b"".join(map(pieces.__getitem__, split(text)))
        first, *rest = text.split(" ")
        return bare[first] + b"".join(map(spaced, rest))

    def row(text: str) -> bytes:
        if prefixed and text:
            text = " " + text
        return line_break.join(map(line, text.split("\n"))) if "\n" in text else line(text)

    return row


def _spaced(ask: Callable[[str], list[int]], kind: np.dtype, *, prefixed: bool) -> Callable[[str], bytes]:
    """Unigram: a piece begins at each space and nowhere else."""
    bare, after_space = Words(ask, kind), Words(lambda word: ask("▁" + word), kind)

    def row(text: str) -> bytes:
        first, *rest = text.replace("▁", " ").split(" ")
        if prefixed and text and first:
            rest = [first, *rest]
            first = ""
        return bare[first] + b"".join(map(after_space.__getitem__, rest))

    return row
