"""The tokenizer inside a GGUF file, rebuilt with the tokenizers library: byte-level BPE, or SentencePiece's BPE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # the kinds of token in a GGUF file

# how a text falls into pieces before merging, by the name in the file
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")


def tokenizer(facts: dict[str, Any]) -> Tokenizer | None:
    """None where the file has none."""
    kind = facts.get("tokenizer.ggml.model")
    if kind is None:
        return None
    made = _bytes(facts) if kind == "gpt2" else _pieces(facts) if kind == "llama" else None
    if made is None:
        raise ValueError(f"a tokenizer of the kind {kind!r} is not understood: there are gpt2 and llama")
    from tokenizers import AddedToken

    kinds = facts.get("tokenizer.ggml.token_type") or []
    for token, sort in zip(facts["tokenizer.ggml.tokens"], kinds, strict=False):
        if sort in (CONTROL, USER):
            made.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    if facts.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        from tokenizers.processors import TemplateProcessing

        bos = int(facts["tokenizer.ggml.bos_token_id"])
        word = facts["tokenizer.ggml.tokens"][bos]
        made.post_processor = TemplateProcessing(single=f"{word} $A", pair=f"{word} $A {word} $B", special_tokens=[(word, bos)])
    return made


def _bytes(facts: dict[str, Any]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=merges))
    level = pre_tokenizers.ByteLevel
    name = facts.get("tokenizer.ggml.pre", "default")
    if name == "smollm":
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                      level(add_prefix_space=False, use_regex=True)])
    elif name == "llama-bpe":
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
                                                      level(add_prefix_space=False, use_regex=False)])
    elif name in ("default", "gpt-2"):
        made.pre_tokenizer = level(add_prefix_space=False, use_regex=True)
    else:
        raise ValueError(f"the pre-tokenizer {name!r} is not understood: there are smollm, llama-bpe and gpt-2")
    made.decoder = decoders.ByteLevel()
    return made


def _pieces(facts: dict[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, scores = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.scores"]
    ids = {token: n for n, token in enumerate(tokens)}
    unknown = tokens[int(facts.get("tokenizer.ggml.unknown_token_id", 0))]
    made = Tokenizer(models.BPE(vocab=ids, merges=_merges(tokens, scores, ids), unk_token=unknown, fuse_unk=True,
                                byte_fallback=True))
    first = [normalizers.Prepend("▁")] if facts.get("tokenizer.ggml.add_space_prefix", True) else []
    made.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      *([decoders.Strip(" ", 1, 0)] if first else [])])
    return made


def _merges(tokens: list[str], scores: list[float], ids: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece keeps no merges: they are all the ways to halve a piece, best piece first."""
    found = []
    for token, score in zip(tokens, scores, strict=True):
        halves = [(ids[token[:n]], ids[token[n:]]) for n in range(1, len(token)) if token[:n] in ids and token[n:] in ids]
        found += [(-score, left, right) for left, right in sorted(halves)]
    found.sort(key=lambda merge: merge[0])  # a stable sort: halves of one piece stay in order
    return [(tokens[left], tokens[right]) for _, left, right in found]
