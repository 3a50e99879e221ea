"""Text that keeps to a regular expression, a JSON schema or a grammar, by llguidance."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from keepleft.decoding.hypotheses import Hypotheses, Transform
from keepleft.decoding.options import Options

OUT = float("-inf")


def of(options: Options) -> str | None:
    """The rule that the options ask for, in llguidance's words."""
    if options.regex is None and options.json_schema is None and options.grammar is None:
        return None
    kinds = _library().LLMatcher
    if options.regex is not None:
        return str(kinds.grammar_from_regex(options.regex))
    if options.grammar is not None:
        return str(kinds.grammar_from_lark(options.grammar))
    schema = options.json_schema
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return str(kinds.grammar_from_json_schema(text, defaults={"whitespace_flexible": False}))


def obeyed(rule: str, tokenizer: Any, end: tuple[int, ...]) -> Transform:
    """Only tokens that keep to the rule; when it is fulfilled and nothing may follow, the end."""
    guide = _library()
    if not end:
        raise ValueError("a text that keeps to a rule must be able to end: give eos_token_id")
    first = guide.LLMatcher(_words(tokenizer.to_str(), tokenizer.get_vocab_size(), end[0]), rule)
    _fine(first)
    held: dict[tuple[int, ...], Any] = {(): first}  # where each text of the last step stands

    def matcher(text: tuple[int, ...]) -> Any:
        if text in held:
            return held[text]
        out = held[text[:-1]].deep_copy() if text[:-1] in held else first.deep_copy()
        for token in text[-1:] if text[:-1] in held else text:
            if token in end or out.is_stopped():
                break
            out.consume_token(token)
            _fine(out)
        return out

    def apply(scores: Tensor, texts: Hypotheses) -> Tensor:
        nonlocal held
        rows = [tuple(row) for row in texts.tokens[:, texts.begin:].tolist()]
        over = texts.done.tolist()
        now = {text: matcher(text) for text, done in zip(rows, over, strict=True) if not done}
        out = torch.full_like(scores, OUT)
        for n, text in enumerate(rows):
            if over[n]:
                continue
            may = _allowed(now[text], scores.shape[-1], end)
            out[n, may] = scores[n, may]
        held = now
        return out
    return apply


@lru_cache(maxsize=4)
def _words(tokenizer: str, vocab: int, end: int) -> Any:
    """The tokenizer as llguidance reads it, which takes a while: it is kept for the next text."""
    return _library().LLTokenizer(tokenizer, n_vocab=vocab, eos_token=end)


def _allowed(matcher: Any, vocab: int, end: tuple[int, ...]) -> Tensor:
    if matcher.is_stopped():
        return torch.tensor(end)
    bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
    open_ = ((bits[:, None] >> torch.arange(8)) & 1).flatten()[:vocab].nonzero()[:, 0]
    _fine(matcher)
    if not len(open_):
        raise ValueError("no token keeps to the rule here: it cannot be fulfilled with this model's tokens")
    return open_


def _fine(matcher: Any) -> None:
    if matcher.is_error():
        raise ValueError(f"the rule cannot be used: {' '.join(matcher.get_error().split())}")


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ImportError("regex, json_schema and grammar need llguidance: pip install 'keepleft[grammar]'") from error
    return llguidance
