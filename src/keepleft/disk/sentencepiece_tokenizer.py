"""A SentencePiece model as a tokenizer of the tokenizers library, with the same ids for a text.

A few texts have other ids. Where SentencePiece's charsmap composes characters but leaves a text that is not
NFC, as with several combining marks on one letter, it is NFC here; with case folding, some letters that are
given decomposed stay so. The character ▁ at the end of a text is kept. Control characters alone are no text.
With a BPE model, a text that is exactly one user-defined symbol has no prefix.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from keepleft.disk.sentencepiece_charsmap import Charsmap
from keepleft.disk.sentencepiece_model import (
    ModelType,
    PieceType,
    SentencePieceModel,
    read_sentencepiece_model,
)
from keepleft.disk.tokenizer_growth import check_growth

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.normalizers import Normalizer

SENTENCEPIECE_SUFFIXES = (".model", ".spm")
METASPACE = "\u2581"  # ▁, which SentencePiece writes for a space
USER_DEFINED_SCORE = -0.1  # SentencePiece's own, so that these symbols are preferred to any split of them
# A character that is in no text, since it is not assigned, and that is a grapheme of its own.
SEPARATOR = "\ufff8"
FIRST_PLACEHOLDER = 0x10F000  # private use: stands for a user-defined symbol while the rest is normalised
# Before characters that belong to the grapheme of the one before them. The library replaces graphemes by the
# charsmap, and loses what follows a character that the charsmap knows; SentencePiece replaces characters.
EXTENDING_CHARACTERS = "[\\p{M}\n\u200c\u200d\uff9e\uff9f\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]"
# What the charsmaps of SentencePiece that normalise to NFKC compose; others do not compose at all.
COMPOSED_EXAMPLES = {"e\u0301": "é", "か\u3099": "が", "\u1100\u1161": "가"}
MAX_LEADING_SPACES = 1 << 16  # that decoding removes from a text


def load_sentencepiece_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a .model or .spm file. Raises ValueError for a file or kind that is not understood."""
    return convert_sentencepiece(read_sentencepiece_model(path), path)


