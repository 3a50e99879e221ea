"""Tokenizers: train one, load one, find its special tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from keepleft.disk.regular_file import read_regular_file
from keepleft.disk.sentencepiece_tokenizer import SENTENCEPIECE_SUFFIXES, load_sentencepiece_tokenizer
from keepleft.disk.split_regexes import PIECE_REGEX
from keepleft.disk.tokenizer_json import MAX_TOKENIZER_BYTES, TOKENIZER_FILE, parse_tokenizer, read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SOURCE_TOKENIZER_FILE = "source_tokenizer.json"  # where source and target have vocabularies of their own
TokenizerKind = Literal["bpe", "unigram", "word", "char"]
TOKENIZER_KINDS = ("bpe", "unigram", "word", "char")

PAD_TOKEN = "<pad>"
BOS_TOKEN = "<s>"
EOS_TOKEN = "</s>"
UNK_TOKEN = "<unk>"
MASK_TOKEN = "<mask>"
SPECIAL_TOKENS = (PAD_TOKEN, BOS_TOKEN, EOS_TOKEN, UNK_TOKEN, MASK_TOKEN)
SCORE_DIGITS = 9  # of unigram pieces
RARE_CHARACTER_DISTANCE = 1e-4  # between their scores, in the unigram trainer
SENTINEL_FORMAT = "<extra_id_{}>"

WORD_REGEX = r"\n|[^ \t\n\r]+"

# names of the special tokens in published tokenizers, the likeliest first
# fmt: off
_TOKEN_NAMES = {
    "pad": (PAD_TOKEN, "[PAD]", "<|pad|>", "<|endoftext|>", EOS_TOKEN, "<|end_of_text|>"),
    "start": (BOS_TOKEN, "[CLS]", "<|startoftext|>", "<|begin_of_text|>", "<|im_start|>", "<|endoftext|>",
              PAD_TOKEN),
    "end": (EOS_TOKEN, "[SEP]", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<eos>"),
    "unknown": (UNK_TOKEN, "[UNK]"),
    "mask": (MASK_TOKEN, "[MASK]"),
}
# fmt: on


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of the special tokens; None where the tokenizer has none of that kind."""

    pad: int | None
    start: int | None
    end: int | None
    unknown: int | None
    mask: int | None

    def require(self, *names: str) -> tuple[int, ...]:
        """The ids of these tokens; a ValueError names those that are missing."""
        if missing := [name for name in names if getattr(self, name) is None]:
            raise ValueError(
                f"the tokenizer has no token for {', '.join(missing)}: add one called "
                f"{' and '.join(_TOKEN_NAMES[name][0] for name in missing)}, or train a new tokenizer"
            )
        return tuple(getattr(self, name) for name in names)

    def ids(self) -> frozenset[int]:
        """All of them but unknown, which may stand for text."""
        return frozenset(n for n in (self.pad, self.start, self.end, self.mask) if n is not None)


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """The special tokens of any tokenizer, by their usual names."""

    def find(candidates: tuple[str, ...]) -> int | None:
        ids = map(tokenizer.token_to_id, candidates)
        return next((token_id for token_id in ids if token_id is not None), None)

    return SpecialTokens(**{name: find(candidates) for name, candidates in _TOKEN_NAMES.items()})


