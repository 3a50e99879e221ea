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
from keepleft.decoding.contrastive import contrastive_search
from keepleft.decoding.generation_config import (
    GenerationConfig,
    as_list,
    decoder_start_token,
    from_model_directory,
)
from keepleft.decoding.graphed_loop import can_capture, decode_graphed
from keepleft.decoding.hypotheses import FinishedSequence, Hypotheses
from keepleft.decoding.loop import decode, right_align
from keepleft.decoding.processor_table import PromptContext, make_processors
from keepleft.decoding.rng import derive_seeds
from keepleft.decoding.sampling import SamplingStrategy, StoppingCriterion
from keepleft.decoding.speculative import make_drafter, speculative_decode
from keepleft.decoding.stopping import any_of, max_time, stop_strings
from keepleft.inference.decode_layers import unsupported_reason
from keepleft.inference.static_runner import static_runner

DEFAULT_BATCH_SIZE = 32  # prompts that are written together
MAX_STATIC_TOKENS = 1 << 22  # tokens that a cache is made for beforehand
DEFAULT_NEW_TOKENS = 128  # tokens that a decoder adds where nothing says how many
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """One written text."""

    text: str
    tokens: list[int]  # without the prompt, with the end if there is one
    score: float  # log-probability; with beams, what they are ranked by
    ended: bool  # by an end or a stop string; otherwise at the limit
    prompt: list[int] = field(repr=False, default_factory=list)


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Prompt | Sequence[Prompt],
    *,
    source_tokenizer: Any = None,
    draft_model: Any = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
    options: GenerationConfig | None = None,
    **overrides: Any,
) -> list[str]:
    """The text that a model writes for each prompt, or several in a row for each with num_return_sequences.

    A prompt is a text, or its tokens; an encoder-decoder reads it as the source. Options are named as in
    Hugging Face's GenerationConfig (kl.GenerationConfig lists them); those of the model directory hold where
    nothing else is said.
    """
    results = completions(
        model,
        tokenizer,
        prompts,
        source_tokenizer=source_tokenizer,
        draft_model=draft_model,
        batch_size=batch_size,
        options=options,
        **overrides,
    )
    return [completion.text for prompt_results in results for completion in prompt_results]


def completions(
    model: Any,
    tokenizer: Any,
    prompts: Prompt | Sequence[Prompt],
    *,
    source_tokenizer: Any = None,
    draft_model: Any = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
    options: GenerationConfig | None = None,
    on_progress: Callable[[int], None] = lambda done: None,
    **overrides: Any,
) -> list[list[Completion]]:
    """The same with tokens and scores: for each prompt its texts, the best first.

    `watch` hears how many prompts are done.
    """
    options = resolve_options(model, options, overrides)
    for note in options.check():
        warnings.warn(note, stacklevel=2)
    token_rows = encode_prompts(
        model, tokenizer if source_tokenizer is None else source_tokenizer, _as_prompt_list(prompts), options
    )
    if isinstance(options.seed, list) and len(options.seed) != len(token_rows):
        raise ValueError(
            f"{len(options.seed)} seeds were given for {len(token_rows)} prompts: give one number, or one for each"
        )
    if draft_model is not None:
        _check_draft_model(model, draft_model)
    prefixes = encode_prefixes(tokenizer, options, len(token_rows))
    warn_no_room(model, token_rows, options, prefixes)
    order = sorted(range(len(token_rows)), key=lambda n: len(token_rows[n]))
    batch_size = 1 if options.deterministic else batch_size
    out: list[list[Completion]] = [[] for _ in token_rows]
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            batch_options = (
                options
                if not isinstance(options.seed, list)
                else options.but(seed=[options.seed[n] for n in indices])
            )
            results = generate_batch(
                model,
                tokenizer,
                [token_rows[n] for n in indices],
                batch_options,
                prefixes and [prefixes[n] for n in indices],
                draft_model,
            )
            for n, sequences in zip(indices, results, strict=True):
                out[n] = [
                    to_completion(
                        tokenizer, token_rows[n], sequence, batch_options, len(prefixes[n]) if prefixes else 0
                    )
                    for sequence in sequences
                ]
            on_progress(min(len(order), start + batch_size))
    finally:
        model.train(was_training)
    return out


