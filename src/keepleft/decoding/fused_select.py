"""Select and append tokens in one kernel, in place: what `SamplingStrategy` and `Beam` do with plain logits,
for CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keepleft.decoding.beam import EXCLUDED_SCORE, Beam
from keepleft.decoding.hypotheses import device_constant
from keepleft.decoding.sampling import SamplingStrategy
from keepleft.kernels.select_tokens import beam_select_kernel, greedy_select_kernel
from keepleft.kernels.topk import topk_logsumexp
from keepleft.kernels.triton_compat import next_power_of_2

MAX_BLOCK_ELEMENTS = 1 << 13  # elements that one program can hold
EARLY_STOPPING = {True: 1, False: 0, "never": 2}


def is_supported(strategy: Any, hypotheses: Any) -> bool:
    """Plain logits, and histories short enough for one program."""
    if (
        strategy.processors
        or strategy.seeds is not None
        or strategy.stop is not None
        or hypotheses.score.dtype != torch.float32
    ):
        return False
    num_rows = 1 if isinstance(strategy, SamplingStrategy) else 2 * strategy.width
    return num_rows * hypotheses.tokens.shape[1] <= MAX_BLOCK_ELEMENTS and (
        isinstance(strategy, SamplingStrategy) or strategy.groups == 1
    )


def select_and_append(
    strategy: SamplingStrategy | Beam, logits: Tensor, hypotheses: Any, static_kv: Any
) -> None:
    """Append the next token of every sequence, in place."""
    columns = hypotheses.tokens.shape[1]
    eos_ids = device_constant(strategy.eos_ids or (-1,), logits.device)
    if isinstance(strategy, SamplingStrategy):
        top = topk_logsumexp(logits, 1)
        greedy_select_kernel[(len(logits),)](
            *top,
            hypotheses.tokens,
            hypotheses.prompt_mask,
            hypotheses.score,
            hypotheses.done,
            hypotheses.lengths,
            hypotheses.max_new_tokens,
            eos_ids,
            len(eos_ids),
            columns,
            next_power_of_2(columns),
            num_warps=4,
        )
    else:
        width, num_prompts = strategy.width, len(hypotheses.finished_tokens)
        num_candidates = strategy.num_candidates(logits.shape[1])
        top = topk_logsumexp(logits, num_candidates)
        per_beam = top.values.shape[1]
        beam_select_kernel[(num_prompts,)](
            *top,
            hypotheses.tokens,
            hypotheses.prompt_mask,
            hypotheses.score,
            hypotheses.done,
            hypotheses.lengths,
            hypotheses.max_new_tokens,
            hypotheses.finished_tokens,
            hypotheses.finished_scores,
            hypotheses.finished_lengths,
            hypotheses.has_finished,
            hypotheses.can_improve,
            hypotheses.new_count,
            static_kv.beam_rows,
            static_kv.position,
            eos_ids,
            len(eos_ids),
            columns,
            len(static_kv.beam_rows),
            strategy.length_penalty,
            width,
            next_power_of_2(width),
            per_beam,
            next_power_of_2(width * per_beam),
            num_candidates,
            next_power_of_2(width + num_candidates),
            EARLY_STOPPING[strategy.early_stopping],
            next_power_of_2(columns),
            next_power_of_2(len(static_kv.beam_rows)),
            EXCLUDED_SCORE,
            num_warps=8,
        )
    hypotheses.new_count.add_(1)
