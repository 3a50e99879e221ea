"""Fast batch tokenisation: each distinct word is tokenized once, then looked up in a hash table of pieces,
many thousand at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keepleft.data.ragged import IntArray
from keepleft.data.tokenizer import WORD_REGEX, special_tokens
from keepleft.disk.split_regexes import PIECE_REGEX

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_CACHED_WORDS = 1 << 20

SPACE, NEWLINE = ord(" "), ord("\n")
SPACE_CLASS = 4
NEWLINE_CLASS = 5


def _byte_class(byte: int) -> int:
    """0 beyond ASCII, 1 for a letter, 2 for a digit, 3 for other characters, SPACE_CLASS, NEWLINE_CLASS."""
    if byte > 127:
        return 0
    if byte in (SPACE, NEWLINE):
        return SPACE_CLASS if byte == SPACE else NEWLINE_CLASS
    return 1 if chr(byte).isalpha() else 2 if chr(byte).isdigit() else 3


BYTE_CLASSES = np.array([_byte_class(byte) for byte in range(256)], np.uint8)

# white space to Python, but not to the tokenizer
_SEPARATOR_CONTROLS = re.compile("[\x1c-\x1f]")
_WORD_REGEX = re.compile(r"(?:[^\s]|[\x1c-\x1f])+")

EncodeFunction = Callable[[Sequence[str]], list[bytes]]  # texts → the bytes of each one's token ids


class WordCache(dict[str, bytes]):
    """The token ids of each word, as bytes; a missing word is tokenized on first access."""

    def __init__(self, tokenize: Callable[[str], list[int]], dtype: np.dtype) -> None:
        super().__init__()
        self.tokenize = tokenize
        self.dtype = dtype

    def __missing__(self, word: str) -> bytes:
        encoded = np.array(self.tokenize(word), self.dtype).tobytes()
        if len(self) < MAX_CACHED_WORDS:
            self[word] = encoded
        return encoded


def encoder(
    tokenizer: Tokenizer, dtype: np.dtype, *, prefix: Sequence[int] = (), suffix: Sequence[int] = ()
) -> EncodeFunction:
    """A function from texts to the bytes of their token ids, with `prefix` and `suffix` around each."""
    prefix_bytes, suffix_bytes = (np.array(part, dtype).tobytes() for part in (prefix, suffix))
    encode_texts = _text_encoder(tokenizer, dtype)
    if not prefix_bytes and not suffix_bytes:
        return encode_texts
    return lambda texts: [prefix_bytes + row + suffix_bytes for row in encode_texts(texts)]


def _text_encoder(tokenizer: Tokenizer, dtype: np.dtype) -> EncodeFunction:
    """The fast encoder where there is one for the tokenizer, else the tokenizer's own."""
    fast = fast_encoder(tokenizer, json.loads(tokenizer.to_str()), dtype)
    if fast is not None:
        return fast
    return lambda texts: [
        np.array(encoding.ids, dtype).tobytes()
        for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    ]


def per_text(encode_text: Callable[[str], bytes]) -> EncodeFunction:
    """The same function over many texts."""
    return lambda texts: [encode_text(text) for text in texts]


def fast_encoder(tokenizer: Tokenizer, tokenizer_json: dict, dtype: np.dtype) -> EncodeFunction | None:
    """An encoder that caches words; None for a tokenizer whose words are not known to be independent."""
    if not tokenizer.encode_special_tokens or any(
        not token["special"] for token in tokenizer_json["added_tokens"]
    ):
        return None
    normalizer, pre_tokenizer = tokenizer_json["normalizer"], tokenizer_json["pre_tokenizer"] or {}
    unk_id = special_tokens(tokenizer).unknown
    # all added tokens are special
    special_to_unk = (
        {} if unk_id is None else {token["id"]: unk_id for token in tokenizer_json["added_tokens"]}
    )

    def tokenize(piece: str) -> list[int]:
        """One piece; "</s>" in a text is four characters or an unknown word, never the special token."""
        return [special_to_unk.get(token.id, token.id) for token in tokenizer.model.tokenize(piece)]

    match tokenizer_json["model"]["type"], pre_tokenizer.get("type"):
        case "BPE", "Sequence" if normalizer in (
            None,
            {"type": "Prepend", "prepend": " "},
        ) and _is_own_pre_tokenizer(pre_tokenizer):
            return _byte_bpe_encoder(tokenizer, dtype, add_prefix_space=normalizer is not None)
        case "Unigram", "Metaspace" if (
            normalizer is None and pre_tokenizer["replacement"] == "▁" and pre_tokenizer["split"]
        ):
            return per_text(
                _unigram_encoder(
                    tokenize, dtype, add_prefix_space=pre_tokenizer["prepend_scheme"] == "always"
                )
            )
        case "WordLevel", "WhitespaceSplit" if normalizer is None:
            word_cache = WordCache(tokenize, dtype)
            split_words = lambda text: (
                _WORD_REGEX.findall(text) if _SEPARATOR_CONTROLS.search(text) else text.split()
            )
            return per_text(lambda text: b"".join(map(word_cache.__getitem__, split_words(text))))
        case "WordLevel", "Split" if (
            normalizer is None
            and pre_tokenizer["pattern"] == {"Regex": WORD_REGEX}
            and pre_tokenizer["invert"]
        ):
            line_cache, find = WordCache(tokenize, dtype), re.compile(WORD_REGEX).findall
            return per_text(lambda text: b"".join(map(line_cache.__getitem__, find(text))))
        case "WordLevel", "Split" if normalizer is None and pre_tokenizer["pattern"] == {"Regex": r"[\s\S]"}:
            char_cache = WordCache(tokenize, dtype)
            return per_text(lambda text: b"".join(map(char_cache.__getitem__, text)))
    return None