def convert_sentencepiece(model: SentencePieceModel, source_name: object) -> Tokenizer:
    """The same model for the tokenizers library. Raises ValueError, naming `source_name`, if it has none."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers

    if model.model_type not in (ModelType.UNIGRAM, ModelType.BPE):
        raise ValueError(
            f"{source_name} is a {model.model_type.name.lower()} model: unigram and BPE models are read"
        )
    if model.whitespace_as_suffix:
        raise ValueError(
            f"{source_name} puts spaces behind words, which is not supported: take another model"
        )
    is_unigram = model.model_type == ModelType.UNIGRAM
    tokenizer = Tokenizer(_unigram(model) if is_unigram else _bpe(model))
    try:
        tokenizer.normalizer = _normalizer(model)
    except ValueError as error:
        raise ValueError(f"{source_name} is not a SentencePiece model: {error}") from error
    if is_unigram:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(SEPARATOR, "removed")
    tokenizer.decoder = decoders.Sequence(
        [
            *([decoders.Replace(METASPACE, " ")] if model.escape_whitespaces else []),
            *([decoders.ByteFallback()] if model.byte_fallback else []),
            decoders.Fuse(),
            *([decoders.Strip(" ", spaces, 0)] if (spaces := _leading_spaces(model)) else []),
        ]
    )
    special = model.texts(PieceType.UNKNOWN, PieceType.CONTROL)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    if not is_unigram:
        symbols = model.texts(PieceType.USER_DEFINED)
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=True) for text in symbols])
    check_growth(tokenizer, source_name)
    return tokenizer


def _leading_spaces(model: SentencePieceModel) -> int:
    """How many spaces at the beginning of a decoded text are not its own."""
    if model.remove_extra_whitespaces:
        return MAX_LEADING_SPACES
    return int(model.add_dummy_prefix)


# The models ----------------------------------------------------------------------------------------


def _unigram(model: SentencePieceModel):  # type: ignore[no-untyped-def] # the library has no type for it
    from tokenizers import models

    vocab = []
    for n, piece in enumerate(model.pieces):
        match piece.type:
            case PieceType.NORMAL:
                vocab.append((piece.text, piece.score))
            case PieceType.USER_DEFINED:
                vocab.append((piece.text, USER_DEFINED_SCORE))
            case PieceType.UNUSED:  # has an id, and stands for no text
                vocab.append((f"{SEPARATOR}{n}", 0.0))
            case _:
                vocab.append((piece.text, 0.0))
    unk_id = next(n for n, piece in enumerate(model.pieces) if piece.type == PieceType.UNKNOWN)
    return models.Unigram(vocab, unk_id, model.byte_fallback)


def _bpe(model: SentencePieceModel):  # type: ignore[no-untyped-def]
    from tokenizers import models

    (unk_token,) = model.texts(PieceType.UNKNOWN)
    return models.BPE(
        vocab={piece.text: n for n, piece in enumerate(model.pieces)},
        merges=ranked_merges(
            [(piece.text, piece.score) for piece in model.pieces if piece.type == PieceType.NORMAL]
        ),
        unk_token=unk_token,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def ranked_merges(pieces: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """SentencePiece stores no merges: they are all ways to split a piece in two, the best piece first."""
    ids = {text: n for n, (text, _) in enumerate(pieces)}
    ranked = []
    for text, score in pieces:
        splits = [(text[:n], text[n:]) for n in range(1, len(text)) if text[:n] in ids and text[n:] in ids]
        splits.sort(key=lambda split: (ids[split[0]], ids[split[1]]))
        ranked += [(-score, split) for split in splits]
    ranked.sort(key=lambda merge: merge[0])  # stable: the splits of one piece stay in order
    return [split for _, split in ranked]


# From text to what the model reads -----------------------------------------------------------------


def _normalizer(model: SentencePieceModel) -> Normalizer:
    """Replace characters by the charsmap, remove spaces, put one before the text, and write them as ▁."""
    from tokenizers import Regex, normalizers

    steps: list[Normalizer] = []
    if model.charsmap:
        steps += _charsmap_steps(model)
    if model.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        steps.append(normalizers.Replace(Regex(r"\A | \z"), ""))
    space = METASPACE if model.escape_whitespaces else " "
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(space))
    if model.escape_whitespaces:
        steps.append(normalizers.Replace(" ", METASPACE))
    if model.model_type == ModelType.UNIGRAM:
        steps += _shield_steps(model)
    elif model.add_dummy_prefix:
        # the library normalises these symbols too, before it looks for them: without a prefix
        steps += [
            normalizers.Replace(Regex(rf"\A{space}{re.escape(text)}\z"), text)
            for text in model.texts(PieceType.USER_DEFINED)
        ]
    return normalizers.Sequence(steps)


def _charsmap_steps(model: SentencePieceModel) -> list[Normalizer]:
    from tokenizers import Regex, normalizers

    charsmap = Charsmap(model.charsmap)
    removed = "".join(charsmap.removed_characters())
    try:
        precompiled = normalizers.Precompiled(model.charsmap)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"the charsmap is damaged: {error}") from error
    steps: list[Normalizer] = [precompiled]
    if all(charsmap.replacement(text) == composed for text, composed in COMPOSED_EXAMPLES.items()):
        # character by character; sequences are then composed by NFC
        steps = [
            # the library panics where its charsmap removes a character after one that it has lengthened
            *([normalizers.Replace(Regex(f"[{re.escape(removed)}]"), "")] if removed else []),
            # not before the first character: the library cannot insert there
            normalizers.Replace(Regex(rf"(?<=[\s\S])(?={EXTENDING_CHARACTERS})"), SEPARATOR),
            precompiled,
            normalizers.Replace(SEPARATOR, ""),
            normalizers.NFC(),
        ]
    # user-defined symbols are taken out of the text before it is normalised
    changed = normalizers.Sequence(steps)
    symbols = [text for text in model.texts(PieceType.USER_DEFINED) if changed.normalize_str(text) != text]
    placeholders = {
        text: chr(FIRST_PLACEHOLDER + n) for n, text in enumerate(sorted(symbols, key=len, reverse=True))
    }
    return [
        *(normalizers.Replace(text, placeholder) for text, placeholder in placeholders.items()),
        *steps,
        *(normalizers.Replace(placeholder, text) for text, placeholder in placeholders.items()),
    ]


def _shield_steps(model: SentencePieceModel) -> list[Normalizer]:
    """Break up control symbols that a text spells out: SentencePiece never finds them there.

    A unigram model of the library would, as it finds any piece. The separators are removed by the
    pre-tokenizer, which splits there: between two characters that are neighbours in no other piece, and not
    both unknown, since unknown characters in a row are one token. Where a symbol has none, it is broken up as
    a whole.
    """
    from tokenizers import Regex, normalizers

    texts = model.texts(PieceType.NORMAL, PieceType.USER_DEFINED)
    known = {text for text in texts if len(text) == 1}
    bigrams = {text[n : n + 2] for text in texts for n in range(len(text) - 1)}
    followers: dict[
        str, set[str]
    ] = {}  # characters to split between: the first, and the possible second ones
    steps: list[Normalizer] = []
    for text in model.texts(PieceType.UNKNOWN, PieceType.CONTROL, PieceType.BYTE):
        pairs = [text[n : n + 2] for n in range(len(text) - 1)]
        if free := [pair for pair in pairs if pair not in bigrams and known & set(pair) and pair.isascii()]:
            followers.setdefault(free[0][0], set()).add(free[0][1])
        elif pairs:
            steps.append(normalizers.Replace(text, text[0] + SEPARATOR + text[1:]))
    places = [
        f"(?<={re.escape(first)})(?=[{''.join(map(re.escape, sorted(seconds)))}])"
        for first, seconds in sorted(followers.items())
    ]
    if places:
        steps.append(normalizers.Replace(Regex("|".join(places)), SEPARATOR))
    return steps
