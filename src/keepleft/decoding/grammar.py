"""Structured output (constrained decoding): text that matches a regular expression, JSON schema or grammar,
by llguidance.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
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


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Making it takes a while: keep it where there are many."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.llg_tokenizer, self.end_token = _llg_tokenizer(tokenizer.to_str())

    def compile(self, options: GenerationConfig) -> CompiledGrammar:
        """The grammar of the options, with the mask of its first token. May be called from any thread."""
        if not options.eos_ids:
            raise ValueError("a text that keeps to a grammar must be able to end: give eos_token_id")
        matcher = _import_llguidance().LLMatcher(self.llg_tokenizer, grammar_from_options(options))
        if matcher.is_error():
            raise ValueError(_error_message(options, matcher.get_error()))
        matcher.compute_bitmask()  # copies of the matcher share what it found out
        return CompiledGrammar(matcher, self.end_token, options.eos_ids)


@dataclass(frozen=True)
class CompiledGrammar:
    """A compiled grammar, for any number of logits processors."""

    matcher: Any  # before the first token; it is only copied
    end_token: int  # allowed by the matcher where the text is complete
    eos_ids: tuple[int, ...]  # that stand for it

    def processor(self) -> LogitsProcessor:
        """A logits processor that allows only tokens of the grammar, and the end where it is complete."""
        initial_matcher = self.matcher.deep_copy()
        # state of each sequence after the last step
        matchers: dict[tuple[int, ...], Any] = {(): initial_matcher}

        def matcher_for(sequence: tuple[int, ...]) -> Any:
            if sequence in matchers:
                return matchers[sequence]
            is_next = sequence[:-1] in matchers
            out = (matchers[sequence[:-1]] if is_next else initial_matcher).deep_copy()
            for token in sequence[-1:] if is_next else sequence:
                if token in self.eos_ids or out.is_stopped():
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
                allowed = self._allowed_tokens(next_matchers[sequence], logits.shape[-1])
                out[n, allowed] = logits[n, allowed]
            matchers = next_matchers
            return out

        return apply

    def _allowed_tokens(self, matcher: Any, vocab: int) -> Tensor:
        eos_ids = [token for token in self.eos_ids if token < vocab]
        if matcher.is_stopped():
            return torch.tensor(eos_ids)
        packed = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
        _raise_on_error(matcher)
        bits = ((packed[:, None] >> torch.arange(8)) & 1).flatten()
        can_end = bits[self.end_token].item()
        bits[self.end_token] = 0
        bits = F.pad(bits[:vocab], (0, max(0, vocab - len(bits))))
        bits[eos_ids] = can_end
        allowed = bits.nonzero()[:, 0]
        if not len(allowed):
            raise ValueError(
                "no token keeps to the rule here: it cannot be fulfilled with this model's tokens"
            )
        return allowed


@lru_cache(maxsize=4)
def add_end_token(tokenizer_json: str) -> tuple[str, int]:
    """The tokenizer with one more token, which ends a text, and that token.

    It stands for whatever end-of-sequence tokens a request names: they need no tokenizers of their own.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    known_tokens = set(tokenizer.get_vocab().values())
    end_token = None
    for n in range(len(known_tokens) + 1):  # where numbers are left out, the next one may be taken
        tokenizer.add_special_tokens([f"<|end of the grammar {n}|>"])
        end_token = tokenizer.token_to_id(f"<|end of the grammar {n}|>")
        if end_token is not None and end_token not in known_tokens:
            break
    assert end_token is not None
    return tokenizer.to_str(), end_token


@lru_cache(maxsize=4)
def _llg_tokenizer(tokenizer_json: str) -> tuple[Any, int]:
    """The tokenizer as llguidance reads it, and its end token. Building it takes a while: it is cached."""
    extended_json, end_token = add_end_token(tokenizer_json)
    llg_tokenizer = _import_llguidance().LLTokenizer(extended_json, eos_token=end_token)
    return llg_tokenizer, end_token


def _raise_on_error(matcher: Any) -> None:
    if matcher.is_error():
        raise ValueError(f"the rule cannot be used: {' '.join(matcher.get_error().split())}")


def _error_message(options: GenerationConfig, error: str) -> str:
    """Names the option, and what is wrong with it; of a regular expression, in the words of its parser."""
    name = next(name for name in ("regex", "grammar", "json_schema") if getattr(options, name) is not None)
    _, _, regex_error = error.partition("\nerror: ")
    reason = regex_error.partition("\n")[0] if options.regex is not None and regex_error else error
    return f"{name} is {getattr(options, name)!r}: it cannot be used; {' '.join(reason.split())}"


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ImportError(
            "regex, json_schema and grammar need llguidance: pip install 'keepleft[grammar]'"
        ) from error
    return llguidance
