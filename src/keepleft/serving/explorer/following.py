"""What could come next: the scores of every token, after a text and what was written so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from keepleft.attention.masks import is_causal
from keepleft.serving.explorer import wire
from keepleft.serving.explorer.given import Given
from keepleft.serving.explorer.reading import stamp

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer


class Steps:
    """The model's state after the last text is kept: one token more costs one step, one less nothing."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cached = all(map(is_causal, model.decoder.masks))
        self.forget()

    def forget(self) -> None:
        self.mark: Any = None         # the source and the weights that the state belongs to
        self.tokens: list[int] = []
        self.state: Any = None
        self.scores: Tensor | None = None

    def after(self, tokens: list[int], source: list[int]) -> Tensor:
        """(V,) the scores of what follows."""
        device = next(self.model.parameters()).device
        laid = lambda row: torch.tensor([row], device=device)
        if not self.cached:
            given = [laid(source)] if source else []
            return self.model.head(self.model.states(*given, laid(tokens))[0, -1:], self.model.token)[0]
        mark = (source, stamp(self.model))
        same = _alike(self.tokens, tokens) if mark == self.mark else 0
        if self.scores is not None and same == len(tokens) == len(self.tokens):
            return self.scores
        keep, was = min(same, len(tokens) - 1), len(self.tokens)
        state = self.state
        self.forget()  # should the model refuse the tokens, nothing half-done is left
        if keep:
            state.drop(was - keep)
            scores = self.model.step(laid(tokens[keep:]), state)
        else:
            scores, state = self.model.start(laid(tokens), **({"memory": self.model.read(laid(source))} if source else {}))
        self.mark, self.tokens, self.state, self.scores = mark, list(tokens), state, scores[0]
        return scores[0]


def following(explorer: Explorer, given: Given) -> dict[str, Any]:
    words = explorer.writer("next")
    row, tokens = words.prompt(explorer.asked(given)), explorer.tokens(given)
    steps = explorer.unmasked_steps if given.flag("unmasked", False) else explorer.steps
    pair, options = explorer.voice.pair, words.options
    whole = [*words.begun, *tokens] if pair else [*row, *tokens]
    explorer.reachable(whole)
    scores = steps.after(whole, row if pair else [])
    return {"prompt": words.source_shown(row) if pair else words.shown(row),
            "written": words.shown(tokens, words.begun if pair else row),
            "scores_f32": wire.f32(scores), "ends": list(options.end), "start": words.begun[0] if pair else -1}


def _alike(these: list[int], those: list[int]) -> int:
    """How many tokens two texts have in common from the beginning."""
    return next((n for n, (a, b) in enumerate(zip(these, those, strict=False)) if a != b), min(len(these), len(those)))
