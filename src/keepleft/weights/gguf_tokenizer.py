"""The tokenizer inside a GGUF file, rebuilt with the tokenizers library: byte-level BPE, or SentencePiece's BPE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keepleft.disk.tokenizer import parsed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # the kinds of token in a GGUF file

HUGGING_FACE = "tokenizer.huggingface.json"  # the whole of a tokenizer.json, for programs that read such

# how a text falls into pieces before merging, by the name in the file
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")


def tokenizer(facts: dict[str, Any]) -> Tokenizer | None:
    """None where the file has none."""
    if isinstance(whole := facts.get(HUGGING_FACE), str):
        return parsed(whole.encode(), repr(HUGGING_FACE))
    kind = facts.get("tokenizer.ggml.model")
    if kind is None:
        return None
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"a tokenizer of the kind {kind!r} is not understood: there are gpt2 and llama")
    tokens = _list(facts, "tokens")
    try:
        made = _bytes(facts, tokens) if kind == "gpt2" else _pieces(facts, tokens)
    except ValueError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"the tokenizer in the file does not fit together: {error}") from error
    from tokenizers import AddedToken

    if "tokenizer.ggml.token_type" in facts:
        for token, sort in zip(tokens, _list(facts, "token_type", len(tokens)), strict=True):
            if sort == CONTROL:
                made.add_special_tokens([AddedToken(token, special=True, normalized=False)])
            elif sort == USER:  # a word of the user's own: never cut up, but text all the same
                made.add_tokens([AddedToken(token, special=False, normalized=False)])
    # where the file is silent, as llama.cpp does: SentencePiece and LLaMA 3 texts begin with a token of their own
    usual = kind == "llama" or (facts.get("tokenizer.ggml.pre") == "llama-bpe" and "tokenizer.ggml.bos_token_id" in facts)
    first = [_special(facts, "bos", tokens, 1)] if facts.get("tokenizer.ggml.add_bos_token", usual) else []
    last = [_special(facts, "eos", tokens, 2)] if facts.get("tokenizer.ggml.add_eos_token", False) else []
    if first or last:
        from tokenizers.processors import TemplateProcessing

        def around(text: str) -> list[str]:
            return [*(word for word, _ in first), text, *(word for word, _ in last)]
        made.post_processor = TemplateProcessing(single=around("$A"), pair=around("$A") + around("$B"),
                                                 special_tokens=[*first, *last])
    return made


def _list(facts: dict[str, Any], name: str, length: int | None = None) -> list[Any]:
    found = facts.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list):
        raise ValueError(f"'tokenizer.ggml.{name}' is {found!r}: a list is needed")
    if length is not None and len(found) != length:
        raise ValueError(f"'tokenizer.ggml.{name}' are {len(found)}, but there are {length} tokens")
    return found


def _special(facts: dict[str, Any], word: str, tokens: list[str], usual: int) -> tuple[str, int]:
    """A special token and its number; SentencePiece files may leave out the usual one."""
    number = facts.get(f"tokenizer.ggml.{word}_token_id", usual if facts["tokenizer.ggml.model"] == "llama" else None)
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise ValueError(f"'tokenizer.ggml.{word}_token_id' is {number!r}, but there are {len(tokens)} tokens")
    return tokens[number], number


def _bytes(facts: dict[str, Any], tokens: list[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    merges = [tuple(merge.split(" ")) for merge in _list(facts, "merges")]
    known = set(tokens)
    if wrong := [" ".join(merge) for merge in merges if len(merge) != 2 or not {*merge, "".join(merge)} <= known]:
        raise ValueError(f"'tokenizer.ggml.merges' has {wrong[0]!r}, which does not join two tokens to a third")
    name = facts.get("tokenizer.ggml.pre", "default")
    made = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=merges,
                                ignore_merges=name == "llama-bpe"))  # whole words that no merges reach
    level = pre_tokenizers.ByteLevel
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


def _pieces(facts: dict[str, Any], tokens: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _list(facts, "scores", len(tokens))
    ids = {token: n for n, token in enumerate(tokens)}
    unknown, _ = _special(facts, "unknown", tokens, 0)
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
