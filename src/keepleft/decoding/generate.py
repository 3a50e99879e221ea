"""Prompts in, texts out: many at a time, by any strategy, from the options alone."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from secrets import randbits
from typing import Any

import torch
from torch import Tensor

from keepleft.decoding import grammar
from keepleft.decoding.beam import Beam
from keepleft.decoding.chance import seeds as seeds_of
from keepleft.decoding.contrastive import contrast
from keepleft.decoding.hypotheses import Hypotheses, Written
from keepleft.decoding.loop import aligned, decode
from keepleft.decoding.options import CACHES, Options, of_model, start_of, whole
from keepleft.decoding.recorded import fits, recorded
from keepleft.decoding.rows import Scene, transforms_of
from keepleft.decoding.single import Single, Stop
from keepleft.decoding.speculative import guessing, speculate
from keepleft.decoding.stops import any_of, over_time, stop_strings
from keepleft.models.lean import why_not
from keepleft.models.steady import steady

AT_ONCE = 32   # prompts that are written together
MOST = 1 << 22  # tokens that a cache is made for beforehand
USUAL = 128    # tokens that a decoder adds where nothing says how many
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Answer:
    """One written text."""

    text: str
    tokens: list[int]  # without the prompt, with the end if there is one
    score: float       # log-probability; with beams, what they are ranked by
    ended: bool        # by an end or a stop string; otherwise at the limit
    prompt: list[int] = field(repr=False, default_factory=list)


def generate(model: Any, tokenizer: Any, prompts: Prompt | Sequence[Prompt], *, source_tokenizer: Any = None, draft: Any = None,
             at_once: int = AT_ONCE, options: Options | None = None, **said: Any) -> list[str]:
    """The text that a model writes for each prompt, or several in a row for each with num_return_sequences.

    A prompt is a text, or its tokens; an encoder-decoder reads it as the source. Options are named as in Hugging Face's
    GenerationConfig (kl.Options lists them); those of the model directory hold where nothing else is said.
    """
    found = answers(model, tokenizer, prompts, source_tokenizer=source_tokenizer, draft=draft, at_once=at_once, options=options,
                    **said)
    return [answer.text for several in found for answer in several]


def answers(model: Any, tokenizer: Any, prompts: Prompt | Sequence[Prompt], *, source_tokenizer: Any = None, draft: Any = None,
            at_once: int = AT_ONCE, options: Options | None = None, watch: Callable[[int], None] = lambda done: None,
            **said: Any) -> list[list[Answer]]:
    """The same with tokens and scores: for each prompt its texts, the best first. `watch` hears how many prompts are done."""
    options = settled(model, options, said)
    for note in options.check():
        warnings.warn(note, stacklevel=2)
    rows = encoded(model, tokenizer if source_tokenizer is None else source_tokenizer, _several(prompts), options)
    if isinstance(options.seed, list) and len(options.seed) != len(rows):
        raise ValueError(f"{len(options.seed)} seeds were given for {len(rows)} prompts: give one number, or one for each")
    if draft is not None:
        _alike(model, draft)
    begun = prefixes_of(tokenizer, options, len(rows))
    tell_full(model, rows, options, begun)
    order = sorted(range(len(rows)), key=lambda n: len(rows[n]))
    at_once = 1 if options.deterministic else at_once
    out: list[list[Answer]] = [[] for _ in rows]
    was = model.training
    model.eval()
    try:
        for first in range(0, len(order), at_once):
            some = order[first:first + at_once]
            here = options if not isinstance(options.seed, list) else options.but(seed=[options.seed[n] for n in some])
            batch = written(model, tokenizer, [rows[n] for n in some], here, begun and [begun[n] for n in some], draft)
            for n, found in zip(some, batch, strict=True):
                out[n] = [answer_of(tokenizer, rows[n], one, here, len(begun[n]) if begun else 0) for one in found]
            watch(min(len(order), first + at_once))
    finally:
        model.train(was)
    return out


def settled(model: Any, options: Options | None, said: dict[str, Any]) -> Options:
    """The options of the model directory, those given, and those said by name."""
    said = {name: value for name, value in said.items() if value is not None}
    said = said if options is None else {**asdict(options), **said}
    base = of_model(getattr(model, "notes", {}))
    if said.get("max_length") is not None and said.get("max_new_tokens") is None:
        base = replace(base, max_new_tokens=None)  # what is said here goes before what the directory says
    return base.but(**said)


def written(model: Any, tokenizer: Any, rows: list[list[int]], options: Options, prefixes: list[list[int]] | None = None,
            draft: Any = None) -> list[list[Written]]:
    """What is written for prompts (or sources) that are tokens already, all in one batch."""
    work = Work.of(model, rows, options, prefixes)
    guessed = draft is not None or options.prompt_lookup_num_tokens is not None
    if len(rows) > 1 and (guessed or min(work.limits) < 1):  # each at its own pace, or some without room for a token
        seeds = options.seed if isinstance(options.seed, list) else [options.seed] * len(rows)
        return [written(model, tokenizer, [row], options.but(seed=seed), prefixes and [prefixes[n]], draft)[0]
                for n, (row, seed) in enumerate(zip(rows, seeds, strict=True))]
    if work.limits[0] < 1:
        return [[Written(prefixes[0] if prefixes else [], 0.0)] * options.copies]
    strategy = chosen(tokenizer, options, work)
    found = strategy.results(deque(steps(model, work, strategy, options, draft, live=True), maxlen=1)[0])  # type: ignore[arg-type]
    return found if prefixes is None else [[Written([*prefix, *one.tokens], one.score) for one in several]
                                           for prefix, several in zip(prefixes, found, strict=True)]


def steps(model: Any, work: Work, strategy: Single | Beam, options: Options, draft: Any = None, *,
          live: bool = False) -> Iterator[Hypotheses]:
    """The texts of a batch after each new token, by whichever loop the options ask for.

    `live`: what is yielded may be written over by the next step, and more may come after all texts have ended.
    """
    given = work.given(model, options)
    lean = _simple(options) and why_not(model) is None
    if draft is not None or options.prompt_lookup_num_tokens is not None:
        if not isinstance(strategy, Single) or options.copies > 1 or options.penalty_alpha:
            raise ValueError("guessing ahead is for greedy and drawn texts, one for each prompt: leave num_beams, "
                             "num_return_sequences and penalty_alpha out")
        theirs = {} if draft is None else work.given(draft, options)
        known = work.source if model.design.source_vocab is None else None  # a source in other tokens suggests nothing
        yield from speculate(model, work.prompt, strategy, guessing(draft, options, strategy, known, **theirs),
                             limit=work.limits[0], **given)
    elif options.penalty_alpha:
        assert isinstance(strategy, Single)
        yield from contrast(model, work.prompt, strategy, alpha=options.penalty_alpha, k=options.top_k or 4, limit=work.limits,
                            segments=work.segments, **given)
    elif lean and live and (work.prompt.is_cuda or model.compiled) and fits(strategy, work.longest):
        given.pop("cache")
        prompt, real = aligned(work.prompt, work.segments)
        yield from recorded(model, prompt, strategy, limits=work.limits, real=real, **given)
    elif lean and not work.prompt.is_cuda:
        given.pop("cache")
        stepper: Any = steady(model)
        yield from decode(stepper, work.prompt, strategy, limit=work.limits, segments=work.segments, **given)
    else:
        yield from decode(model, work.prompt, strategy, limit=work.limits, segments=work.segments,
                          chunk=options.prefill_chunk_size or 0, **given)


def _simple(options: Options) -> bool:
    """Nothing is asked of the cache, or of how prompts are read."""
    return options.cache_implementation in (None, "dynamic") and not options.deterministic and not options.prefill_chunk_size


@dataclass(frozen=True)
class Work:
    """A batch that is ready to be written."""

    prompt: Tensor               # (B, T)
    segments: Tensor | None      # (B, T) where prompts are of unequal length
    limits: list[int]            # tokens to add to each
    source: Tensor | None = None
    source_segments: Tensor | None = None

    @classmethod
    def of(cls, model: Any, rows: list[list[int]], options: Options, prefixes: list[list[int]] | None = None) -> Work:
        device = next(model.parameters()).device
        reach = model.design.longest
        if model.design.encoder is None:
            whole_rows = [[*row, *(prefixes[n] if prefixes else [])] for n, row in enumerate(rows)]
            return cls(*padded(whole_rows, device), [options.limit(len(row), USUAL, reach) for row in whole_rows])
        source, source_segments = padded(rows, device, left=False)
        start = start_of(options)
        begun = [[start, *(prefixes[n] if prefixes else [])] for n in range(len(rows))]
        limits = [options.limit(len(begin), 2 * len(row) + 10, reach) for begin, row in zip(begun, rows, strict=True)]
        return cls(*padded(begun, device), limits, source, source_segments)

    def given(self, model: Any, options: Options) -> dict[str, Any]:
        """What model.start() wants besides the prompt."""
        kind = CACHES[options.cache_implementation or "dynamic"]
        out: dict[str, Any] = {"cache": kind}
        if kind == "static":
            capacity = out["capacity"] = self.longest
            if capacity > MOST:
                raise ValueError(f"a static cache for {capacity:,} tokens is too large: give fewer max_new_tokens, or another "
                                 "cache_implementation")
        if self.source is not None:
            with torch.no_grad():
                out["memory"] = model.read(self.source, segments=self.source_segments)
        return out

    @property
    def longest(self) -> int:
        """Tokens of the longest text, prompt included."""
        return self.prompt.shape[1] + max(self.limits)

    def scene(self) -> Scene:
        known = None if self.source_segments is None else self.source_segments != 0
        return Scene(self.prompt.shape[1], self.source, known)


def chosen(tokenizer: Any, options: Options, work: Work) -> Single | Beam:
    """The strategy that the options ask for."""
    device, rows = work.prompt.device, len(work.prompt)
    transforms = transforms_of(options, work.scene())
    if (rule := grammar.of(options)) is not None:
        transforms.append(grammar.obeyed(rule, tokenizer, options.end))
    stop = stops(tokenizer, options)
    seeds = None
    if options.do_sample:
        each = whole(options.seed) if options.seed is not None else [randbits(62) for _ in range(rows)]
        copies = 1 if options.beams > 1 else options.copies
        each = each * rows if len(each) == 1 else each
        seeds = torch.cat([seeds_of(seed, torch.arange(copies)) for seed in each]).to(device)
    if options.beams > 1:
        penalty = 1.0 if options.length_penalty is None else options.length_penalty
        return Beam(options.beams, penalty, options.early_stopping or False, options.end, tuple(transforms), stop,
                    options.num_beam_groups or 1, options.diversity_penalty or 0.0, seeds, options.copies)
    return Single(tuple(transforms), options.end, stop, seeds, options.copies)


def stops(tokenizer: Any, options: Options) -> Stop | None:
    found: list[Stop] = []
    if options.stop_strings:
        if tokenizer is None:
            raise ValueError("stop_strings are looked for in text, and there is no tokenizer: give one")
        found.append(stop_strings(tokenizer, options.strings))
    if options.max_time is not None:
        found.append(over_time(time.monotonic() + options.max_time))
    return any_of(found)


def stream(model: Any, tokenizer: Any, prompt: Prompt, *, source_tokenizer: Any = None, draft: Any = None,
           options: Options | None = None, **said: Any) -> Iterator[str]:
    """Pieces of one text as they are written, each whole characters."""
    from tokenizers.decoders import DecodeStream

    options = settled(model, options, said)
    for note in options.check():
        warnings.warn(note, stacklevel=2)
    if options.beams > 1 or options.copies > 1:
        raise ValueError("only one text can be streamed as it is written: leave num_beams and num_return_sequences out")
    rows = encoded(model, source_tokenizer or tokenizer, [prompt], options)
    prefixes = prefixes_of(tokenizer, options, 1)
    tell_full(model, rows, options, prefixes)
    work = Work.of(model, rows, options, prefixes)
    if work.limits[0] < 1:
        return
    tokens = list(prefixes[0]) if prefixes else []
    pieces, shown, was = DecodeStream(skip_special_tokens=True), "", model.training
    model.eval()
    try:
        for token in tokens:
            shown += (piece := pieces.step(tokenizer, token) or "")
            if piece:
                yield piece
        for texts in steps(model, work, chosen(tokenizer, options, work), options, draft, live=True):
            tokens.append(int(texts.tokens[0, -1]))
            shown += (piece := pieces.step(tokenizer, tokens[-1]) or "")
            if piece:
                yield piece
            if bool(texts.done):
                break
    finally:
        model.train(was)
    whole_text = tokenizer.decode(tokens, skip_special_tokens=True)
    if whole_text.startswith(shown) and len(whole_text) > len(shown):
        yield whole_text[len(shown):]  # what waited for more bytes


def encoded(model: Any, tokenizer: Any, prompts: Sequence[Prompt], options: Options) -> list[list[int]]:
    """Prompts as tokens. An empty one is the beginning of a text, where the model has a token for that."""
    out = []
    for n, prompt in enumerate(prompts):
        if isinstance(prompt, str) and tokenizer is None:
            raise ValueError("the model has no tokenizer: give prompts as lists of tokens")
        row = list(tokenizer.encode(prompt).ids) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not row:
            if options.bos_token_id is None or model.design.encoder is not None:
                raise ValueError(f"prompt {n} is empty, and the model has no token that a text begins with: give it some text")
            row = [options.bos_token_id]
        vocab = model.design.source_vocab or model.design.vocab
        if odd := [token for token in row if not 0 <= token < vocab]:
            raise ValueError(f"prompt {n} holds token {odd[0]}, and the model knows {vocab}: is it the model's own tokenizer?")
        reach = model.design.longest
        if reach is not None and len(row) > reach - (model.design.encoder is None):
            raise ValueError(f"prompt {n} has {len(row)} tokens, and the model reaches {reach}: shorten it")
        out.append(row)
    return out


def padded(rows: Sequence[Sequence[int]], device: torch.device, *, left: bool = True) -> tuple[Tensor, Tensor | None]:
    """(B, T) tokens and segments, or None where all rows are as long."""
    width = max(map(len, rows), default=0)
    if all(len(row) == width for row in rows):
        return torch.tensor([list(row) for row in rows], dtype=torch.long, device=device), None
    fill = lambda row, value: [value] * (width - len(row))
    tokens = [fill(row, 0) + list(row) if left else list(row) + fill(row, 0) for row in rows]
    there = [fill(row, 0) + [1] * len(row) if left else [1] * len(row) + fill(row, 0) for row in rows]
    return torch.tensor(tokens, device=device), torch.tensor(there, device=device)


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    listed: list[Any] = prompts.tolist() if isinstance(prompts, Tensor) else list(prompts)
    return [listed] if listed and all(isinstance(token, int) for token in listed) else listed


def _alike(model: Any, draft: Any) -> None:
    """A draft must read and write the same tokens."""
    ours, theirs = model.design, draft.design
    kind = lambda design: (design.vocab, design.source_vocab, design.encoder is None)
    if kind(ours) != kind(theirs):
        raise ValueError(f"the draft knows {theirs.vocab} tokens and the model {ours.vocab}, or one of them reads a source and "
                         "the other does not: take a smaller model of the same kind with the same tokenizer")


def prefixes_of(tokenizer: Any, options: Options, count: int) -> list[list[int]] | None:
    """The tokens that each of so many texts has to begin with."""
    if options.prefix is None:
        return None
    given = [options.prefix] * count if isinstance(options.prefix, str) else list(options.prefix)
    if len(given) != count:
        raise ValueError(f"{len(given)} prefixes were given for {count} prompts: give one, or one for each")
    return [list(tokenizer.encode(text, add_special_tokens=False).ids) for text in given]


def tell_full(model: Any, rows: list[list[int]], options: Options, prefixes: list[list[int]] | None) -> None:
    """Warn once where a prompt leaves no room below max_length: its text would be empty without a word."""
    pair = model.design.encoder is not None
    lengths = [(1 if pair else len(row)) + (len(prefixes[n]) if prefixes else 0) for n, row in enumerate(rows)]
    if note := options.full(max(lengths, default=0)):
        warnings.warn(note, stacklevel=3)


def answer_of(tokenizer: Any, row: list[int], one: Written, options: Options, prefix: int = 0) -> Answer:
    """`prefix`: how many of the tokens were there before anything was written."""
    decoded = lambda tokens: "" if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True)
    new = one.tokens[prefix:]
    ended = bool(new) and (new[-1] in options.end or any(string in decoded(new) for string in options.strings))
    return Answer(decoded(one.tokens), one.tokens, one.score, ended, row)
