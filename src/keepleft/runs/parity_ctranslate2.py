"""Does CTranslate2 say what the model says? Scores of given targets, and what both write, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepleft.decoding.generate import written
from keepleft.decoding.options import Options
from keepleft.models.wholes import EncoderDecoder
from keepleft.runs.parity import TOLERANCE, Check, alike, room, texts
from keepleft.weights.to_ctranslate2 import special, start_of, vocabulary

Texts = list[list[int]]


def compared(model: Any, tokenizer: Any, folder: Path, quantization: str | None, given: list[int] | None) -> Iterator[Check]:
    """The file is judged by what CTranslate2 computes from it in float32, which every CPU can: int16 and int8 products are
    done as the CPU allows, and without VNNI they saturate. What this CPU does by default is measured beside it and told.
    """
    import ctranslate2

    design, kind, limit = model.design, quantization or "float32", room(model) // 2 - 1
    words = vocabulary(tokenizer, design.vocab)
    spelt = lambda rows, known=words: [[known[token] for token in row] for row in rows]
    end = words.index(word) if (word := special(model, words)["eos_token"]) else None
    ends = [] if end is None else [end]  # an empty list has to be said: without an end of its own it would pass over token 0
    prompts = texts(model, given, source=True)
    start = [start_of(model)]
    program = ctranslate2.Translator if isinstance(model, EncoderDecoder) else ctranslate2.Generator
    peer: Any = program(str(folder), device="cpu", compute_type="float32")
    if isinstance(model, EncoderDecoder):
        sources = spelt(prompts, words if design.source_vocab is None else vocabulary(None, design.source_vocab))
        targets = texts(model, None, count=len(prompts), seed=1)

        def scored(by: Any) -> Tensor:
            found = by.score_batch(sources, spelt(targets))
            return torch.tensor([score for row, target in zip(found, targets, strict=True)
                                 for score in row.log_probs[:len(target)]])

        ours = torch.cat([_given(scores(model, prompt, [*start, *target])[:-1], target)
                          for prompt, target in zip(prompts, targets, strict=True)])
        found = peer.translate_batch(sources, beam_size=1, min_decoding_length=0, max_decoding_length=limit,
                                     end_token=ends)
        written = [[words.index(token) for token in row.hypotheses[0]] for row in found]
    else:
        def scored(by: Any) -> Tensor:
            every = np.array(by.forward_batch(spelt(prompts)))
            return torch.cat([torch.from_numpy(row[:len(prompt)].astype(np.float32)).flatten()
                              for row, prompt in zip(every, prompts, strict=True)])

        ours = torch.cat([scores(model, None, prompt).flatten() for prompt in prompts])
        found = peer.generate_batch(spelt(prompts), beam_size=1, max_length=limit, end_token=ends,
                                    include_prompt_in_result=False)
        written = [row.sequences_ids[0] for row in found]
    check = alike("scores, by CTranslate2", ours, scored(peer), kind)
    default = program(str(folder), device="cpu")
    if default.compute_type != peer.compute_type:
        apart = float((ours - scored(default)).abs().max())
        check = replace(check, found=f"{check.found} in {peer.compute_type}; in {default.compute_type}, "
                                     f"as CTranslate2 computes on this CPU by default, {apart:.2g}")
    yield check
    yield same(model, prompts, written, limit, end, TOLERANCE[kind] * float(ours.abs().max()))


def same(model: Any, prompts: Texts, theirs: Texts, limit: int, end: int | None, near: float) -> Check:
    """What both write, always the likeliest token. Where they part, the two tokens must have been as likely, up to rounding."""
    equal = total = 0
    parted = None
    for prompt, other in zip(prompts, theirs, strict=True):
        mine = write(model, prompt, limit, end)
        at = next((n for n, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other)))
        equal, total = equal + at, total + max(len(mine), len(other))
        if parted is None and mine != other:
            parted = prompt, mine, other, at
    share = f"{equal} of {total} tokens the same" + (f" ({equal / total:.1%})" if total else "")
    if parted is None:
        return Check("what both write, greedily", share, True)
    prompt, mine, other, at = parted
    ours, their = (text[at] if at < len(text) else end for text in (mine, other))
    if isinstance(model, EncoderDecoder):
        last = scores(model, prompt, [start_of(model), *mine[:at]])[-1]
    else:
        last = scores(model, None, [*prompt, *mine[:at]])[-1]
    gap = float("inf") if ours is None or their is None else float(last[ours] - last[their])
    return Check("what both write, greedily", f"{share}; the first difference is token {at} of a text, {ours} here and {their} "
                 f"there, with scores {gap:.2g} apart", gap <= 2 * near)


@torch.no_grad()
def scores(model: Any, source: list[int] | None, tokens: list[int]) -> Tensor:
    """(T, V): scores of a decoder as they are, of an encoder-decoder as log-probabilities, which is what CTranslate2 tells"""
    text = torch.tensor([tokens])
    return model(text)[0] if source is None else model(torch.tensor([source]), text)[0].log_softmax(-1)


def write(model: Any, prompt: list[int], limit: int, end: int | None) -> list[int]:
    """The likeliest tokens, without the end."""
    options = Options(max_new_tokens=limit, eos_token_id=[] if end is None else [end],
                      decoder_start_token_id=start_of(model) if isinstance(model, EncoderDecoder) else None)
    out = written(model, None, [prompt], options)[0][0].tokens
    return out[:-1] if out and out[-1] == end else out


def _given(scores: Tensor, tokens: list[int]) -> Tensor:
    """(T, V) → (T,): the scores of just these tokens"""
    return scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
