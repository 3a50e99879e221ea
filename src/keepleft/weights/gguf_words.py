"""A tokenizer as the facts of a GGUF file: byte-level BPE by its merges, SentencePiece's BPE by scores."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from keepleft.weights.gguf_tokenizer import BYTE, CONTROL, HUGGING_FACE, LLAMA3, NORMAL, UNKNOWN, UNUSED, USER

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL = {"bos_token_id": "bos", "eos_token_id": "eos", "unk_token_id": "unknown", "pad_token_id": "padding"}
BYTES = re.compile(r"<0x[0-9A-F]{2}>")


def words(tokenizer: Tokenizer, size: int, notes: dict[str, Any]) -> dict[str, Any]:
    """All that a file says of its tokenizer, under the names it says it with. `size` is the model's vocabulary."""
    said = json.loads(tokenizer.to_str())
    model = said["model"]
    kind = _kind(said)
    vocab = {number: word for word, number in tokenizer.get_vocab().items()}
    if max(vocab) >= size:
        raise ValueError(f"the tokenizer knows {max(vocab) + 1} tokens, the model {size}: they do not belong together")
    tokens = [vocab.get(number, f"[PAD{number}]") for number in range(size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    facts: dict[str, Any] = {"model": kind, "tokens": tokens, "token_type": _types(said, vocab, size, kind)}
    if kind == "gpt2":
        facts |= {"pre": _split(said), "merges": merges}
    else:
        rank: dict[str, int] = {}
        for place, merge in enumerate(merges):
            rank.setdefault(merge.replace(" ", ""), place)
        facts |= {"scores": [-float(rank.get(token, len(merges))) for token in tokens],
                  "add_space_prefix": "Prepend" in json.dumps(said.get("normalizer"))}
    marks: dict[str, Any] = {name: notes.get(name) for name in SPECIAL}
    if marks["unk_token_id"] is None and model.get("unk_token") is not None:
        marks["unk_token_id"] = tokenizer.token_to_id(model["unk_token"])
    for name, word in SPECIAL.items():
        said_of = marks[name]
        number = said_of[0] if isinstance(said_of, list) and said_of else said_of
        if isinstance(number, int) and 0 <= number < size:
            facts[f"{word}_token_id"] = number
    around = tokenizer.encode("").ids
    facts |= {"add_bos_token": facts.get("bos_token_id") in around[:1],
              "add_eos_token": facts.get("eos_token_id") in around[-1:]}
    facts = {f"tokenizer.ggml.{name}": value for name, value in facts.items()} | {HUGGING_FACE: tokenizer.to_str()}
    if isinstance(template := notes.get("chat_template"), str):
        facts["tokenizer.chat_template"] = template
    return facts


def _kind(said: dict[str, Any]) -> str:
    model = said["model"]
    if model["type"] == "BPE" and "ByteLevel" in json.dumps(said.get("pre_tokenizer")):
        return "gpt2"
    if model["type"] == "BPE" and model.get("byte_fallback"):
        return "llama"
    raise ValueError(f"a tokenizer of the kind {model['type']} cannot be put into a GGUF file of the LLaMA family: "
                     "byte-level BPE and SentencePiece's BPE can (keepleft train --words.kind bpe)")


def _split(said: dict[str, Any]) -> str:
    """The name of the rule by which texts fall into pieces; GPT-2's where it is none that such files have a name for."""
    parts = said["pre_tokenizer"].get("pretokenizers", [said["pre_tokenizer"]])
    if any(part["type"] == "Split" and part["pattern"].get("Regex") == LLAMA3 for part in parts):
        return "llama-bpe"
    return "smollm" if any(part["type"] == "Digits" and part["individual_digits"] for part in parts) else "gpt-2"


def _types(said: dict[str, Any], vocab: dict[int, str], size: int, kind: str) -> list[int]:
    types = [NORMAL if number in vocab else UNUSED for number in range(size)]
    if kind == "llama":
        for number, word in vocab.items():
            types[number] = BYTE if BYTES.fullmatch(word) else types[number]
    for token in said["added_tokens"]:
        types[token["id"]] = CONTROL if token["special"] else USER
    if kind == "llama" and (unknown := said["model"].get("unk_token")) is not None:
        types[said["model"]["vocab"][unknown]] = UNKNOWN
    return types
