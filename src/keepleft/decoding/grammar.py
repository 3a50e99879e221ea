"""Structured output (constrained decoding): text that matches a regular expression, JSON schema or grammar,
by llguidance.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from keepleft.decoding.filters import NEG_INF
from keepleft.decoding.generation_config import GenerationConfig
from keepleft.decoding.hypotheses import Hypotheses, LogitsProcessor

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def grammar_from_options(options: GenerationConfig) -> str:
    """The grammar that the options ask for, as llguidance reads it."""
    matcher_class = _import_llguidance().LLMatcher
    if options.regex is not None:
        return str(matcher_class.grammar_from_regex(options.regex))
    if options.grammar is not None:
        return str(matcher_class.grammar_from_lark(options.grammar))
    schema = options.json_schema
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return str(matcher_class.grammar_from_json_schema(text, defaults={"whitespace_flexible": False}))


def grammar_processor(grammar: str, tokenizer: Tokenizer, eos_ids: tuple[int, ...]) -> LogitsProcessor:
    """A logits processor that allows only tokens of the grammar, and the end where it is complete."""
    llg = _import_llguidance()
    if not eos_ids:
        raise ValueError("a text that keeps to a grammar must be able to end: give eos_token_id")
    initial_matcher = llg.LLMatcher(
        _llg_tokenizer(tokenizer.to_str(), tokenizer.get_vocab_size(), eos_ids[0]), grammar
    )
    _raise_on_error(initial_matcher)
    matchers: dict[tuple[int, ...], Any] = {(): initial_matcher}  # state of each sequence after the last step

    def matcher_for(sequence: tuple[int, ...]) -> Any:
        if sequence in matchers:
            return matchers[sequence]
        out = (
            matchers[sequence[:-1]].deep_copy() if sequence[:-1] in matchers else initial_matcher.deep_copy()
        )
        for token in sequence[-1:] if sequence[:-1] in matchers else sequence:
            if token in eos_ids or out.is_stopped():
                break
            out.consume_token(token)
            _raise_on_error(out)
        return out

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        nonlocal matchers
        sequences = [tuple(row) for row in hypotheses.tokens[:, hypotheses.prompt_width :].tolist()]
        finished = hypotheses.done.tolist()
        next_matchers = {
            sequence: matcher_for(sequence)
            for sequence, done in zip(sequences, finished, strict=True)
            if not done
        }
        out = torch.full_like(logits, NEG_INF)
        for n, sequence in enumerate(sequences):
            if finished[n]:
                continue
            allowed = _allowed_tokens(next_matchers[sequence], logits.shape[-1], eos_ids)
            out[n, allowed] = logits[n, allowed]
        matchers = next_matchers
        return out

    return apply


@lru_cache(maxsize=4)
def _llg_tokenizer(tokenizer_json: str, vocab: int, eos_id: int) -> Any:
    """The tokenizer as llguidance reads it. Building it takes a while, so it is cached."""
    return _import_llguidance().LLTokenizer(tokenizer_json, n_vocab=vocab, eos_token=eos_id)


def _allowed_tokens(matcher: Any, vocab: int, eos_ids: tuple[int, ...]) -> Tensor:
    if matcher.is_stopped():
        return torch.tensor(eos_ids)
    bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
    allowed = ((bits[:, None] >> torch.arange(8)) & 1).flatten()[:vocab].nonzero()[:, 0]
    _raise_on_error(matcher)
    if not len(allowed):
        raise ValueError("no token keeps to the rule here: it cannot be fulfilled with this model's tokens")
    return allowed


def _raise_on_error(matcher: Any) -> None:
    if matcher.is_error():
        raise ValueError(f"the rule cannot be used: {' '.join(matcher.get_error().split())}")


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ImportError(
            "regex, json_schema and grammar need llguidance: pip install 'keepleft[grammar]'"
        ) from error
    return llguidance
