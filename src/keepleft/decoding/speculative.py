"""Several tokens for one pass of the model, without changing the text: guesses are made cheaply and looked over all at once.

The model chooses every token itself, from its own scores and with the random number that the place in the text has anyway; a
guess that is what it chose saves it a pass. So the text is the one that it would have written alone, drawn or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from keepleft.decoding.hypotheses import Hypotheses, Stepper
from keepleft.decoding.options import Options
from keepleft.decoding.single import Single

Guess = Callable[[Hypotheses, int], list[int]]  # the text so far, and the most tokens to guess


def speculate(model: Any, prompt: Tensor, strategy: Single, guess: Guess, *, limit: int, **given: Any) -> Iterator[Hypotheses]:
    """One prompt, (1, T): yield the text after each new token."""
    if len(prompt) != 1 or strategy.copies != 1:
        raise ValueError(f"{len(prompt)} prompts with {strategy.copies} texts each: guessing ahead takes one at a time")
    texts, _ = strategy.begin(prompt, None, torch.tensor([limit], device=prompt.device))
    with torch.no_grad():
        scores, state = model.start(prompt, **given)
        texts, _ = strategy.choose(scores, texts)
    yield texts
    while texts.written < limit and not bool(texts.done):
        guesses = guess(texts, limit - texts.written - 1)
        with torch.no_grad():
            new = torch.cat([texts.tokens[:, -1:], torch.tensor([guesses], dtype=torch.long, device=prompt.device)], 1)
            all_ = model.head(model.extend(new, state), model.token)[0]
        for n, scores in enumerate(all_):
            with torch.no_grad():
                texts, _ = strategy.choose(scores[None], texts)
            yield texts
            if bool(texts.done):
                return
            if n < len(guesses) and int(texts.tokens[0, -1]) != guesses[n]:
                state.drop(len(guesses) - n)
                break


def guessing(draft: Any, options: Options, strategy: Single, source: Tensor | None = None, **given: Any) -> Guess:
    """A smaller model's guesses, or those that the text itself suggests."""
    if draft is not None:
        return Draft(draft, strategy, options.num_assistant_tokens or 5, given)
    return lookup(options.prompt_lookup_num_tokens or 10, options.max_matching_ngram_size or 2, source)


def lookup(count: int, longest: int, source: Tensor | None = None) -> Guess:
    """What followed the last tokens when they came before, in the source or in the text."""
    before = [] if source is None else source[0].tolist()

    def guess(texts: Hypotheses, most: int) -> list[int]:
        text = texts.tokens[0].tolist()
        there = [*before, *text]
        for size in range(min(longest, len(text)), 0, -1):
            tail = text[-size:]
            for begin in range(len(there) - size - 1, -1, -1):
                if there[begin:begin + size] == tail:
                    return there[begin + size:begin + size + min(count, most)]
        return []
    return guess


class Draft:
    """Another model with the same tokens, which writes ahead by the same strategy."""

    def __init__(self, model: Stepper, strategy: Single, count: int, given: dict[str, Any]) -> None:
        self.model, self.strategy, self.count, self.given = model, strategy, count, given
        self.state: Any = None
        self.read: list[int] = []  # the tokens that its state holds

    def __call__(self, texts: Hypotheses, most: int) -> list[int]:
        out: list[int] = []
        reach = getattr(getattr(self.model, "design", None), "longest", None)
        room = most if reach is None else min(most, reach - texts.tokens.shape[1])
        with torch.no_grad():
            for _ in range(min(self.count, room)):
                texts, _ = self.strategy.choose(self._scores(texts.tokens), texts)
                out.append(int(texts.tokens[0, -1]))
                if bool(texts.done):
                    break
        return out

    def _scores(self, tokens: Tensor) -> Tensor:
        """Of what follows these: what is known already is not read again."""
        text = tokens[0].tolist()
        if self.state is None:
            scores, self.state = self.model.start(tokens, **self.given)
        else:
            same = next((n for n, (a, b) in enumerate(zip(self.read, text, strict=False)) if a != b),
                        min(len(self.read), len(text) - 1))
            self.state.drop(len(self.read) - same)
            scores = self.model.step(tokens[:, same:], self.state)
        self.read = text
        return scores
