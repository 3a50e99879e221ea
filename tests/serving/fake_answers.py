"""Made-up texts, tokens and attention, and arrays encoded as in the explorer's answers."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import lru_cache
from typing import Any

import numpy as np

VOCAB = 5_000
SOURCE = "The little ship sails on the calm blue sea today."
TARGET = "Le petit bateau navigue aujourd'hui sur la mer bleue et calme."
HINDI = "नमस्ते दुनिया, समुद्र शांत है और हिन्दी में क्ष त्र ज्ञ।"
HTML_INJECTIONS = [
    "<img src=x onerror=window.broken=1>",
    "</script><script>window.broken=2</script>",
    '"><svg onload=window.broken=3>',
]
WORDS = [" sea", " ship", "ing", " नीला", " é", " bleu", " calm", "s", "ा", " sails"]


def u8(values: Any) -> str:
    return b64encode(np.ascontiguousarray(values, np.uint8).tobytes()).decode()


def f32(values: Any) -> str:
    return b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode()


def bits(values: Any) -> str:
    return b64encode(np.packbits(values, axis=1).tobytes()).decode()


def quantize(values: Any, max_weight: float = 1.0) -> Any:
    return np.round(255 * np.sqrt(np.clip(values / max_weight, 0, 1)))


def split_tokens(text: str) -> list[dict[str, Any]]:
    """Words and pieces of words; Devanagari is split into code points, as byte-level tokenizers often do."""
    pieces: list[str] = []
    for word in re.findall(r"</?[^\s>]+[^>]*>|\s*[\w'’]+|\s*[^\w\s]|\s+", text):
        if re.search(r"[\u0900-\u097f]", word):
            pieces += [*word.strip()] if word == word.strip() else [" " + word.strip()[:1], *word.strip()[1:]]
        elif len(word) > 8 and not word.startswith("<"):
            pieces += [word[:5], word[5:]]
        else:
            pieces.append(word)
    return [token(hash_of(piece) % VOCAB, piece) for piece in pieces]


def token(token_id: int, text: str, special: bool = False) -> dict[str, Any]:
    return {"id": token_id, "text": text, "special": special}


def hash_of(text: str) -> int:
    result = 7
    for letter in text:
        result = (result * 31 + ord(letter)) % 1_000_003
    return result


@lru_cache(48)
def weights(rows: int, columns: int, causal: bool, layer: int, head: int, leak: bool) -> Any:
    """A head with a pattern: it attends to the previous token, the first one, near ones, or random ones."""
    i, j = np.arange(rows)[:, None], np.arange(columns)[None, :]
    diagonal = i * (columns / rows) if rows != columns else i
    noise = np.random.default_rng(layer * 97 + head).normal(size=(1, columns)).astype(np.float32)
    scores = {
        0: -np.abs(diagonal - 1 - j) * 1.5,
        1: 3.0 * (j == 0) - 0.02 * np.abs(diagonal - j),
        2: -np.abs(diagonal - j) / (2 + layer),
        3: 1.5 * noise - 0.01 * np.abs(diagonal - j),
    }[head % 4].astype(np.float32)
    if causal:
        scores = np.where(j <= i, scores, -np.inf)
    result = np.exp(scores - scores.max(1, keepdims=True))
    result /= result.sum(1, keepdims=True)
    if leak and causal and rows > 6:
        result[rows // 3, rows // 2] = 0.2
    return result.astype(np.float32)


def token_text(token_id: int) -> str:
    """The text of a token; some are attempts to inject HTML."""
    if token_id == 0:
        return "</s>"
    if token_id % 97 == 5:
        return HTML_INJECTIONS[token_id % 3]
    return WORDS[token_id % 10] + ("" if token_id % 3 else "n")


def describe(token_ids: list[int]) -> list[dict[str, Any]]:
    return [token(token_id, token_text(token_id)) for token_id in token_ids]
