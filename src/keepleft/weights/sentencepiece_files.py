"""The tokenizers of model directories that have SentencePiece files in place of a tokenizer.json.

T5 has spiece.model, LLaMA tokenizer.model, and Marian source.spm and target.spm, whose pieces have their ids
in vocab.json. What stands around a text, and which tokens come after the pieces, is in tokenizer_config.json.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from keepleft.disk.regular_file import exists_in, read_file_in
from keepleft.disk.sentencepiece_model import (
    MAX_MODEL_BYTES,
    ModelType,
    Piece,
    PieceType,
    SentencePieceModel,
    parse_sentencepiece_model,
)
from keepleft.disk.sentencepiece_tokenizer import convert_sentencepiece
from keepleft.weights.json_file import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
ADDED_TOKENS_FILE = "added_tokens.json"
SOURCE_FILE = "source.spm"
TARGET_FILE = "target.spm"
MARIAN_VOCAB_FILE = "vocab.json"
MARIAN_TARGET_VOCAB_FILE = "target_vocab.json"
SENTENCEPIECE_FILES = ("spiece.model", "tokenizer.model", SOURCE_FILE, TARGET_FILE)
# model_type → its file, and whether a text begins with <s> and ends with </s>
FAMILIES = {
    "t5": ("spiece.model", False, True),
    "mt5": ("spiece.model", False, True),
    "llama": ("tokenizer.model", True, False),
    "mistral": ("tokenizer.model", True, False),
}
T5_SENTINELS = 100  # <extra_id_0> to <extra_id_99>, where tokenizer_config.json does not say
LANGUAGE_CODE = re.compile(r">>[^<>]+<<")  # of multilingual Marian models: before a source
UNREACHABLE_SCORE = -1e4  # of a piece that the other language alone has: any other split is better


class TokenizerPair(NamedTuple):
    """`source`: of an encoder-decoder whose source is split by pieces of its own."""

    tokenizer: Tokenizer
    source: Tokenizer | None = None


def read_sentencepiece_files(folder: Path, model_type: object) -> TokenizerPair | None:
    """The tokenizers of a directory; None where it has no SentencePiece files for a model of this type.

    Raises ValueError for files that are damaged or do not fit together.
    """
    if model_type == "marian" and exists_in(folder, SOURCE_FILE):
        return _read_marian(folder)
    name, add_bos, add_eos = FAMILIES.get(str(model_type), (None, False, False))
    if name is None or not exists_in(folder, name):
        return None
    config = _read_json(folder, TOKENIZER_CONFIG_FILE)
    model = _read_model(folder, name)
    tokenizer = convert_sentencepiece(model, folder / name)
    _add_tokens(tokenizer, _added_tokens(folder, config, model, model_type), folder)
    bos = _piece(model, config, "bos_token", "<s>") if config.get("add_bos_token", add_bos) else None
    eos = _piece(model, config, "eos_token", "</s>") if config.get("add_eos_token", add_eos) else None
    _set_template(tokenizer, bos, eos)
    return TokenizerPair(tokenizer)


def _read_marian(folder: Path) -> TokenizerPair:
    config = _read_json(folder, TOKENIZER_CONFIG_FILE)
    target_vocab_file = MARIAN_TARGET_VOCAB_FILE if config.get("separate_vocabs") else MARIAN_VOCAB_FILE
    tokenizers = []
    for name, vocab_file in ((TARGET_FILE, target_vocab_file), (SOURCE_FILE, MARIAN_VOCAB_FILE)):
        vocab = _read_vocab(folder, vocab_file)
        model = _with_vocab(_read_model(folder, name), vocab, folder / vocab_file)
        tokenizer = convert_sentencepiece(model, folder / name)
        _set_template(tokenizer, None, _piece(model, config, "eos_token", "</s>"))
        tokenizers.append(tokenizer)
    return TokenizerPair(*tokenizers)


def _with_vocab(model: SentencePieceModel, vocab: list[str], source_name: Path) -> SentencePieceModel:
    """The model with the ids of a vocabulary, which several models may share.

    A piece that the vocabulary lacks is never chosen: the text is split in another way.
    """
    if model.model_type != ModelType.UNIGRAM:
        raise ValueError(f"{source_name} goes with unigram models, and the model beside it is none")
    known = {piece.text: piece for piece in model.pieces}
    (unknown,) = model.texts(PieceType.UNKNOWN)
    if unknown not in vocab:
        raise ValueError(f"{source_name} has no {unknown}, which stands for what is unknown")
    pieces = []
    for text in vocab:
        if text in known:
            pieces.append(known[text])
        elif text == "<pad>" or LANGUAGE_CODE.fullmatch(text):
            pieces.append(Piece(text, 0.0, PieceType.CONTROL))
        else:
            pieces.append(Piece(text, UNREACHABLE_SCORE * len(text) ** 2, PieceType.NORMAL))
    return replace(model, pieces=pieces)


def _added_tokens(
    folder: Path, config: dict[str, Any], model: SentencePieceModel, model_type: object
) -> dict[int, tuple[str, bool]]:
    """The tokens that come after the pieces, by id: each one's text, and whether it is special."""
    added = {
        token_id: (text, False)
        for text, token_id in _read_json(folder, ADDED_TOKENS_FILE).items()
        if isinstance(token_id, int)
    }
    for token_id, entry in (config.get("added_tokens_decoder") or {}).items():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and str(token_id).isdecimal():
            added[int(token_id)] = entry["content"], bool(entry.get("special"))
    num_pieces = len(model.pieces)
    added = {token_id: token for token_id, token in added.items() if token_id >= num_pieces}
    if not added and model_type == "t5":
        count = config.get("extra_ids", T5_SENTINELS)
        sentinels = [f"<extra_id_{n}>" for n in reversed(range(int(count)))]
        added = {num_pieces + n: (text, True) for n, text in enumerate(sentinels)}
    return added