def resolve_options(
    model: Any, options: GenerationConfig | None, overrides: dict[str, Any]
) -> GenerationConfig:
    """The options of the model directory, those given, and those said by name."""
    overrides = {name: value for name, value in overrides.items() if value is not None}
    overrides = overrides if options is None else {**asdict(options), **overrides}
    base = from_model_directory(getattr(model, "notes", {}))
    if overrides.get("max_length") is not None and overrides.get("max_new_tokens") is None:
        base = replace(base, max_new_tokens=None)  # what is said here goes before what the directory says
    return base.but(**overrides)


def generate_batch(
    model: Any,
    tokenizer: Any,
    token_rows: list[list[int]],
    options: GenerationConfig,
    prefixes: list[list[int]] | None = None,
    draft_model: Any = None,
) -> list[list[FinishedSequence]]:
    """What is written for prompts (or sources) that are tokens already, all in one batch."""
    batch = DecodeBatch.build(model, token_rows, options, prefixes)
    speculative = draft_model is not None or options.prompt_lookup_num_tokens is not None
    if len(token_rows) > 1 and (
        speculative or min(batch.max_new_tokens) < 1
    ):  # each at its own pace, or some without room for a token
        seeds = options.seed if isinstance(options.seed, list) else [options.seed] * len(token_rows)
        return [
            generate_batch(
                model, tokenizer, [row], options.but(seed=seed), prefixes and [prefixes[n]], draft_model
            )[0]
            for n, (row, seed) in enumerate(zip(token_rows, seeds, strict=True))
        ]
    if batch.max_new_tokens[0] < 1:
        return [[FinishedSequence(prefixes[0] if prefixes else [], 0.0)] * options.num_sequences]
    strategy = make_strategy(tokenizer, options, batch)
    steps = decode_steps(model, batch, strategy, options, draft_model, in_place=True)
    results = strategy.results(deque(steps, maxlen=1)[0])  # type: ignore[arg-type]
    return (
        results
        if prefixes is None
        else [
            [FinishedSequence([*prefix, *sequence.tokens], sequence.score) for sequence in sequences]
            for prefix, sequences in zip(prefixes, results, strict=True)
        ]
    )


def decode_steps(
    model: Any,
    batch: DecodeBatch,
    strategy: SamplingStrategy | Beam,
    options: GenerationConfig,
    draft_model: Any = None,
    *,
    in_place: bool = False,
) -> Iterator[Hypotheses]:
    """The texts of a batch after each new token, by whichever loop the options ask for.

    `live`: what is yielded may be written over by the next step, and more may come after all texts have
    ended.
    """
    start_kwargs = batch.start_kwargs(model, options)
    fused = _uses_default_cache(options) and unsupported_reason(model) is None
    if draft_model is not None or options.prompt_lookup_num_tokens is not None:
        if not isinstance(strategy, SamplingStrategy) or options.num_sequences > 1 or options.penalty_alpha:
            raise ValueError(
                "guessing ahead is for greedy and drawn texts, one for each prompt: leave num_beams, "
                "num_return_sequences and penalty_alpha out"
            )
        draft_kwargs = {} if draft_model is None else batch.start_kwargs(draft_model, options)
        # a source in other tokens suggests nothing
        lookup_source = batch.source if model.design.source_vocab is None else None
        yield from speculative_decode(
            model,
            batch.prompt,
            strategy,
            make_drafter(draft_model, options, strategy, lookup_source, **draft_kwargs),
            max_new_tokens=batch.max_new_tokens[0],
            **start_kwargs,
        )
    elif options.penalty_alpha:
        assert isinstance(strategy, SamplingStrategy)
        yield from contrastive_search(
            model,
            batch.prompt,
            strategy,
            alpha=options.penalty_alpha,
            k=options.top_k or 4,
            max_new_tokens=batch.max_new_tokens,
            segments=batch.segments,
            **start_kwargs,
        )
    elif (
        fused
        and in_place
        and (batch.prompt.is_cuda or model.compiled)
        and can_capture(strategy, batch.max_length)
    ):
        start_kwargs.pop("cache")
        prompt, prompt_mask = right_align(batch.prompt, batch.segments)
        yield from decode_graphed(
            model,
            prompt,
            strategy,
            max_new_tokens=batch.max_new_tokens,
            prompt_mask=prompt_mask,
            **start_kwargs,
        )
    elif fused and not batch.prompt.is_cuda:
        start_kwargs.pop("cache")
        runner: Any = static_runner(model)
        yield from decode(
            runner,
            batch.prompt,
            strategy,
            max_new_tokens=batch.max_new_tokens,
            segments=batch.segments,
            **start_kwargs,
        )
    else:
        yield from decode(
            model,
            batch.prompt,
            strategy,
            max_new_tokens=batch.max_new_tokens,
            segments=batch.segments,
            prefill_chunk_size=options.prefill_chunk_size or 0,
            **start_kwargs,
        )


