"""Tokenizers: learn one from text, find the special tokens of any, and encode a text as a sequence of integers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from keepleft.disk.tokenizer import parsed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Kind = Literal["bpe", "unigram", "word", "char"]
KINDS = ("bpe", "unigram", "word", "char")

PAD, START, END, UNKNOWN, MASK = "<pad>", "<s>", "</s>", "<unk>", "<mask>"
SPECIAL = (PAD, START, END, UNKNOWN, MASK)
SENTINEL = "<extra_id_{}>"

# Letters, digits and other marks apart, each with at most one space before it; every line break by itself. Classes are spelt
# out, so that every regular expression engine reads them alike. Beyond ASCII everything is a letter but the marks named here:
# so the vowel signs of Devanagari stay with their consonants.
_MARKS = r"!-/:-@\[-`{-\x7f\x00-\x08\x0b\x0c\x0e-\x1f" "¡«»¿\u0964\u0965\u2010-\u206f\u3000-\u303f"
PIECES = (rf" ?[A-Za-z]+| ?[^ \t\n\rA-Za-z0-9{_MARKS}][^ \t\n\r0-9{_MARKS}]*| ?[0-9]{{1,3}}| ?[{_MARKS}]+"
          r"|\n|[ \t\r]+(?![^ \t\n\r])|[ \t\r]+")

WORDS = r"\n|[^ \t\n\r]+"

_NAMES = {  # what others call them, the likeliest first
    "pad": (PAD, "[PAD]", "<|pad|>", "<|endoftext|>", END, "<|end_of_text|>"),
    "start": (START, "[CLS]", "<|startoftext|>", "<|begin_of_text|>", "<|im_start|>", "<|endoftext|>", PAD),
    "end": (END, "[SEP]", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<eos>"),
    "unknown": (UNKNOWN, "[UNK]"),
    "mask": (MASK, "[MASK]"),
}


@dataclass(frozen=True)
class Marks:
    """The integers of the special tokens; None where a tokenizer has none of that kind."""

    pad: int | None
    start: int | None
    end: int | None
    unknown: int | None
    mask: int | None

    def need(self, *names: str) -> tuple[int, ...]:
        """Those that a task cannot do without."""
        if lacking := [name for name in names if getattr(self, name) is None]:
            raise ValueError(f"the tokenizer has no token for {', '.join(lacking)}: add one called "
                             f"{' and '.join(_NAMES[name][0] for name in lacking)}, or learn a new tokenizer")
        return tuple(getattr(self, name) for name in names)

    def special(self) -> frozenset[int]:
        return frozenset(n for n in (self.pad, self.start, self.end, self.mask) if n is not None)


def marks(tokenizer: Tokenizer) -> Marks:
    return Marks(**{name: next((n for word in words if (n := tokenizer.token_to_id(word)) is not None), None)
                    for name, words in _NAMES.items()})


def learn(kind: Kind, texts: Iterable[str], size: int, *, running: bool = False, more: Sequence[str] = (),
          least: int = 2) -> Tokenizer:
    """A new tokenizer of at most `size` tokens. `more` are further special ones (language tags, sentinels).

    bpe and unigram break words into pieces, word and char do not. Text that is `running` is left as it is; otherwise a text
    begins as a word in its middle does, with a space, which decoding takes away again. Words and pieces seen fewer than
    `least` times are not learned.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if kind not in KINDS:
        raise ValueError(f"no tokenizer is called {kind!r}: there are {', '.join(KINDS)}")
    special = [*SPECIAL, *more]
    room = {"bpe": 256, "unigram": 64}.get(kind, 1)
    if size < len(special) + room:
        raise ValueError(f"a vocabulary of {size} is too small: {len(special)} special tokens and {room} more is the least")
    if kind == "bpe":
        out = Tokenizer(models.BPE())
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        out.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PIECES), "isolated"), bytes_])
        out.decoder = decoders.ByteLevel()
        if not running:
            out.normalizer = normalizers.Prepend(" ")
            out.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
        trainer: trainers.Trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=special, min_frequency=least, show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    elif kind == "unigram":
        out = Tokenizer(models.Unigram())
        scheme: Literal["always", "never"] = "never" if running else "always"
        out.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        out.decoder = decoders.Metaspace(prepend_scheme=scheme)
        trainer = trainers.UnigramTrainer(vocab_size=size, special_tokens=special, unk_token=UNKNOWN, show_progress=False)
    else:
        out = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
        if kind == "char":
            out.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
            out.decoder = decoders.Fuse()
        elif running:  # a line break is a word too
            out.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "removed", invert=True)
        else:
            out.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(vocab_size=size, special_tokens=[], show_progress=False,
                                            min_frequency=1 if kind == "char" else least)
    out.train_from_iterator(texts, trainer)
    if kind in ("word", "char"):  # "<unk>" may stand in the text, and the trainer would number it a second time
        known = out.get_vocab()
        found = sorted(known.keys() - set(special), key=known.__getitem__)[:size - len(special)]
        out.model = models.WordLevel({word: n for n, word in enumerate([*special, *found])}, UNKNOWN)
        out.add_special_tokens(special)
    out.encode_special_tokens = True  # "</s>" in a text is four characters, not the end
    return out


def span(tokenizer: Tokenizer) -> int:
    """How many integers a model must know: one more than the highest, for some tokenizers leave holes."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def read(path: str | Path) -> Tokenizer:
    """A tokenizer.json, or the one in a model directory."""
    path = Path(path)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        raise FileNotFoundError(f"there is no tokenizer {path}")
    out = parsed(path.read_bytes(), path)
    out.encode_special_tokens = True
    return out
