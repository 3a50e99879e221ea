"""Tokens as words: a few of them, or all that there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keepleft.serving.explorer.given import Given

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer


def spell(explorer: Explorer, given: Given) -> dict[str, Any]:
    """Tokens as they read one after the other, after those before."""
    vocab = explorer.voice.model.design.vocab
    return {"tokens": explorer.words.shown(given.numbers("ids", vocab), given.numbers("before", vocab, default=[]))}


def vocabulary(explorer: Explorer, given: Given) -> dict[str, Any]:
    return {"words": explorer.words.all()}