def _uses_default_cache(options: GenerationConfig) -> bool:
    """Nothing is asked of the cache, or of how prompts are read."""
    return (
        options.cache_implementation in (None, "dynamic")
        and not options.deterministic
        and not options.prefill_chunk_size
    )


@dataclass(frozen=True)
class DecodeBatch:
    """A batch that is ready to be written."""

    prompt: Tensor  # (B, T)
    segments: Tensor | None  # (B, T) where prompts are of unequal length
    max_new_tokens: list[int]  # tokens to add to each
    source: Tensor | None = None
    source_segments: Tensor | None = None

    @classmethod
    def build(
        cls,
        model: Any,
        token_rows: list[list[int]],
        options: GenerationConfig,
        prefixes: list[list[int]] | None = None,
    ) -> DecodeBatch:
        device = next(model.parameters()).device
        max_positions = model.design.max_positions
        if model.design.encoder is None:
            prompts = [[*row, *(prefixes[n] if prefixes else [])] for n, row in enumerate(token_rows)]
            return cls(
                *pad_batch(prompts, device),
                [
                    options.resolve_max_new_tokens(len(row), DEFAULT_NEW_TOKENS, max_positions)
                    for row in prompts
                ],
            )
        source, source_segments = pad_batch(token_rows, device, left=False)
        start_token = decoder_start_token(options)
        decoder_prompts = [[start_token, *(prefixes[n] if prefixes else [])] for n in range(len(token_rows))]
        max_new_tokens = [
            options.resolve_max_new_tokens(len(decoder_prompt), 2 * len(row) + 10, max_positions)
            for decoder_prompt, row in zip(decoder_prompts, token_rows, strict=True)
        ]
        return cls(*pad_batch(decoder_prompts, device), max_new_tokens, source, source_segments)

    def start_kwargs(self, model: Any, options: GenerationConfig) -> dict[str, Any]:
        """What model.start() wants besides the prompt."""
        cache_kind = options.cache_implementation or "dynamic"
        out: dict[str, Any] = {"cache": cache_kind}
        if cache_kind == "static":
            capacity = out["capacity"] = self.max_length
            if capacity > MAX_STATIC_TOKENS:
                raise ValueError(
                    f"a static cache for {capacity:,} tokens is too large: give fewer max_new_tokens, or another "
                    "cache_implementation"
                )
        if self.source is not None:
            with torch.no_grad():
                out["memory"] = model.encode_memory(self.source, segments=self.source_segments)
        return out

    @property
    def max_length(self) -> int:
        """Tokens of the longest text, prompt included."""
        return self.prompt.shape[1] + max(self.max_new_tokens)

    def prompt_context(self) -> PromptContext:
        source_mask = None if self.source_segments is None else self.source_segments != 0
        return PromptContext(self.prompt.shape[1], self.source, source_mask)