def train_tokenizer(
    kind: TokenizerKind,
    texts: Iterable[str],
    size: int,
    *,
    running_text: bool = False,
    extra_special_tokens: Sequence[str] = (),
    min_frequency: int = 2,
) -> Tokenizer:
    """Train a tokenizer of at most `size` tokens, special tokens included (language tags, sentinels …).

    "bpe" and "unigram" split words into pieces, "word" and "char" do not. `running_text` is encoded as it is;
    other texts get a space in front, so that their first word is encoded as in the middle of a text, and
    decoding removes it again. Words and pieces seen fewer than `min_frequency` times are not learned.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if kind not in TOKENIZER_KINDS:
        raise ValueError(f"no tokenizer is called {kind!r}: there are {', '.join(TOKENIZER_KINDS)}")
    all_special = [*SPECIAL_TOKENS, *extra_special_tokens]
    min_learned = {"bpe": 256, "unigram": 64}.get(kind, 1)
    if size < len(all_special) + min_learned:
        raise ValueError(
            f"a vocabulary of {size} is too small: it needs at least {len(all_special)} special tokens and "
            f"{min_learned} more"
        )
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(PIECE_REGEX), "isolated"), byte_level]
        )
        tokenizer.decoder = decoders.ByteLevel()
        if not running_text:
            tokenizer.normalizer = normalizers.Prepend(" ")
            tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
        trainer: trainers.Trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=all_special,
            min_frequency=min_frequency,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        scheme: Literal["always", "never"] = "never" if running_text else "always"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
        trainer = trainers.UnigramTrainer(
            vocab_size=size, special_tokens=all_special, unk_token=UNK_TOKEN, show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.WordLevel(unk_token=UNK_TOKEN))
        if kind == "char":
            tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
            tokenizer.decoder = decoders.Fuse()
        elif running_text:  # a line break is a word
            tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD_REGEX), "removed", invert=True)
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(
            vocab_size=size,
            special_tokens=[],
            show_progress=False,
            min_frequency=1 if kind == "char" else min_frequency,
        )
    tokenizer.train_from_iterator(texts, trainer)
    if kind == "unigram":
        _round_scores(tokenizer, len(all_special))
    if kind in ("word", "char"):
        # "<unk>" may stand in the text, and the trainer would give it a second id
        vocab = tokenizer.get_vocab()
        learned = sorted(vocab.keys() - set(all_special), key=vocab.__getitem__)[: size - len(all_special)]
        tokenizer.model = models.WordLevel(
            {token: n for n, token in enumerate([*all_special, *learned])}, UNK_TOKEN
        )
        tokenizer.add_special_tokens(all_special)
    tokenizer.encode_special_tokens = True  # "</s>" in a text is four characters, not the end
    return tokenizer


def _round_scores(tokenizer: Tokenizer, num_special: int) -> None:
    """Make the same unigram model of the same texts.

    The trainer goes through hash tables, in another order each time: its scores differ in the last digits,
    and rare characters, which get the lowest scores at equal distances, take them in any order.
    """
    from tokenizers import models

    model = json.loads(tokenizer.to_str())["model"]
    pieces = [(piece, round(score, SCORE_DIGITS)) for piece, score in model["vocab"]]
    learned = sorted(pieces[num_special:], key=lambda entry: (-entry[1], entry[0]))
    rare: list[int] = []  # the indices of rare characters, the lowest score first
    score = learned[-1][1]
    for index in reversed(range(len(learned))):
        if learned[index][1] - score > 1.01 * RARE_CHARACTER_DISTANCE:
            break
        if len(learned[index][0]) == 1:
            rare.append(index)
            score = learned[index][1]
    characters = sorted((learned[index][0] for index in rare), reverse=True)
    for index, character in zip(rare, characters, strict=True):
        learned[index] = (character, learned[index][1])
    tokenizer.model = models.Unigram(
        [*pieces[:num_special], *learned], model["unk_id"], model["byte_fallback"]
    )


def vocab_size(tokenizer: Tokenizer) -> int:
    """The vocabulary size a model needs: one more than the highest id, since some tokenizers leave gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def copy_tokenizer(tokenizer: Tokenizer, *, encode_special_tokens: bool) -> Tokenizer:
    """`encode_special_tokens`: split them like any other text, as the library calls it."""
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.encode_special_tokens = encode_special_tokens
    return copy


def load_tokenizer(path: str | Path, name: str = TOKENIZER_FILE) -> Tokenizer:
    """A tokenizer file (tokenizer.json, or SentencePiece's .model), or that called `name` in a directory."""
    path = Path(path)
    is_folder = path.is_dir()
    file_path = path / name if is_folder else path
    if not os.path.lexists(file_path):
        raise FileNotFoundError(f"there is no tokenizer {file_path}")
    if is_folder:
        tokenizer = read_tokenizer(path, name)
    elif path.suffix in SENTENCEPIECE_SUFFIXES:
        tokenizer = load_sentencepiece_tokenizer(path)
    else:
        tokenizer = parse_tokenizer(read_regular_file(path, max_bytes=MAX_TOKENIZER_BYTES), path)
    tokenizer.encode_special_tokens = True
    return tokenizer
