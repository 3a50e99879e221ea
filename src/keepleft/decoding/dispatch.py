"""Which strategy and which decode loop serve the options: eager, static KV cache, CUDA graph, speculative or
contrastive.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from secrets import randbits
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from keepleft.decoding.batch import DecodeBatch
from keepleft.decoding.beam import Beam
from keepleft.decoding.contrastive import contrastive_search
from keepleft.decoding.generation_config import GenerationConfig, as_list
from keepleft.decoding.grammar import CompiledGrammar, GrammarCompiler
from keepleft.decoding.graphed_loop import can_capture, decode_graphed
from keepleft.decoding.hypotheses import Hypotheses
from keepleft.decoding.loop import decode, right_align
from keepleft.decoding.processor_table import make_processors
from keepleft.decoding.sampling import SamplingStrategy, StoppingCriterion, derive_seeds
from keepleft.decoding.speculative import make_drafter, speculative_decode
from keepleft.decoding.stopping import any_of, max_time, stop_strings
from keepleft.inference.decode_layers import unsupported_reason
from keepleft.inference.static_runner import static_runner
from keepleft.models.ensemble import Ensemble, EnsembleState
from keepleft.models.transformer import CausalModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def make_strategy(
    tokenizer: Tokenizer | None,
    options: GenerationConfig,
    batch: DecodeBatch,
    compiled_grammar: CompiledGrammar | None = None,
) -> SamplingStrategy | Beam:
    """Greedy, sampling or beam search, with the logits processors and stopping criteria of the options.

    `compiled_grammar`: that of the options, where it was compiled before.
    """
    device, num_prompts = batch.prompt.device, len(batch.prompt)
    processors = make_processors(options, batch.prompt_context())
    if options.has_grammar:
        if tokenizer is None:
            raise ValueError("a grammar is matched against text, and there is no tokenizer: give one")
        if compiled_grammar is None:
            compiled_grammar = GrammarCompiler(tokenizer).compile(options)
        processors.append(compiled_grammar.processor())
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


def make_stopping_criterion(
    tokenizer: Tokenizer | None, options: GenerationConfig
) -> StoppingCriterion | None:
    criteria: list[StoppingCriterion] = []
    if options.stop_strings:
        if tokenizer is None:
            raise ValueError("stop_strings are looked for in text, and there is no tokenizer: give one")
        criteria.append(stop_strings(tokenizer, options.stop_list))
    if options.max_time is not None:
        criteria.append(max_time(time.monotonic() + options.max_time))
    return any_of(criteria) if criteria else None


def decode_steps(
    model: CausalModel,
    batch: DecodeBatch,
    strategy: SamplingStrategy | Beam,
    options: GenerationConfig,
    draft_model: CausalModel | None = None,
    *,
    in_place: bool = False,
) -> Iterator[Hypotheses]:
    """Yield the hypotheses of a batch after each new token, by the loop that the options ask for.

    `in_place`: what is yielded may be overwritten by the next step, and more may come after all have
    finished.
    """
    start_kwargs = batch.start_kwargs(model, options)
    fused = _uses_default_cache(options) and all(
        unsupported_reason(member) is None for member in members(model)
    )
    if draft_model is not None or options.prompt_lookup_num_tokens is not None:
        if not isinstance(strategy, SamplingStrategy) or options.num_sequences > 1 or options.penalty_alpha:
            raise ValueError(
                "speculative decoding is for greedy and sampled texts, one for each prompt: leave num_beams, "
                "num_return_sequences and penalty_alpha out"
            )
        draft_kwargs = {} if draft_model is None else batch.start_kwargs(draft_model, options)
        # a source with a vocabulary of its own has nothing to look up
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
        and not isinstance(model, Ensemble)
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
        runner: Any = EnsembleRunner(model) if isinstance(model, Ensemble) else static_runner(model)
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


class EnsembleRunner:
    """Decodes with the fused step of each member."""

    def __init__(self, ensemble: Ensemble) -> None:
        self.ensemble = ensemble
        self.runners = [static_runner(model) for model in ensemble.models]

    def start(self, prompt: Tensor, **start_kwargs: Any) -> tuple[Tensor, EnsembleState]:
        return self.ensemble.start_with(self.runners, prompt, **start_kwargs)

    def step(self, tokens: Tensor, state: EnsembleState) -> Tensor:
        logits = [runner.step(tokens, part) for runner, part in zip(self.runners, state.states, strict=True)]
        return self.ensemble.average_logits(logits)


def members(model: CausalModel) -> Sequence[CausalModel]:
    """The models of an ensemble; any other model alone."""
    return model.models if isinstance(model, Ensemble) else [model]


def _uses_default_cache(options: GenerationConfig) -> bool:
    """No special KV cache and no chunked prefill is asked for."""
    return (
        options.cache_implementation in (None, "dynamic")
        and not options.deterministic
        and not options.prefill_chunk_size
    )


def check_draft_model(model: CausalModel, draft_model: CausalModel) -> None:
    """Raise ValueError unless both models read and write the same tokens."""
    model_design, draft_design = model.design, draft_model.design
    vocabulary_key = lambda design: (design.vocab, design.source_vocab, design.is_encoder_decoder)
    if vocabulary_key(model_design) != vocabulary_key(draft_design):
        raise ValueError(
            f"the draft knows {draft_design.vocab} tokens and the model {model_design.vocab}, or one of them "
            "reads a source and "
            "the other does not: take a smaller model of the same kind with the same tokenizer"
        )
