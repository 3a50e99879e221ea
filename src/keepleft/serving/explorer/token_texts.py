"""Tokens as words: a few of them, or all that there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keepleft.serving.explorer.params import Params

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer


def describe_tokens(explorer: Explorer, params: Params) -> dict[str, Any]:
    """Tokens as they read one after the other, after those before."""
    vocab = explorer.generator.model.design.vocab
    return {
        "tokens": explorer.display_tokenizer.describe(
            params.integers("ids", vocab), params.integers("before", vocab, default=[])
        )
    }


def vocabulary(explorer: Explorer, params: Params) -> dict[str, Any]:
    return {"words": explorer.display_tokenizer.vocabulary()}