def _add_tokens(tokenizer: Tokenizer, added: dict[int, tuple[str, bool]], folder: Path) -> None:
    from tokenizers import AddedToken

    for token_id in sorted(added):
        text, is_special = added[token_id]
        if token_id != tokenizer.get_vocab_size() or tokenizer.token_to_id(text) is not None:
            raise ValueError(
                f"{folder} adds the token {text!r} with the id {token_id}: the next free id is "
                f"{tokenizer.get_vocab_size()}, and no token may be there twice"
            )
        tokenizer.add_tokens([AddedToken(text, special=is_special, normalized=False)])


def _piece(model: SentencePieceModel, config: dict[str, Any], field: str, default: str) -> tuple[str, int]:
    """A special token of the configuration, and its id."""
    value = config.get(field)
    text = value.get("content") if isinstance(value, dict) else value
    text = text if isinstance(text, str) else default
    ids = [n for n, piece in enumerate(model.pieces) if piece.text == text]
    if not ids:
        raise ValueError(f"'{field}' is {text!r} in {TOKENIZER_CONFIG_FILE}, and the model has no such piece")
    return text, ids[0]


def _set_template(tokenizer: Tokenizer, bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> None:
    from tokenizers.processors import TemplateProcessing

    special_tokens = [token for token in (bos, eos) if token is not None]
    if special_tokens:
        begin, end = ([] if token is None else [token[0]] for token in (bos, eos))
        tokenizer.post_processor = TemplateProcessing(
            single=[*begin, "$A", *end],
            pair=[*begin, "$A", *end, *begin, "$B", *end],
            special_tokens=special_tokens,
        )


def _read_model(folder: Path, name: str) -> SentencePieceModel:
    return parse_sentencepiece_model(read_file_in(folder, name, max_bytes=MAX_MODEL_BYTES), folder / name)


def _read_vocab(folder: Path, name: str) -> list[str]:
    """The tokens of a vocabulary in the order of their ids, which must have no gaps."""
    ids = _read_json(folder, name)
    tokens = sorted(ids, key=lambda token: ids[token] if isinstance(ids[token], int) else -1)
    if not tokens or [ids[token] for token in tokens] != list(range(len(tokens))):
        raise ValueError(f"{folder / name} is missing, or its ids are not 0, 1, 2 …: copy it again")
    return tokens


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    return read_json(folder, name) if exists_in(folder, name) else {}
