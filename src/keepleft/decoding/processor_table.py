"""Options to logits processors: one row each, in the order of Hugging Face's `generate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from keepleft.decoding import filters, logits_processors
from keepleft.decoding.generation_config import GenerationConfig, as_list
from keepleft.decoding.hypotheses import LogitsProcessor


@dataclass(frozen=True)
class PromptContext:
    """What processors may need to know about the prompts."""

    prompt_width: int  # columns of the prompt
    source: Tensor | None = None  # (B, S) of an encoder-decoder
    source_mask: Tensor | None = None


class ProcessorRow(NamedTuple):
    name: str
    # from its value, all options and the prompt context
    make: Callable[[Any, GenerationConfig, PromptContext], LogitsProcessor | None]
    sampling_only: bool = False  # applied only when sampling


def _min_tokens_to_keep(options: GenerationConfig) -> int:
    """Sampling beams need one more token than there are end-of-sequence tokens."""
    return len(options.eos_ids) + 1 if options.beam_count > 1 else 1


def _bad_words(value: list[list[int]], options: GenerationConfig, prompt: PromptContext) -> LogitsProcessor:
    if not value or not all(isinstance(sequence, list) and sequence for sequence in value):
        raise ValueError(
            f"bad_words_ids is {value!r}: it must be a list of lists of tokens, none of them empty"
        )
    return logits_processors.sequence_bias(
        {
            tuple(sequence): float("-inf")
            for sequence in value
            if not (len(sequence) == 1 and sequence[0] in options.eos_ids)
        }
    )


def _sequence_bias(value: Any, options: GenerationConfig, prompt: PromptContext) -> LogitsProcessor:
    pairs = value.items() if isinstance(value, dict) else [(sequence, bias) for sequence, bias in value]
    return logits_processors.sequence_bias({tuple(sequence): float(bias) for sequence, bias in pairs})


def _min_new_tokens(min_tokens: int, options: GenerationConfig) -> LogitsProcessor | None:
    return (
        logits_processors.suppress_tokens(options.eos_ids, until=min_tokens)
        if options.eos_ids and min_tokens > 0
        else None
    )


def _begin_suppress_tokens(
    value: list[int], options: GenerationConfig, prompt: PromptContext
) -> LogitsProcessor | None:
    if not value:
        return None
    return logits_processors.suppress_tokens(
        value, only_at=1 if prompt.prompt_width == 1 and options.forced_bos_token_id is not None else 0
    )


PROCESSORS = (
    ProcessorRow("sequence_bias", _sequence_bias),
    ProcessorRow(
        "logit_bias",
        lambda v, o, s: logits_processors.sequence_bias(
            {(int(token),): float(added) for token, added in v.items()}
        ),
    ),
    ProcessorRow(
        "encoder_repetition_penalty",
        lambda v, o, s: (
            None
            if s.source is None or v == 1
            else logits_processors.encoder_repetition_penalty(v, s.source, s.source_mask)
        ),
    ),
    ProcessorRow(
        "repetition_penalty", lambda v, o, s: None if v == 1 else logits_processors.repetition_penalty(v)
    ),
    ProcessorRow("presence_penalty", lambda v, o, s: logits_processors.presence_penalty(v) if v else None),
    ProcessorRow("frequency_penalty", lambda v, o, s: logits_processors.frequency_penalty(v) if v else None),
    ProcessorRow("no_repeat_ngram_size", lambda v, o, s: logits_processors.no_repeat_ngram(v) if v else None),
    ProcessorRow(
        "encoder_no_repeat_ngram_size",
        lambda v, o, s: (
            logits_processors.encoder_no_repeat_ngram(s.source, v, s.source_mask)
            if v and s.source is not None
            else None
        ),
    ),
    ProcessorRow("bad_words_ids", _bad_words),
    ProcessorRow(
        "min_length",
        lambda v, o, s: (
            logits_processors.min_length(o.eos_ids, v) if o.eos_ids and o.min_new_tokens is None else None
        ),
    ),
    ProcessorRow("min_new_tokens", lambda v, o, s: _min_new_tokens(v, o)),
    ProcessorRow(
        "forced_bos_token_id",
        lambda v, o, s: logits_processors.force_tokens([v], 0) if s.prompt_width == 1 else None,
    ),
    ProcessorRow(
        "forced_eos_token_id",
        lambda v, o, s: logits_processors.force_last(as_list(v)) if as_list(v) else None,
    ),
    ProcessorRow("remove_invalid_values", lambda v, o, s: logits_processors.remove_invalid if v else None),
    ProcessorRow(
        "exponential_decay_length_penalty",
        lambda v, o, s: (
            logits_processors.exponential_decay_length_penalty(int(v[0]), float(v[1]), o.eos_ids)
            if o.eos_ids
            else None
        ),
    ),
    ProcessorRow("suppress_tokens", lambda v, o, s: logits_processors.suppress_tokens(v) if v else None),
    ProcessorRow("begin_suppress_tokens", _begin_suppress_tokens),
    ProcessorRow("shortlist", lambda v, o, s: logits_processors.allow_only(v)),
    ProcessorRow("temperature", lambda v, o, s: None if v == 1 else filters.temperature(v), True),
    ProcessorRow("top_h", lambda v, o, s: filters.top_h(v), True),
    ProcessorRow("top_k", lambda v, o, s: filters.top_k(v, _min_tokens_to_keep(o)) if v else None, True),
    ProcessorRow("top_p", lambda v, o, s: filters.top_p(v, _min_tokens_to_keep(o)) if v < 1 else None, True),
    ProcessorRow("min_p", lambda v, o, s: filters.min_p(v, _min_tokens_to_keep(o)), True),
    ProcessorRow(
        "typical_p", lambda v, o, s: filters.typical_p(v, _min_tokens_to_keep(o)) if v < 1 else None, True
    ),
    ProcessorRow(
        "epsilon_cutoff",
        lambda v, o, s: filters.epsilon_cutoff(v, _min_tokens_to_keep(o)) if v else None,
        True,
    ),
    ProcessorRow(
        "eta_cutoff", lambda v, o, s: filters.eta_cutoff(v, _min_tokens_to_keep(o)) if v else None, True
    ),
    ProcessorRow("renormalize_logits", lambda v, o, s: logits_processors.renormalize if v else None),
)


MAX_CACHED_PROCESSORS = 64
# equal options get the same processor objects, so that graphs captured with them are found again
_processor_cache: dict[Any, tuple[LogitsProcessor, ...]] = {}


def make_processors(options: GenerationConfig, prompt: PromptContext) -> list[LogitsProcessor]:
    """The processors that the options ask for, in order."""
    requested = [
        (row, value)
        for row in PROCESSORS
        if (value := getattr(options, row.name)) is not None and (options.do_sample or not row.sampling_only)
    ]
    uses_source = prompt.source is not None and any(row.name.startswith("encoder_") for row, _ in requested)
    key = (
        tuple((row.name, repr(value)) for row, value in requested),
        options.eos_ids,
        options.beam_count,
        prompt.prompt_width == 1,
    )
    if not uses_source and key in _processor_cache:
        return list(_processor_cache[key])
    processors = []
    for row, value in requested:
        if (processor := row.make(value, options, prompt)) is not None:
            processor.capturable = True  # type: ignore[attr-defined]
            processor.logits_only = row.sampling_only  # type: ignore[attr-defined]  # needs no hypotheses
            processors.append(processor)
    if not uses_source:
        if len(_processor_cache) >= MAX_CACHED_PROCESSORS:
            del _processor_cache[next(iter(_processor_cache))]
        _processor_cache[key] = tuple(processors)
    return processors