def make_strategy(tokenizer: Any, options: GenerationConfig, batch: DecodeBatch) -> SamplingStrategy | Beam:
    """The strategy that the options ask for."""
    device, num_prompts = batch.prompt.device, len(batch.prompt)
    processors = make_processors(options, batch.prompt_context())
    if (llg_grammar := grammar.grammar_from_options(options)) is not None:
        processors.append(grammar.grammar_processor(llg_grammar, tokenizer, options.eos_ids))
    stop = make_stopping_criterion(tokenizer, options)
    seeds = None
    if options.do_sample:
        prompt_seeds = (
            as_list(options.seed) if options.seed is not None else [randbits(62) for _ in range(num_prompts)]
        )
        num_sequences = 1 if options.beam_count > 1 else options.num_sequences
        prompt_seeds = prompt_seeds * num_prompts if len(prompt_seeds) == 1 else prompt_seeds
        seeds = torch.cat([derive_seeds(seed, torch.arange(num_sequences)) for seed in prompt_seeds]).to(
            device
        )
    if options.beam_count > 1:
        length_penalty = 1.0 if options.length_penalty is None else options.length_penalty
        return Beam(
            options.beam_count,
            length_penalty,
            options.early_stopping or False,
            options.eos_ids,
            tuple(processors),
            stop,
            options.num_beam_groups or 1,
            options.diversity_penalty or 0.0,
            seeds,
            options.num_sequences,
        )
    return SamplingStrategy(tuple(processors), options.eos_ids, stop, seeds, options.num_sequences)


def make_stopping_criterion(tokenizer: Any, options: GenerationConfig) -> StoppingCriterion | None:
    criteria: list[StoppingCriterion] = []
    if options.stop_strings:
        if tokenizer is None:
            raise ValueError("stop_strings are looked for in text, and there is no tokenizer: give one")
        criteria.append(stop_strings(tokenizer, options.stop_list))
    if options.max_time is not None:
        criteria.append(max_time(time.monotonic() + options.max_time))
    return any_of(criteria)


def stream(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    *,
    source_tokenizer: Any = None,
    draft_model: Any = None,
    options: GenerationConfig | None = None,
    **overrides: Any,
) -> Iterator[str]:
    """Pieces of one text as they are written, each whole characters."""
    from tokenizers.decoders import DecodeStream

    options = resolve_options(model, options, overrides)
    for note in options.check():
        warnings.warn(note, stacklevel=2)
    if options.beam_count > 1 or options.num_sequences > 1:
        raise ValueError(
            "only one text can be streamed as it is written: leave num_beams and num_return_sequences out"
        )
    token_rows = encode_prompts(model, source_tokenizer or tokenizer, [prompt], options)
    prefixes = encode_prefixes(tokenizer, options, 1)
    warn_no_room(model, token_rows, options, prefixes)
    batch = DecodeBatch.build(model, token_rows, options, prefixes)
    if batch.max_new_tokens[0] < 1:
        return
    tokens = list(prefixes[0]) if prefixes else []
    decode_stream = DecodeStream(skip_special_tokens=True)
    streamed_text = ""
    was_training = model.training
    model.eval()
    try:
        for token in tokens:
            streamed_text += (piece := decode_stream.step(tokenizer, token) or "")
            if piece:
                yield piece
        for hypotheses in decode_steps(
            model, batch, make_strategy(tokenizer, options, batch), options, draft_model, in_place=True
        ):
            tokens.append(int(hypotheses.tokens[0, -1]))
            streamed_text += (piece := decode_stream.step(tokenizer, tokens[-1]) or "")
            if piece:
                yield piece
            if bool(hypotheses.done):
                break
    finally:
        model.train(was_training)
    full_text = tokenizer.decode(tokens, skip_special_tokens=True)
    if full_text.startswith(streamed_text) and len(full_text) > len(streamed_text):
        yield full_text[len(streamed_text) :]  # what waited for more bytes


