"""Export parity with CTranslate2: the scores of given tokens, and what greedy decoding generates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from keepleft.decoding.generate import generate_batch
from keepleft.decoding.generation_config import GenerationConfig
from keepleft.models.transformer import CausalModel, EncoderDecoder
from keepleft.runs.parity import TOLERANCE, Check, compare_outputs, max_length, sample_sequences
from keepleft.weights.to_ctranslate2 import decoder_start_token, special_tokens, vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TokenSequences = list[list[int]]


def compare(
    model: CausalModel,
    tokenizer: Tokenizer | None,
    folder: Path,
    quantization: str | None,
    user_tokens: list[int] | None,
) -> Iterator[Check]:
    """Compare with what CTranslate2 computes from the folder in float32.

    Every CPU can do that; int16 and int8 products depend on the CPU, and saturate without VNNI. What this CPU
    does by default is measured, too, and reported beside it.
    """
    import ctranslate2

    design = model.design
    precision = quantization or "float32"
    max_new_tokens = max_length(model) // 2 - 1
    vocab = vocabulary(tokenizer, design.vocab)
    to_strings = lambda rows, strings=vocab: [[strings[token] for token in row] for row in rows]
    eos_id = vocab.index(eos_token) if (eos_token := special_tokens(model, vocab)["eos_token"]) else None
    # an empty list must be passed: otherwise token 0 is taken for the end of a model that has no end token
    end_tokens = [] if eos_id is None else [eos_id]
    prompts = sample_sequences(model, user_tokens, source=True)
    start_tokens = [decoder_start_token(model)]
    runtime_class = ctranslate2.Translator if isinstance(model, EncoderDecoder) else ctranslate2.Generator
    peer: Any = runtime_class(str(folder), device="cpu", compute_type="float32")
    if isinstance(model, EncoderDecoder):
        source_vocab = vocab if design.source_vocab is None else vocabulary(None, design.source_vocab)
        sources = to_strings(prompts, source_vocab)
        targets = sample_sequences(model, None, count=len(prompts), seed=1)

        def peer_scores(runtime: Any) -> Tensor:
            results = runtime.score_batch(sources, to_strings(targets))
            rows = zip(results, targets, strict=True)
            return torch.tensor([score for row, target in rows for score in row.log_probs[: len(target)]])

        our_scores = []
        for prompt, target in zip(prompts, targets, strict=True):
            logprobs = reference_scores(model, prompt, [*start_tokens, *target])
            our_scores.append(_gather_scores(logprobs[:-1], target))
        ours = torch.cat(our_scores)
        results = peer.translate_batch(
            sources,
            beam_size=1,
            min_decoding_length=0,
            max_decoding_length=max_new_tokens,
            end_token=end_tokens,
        )
        generated = [[vocab.index(token) for token in row.hypotheses[0]] for row in results]
    else:

        def peer_scores(runtime: Any) -> Tensor:
            all_logits = np.array(runtime.forward_batch(to_strings(prompts)))
            rows = zip(all_logits, prompts, strict=True)
            logits = [torch.from_numpy(row[: len(prompt)].astype(np.float32)) for row, prompt in rows]
            return torch.cat([row.flatten() for row in logits])

        ours = torch.cat([reference_scores(model, None, prompt).flatten() for prompt in prompts])
        results = peer.generate_batch(
            to_strings(prompts),
            beam_size=1,
            max_length=max_new_tokens,
            end_token=end_tokens,
            include_prompt_in_result=False,
        )
        generated = [row.sequences_ids[0] for row in results]
    check = compare_outputs("scores, by CTranslate2", ours, peer_scores(peer), precision)
    default_peer = runtime_class(str(folder), device="cpu")
    if default_peer.compute_type != peer.compute_type:
        difference = float((ours - peer_scores(default_peer)).abs().max())
        found = (
            f"{check.found} in {peer.compute_type}; in {default_peer.compute_type}, as CTranslate2 computes "
            f"on this CPU by default, {difference:.2g}"
        )
        check = replace(check, found=found)
    yield check
    tolerance = TOLERANCE[precision] * float(ours.abs().max())
    yield compare_generation(model, prompts, generated, max_new_tokens, eos_id, tolerance)


def compare_generation(
    model: CausalModel,
    prompts: TokenSequences,
    their_sequences: TokenSequences,
    max_new_tokens: int,
    eos_id: int | None,
    tolerance: float,
) -> Check:
    """Compare what greedy decoding generates in both.

    At the first token that differs, both tokens must have the same score up to rounding.
    """
    what = "greedy decoding, in both"
    num_equal = 0
    total = 0
    first_mismatch = None
    for prompt, their_tokens in zip(prompts, their_sequences, strict=True):
        our_tokens = generate_greedy(model, prompt, max_new_tokens, eos_id)
        position = next(
            (n for n, (a, b) in enumerate(zip(our_tokens, their_tokens, strict=False)) if a != b),
            min(len(our_tokens), len(their_tokens)),
        )
        num_equal += position
        total += max(len(our_tokens), len(their_tokens))
        if first_mismatch is None and our_tokens != their_tokens:
            first_mismatch = prompt, our_tokens, their_tokens, position
    summary = f"{num_equal} of {total} tokens the same" + (f" ({num_equal / total:.1%})" if total else "")
    if first_mismatch is None:
        return Check(what, summary, True)
    prompt, our_tokens, their_tokens, position = first_mismatch
    our_token, their_token = (
        sequence[position] if position < len(sequence) else eos_id for sequence in (our_tokens, their_tokens)
    )
    if isinstance(model, EncoderDecoder):
        scores = reference_scores(model, prompt, [decoder_start_token(model), *our_tokens[:position]])
    else:
        scores = reference_scores(model, None, [*prompt, *our_tokens[:position]])
    gap = float("inf")
    if our_token is not None and their_token is not None:
        gap = float(scores[-1, our_token] - scores[-1, their_token])
    difference = (
        f"the first difference is token {position} of a text, {our_token} here and {their_token} there, "
        f"with scores {gap:.2g} apart"
    )
    return Check(what, f"{summary}; {difference}", gap <= 2 * tolerance)


@torch.no_grad()
def reference_scores(model: CausalModel, source: list[int] | None, tokens: list[int]) -> Tensor:
    """(T, V): logits of a decoder, log-probabilities of an encoder-decoder, as CTranslate2 returns them"""
    inputs = torch.tensor([tokens])
    if source is None:
        return model(inputs)[0]
    return model(torch.tensor([source]), inputs)[0].log_softmax(-1)


def generate_greedy(
    model: CausalModel, prompt: list[int], max_new_tokens: int, eos_id: int | None
) -> list[int]:
    """The tokens that greedy decoding generates, without the end token."""
    options = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=[] if eos_id is None else [eos_id],
        decoder_start_token_id=decoder_start_token(model) if isinstance(model, EncoderDecoder) else None,
    )
    out = generate_batch(model, None, [prompt], options)[0][0].tokens
    return out[:-1] if out and out[-1] == eos_id else out


def _gather_scores(scores: Tensor, tokens: list[int]) -> Tensor:
    """(T, V) → (T,): the scores of these tokens"""
    return scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
