"""generate, completions and stream: prompts in, generated text out."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from keepleft.decoding.batch import DecodeBatch, Prompt, encode_prefixes, encode_prompts, warn_no_room
from keepleft.decoding.detokenizer import IncrementalDetokenizer
from keepleft.decoding.dispatch import check_draft_model, decode_steps, make_strategy
from keepleft.decoding.generation_config import GenerationConfig, from_model_directory
from keepleft.decoding.hypotheses import FinishedSequence
from keepleft.models.transformer import CausalModel, Model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_BATCH_SIZE = 32  # prompts that are decoded together


@dataclass(frozen=True)
class Completion:
    """One generated text."""

    text: str
    tokens: list[int]  # without the prompt, with the end-of-sequence token if there is one
    score: float  # log-probability; with beams, the score that they are ranked by
    ended: bool  # by an end-of-sequence token or a stop string; otherwise cut at the limit
    prompt: list[int] = field(repr=False, default_factory=list)


def generate(
    model: Model,
    tokenizer: Tokenizer | None,
    prompts: Prompt | Sequence[Prompt],
    *,
    source_tokenizer: Tokenizer | None = None,
    draft_model: Model | None = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
    options: GenerationConfig | None = None,
    **overrides: Any,
) -> list[str]:
    """The text that a model generates for each prompt, or several in a row with num_return_sequences.

    A prompt is a string, or its tokens; an encoder-decoder takes it as the source. Options are named as in
    Hugging Face's GenerationConfig (see kl.GenerationConfig); those of the model directory are the defaults.
    `draft_model` turns on speculative decoding.
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
    model: Model,
    tokenizer: Tokenizer | None,
    prompts: Prompt | Sequence[Prompt],
    *,
    source_tokenizer: Tokenizer | None = None,
    draft_model: Model | None = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
    options: GenerationConfig | None = None,
    on_progress: Callable[[int], None] = lambda done: None,
    **overrides: Any,
) -> list[list[Completion]]:
    """What `generate` returns, with tokens and scores: for each prompt its completions, best first.

    `on_progress` is called with the number of prompts done.
    """
    model = _require_causal(model)
    options = resolve_options(model, options, overrides)
    for note in options.check():
        warnings.warn(note, stacklevel=2)
    token_rows = encode_prompts(
        model, tokenizer if source_tokenizer is None else source_tokenizer, _as_prompt_list(prompts), options
    )
    if isinstance(options.seed, list) and len(options.seed) != len(token_rows):
        raise ValueError(
            f"{len(options.seed)} seeds were given for {len(token_rows)} prompts: give one number, or one "
            "for each"
        )
    if draft_model is not None:
        draft_model = _require_causal(draft_model)
        check_draft_model(model, draft_model)
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


def stream(
    model: Model,
    tokenizer: Tokenizer | None,
    prompt: Prompt,
    *,
    source_tokenizer: Tokenizer | None = None,
    draft_model: Model | None = None,
    options: GenerationConfig | None = None,
    on_token: Callable[[int], object] = lambda token: None,
    **overrides: Any,
) -> Iterator[str]:
    """Yield one completion piece by piece as its tokens are generated, each piece whole characters.

    `on_token` is called with each token.
    """
    if tokenizer is None:
        raise ValueError("a stream is text, and there is no tokenizer: give one, or call completions()")
    model = _require_causal(model)
    draft_model = None if draft_model is None else _require_causal(draft_model)
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
    detokenizer = IncrementalDetokenizer(tokenizer)
    was_training = model.training
    model.eval()
    try:
        if prefixes:
            yield from filter(None, [detokenizer.begin(prefixes[0])])
        strategy = make_strategy(tokenizer, options, batch)
        for hypotheses in decode_steps(model, batch, strategy, options, draft_model, in_place=True):
            token = int(hypotheses.tokens[0, -1])
            on_token(token)
            if piece := detokenizer.add(token):
                yield piece
            if bool(hypotheses.done):
                break
    finally:
        model.train(was_training)
    if piece := detokenizer.end():
        yield piece


def resolve_options(
    model: CausalModel, options: GenerationConfig | None, overrides: dict[str, Any]
) -> GenerationConfig:
    """The options of the model directory, overridden by `options`, overridden by `overrides`."""
    overrides = {name: value for name, value in overrides.items() if value is not None}
    overrides = overrides if options is None else {**asdict(options), **overrides}
    base = from_model_directory(getattr(model, "notes", {}))
    if overrides.get("max_length") is not None and overrides.get("max_new_tokens") is None:
        # a max_length given here goes before the directory's max_new_tokens
        base = replace(base, max_new_tokens=None)
    return base.but(**overrides)


def generate_batch(
    model: CausalModel,
    tokenizer: Tokenizer | None,
    token_rows: list[list[int]],
    options: GenerationConfig,
    prefixes: list[list[int]] | None = None,
    draft_model: CausalModel | None = None,
) -> list[list[FinishedSequence]]:
    """Decode prompts (or sources) that are tokens already, all in one batch."""
    batch = DecodeBatch.build(model, token_rows, options, prefixes)
    speculative = draft_model is not None or options.prompt_lookup_num_tokens is not None
    # speculative decoding goes at each sequence's own pace; some may have no room for a token
    if len(token_rows) > 1 and (speculative or min(batch.max_new_tokens) < 1):
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


def to_completion(
    tokenizer: Tokenizer | None,
    prompt: list[int],
    sequence: FinishedSequence,
    options: GenerationConfig,
    prefix_length: int = 0,
) -> Completion:
    """A finished sequence as a completion; its first `prefix_length` tokens were forced, not generated."""
    detokenize = lambda tokens: (
        "" if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True)
    )
    new_tokens = sequence.tokens[prefix_length:]
    ended = bool(new_tokens) and (
        new_tokens[-1] in options.eos_ids
        or any(string in detokenize(new_tokens) for string in options.stop_list)
    )
    return Completion(detokenize(sequence.tokens), sequence.tokens, sequence.score, ended, prompt)


def _as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = prompts.tolist() if isinstance(prompts, Tensor) else list(prompts)
    return [items] if items and all(isinstance(token, int) for token in items) else items


def _require_causal(model: Model) -> CausalModel:
    if not isinstance(model, CausalModel):
        raise ValueError("the model is an encoder and generates no text: classify, fill or embed with it")
    return model
