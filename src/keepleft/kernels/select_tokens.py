"""Token selection in Triton: a greedy step or a whole beam-search step in one kernel, histories moved in
place.

`SamplingStrategy.choose` and `Beam.choose` in decoding/ are the definition; each of their many small steps
would be a kernel.
"""

from __future__ import annotations

from keepleft.kernels.triton_compat import jit, tl


@jit
def greedy_select_kernel(
    top_logits,
    top_tokens,
    logsumexp,
    tokens,
    text_mask,
    score,
    done,
    lengths,
    max_new_tokens,
    eos_ids,
    num_eos,
    columns,
    block: tl.constexpr,
):
    r = tl.program_id(0)
    finished = tl.load(done + r) != 0
    column = tl.arange(0, block)
    offsets = r * columns + column
    history = tl.load(tokens + offsets + 1, mask=column < columns - 1, other=0)
    mask_history = tl.load(text_mask + offsets + 1, mask=column < columns - 1, other=0)
    token = tl.where(finished, tl.load(tokens + r * columns + columns - 1), tl.load(top_tokens + r))
    length = tl.load(lengths + r) + tl.where(finished, 0, 1)
    logprob = tl.where(finished, 0.0, tl.load(top_logits + r) - tl.load(logsumexp + r))
    new_score = tl.load(score + r) + logprob
    finished = finished | (length >= tl.load(max_new_tokens + r))
    for n in range(num_eos):
        finished = finished | (token == tl.load(eos_ids + n))
    tl.debug_barrier()  # all is read before anything is written
    tl.store(tokens + offsets, tl.where(column == columns - 1, token, history), mask=column < columns)
    tl.store(
        text_mask + offsets,
        tl.where(column == columns - 1, 1, mask_history).to(tl.int1),
        mask=column < columns,
    )
    tl.store(score + r, new_score)
    tl.store(lengths + r, length)
    tl.store(done + r, finished)


