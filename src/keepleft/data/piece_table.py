"""A hash table from pieces of text to token ids, looked up many thousand at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from keepleft.data.ragged import IntArray

HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
MAX_CACHED_PIECES = 1 << 20  # when the table holds more, it is cleared

ByteArray = NDArray[np.uint8]
HashArray = NDArray[np.uint64]


class PieceTable:
    """From pieces of UTF-8 to token ids; each distinct piece is tokenized once and cached.

    A piece's hash is the sum of random numbers, one for each byte value, each times a power of a random odd
    number: prefix sums over all text give the hashes of all pieces at once, and as the numbers are drawn anew
    in each process, no text can be made to collide. Hashes have 64 bits: of a million distinct pieces two
    share one in fewer than one of ten million corpora.
    """

    def __init__(self, tokenize: Callable[[list[str]], list[list[int]]], dtype: np.dtype) -> None:
        self.tokenize = tokenize
        self.dtype = dtype
        rng = np.random.default_rng()
        self.byte_hashes = rng.integers(1, 1 << 63, 256, np.uint64) * np.uint64(2) + np.uint64(1)
        self.base = int(rng.integers(1, 1 << 62)) * 4 + 1
        self.powers = self.inverse_powers = np.empty(0, np.uint64)
        self.clear()

    def clear(self) -> None:
        self.num_pieces = 0
        self.tokens = np.empty(1 << 12, self.dtype)
        self.tokens_used = 0
        self._allocate(16)

    def _allocate(self, bits: int) -> None:
        """An empty table of 2^bits slots, with open addressing: key 0 marks an empty slot."""
        self.shift = np.uint64(64 - bits)
        self.slot_mask = (1 << bits) - 1
        self.keys: HashArray = np.zeros(1 << bits, np.uint64)
        self.starts = np.zeros(1 << bits, np.int64)
        self.counts = np.zeros(1 << bits, np.int64)

    def __call__(self, utf8: ByteArray, starts: IntArray, ends: IntArray) -> tuple[np.ndarray, IntArray]:
        """The token ids of all pieces utf8[start:end], concatenated, and how many each piece has."""
        if self.num_pieces > MAX_CACHED_PIECES:
            self.clear()
        hashes = self._hashes(utf8, starts, ends)
        slots, is_known = self._look_up(hashes)
        if not is_known.all():
            new = np.flatnonzero(~is_known)
            _, first = np.unique(hashes[new], return_index=True)
            new = new[first]
            pieces = [
                utf8[a:b].tobytes().decode()
                for a, b in zip(starts[new].tolist(), ends[new].tolist(), strict=True)
            ]
            self._add(hashes[new], self.tokenize(pieces))
            slots, is_known = self._look_up(hashes)
            assert is_known.all()
        counts = self.counts[slots]
        total = np.cumsum(counts)
        index = np.repeat(self.starts[slots] - (total - counts), counts)
        index += np.arange(len(index))
        return self.tokens[index], counts

    def _hashes(self, utf8: ByteArray, starts: IntArray, ends: IntArray) -> HashArray:
        if len(utf8) > len(self.powers):
            size = 1 << max(16, len(utf8).bit_length())
            self.powers, self.inverse_powers = (
                _powers(base, size) for base in (self.base, pow(self.base, -1, 1 << 64))
            )
        prefix_sums = np.empty(len(utf8) + 1, np.uint64)
        prefix_sums[0] = 0
        np.cumsum(self.byte_hashes[utf8] * self.powers[: len(utf8)], out=prefix_sums[1:])
        # odd, since key 0 marks an empty slot
        return ((prefix_sums[ends] - prefix_sums[starts]) * self.inverse_powers[starts]) | np.uint64(1)

    def _first_slots(self, hashes: HashArray) -> IntArray:
        """The slot at which probing for each hash begins."""
        return ((hashes * HASH_MULTIPLIER) >> self.shift).astype(np.int64)

    def _look_up(self, hashes: HashArray) -> tuple[IntArray, NDArray[np.bool_]]:
        """The slot of each hash, and whether it is known: linear probing until it or an empty slot is met."""
        slots = self._first_slots(hashes)
        stored = self.keys[slots]
        is_known = stored == hashes
        pending = np.flatnonzero(~is_known & (stored != 0))
        while len(pending):
            slots[pending] = (slots[pending] + 1) & self.slot_mask
            stored = self.keys[slots[pending]]
            is_known[pending] = stored == hashes[pending]
            pending = pending[(stored != 0) & ~is_known[pending]]
        return slots, is_known

    def _add(self, keys: HashArray, tokens: list[list[int]]) -> None:
        """Cache the token ids of new pieces; the table grows so as to stay at most a third full."""
        counts = np.fromiter(map(len, tokens), np.int64, len(tokens))
        starts = self.tokens_used + np.cumsum(counts) - counts
        self.tokens_used += int(counts.sum())
        if self.tokens_used > len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.empty(self.tokens_used, self.dtype)])
        self.tokens[self.tokens_used - int(counts.sum()) : self.tokens_used] = np.fromiter(
            chain.from_iterable(tokens), self.dtype
        )
        self.num_pieces += len(keys)
        if 3 * self.num_pieces > len(self.keys):
            occupied = np.flatnonzero(self.keys)
            entries = self.keys[occupied], self.starts[occupied], self.counts[occupied]
            self._allocate((3 * self.num_pieces).bit_length() + 1)
            self._insert(*entries)
        self._insert(keys, starts, counts)

    def _insert(self, keys: HashArray, starts: IntArray, counts: IntArray) -> None:
        """Put each key into the first empty slot; where several probe the same one, the first gets it."""
        slots, pending = self._first_slots(keys), np.arange(len(keys))
        while len(pending):
            free = pending[self.keys[slots[pending]] == 0]
            _, first = np.unique(slots[free], return_index=True)
            winners = free[first]
            self.keys[slots[winners]] = keys[winners]
            self.starts[slots[winners]] = starts[winners]
            self.counts[slots[winners]] = counts[winners]
            pending = pending[self.keys[slots[pending]] != keys[pending]]
            slots[pending] = (slots[pending] + 1) & self.slot_mask


def _powers(base: int, count: int) -> HashArray:
    """1, base, base², … modulo 2⁶⁴"""
    out = np.ones(1, np.uint64)
    while len(out) < count:
        out = np.concatenate([out, out * np.uint64(pow(base, len(out), 1 << 64))])
    return out[:count]