def _is_own_pre_tokenizer(pre_tokenizer: dict) -> bool:
    """Whether train_tokenizer() made it, so that pieces follow PIECE_REGEX."""
    parts = pre_tokenizer["pretokenizers"]
    return (
        [part["type"] for part in parts] == ["Split", "ByteLevel"]
        and parts[0]["pattern"] == {"Regex": PIECE_REGEX}
        and parts[0]["behavior"] == "Isolated"
        and not parts[1]["add_prefix_space"]
        and not parts[1]["use_regex"]
    )


def _byte_bpe_encoder(tokenizer: Tokenizer, dtype: np.dtype, *, add_prefix_space: bool) -> EncodeFunction:
    """Byte-level BPE over PIECE_REGEX: no piece crosses a line break, and a space only begins one.

    So text can be cut at spaces, and where ASCII letters, digits and punctuation meet, and each part looked
    up by itself. Lines with other white space take the slow path, piece by piece.
    """
    from tokenizers import Tokenizer

    raw_tokenizer = Tokenizer.from_str(tokenizer.to_str())
    raw_tokenizer.normalizer = None  # type: ignore[assignment]
    raw_tokenizer.encode_special_tokens = True
    split = re.compile(PIECE_REGEX).findall

    def tokenize(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in raw_tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    piece_table = PieceTable(tokenize, dtype)
    piece_cache = WordCache(lambda piece: tokenize([piece])[0], dtype)
    line_break = np.array(tokenize(["\n"])[0], dtype).tobytes()

    def encode_slowly(line: str) -> bytes:
        return b"".join(map(piece_cache.__getitem__, split(line)))

    def look_up_pieces(utf8: ByteArray) -> tuple[np.ndarray, IntArray, IntArray]:
        """Token ids; each piece's offset in bytes; each piece's offset in tokens, and their number."""
        classes = BYTE_CLASSES[utf8]
        is_start = np.empty(len(utf8), bool)
        is_start[0] = True
        previous, current = classes[:-1], classes[1:]
        is_start[1:] = (
            (current >= SPACE_CLASS)
            | (previous == NEWLINE_CLASS)
            | ((current != previous) & (current > 0) & (previous > 0) & (previous < SPACE_CLASS))
        )
        starts = np.flatnonzero(is_start)
        tokens, counts = piece_table(utf8, starts, np.append(starts[1:], len(utf8)))
        return tokens, starts, np.append(0, np.cumsum(counts))

    def encode_running_text(text: str) -> bytes:
        utf8 = np.frombuffer(text.encode(), np.uint8)
        if has_irregular_spaces(utf8):
            return line_break.join(
                encode_slowly(line) if irregular else encode_lines([line])[0]
                for line, irregular in flag_irregular(text.split("\n"))
            )
        return look_up_pieces(utf8)[0].tobytes() if len(utf8) else b""

    def encode_lines(lines: list[str]) -> list[bytes]:
        """Lines, all at once: joined by line breaks, whose tokens are left out again."""
        utf8 = np.frombuffer("\n".join(lines).encode(), np.uint8)
        if not len(utf8):
            return [b""] * len(lines)
        if has_irregular_spaces(utf8):
            flagged = flag_irregular(lines)
            regular = iter(encode_lines([line for line, irregular in flagged if not irregular]))
            return [encode_slowly(line) if irregular else next(regular) for line, irregular in flagged]
        tokens, starts, token_offsets = look_up_pieces(utf8)
        # the pieces that are line breaks
        breaks = np.searchsorted(starts, np.flatnonzero(utf8 == NEWLINE))
        first, last = token_offsets[np.append(0, breaks + 1)], token_offsets[np.append(breaks, len(starts))]
        data, size = tokens.tobytes(), dtype.itemsize
        return [data[a:b] for a, b in zip((first * size).tolist(), (last * size).tolist(), strict=True)]

    def encode_texts(texts: Sequence[str]) -> list[bytes]:
        texts = [" " + text if text else text for text in texts] if add_prefix_space else list(texts)
        if any("\n" in text for text in texts):
            return [encode_running_text(text) for text in texts]
        return encode_lines(texts)

    return encode_texts


def has_irregular_spaces(utf8: ByteArray) -> bool:
    """Whether there are control characters, or spaces other than one or two before a word."""
    if not len(utf8):
        return False
    is_space, is_newline = utf8 == SPACE, utf8 == NEWLINE
    if bool(((utf8 < SPACE) & ~is_newline).any()):
        return True
    after_double_space = np.flatnonzero(is_space[1:] & is_space[:-1]) + 2  # what follows two spaces
    return bool(len(after_double_space)) and (
        int(after_double_space[-1]) == len(utf8) or bool((is_space | is_newline)[after_double_space].any())
    )


def flag_irregular(lines: list[str]) -> list[tuple[str, bool]]:
    """Each line, and whether it has irregular spaces."""
    return [(line, has_irregular_spaces(np.frombuffer(line.encode(), np.uint8))) for line in lines]


def _unigram_encoder(
    tokenize: Callable[[str], list[int]], dtype: np.dtype, *, add_prefix_space: bool
) -> Callable[[str], bytes]:
    """Unigram with Metaspace: a piece begins at each space and nowhere else."""
    first_cache = WordCache(tokenize, dtype)
    spaced_cache = WordCache(lambda word: tokenize("▁" + word), dtype)

    def encode_text(text: str) -> bytes:
        first, *rest = text.replace("▁", " ").split(" ")
        if add_prefix_space and text and first:
            rest = [first, *rest]
            first = ""
        return first_cache[first] + b"".join(map(spaced_cache.__getitem__, rest))

    return encode_text


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
