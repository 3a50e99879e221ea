"""A model in use: everything that a command needs to write with it."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from keepleft.decoding import grammar
from keepleft.decoding.generate import (
    Answer,
    Work,
    answer_of,
    answers,
    chosen,
    encoded,
    prefixes_of,
    settled,
    steps,
    stream,
    tell_full,
)
from keepleft.decoding.hypotheses import Written
from keepleft.decoding.options import Options, overlooked, start_of
from keepleft.decoding.rescore import rescored
from keepleft.runs.opened import opened


@dataclass(frozen=True)
class Said(Answer):
    """An answer with what was asked for besides."""

    logprobs: list[dict[str, Any]] | None = None
    alignment: str | None = None


class Seen:
    """A transform that changes nothing and keeps what it saw."""

    scores: Any = None

    def __call__(self, scores: Any, texts: Any) -> Any:
        self.scores = scores if self.scores is None else self.scores
        return scores

    def likeliest(self, count: int) -> list[int]:
        """So many tokens of the first text, fewer where fewer may come."""
        best = self.scores[0].topk(min(count, self.scores.shape[-1]))
        return [token for token, score in zip(best.indices.tolist(), best.values.tolist(), strict=True) if score > -math.inf]


@dataclass(frozen=True)
class First:
    """A transform that lets a text begin with one token alone."""

    token: int

    def __call__(self, scores: Any, texts: Any) -> Any:
        if texts.written:
            return scores
        out = torch.full_like(scores, -math.inf)
        out[:, self.token] = scores[:, self.token]
        return out


@dataclass(frozen=True)
class Voice:
    """A model and its tokenizers."""

    model: Any
    tokenizer: Any
    source_tokenizer: Any = None
    draft: Any = None

    @property
    def reading(self) -> Any:
        """The tokenizer of what is read."""
        return self.source_tokenizer or self.tokenizer

    @property
    def pair(self) -> bool:
        return self.model.design.encoder is not None and self.model.design.decoder is not None

    def settled(self, options: Options) -> Options:
        return settled(self.model, options, {})

    def prompt(self, text: str, tag: str | None) -> str | list[int]:
        """A text, or its tokens where a tag goes before it."""
        if tag is None:
            return text
        special = {token.content: number for number, token in self.reading.get_added_tokens_decoder().items() if token.special}
        if tag not in special:  # an ordinary word is none
            known = [word for word in special if word.startswith("<2") and word.endswith(">")]
            raise ValueError(f"the model has no tag {tag!r}: " + (f"there are {', '.join(sorted(known))}" if known else
                                                                  "leave it out"))
        return [special[tag], *self.reading.encode(text).ids]

    def write(self, texts: Sequence[str], options: Options, *, tag: str | None = None, alternatives: int | None = None,
              logprobs: int | None = None, alignments: bool = False) -> list[list[Said]]:
        """What is written for each text."""
        prompts = [self.prompt(text, tag) for text in texts]
        if alternatives:
            found = [self._alternatives(prompt, part(options, n, 1), alternatives) for n, prompt in enumerate(prompts)]
        else:
            found = answers(self.model, self.tokenizer, prompts, source_tokenizer=self.source_tokenizer, draft=self.draft,
                            at_once=max(1, len(prompts)), options=options)
        return [[self._more(one, options, logprobs, alignments) for one in several] for several in found]

    def stream(self, text: str, options: Options, *, tag: str | None = None) -> Iterator[str]:
        return stream(self.model, self.tokenizer, self.prompt(text, tag), source_tokenizer=self.source_tokenizer,
                      draft=self.draft, options=options)

    def _begun(self, options: Options) -> list[int]:
        """What a text of an encoder-decoder begins with."""
        return [start_of(options)] if self.pair else []

    def _prefix(self, options: Options) -> list[int]:
        """What the text has to begin with, of options for one text."""
        return (prefixes_of(self.tokenizer, options, 1) or [[]])[0]

    def _alternatives(self, prompt: str | list[int], options: Options, count: int) -> list[Answer]:
        """One text for each of the likeliest next tokens, with its log-probability."""
        if grammar.of(options) is not None or options.copies > 1:
            raise ValueError("alternatives are texts that begin differently: leave rules and num_return_sequences out")
        row, = encoded(self.model, self.reading, [prompt], options)
        prefix = self._prefix(options)
        tell_full(self.model, [row], options, [prefix])
        work = Work.of(self.model, [row], options, [prefix])
        if work.limits[0] < 1:
            return [answer_of(self.tokenizer, row, Written(prefix, 0.0), options, len(prefix))]
        plain = replace(options, num_beams=1)
        led = lambda one, how, lead: steps(self.model, work, replace(one, transforms=(*one.transforms, lead)), how)
        next(led(chosen(self.tokenizer, plain, work), plain, seen := Seen()))
        out = []
        for token in seen.likeliest(count):
            strategy = chosen(self.tokenizer, options, work)
            last = deque(led(strategy, options, First(token)), maxlen=1)[0]
            tokens = [*prefix, *strategy.results(last)[0][0].tokens]  # type: ignore[arg-type]
            thoughts = rescored(self.model, self._begun(options) or row, tokens, source=row if self.pair else None)
            one = Written(tokens, sum(thought.logprob for thought in thoughts[len(prefix):]))
            out.append(answer_of(self.tokenizer, row, one, options, len(prefix)))
        return out

    def _more(self, one: Answer, options: Options, logprobs: int | None, alignments: bool) -> Said:
        out = Said(one.text, one.tokens, one.score, one.ended, one.prompt)
        before = self._begun(options) if self.pair else one.prompt
        if logprobs is not None:
            thoughts = rescored(self.model, before, one.tokens, source=one.prompt if self.pair else None, likely=logprobs)
            word = self.tokenizer.id_to_token
            out = replace(out, logprobs=[{"token": word(t.token), "logprob": round(t.logprob, 6),
                                          "top": {word(n): round(value, 6) for n, value in t.likely}} for t in thoughts])
        if alignments:
            from keepleft.runs.alignment import aligned, pairs

            if not self.pair:
                raise ValueError("an alignment is of source and target, and this model has no source: leave --alignments out")
            weights = aligned(self.model, one.prompt, [*before, *one.tokens])
            out = replace(out, alignment=" ".join(f"{i}-{j}" for i, j in pairs(weights)))
        return out

    def picture(self, path: Path, text: str, options: Options, *, tag: str | None = None) -> Path:
        """One text drawn while it is written: the tree of beams, the alignment, or the distribution at each step."""
        from keepleft.runs.alignment import aligned, alignment
        from keepleft.runs.choices import distributions, watched
        from keepleft.runs.spelled import in_turn
        from keepleft.runs.tree import tree

        row, = encoded(self.model, self.reading, [self.prompt(text, tag)], options)
        prefix = self._prefix(options)
        work = Work.of(self.model, [row], options, [prefix])
        strategy = chosen(self.tokenizer, options, work)
        seen = list(steps(self.model, work, strategy, options, self.draft))
        if options.beams > 1:
            return tree(path, seen, self.tokenizer, title=text, prefix=prefix)  # type: ignore[arg-type]
        whole = [*prefix, *strategy.results(seen[-1])[0][0].tokens]  # type: ignore[arg-type]
        if self.pair:
            weights = aligned(self.model, row, [*self._begun(options), *whole])
            return alignment(path, in_turn(self.reading, row), in_turn(self.tokenizer, whole), weights, title=text)
        return distributions(path, watched(self.model, self.tokenizer, [*row, *whole], len(row) + len(prefix),
                                           transforms=strategy.transforms), title=text)


def part(options: Options, first: int, count: int) -> Options:
    """The options of some of the texts, where there is a seed or a prefix for each."""
    some: dict[str, Any] = {name: getattr(options, name)[first:first + count] for name in ("seed", "prefix")
                            if isinstance(getattr(options, name), list)}
    if short := [name for name, value in some.items() if len(value) != count]:
        raise ValueError(f"{short[0]} has {len(getattr(options, short[0]))} values, and there are more texts: give one, or one "
                         "for each")
    return replace(options, **some)


def voice(place: str, *, dtype: str = "float32", device: str | None = None, draft: str | None = None) -> Voice:
    """A model directory, ready to write."""
    found = opened(place, dtype=dtype, device=device)
    if found.model.design.decoder is None:
        raise ValueError(f"{place} is an encoder and writes no text: `keepleft classify`, `fill` or `score` may be meant")
    for name in overlooked(found.model.notes):
        warnings.warn(f"generation_config.json asks for {name}, which is not done here", stacklevel=2)
    return Voice(*found, None if draft is None else opened(draft, dtype=dtype, device=device).model)
