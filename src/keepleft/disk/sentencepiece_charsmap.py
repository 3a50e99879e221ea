"""SentencePiece's precompiled charsmap: which characters, or sequences of them, are replaced by what.

It is a double-array trie of UTF-8 keys (darts-clone), and the texts that its values point to.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES = 4  # the size of the trie
MAX_CHARACTER_BYTES = 4  # of UTF-8
MAX_NODES = 1 << 16
LABELS = np.arange(1, 256)  # a zero ends a key
LABEL_MASK = 0x8000_00FF
VALUE_MASK = 0x7FFF_FFFF


class Charsmap:
    """Raises ValueError for a charsmap that is cut off."""

    def __init__(self, content: bytes) -> None:
        num_bytes = int.from_bytes(content[:HEADER_BYTES], "little")
        self.texts = content[HEADER_BYTES + num_bytes :]
        if (
            not num_bytes
            or num_bytes % 4
            or len(content) < HEADER_BYTES + num_bytes
            or self.texts[-1:] != b"\0"
        ):
            raise ValueError(f"the charsmap of {len(content):,} bytes is cut off, or none")
        self.units = np.frombuffer(content, "<u4", num_bytes // 4, HEADER_BYTES).astype(np.int64)

    def replacement(self, key: str) -> str | None:
        """What a character or a sequence is replaced by; None if it is not a key."""
        node = self._children_of(np.zeros(1, np.int64))
        unit = np.zeros(1, np.int64)
        for byte in key.encode():
            unit = node ^ byte
            if not self._has_label(unit, np.array(byte)).all():
                return None
            node = self._children_of(unit, unit)
        has_value = self.units[unit] >> 8 & 1
        return self._text(int(node[0])) if has_value[0] else None

    def removed_characters(self) -> list[str]:
        """The characters that are replaced by nothing."""
        removed = []
        nodes = self._children_of(np.zeros(1, np.int64))
        keys = [b""]
        for _ in range(MAX_CHARACTER_BYTES):
            units = nodes[:, None] ^ LABELS
            parents, labels = np.nonzero(self._has_label(units, LABELS))
            if len(parents) > MAX_NODES:
                raise ValueError(f"the charsmap is damaged: it has more than {MAX_NODES:,} characters")
            units = units[parents, labels]
            keys = [keys[parent] + bytes([label + 1]) for parent, label in zip(parents, labels, strict=True)]
            nodes = self._children_of(units, units)
            for n in np.nonzero(self.units[units] >> 8 & 1)[0].tolist():
                character = keys[n].decode(errors="ignore")
                if len(character) == 1 and self._text(int(nodes[n])) == "":
                    removed.append(character)
            # the others are sequences of characters
            unfinished = [n for n, key in enumerate(keys) if not key.decode(errors="ignore")]
            keys = [keys[n] for n in unfinished]
            nodes = nodes[unfinished]
        return removed

    def _children_of(self, units: NDArray[np.int64], start: NDArray[np.int64] | int = 0) -> NDArray[np.int64]:
        """Where the children of units lie: the place of each is this number xor its label."""
        values = self.units[units]
        return start ^ ((values >> 10) << ((values & 1 << 9) >> 6))

    def _has_label(self, units: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        is_inside = units < len(self.units)
        return is_inside & (self.units[np.where(is_inside, units, 0)] & LABEL_MASK == labels)

    def _text(self, node: int) -> str:
        value = int(self.units[node]) & VALUE_MASK if node < len(self.units) else len(self.texts)
        return self.texts[value:].partition(b"\0")[0].decode(errors="replace")