@jit
def beam_select_kernel(
    top_logits,
    top_tokens,
    logsumexp,
    tokens,
    text_mask,
    score,
    done,
    lengths,
    max_new_tokens,
    finished_tokens,
    finished_scores,
    finished_lengths,
    has_finished,
    can_improve,
    num_new,
    beam_rows,
    position,
    eos_ids,
    num_eos,
    columns,
    capacity,
    length_penalty,
    width: tl.constexpr,
    width_block: tl.constexpr,
    per_beam: tl.constexpr,
    pool_block: tl.constexpr,
    num_candidates: tl.constexpr,
    lanes: tl.constexpr,
    early_stopping: tl.constexpr,
    block: tl.constexpr,
    capacity_block: tl.constexpr,
    excluded_score: tl.constexpr,
):
    b = tl.program_id(0)
    length = tl.load(num_new) + 1
    limit = tl.load(max_new_tokens + b * width)
    # the best continuations of all beams of this prompt, one after the other
    pool_index = tl.arange(0, pool_block)
    row = b * width + pool_index // per_beam
    valid = pool_index < width * per_beam
    x = tl.load(score + row, mask=valid, other=0.0) + (
        tl.load(top_logits + b * width * per_beam + pool_index, mask=valid, other=0.0)
        - tl.load(logsumexp + row, mask=valid, other=0.0)
    )
    x = tl.where(valid, x, float("nan"))
    token = tl.load(top_tokens + b * width * per_beam + pool_index, mask=valid, other=0)
    lane = tl.arange(0, lanes)  # candidates first, then finished hypotheses
    value = tl.zeros([lanes], tl.float32)
    parent = tl.zeros([lanes], tl.int64)
    last_token = tl.zeros([lanes], tl.int64)
    for n in range(num_candidates):
        top = tl.max(tl.where(x == x, x, float("-inf")), 0)
        index = tl.min(tl.where(x == top, pool_index, pool_block), 0)
        value = tl.where(lane == n, top, value)
        parent = tl.where(lane == n, (index // per_beam).to(tl.int64), parent)
        last_token = tl.where(lane == n, tl.sum(tl.where(pool_index == index, token, 0), 0), last_token)
        x = tl.where(pool_index == index, float("nan"), x)
    candidate = lane < num_candidates
    finishes = candidate & (length >= limit)
    for n in range(num_eos):
        finishes = finishes | (candidate & (last_token == tl.load(eos_ids + n)))
    # the beams that go on
    x = tl.where(candidate, value + tl.where(finishes, excluded_score, 0.0), float("nan"))
    beam = tl.arange(0, width_block)
    running_score = tl.zeros([width_block], tl.float32)
    running_parent = tl.zeros([width_block], tl.int64)
    running_token = tl.zeros([width_block], tl.int64)
    for n in range(width):
        top = tl.max(tl.where(x == x, x, float("-inf")), 0)
        index = tl.min(tl.where(x == top, lane, lanes), 0)
        running_score = tl.where(beam == n, top, running_score)
        running_parent = tl.where(beam == n, tl.sum(tl.where(lane == index, parent, 0), 0), running_parent)
        running_token = tl.where(beam == n, tl.sum(tl.where(lane == index, last_token, 0), 0), running_token)
        x = tl.where(lane == index, float("nan"), x)
    # finished hypotheses, new and old: old ones come first at equal scores
    is_old = (lane >= num_candidates) & (lane < num_candidates + width)
    index = b * width + lane - num_candidates
    old_finished = tl.load(has_finished + index, mask=is_old, other=0) != 0
    improvable = tl.load(can_improve + b) != 0
    closed = improvable == 0
    if early_stopping == 1:
        closed = closed | (tl.sum(tl.where(is_old & old_finished, 1, 0), 0) == width)
    newly_finished = finishes & (lane < width)
    finish_score = value / _length_power(length, length_penalty)
    finish_score = finish_score + tl.where(newly_finished, 0.0, excluded_score)
    finish_score = finish_score + tl.where(closed, excluded_score, 0.0)
    x = tl.where(
        is_old,
        tl.load(finished_scores + index, mask=is_old, other=0.0),
        tl.where(candidate, finish_score, float("nan")),
    )
    filled = tl.where(is_old, old_finished, newly_finished)
    lane_lengths = tl.where(is_old, tl.load(finished_lengths + index, mask=is_old, other=0), length)
    origin = tl.where(is_old, lane - num_candidates, width + parent)
    order = tl.where(is_old, lane - num_candidates, lane + width)
    best_score = tl.zeros([width_block], tl.float32)
    best_length = tl.zeros([width_block], tl.int64)
    best_finished = beam < 0
    best_origin = tl.zeros([width_block], tl.int64)
    best_token = tl.zeros([width_block], tl.int64)
    for n in range(width):
        top = tl.max(tl.where(x == x, x, float("-inf")), 0)
        best_order = tl.min(tl.where(x == top, order, 2 * lanes), 0)
        selected = order == best_order
        selected = selected & (is_old | candidate)
        best_score = tl.where(beam == n, top, best_score)
        best_length = tl.where(beam == n, tl.sum(tl.where(selected, lane_lengths, 0), 0), best_length)
        best_finished = best_finished | ((beam == n) & (tl.sum(tl.where(selected & filled, 1, 0), 0) > 0))
        best_origin = tl.where(beam == n, tl.sum(tl.where(selected, origin, 0), 0), best_origin)
        best_token = tl.where(beam == n, tl.sum(tl.where(selected, last_token, 0), 0), best_token)
        x = tl.where(selected, float("nan"), x)
    in_beam = beam < width
    lowest = tl.min(tl.where(in_beam, best_score, float("inf")), 0)
    highest = tl.max(tl.where(beam == 0, running_score, float("-inf")), 0)
    max_length = length
    if early_stopping == 2:
        max_length = tl.where(length_penalty > 0, limit, length)
    best_possible = highest / _length_power(max_length, length_penalty)
    better = (
        tl.sum(tl.where(in_beam & (best_possible > tl.where(best_finished, lowest, excluded_score)), 1, 0), 0)
        > 0
    )
    improvable = improvable & better
    all_done = (improvable == 0) | (tl.sum(tl.where(candidate & (finishes == 0), 1, 0), 0) == 0)
    if early_stopping == 1:
        all_done = all_done | (tl.sum(tl.where(in_beam & best_finished, 1, 0), 0) == width)
    # histories: all are read, then all are written, one column to the left
    column = tl.arange(0, block)
    shift_mask = (column < columns - 1)[None, :] & in_beam[:, None]
    running_pointers = tokens + (b * width + running_parent)[:, None] * columns + column[None, :] + 1
    running_history = tl.load(running_pointers, mask=shift_mask, other=0)
    running_mask = tl.load(
        text_mask + (b * width + running_parent)[:, None] * columns + column[None, :] + 1,
        mask=shift_mask,
        other=0,
    )
    from_finished = best_origin < width
    best_history = tl.load(
        finished_tokens + (b * width + best_origin)[:, None] * columns + column[None, :] + 1,
        mask=shift_mask & from_finished[:, None],
        other=0,
    )
    best_history += tl.load(
        tokens + (b * width + best_origin - width)[:, None] * columns + column[None, :] + 1,
        mask=shift_mask & (from_finished == 0)[:, None],
        other=0,
    )
    step = tl.arange(0, capacity_block)
    rows = tl.num_programs(0) * width
    table_mask = (step < capacity)[:, None] & in_beam[None, :]
    table = tl.load(
        beam_rows + step[:, None] * rows + (b * width + running_parent)[None, :], mask=table_mask, other=0
    )
    table = tl.where((step == tl.load(position))[:, None], (b * width + running_parent)[None, :], table)
    tl.debug_barrier()
    store_mask = (column < columns)[None, :] & in_beam[:, None]
    row_offsets = (b * width + beam)[:, None] * columns + column[None, :]
    is_last_column = (column == columns - 1)[None, :]
    tl.store(
        tokens + row_offsets,
        tl.where(is_last_column, running_token[:, None], running_history),
        mask=store_mask,
    )
    tl.store(text_mask + row_offsets, tl.where(is_last_column, 1, running_mask).to(tl.int1), mask=store_mask)
    tl.store(
        finished_tokens + row_offsets,
        tl.where(is_last_column, best_token[:, None], best_history),
        mask=store_mask,
    )
    tl.store(beam_rows + step[:, None] * rows + (b * width + beam)[None, :], table, mask=table_mask)
    beam_offsets = b * width + beam
    tl.store(score + beam_offsets, running_score, mask=in_beam)
    tl.store(lengths + beam_offsets, tl.load(lengths + beam_offsets, mask=in_beam, other=0) + 1, mask=in_beam)
    tl.store(done + beam_offsets, all_done & in_beam, mask=in_beam)
    tl.store(finished_scores + beam_offsets, best_score, mask=in_beam)
    tl.store(finished_lengths + beam_offsets, best_length, mask=in_beam)
    tl.store(has_finished + beam_offsets, best_finished, mask=in_beam)
    tl.store(can_improve + b, improvable)


@jit
def _length_power(length, length_penalty):
    """length ** length_penalty, as precisely as PyTorch's"""
    return tl.exp2(length_penalty * tl.log2(length.to(tl.float64))).to(tl.float32)
