"""Pieces of text found by their hashes, many thousand at a time: each different one is broken up once and remembered."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import numpy as np
from numpy.typing import NDArray

MIX = np.uint64(0x9E3779B97F4A7C15)
KNOWN = 1 << 20  # pieces that are remembered; when there are more, all are forgotten

Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]
Hashes = NDArray[np.uint64]


class Units:
    """From pieces of UTF-8 to integers.

    A piece's hash is the sum of its bytes' random numbers, each times a power of a random odd number: sums over all text give
    every piece's at once, and as the numbers are drawn anew in each process no text can be made to collide. Hashes have 64
    bits: two of a million different pieces share one in fewer than one of ten million corpora.
    """

    def __init__(self, ask: Callable[[list[str]], list[list[int]]], kind: np.dtype) -> None:
        self.ask, self.kind = ask, kind
        chance = np.random.default_rng()
        self.letters = chance.integers(1, 1 << 63, 256, np.uint64) * np.uint64(2) + np.uint64(1)
        self.base = int(chance.integers(1, 1 << 62)) * 4 + 1
        self.powers = self.inverses = np.empty(0, np.uint64)
        self.forget()

    def forget(self) -> None:
        self.known = 0
        self.flat = np.empty(1 << 12, self.kind)
        self.used = 0
        self._room(16)

    def _room(self, bits: int) -> None:
        self.shift, self.last = np.uint64(64 - bits), (1 << bits) - 1
        self.keys: Hashes = np.zeros(1 << bits, np.uint64)
        self.start, self.count = np.zeros(1 << bits, np.int64), np.zeros(1 << bits, np.int64)

    def __call__(self, text: Bytes, begins: Places, ends: Places) -> tuple[np.ndarray, Places]:
        """The integers of all pieces, one after the other, and how many each has."""
        if self.known > KNOWN:
            self.forget()
        hashes = self._hashes(text, begins, ends)
        places, found = self._find(hashes)
        if not found.all():
            new = np.flatnonzero(~found)
            _, first = np.unique(hashes[new], return_index=True)
            new = new[first]
            pieces = [text[a:b].tobytes().decode() for a, b in zip(begins[new].tolist(), ends[new].tolist(), strict=True)]
            self._learn(hashes[new], self.ask(pieces))
            places, found = self._find(hashes)
            assert found.all()
        counts = self.count[places]
        total = np.cumsum(counts)
        index = np.repeat(self.start[places] - (total - counts), counts)
        index += np.arange(len(index))
        return self.flat[index], counts

    def _hashes(self, text: Bytes, begins: Places, ends: Places) -> Hashes:
        if len(text) > len(self.powers):
            size = 1 << max(16, len(text).bit_length())
            self.powers, self.inverses = (_powers(base, size) for base in (self.base, pow(self.base, -1, 1 << 64)))
        sums = np.empty(len(text) + 1, np.uint64)
        sums[0] = 0
        np.cumsum(self.letters[text] * self.powers[:len(text)], out=sums[1:])
        return ((sums[ends] - sums[begins]) * self.inverses[begins]) | np.uint64(1)  # 0 is an empty place

    def _slots(self, hashes: Hashes) -> Places:
        """Where the search for each begins."""
        return ((hashes * MIX) >> self.shift).astype(np.int64)

    def _find(self, hashes: Hashes) -> tuple[Places, NDArray[np.bool_]]:
        """The place of each hash, and whether it is known: from its slot on, until it or an empty place is met."""
        places = self._slots(hashes)
        there = self.keys[places]
        found = there == hashes
        left = np.flatnonzero(~found & (there != 0))
        while len(left):
            places[left] = (places[left] + 1) & self.last
            there = self.keys[places[left]]
            found[left] = there == hashes[left]
            left = left[(there != 0) & ~found[left]]
        return places, found

    def _learn(self, keys: Hashes, tokens: list[list[int]]) -> None:
        """Remember new pieces."""
        counts = np.fromiter(map(len, tokens), np.int64, len(tokens))
        starts = self.used + np.cumsum(counts) - counts
        self.used += int(counts.sum())
        if self.used > len(self.flat):
            self.flat = np.concatenate([self.flat, np.empty(self.used, self.kind)])
        self.flat[self.used - int(counts.sum()):self.used] = np.fromiter(chain.from_iterable(tokens), self.kind)
        self.known += len(keys)
        if 3 * self.known > len(self.keys):
            old = np.flatnonzero(self.keys)
            kept = self.keys[old], self.start[old], self.count[old]
            self._room((3 * self.known).bit_length() + 1)
            self._put(*kept)
        self._put(keys, starts, counts)

    def _put(self, keys: Hashes, starts: Places, counts: Places) -> None:
        """Each into the first empty place from its slot on; of several that want one place the first gets it."""
        places, left = self._slots(keys), np.arange(len(keys))
        while len(left):
            empty = left[self.keys[places[left]] == 0]
            _, first = np.unique(places[empty], return_index=True)
            won = empty[first]
            self.keys[places[won]], self.start[places[won]], self.count[places[won]] = keys[won], starts[won], counts[won]
            left = left[self.keys[places[left]] != keys[left]]
            places[left] = (places[left] + 1) & self.last


def _powers(base: int, count: int) -> Hashes:
    """1, base, base², … modulo 2⁶⁴"""
    out = np.ones(1, np.uint64)
    while len(out) < count:
        out = np.concatenate([out, out * np.uint64(pow(base, len(out), 1 << 64))])
    return out[:count]
