"""Text to integers, quickly: each word is broken up once and remembered."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from keepleft.data.tokenizer import PIECES, WORDS, marks
from keepleft.data.units import Bytes, Places, Units

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KNOWN = 1 << 20  # words that are remembered

SPACE, LINE = ord(" "), ord("\n")
BLANK, BREAK = 4, 5  # kinds of byte; 0 is a part of a sign beyond ASCII, 1 a letter, 2 a digit, 3 another mark
KINDS = np.array([0 if n > 127 else BREAK if n == LINE else BLANK if n == SPACE else 1 if chr(n).isalpha() else
                  2 if chr(n).isdigit() else 3 for n in range(256)], np.uint8)
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
    rows = _rows(tokenizer, kind)
    return rows if not head and not tail else lambda texts: [head + row + tail for row in rows(texts)]


def _rows(tokenizer: Tokenizer, kind: np.dtype) -> Encode:
    """Texts' integers by way of their words, where it is known of the tokenizer that words stay apart."""
    said = json.loads(tokenizer.to_str())
    quick = quick_way(tokenizer, said, kind)
    if quick is not None:
        return quick
    return lambda texts: [np.array(one.ids, kind).tobytes()
                          for one in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def each(row: Callable[[str], bytes]) -> Encode:
    return lambda texts: [row(text) for text in texts]


def quick_way(tokenizer: Tokenizer, said: dict, kind: np.dtype) -> Encode | None:
    """None for a tokenizer of which it is not known that words stay apart."""
    if not tokenizer.encode_special_tokens or any(not token["special"] for token in said["added_tokens"]):
        return None
    before, way = said["normalizer"], said["pre_tokenizer"] or {}
    unknown = marks(tokenizer).unknown
    special = {} if unknown is None else {token["id"]: unknown for token in said["added_tokens"]}  # all are special

    def ask(piece: str) -> list[int]:
        """One piece; "</s>" in a text is four signs or an unknown word, never the end."""
        return [special.get(token.id, token.id) for token in tokenizer.model.tokenize(piece)]

    match said["model"]["type"], way.get("type"):
        case "BPE", "Sequence" if before in (None, {"type": "Prepend", "prepend": " "}) and _ours(way):
            return _pieces(tokenizer, kind, prefixed=before is not None)
        case "Unigram", "Metaspace" if before is None and way["replacement"] == "▁" and way["split"]:
            return each(_spaced(ask, kind, prefixed=way["prepend_scheme"] == "always"))
        case "WordLevel", "WhitespaceSplit" if before is None:
            words = Words(ask, kind)
            apart = lambda text: _WORD.findall(text) if _RARE.search(text) else text.split()
            return each(lambda text: b"".join(map(words.__getitem__, apart(text))))
        case "WordLevel", "Split" if before is None and way["pattern"] == {"Regex": WORDS} and way["invert"]:
            lines, find = Words(ask, kind), re.compile(WORDS).findall
            return each(lambda text: b"".join(map(lines.__getitem__, find(text))))
        case "WordLevel", "Split" if before is None and way["pattern"] == {"Regex": r"[\s\S]"}:
            signs = Words(ask, kind)
            return each(lambda text: b"".join(map(signs.__getitem__, text)))
    return None


def _ours(way: dict) -> bool:
    parts = way["pretokenizers"]
    return ([part["type"] for part in parts] == ["Split", "ByteLevel"] and parts[0]["pattern"] == {"Regex": PIECES}
            and parts[0]["behavior"] == "Isolated" and not parts[1]["add_prefix_space"] and not parts[1]["use_regex"])


def _pieces(tokenizer: Tokenizer, kind: np.dtype, *, prefixed: bool) -> Encode:
    """Byte-level BPE with our own pieces: none reaches over a line break, or over a single space but to take it along.

    So what begins at a space, and where letters, digits and marks of ASCII meet, can be looked up by itself; rare kinds of
    white space go the plain way.
    """
    from tokenizers import Tokenizer

    bare = Tokenizer.from_str(tokenizer.to_str())
    bare.normalizer = None  # type: ignore[assignment]
    bare.encode_special_tokens = True
    split = re.compile(PIECES).findall

    def broken(texts: list[str]) -> list[list[int]]:
        return [one.ids for one in bare.encode_batch_fast(texts, add_special_tokens=False)]

    units, pieces = Units(broken, kind), Words(lambda piece: broken([piece])[0], kind)
    line_break = np.array(broken(["\n"])[0], kind).tobytes()

    def plain(line: str) -> bytes:
        return b"".join(map(pieces.__getitem__, split(line)))

    def looked_up(text: Bytes) -> tuple[np.ndarray, Places, Places]:
        """The integers of a text, where its pieces begin, and how many integers were made before each and at the end."""
        kinds = KINDS[text]
        opens = np.empty(len(text), bool)
        opens[0] = True
        before, here = kinds[:-1], kinds[1:]
        opens[1:] = (here >= BLANK) | (before == BREAK) | ((here != before) & (here > 0) & (before > 0) & (before < BLANK))
        begins = np.flatnonzero(opens)
        tokens, counts = units(text, begins, np.append(begins[1:], len(text)))
        return tokens, begins, np.append(0, np.cumsum(counts))

    def running(text: str) -> bytes:
        data = np.frombuffer(text.encode(), np.uint8)
        if odd(data):
            return line_break.join(plain(line) if strange else quick([line])[0] for line, strange in told(text.split("\n")))
        return looked_up(data)[0].tobytes() if len(data) else b""

    def quick(lines: list[str]) -> list[bytes]:
        """Lines without line breaks, joined by some, all at once."""
        text = np.frombuffer("\n".join(lines).encode(), np.uint8)
        if not len(text):
            return [b""] * len(lines)
        if odd(text):
            usual = iter(quick([line for line, strange in told(lines) if not strange]))
            return [plain(line) if strange else next(usual) for line, strange in told(lines)]
        tokens, begins, done = looked_up(text)
        breaks = np.searchsorted(begins, np.flatnonzero(text == LINE))  # which pieces stand between two lines
        first, last = done[np.append(0, breaks + 1)], done[np.append(breaks, len(begins))]
        data, size = tokens.tobytes(), kind.itemsize
        return [data[a:b] for a, b in zip((first * size).tolist(), (last * size).tolist(), strict=True)]

    def rows(texts: Sequence[str]) -> list[bytes]:
        texts = [" " + text if text else text for text in texts] if prefixed else list(texts)
        return [running(text) for text in texts] if any("\n" in text for text in texts) else quick(texts)

    return rows


def odd(text: Bytes) -> bool:
    """Are there control signs, or spaces that are not one or two before a word?"""
    if not len(text):
        return False
    space, line = text == SPACE, text == LINE
    if bool(((text < SPACE) & ~line).any()):
        return True
    double = np.flatnonzero(space[1:] & space[:-1]) + 2  # what follows two spaces
    return bool(len(double)) and (int(double[-1]) == len(text) or bool((space | line)[double].any()))


def told(lines: list[str]) -> list[tuple[str, bool]]:
    """Each line, and whether it is odd."""
    return [(line, odd(np.frombuffer(line.encode(), np.uint8))) for line in lines]


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