def encode_prompts(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], options: GenerationConfig
) -> list[list[int]]:
    """Prompts as tokens. An empty one is the beginning of a text, where the model has a token for that."""
    out = []
    for n, prompt in enumerate(prompts):
        if isinstance(prompt, str) and tokenizer is None:
            raise ValueError("the model has no tokenizer: give prompts as lists of tokens")
        row = (
            list(tokenizer.encode(prompt).ids)
            if isinstance(prompt, str)
            else [int(token) for token in prompt]
        )
        if not row:
            if options.bos_token_id is None or model.design.encoder is not None:
                raise ValueError(
                    f"prompt {n} is empty, and the model has no token that a text begins with: give it some text"
                )
            row = [options.bos_token_id]
        vocab = model.design.source_vocab or model.design.vocab
        if out_of_range := [token for token in row if not 0 <= token < vocab]:
            raise ValueError(
                f"prompt {n} holds token {out_of_range[0]}, and the model knows {vocab}: is it the model's own tokenizer?"
            )
        max_positions = model.design.max_positions
        if max_positions is not None and len(row) > max_positions - (model.design.encoder is None):
            raise ValueError(
                f"prompt {n} has {len(row)} tokens, and the model reaches {max_positions}: shorten it"
            )
        out.append(row)
    return out


def pad_batch(
    token_rows: Sequence[Sequence[int]], device: torch.device, *, left: bool = True
) -> tuple[Tensor, Tensor | None]:
    """(B, T) tokens and segments, or None where all rows are as long."""
    width = max(map(len, token_rows), default=0)
    if all(len(row) == width for row in token_rows):
        return torch.tensor([list(row) for row in token_rows], dtype=torch.long, device=device), None
    padding = lambda row, value: [value] * (width - len(row))
    tokens = [padding(row, 0) + list(row) if left else list(row) + padding(row, 0) for row in token_rows]
    segments = [
        padding(row, 0) + [1] * len(row) if left else [1] * len(row) + padding(row, 0) for row in token_rows
    ]
    return torch.tensor(tokens, device=device), torch.tensor(segments, device=device)


def _as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = prompts.tolist() if isinstance(prompts, Tensor) else list(prompts)
    return [items] if items and all(isinstance(token, int) for token in items) else items


def _check_draft_model(model: Any, draft_model: Any) -> None:
    """A draft must read and write the same tokens."""
    model_design, draft_design = model.design, draft_model.design
    vocabulary_key = lambda design: (design.vocab, design.source_vocab, design.encoder is None)
    if vocabulary_key(model_design) != vocabulary_key(draft_design):
        raise ValueError(
            f"the draft knows {draft_design.vocab} tokens and the model {model_design.vocab}, or one of them reads a source and "
            "the other does not: take a smaller model of the same kind with the same tokenizer"
        )


def encode_prefixes(tokenizer: Any, options: GenerationConfig, num_prompts: int) -> list[list[int]] | None:
    """The tokens that each of so many texts has to begin with."""
    if options.prefix is None:
        return None
    prefixes = [options.prefix] * num_prompts if isinstance(options.prefix, str) else list(options.prefix)
    if len(prefixes) != num_prompts:
        raise ValueError(
            f"{len(prefixes)} prefixes were given for {num_prompts} prompts: give one, or one for each"
        )
    return [list(tokenizer.encode(text, add_special_tokens=False).ids) for text in prefixes]


def warn_no_room(
    model: Any, token_rows: list[list[int]], options: GenerationConfig, prefixes: list[list[int]] | None
) -> None:
    """Warn once where a prompt leaves no room below max_length: its text would be empty without a word."""
    is_encoder_decoder = model.design.encoder is not None
    lengths = [
        (1 if is_encoder_decoder else len(row)) + (len(prefixes[n]) if prefixes else 0)
        for n, row in enumerate(token_rows)
    ]
    if note := options.no_room_message(max(lengths, default=0)):
        warnings.warn(note, stacklevel=3)


def to_completion(
    tokenizer: Any,
    prompt: list[int],
    sequence: FinishedSequence,
    options: GenerationConfig,
    prefix_length: int = 0,
) -> Completion:
    """`prefix`: how many of the tokens were there before anything was written."""
    detokenize = lambda tokens: (
        "" if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True)
    )
    new_tokens = sequence.tokens[prefix_length:]
    ended = bool(new_tokens) and (
        new_tokens[-1] in options.eos_ids
        or any(string in detokenize(new_tokens) for string in options.stop_list)
    )
    return Completion(detokenize(sequence.tokens), sequence.tokens, sequence.score, ended, prompt)
