"""A tokenizer as metadata of a GGUF file: byte-level BPE by its merges, SentencePiece BPE by scores."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from keepleft.disk.split_regexes import LLAMA3_SPLIT_REGEX
from keepleft.weights.gguf_tokenizer import (
    BYTE,
    CONTROL,
    HF_TOKENIZER_KEY,
    NORMAL,
    SPECIAL_TOKEN_KEYS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE_TOKEN_REGEX = re.compile(r"<0x[0-9A-F]{2}>")


def tokenizer_metadata(tokenizer: Tokenizer, vocab_size: int, notes: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a tokenizer, its special tokens and its chat template, by key.

    `vocab_size` is the model's; tokens that the tokenizer lacks are filled in.
    """
    tokenizer_json = json.loads(tokenizer.to_str())
    model = tokenizer_json["model"]
    model_type = _tokenizer_model(tokenizer_json)
    vocab = {token_id: token_name for token_name, token_id in tokenizer.get_vocab().items()}
    if max(vocab) >= vocab_size:
        raise ValueError(
            f"the tokenizer knows {max(vocab) + 1} tokens, the model {vocab_size}: they do not belong "
            "together"
        )
    tokens = [vocab.get(token_id, f"[PAD{token_id}]") for token_id in range(vocab_size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    metadata: dict[str, Any] = {
        "model": model_type,
        "tokens": tokens,
        "token_type": _token_types(tokenizer_json, vocab, vocab_size, model_type),
    }
    if model_type == "gpt2":
        metadata |= {"pre": _pre_tokenizer_name(tokenizer_json), "merges": merges}
    else:
        rank: dict[str, int] = {}
        for index, merge in enumerate(merges):
            rank.setdefault(merge.replace(" ", ""), index)
        metadata |= {
            "scores": [-float(rank.get(token, len(merges))) for token in tokens],
            "add_space_prefix": "Prepend" in json.dumps(tokenizer_json.get("normalizer")),
        }
    special_tokens: dict[str, Any] = {name: notes.get(name) for name in SPECIAL_TOKEN_KEYS}
    if special_tokens["unk_token_id"] is None and model.get("unk_token") is not None:
        special_tokens["unk_token_id"] = tokenizer.token_to_id(model["unk_token"])
    for config_key, gguf_name in SPECIAL_TOKEN_KEYS.items():
        token_id = special_tokens[config_key]
        if isinstance(token_id, list) and token_id:
            token_id = token_id[0]
        if isinstance(token_id, int) and 0 <= token_id < vocab_size:
            metadata[f"{gguf_name}_token_id"] = token_id
    added_ids = tokenizer.encode("").ids
    metadata |= {
        "add_bos_token": metadata.get("bos_token_id") in added_ids[:1],
        "add_eos_token": metadata.get("eos_token_id") in added_ids[-1:],
    }
    metadata = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()} | {
        HF_TOKENIZER_KEY: tokenizer.to_str()
    }
    if isinstance(template := notes.get("chat_template"), str):
        metadata["tokenizer.chat_template"] = template
    return metadata


def _tokenizer_model(tokenizer_json: dict[str, Any]) -> str:
    """The value of "tokenizer.ggml.model"."""
    model = tokenizer_json["model"]
    if model["type"] == "BPE" and "ByteLevel" in json.dumps(tokenizer_json.get("pre_tokenizer")):
        return "gpt2"
    if model["type"] == "BPE" and model.get("byte_fallback"):
        return "llama"
    raise ValueError(
        f"a tokenizer of the kind {model['type']} cannot be put into a GGUF file of the LLaMA family: "
        "byte-level BPE and SentencePiece's BPE can (keepleft train --tokenizer.kind bpe)"
    )


def _pre_tokenizer_name(tokenizer_json: dict[str, Any]) -> str:
    """The value of "tokenizer.ggml.pre"; GPT-2's where GGUF has no name for the pre-tokenizer."""
    parts = tokenizer_json["pre_tokenizer"].get("pretokenizers", [tokenizer_json["pre_tokenizer"]])
    if any(part["type"] == "Split" and part["pattern"].get("Regex") == LLAMA3_SPLIT_REGEX for part in parts):
        return "llama-bpe"
    if any(part["type"] == "Digits" and part["individual_digits"] for part in parts):
        return "smollm"
    return "gpt-2"


def _token_types(
    tokenizer_json: dict[str, Any], vocab: dict[int, str], vocab_size: int, model_type: str
) -> list[int]:
    """The values of "tokenizer.ggml.token_type"."""
    types = [NORMAL if token_id in vocab else UNUSED for token_id in range(vocab_size)]
    if model_type == "llama":
        for token_id, piece in vocab.items():
            types[token_id] = BYTE if BYTE_TOKEN_REGEX.fullmatch(piece) else types[token_id]
    for token in tokenizer_json["added_tokens"]:
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    if model_type == "llama" and (unk_token := tokenizer_json["model"].get("unk_token")) is not None:
        types[tokenizer_json["model"]["vocab"][unk_token]] = UNKNOWN
    return types
