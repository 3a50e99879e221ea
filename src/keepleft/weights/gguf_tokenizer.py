"""The tokenizer of a GGUF file, rebuilt with the tokenizers library: byte-level or SentencePiece BPE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keepleft.disk.sentencepiece_tokenizer import ranked_merges
from keepleft.disk.split_regexes import LLAMA3_SPLIT_REGEX
from keepleft.disk.tokenizer_growth import check_growth
from keepleft.disk.tokenizer_json import parse_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# values of "tokenizer.ggml.token_type"
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6

HF_TOKENIZER_KEY = "tokenizer.huggingface.json"  # a complete tokenizer.json, for programs that read it

# key of config.json → name in "tokenizer.ggml.{name}_token_id"
SPECIAL_TOKEN_KEYS = {
    "bos_token_id": "bos",
    "eos_token_id": "eos",
    "unk_token_id": "unknown",
    "pad_token_id": "padding",
}


def read_tokenizer(metadata: dict[str, Any]) -> Tokenizer | None:
    """The tokenizer of a file's metadata; None where there is none."""
    if isinstance(tokenizer_json := metadata.get(HF_TOKENIZER_KEY), str):
        return parse_tokenizer(tokenizer_json.encode(), repr(HF_TOKENIZER_KEY))
    model_type = metadata.get("tokenizer.ggml.model")
    if model_type is None:
        return None
    if model_type not in ("gpt2", "llama"):
        raise ValueError(
            f"a tokenizer of the kind {model_type!r} is not understood: there are gpt2 and llama"
        )
    tokens = _metadata_list(metadata, "tokens")
    build_tokenizer = _byte_level_bpe if model_type == "gpt2" else _sentencepiece_bpe
    try:
        tokenizer = build_tokenizer(metadata, tokens)
    except ValueError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"the tokenizer in the file does not fit together: {error}") from error
    _add_special_tokens(tokenizer, metadata, tokens)
    _add_template(tokenizer, metadata, tokens)
    check_growth(tokenizer, "the tokenizer in the file")
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str]) -> None:
    from tokenizers import AddedToken

    if "tokenizer.ggml.token_type" not in metadata:
        return
    token_types = _metadata_list(metadata, "token_type", len(tokens))
    for token, token_type in zip(tokens, token_types, strict=True):
        if token_type == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == USER_DEFINED:  # never split, but text all the same
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _add_template(tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str]) -> None:
    """The special tokens around a text.

    Where the file does not say, as in llama.cpp: SentencePiece and LLaMA 3 texts begin with the bos token.
    """
    from tokenizers.processors import TemplateProcessing

    add_bos = metadata["tokenizer.ggml.model"] == "llama" or (
        metadata.get("tokenizer.ggml.pre") == "llama-bpe" and "tokenizer.ggml.bos_token_id" in metadata
    )
    bos_tokens = []
    eos_tokens = []
    if metadata.get("tokenizer.ggml.add_bos_token", add_bos):
        bos_tokens = [_special_token(metadata, "bos", tokens, 1)]
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        eos_tokens = [_special_token(metadata, "eos", tokens, 2)]
    if not bos_tokens and not eos_tokens:
        return

    def with_special_tokens(placeholder: str) -> list[str]:
        return [*(token for token, _ in bos_tokens), placeholder, *(token for token, _ in eos_tokens)]

    tokenizer.post_processor = TemplateProcessing(
        single=with_special_tokens("$A"),
        pair=with_special_tokens("$A") + with_special_tokens("$B"),
        special_tokens=[*bos_tokens, *eos_tokens],
    )


def _metadata_list(metadata: dict[str, Any], name: str, length: int | None = None) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list):
        raise ValueError(f"'tokenizer.ggml.{name}' is {values!r}: a list is needed")
    if length is not None and len(values) != length:
        raise ValueError(f"'tokenizer.ggml.{name}' are {len(values)}, but there are {length} tokens")
    return values


def _special_token(
    metadata: dict[str, Any], name: str, tokens: list[str], default_id: int
) -> tuple[str, int]:
    """A special token and its id; SentencePiece files may leave out the usual id."""
    token_id = metadata.get(
        f"tokenizer.ggml.{name}_token_id", default_id if metadata["tokenizer.ggml.model"] == "llama" else None
    )
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise ValueError(
            f"'tokenizer.ggml.{name}_token_id' is {token_id!r}, but there are {len(tokens)} tokens"
        )
    return tokens[token_id], token_id


def _byte_level_bpe(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    merges = [tuple(merge.split(" ")) for merge in _metadata_list(metadata, "merges")]
    vocab = set(tokens)
    if bad_merges := [
        " ".join(merge) for merge in merges if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab
    ]:
        raise ValueError(
            f"'tokenizer.ggml.merges' has {bad_merges[0]!r}, which does not join two tokens to a third"
        )
    name = metadata.get("tokenizer.ggml.pre", "default")
    is_llama3 = name == "llama-bpe"  # its vocabulary has words that no merges reach
    vocab_ids = {token: n for n, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab_ids, merges=merges, ignore_merges=is_llama3))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not is_llama3)
    if is_llama3:
        split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT_REGEX), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif name in ("default", "gpt-2"):
        tokenizer.pre_tokenizer = byte_level
    else:
        raise ValueError(
            f"the pre-tokenizer {name!r} is not understood: there are smollm, llama-bpe and gpt-2"
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _metadata_list(metadata, "scores", len(tokens))
    ids = {token: n for n, token in enumerate(tokens)}
    unk_token, _ = _special_token(metadata, "unknown", tokens, 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=ranked_merges(list(zip(tokens, scores, strict=True))),
            unk_token=unk_token,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prepend = [normalizers.Prepend("▁")] if metadata.get("tokenizer.ggml.add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prepend else []),
        ]
    )
    return tokenizer
