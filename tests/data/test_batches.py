"""Batches: every record once an epoch, resumable at any step, and nothing lost in the layout."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepleft.data.batches import BatchCursor, Batches, BucketedLayout, WindowLayout
from keepleft.data.objectives import Classification, NextToken, Translation
from keepleft.data.packing import PackedLayout
from keepleft.data.prefetch import prefetch
from keepleft.data.token_store import TokenStore
from keepleft.nn.loss import IGNORE_INDEX

START, END = 1, 2
texts = st.lists(
    st.lists(st.integers(5, 40), min_size=1, max_size=11).map(lambda text: [*text, END]),
    min_size=1,
    max_size=40,
)
layouts = st.sampled_from(
    [
        BucketedLayout(),
        BucketedLayout(4),
        BucketedLayout(8, fixed_height=True),
        PackedLayout(12),
        PackedLayout(24),
    ]
)


def pairs(n: int, seed: int = 0) -> TokenStore:
    rng = np.random.default_rng(seed)
    text = lambda: [*rng.integers(5, 40, rng.integers(1, 12)).tolist(), END]
    return TokenStore.from_lists(src=[text() for _ in range(n)], tgt=[text() for _ in range(n)])


def undo_layout(batch) -> list[tuple[list[int], list[int], list[int] | None]]:
    """Inputs, targets and source of each sequence in a batch."""
    out = []
    for row in range(len(batch.targets)):
        segments = batch.inputs["segments"][row]
        for segment in sorted(set(segments.tolist()) - {0}):
            own = segments == segment
            source = None
            if "source" in batch.inputs:
                source = batch.inputs["source"][row][batch.inputs["source_segments"][row] == segment].tolist()
            out.append((batch.inputs["tokens"][row][own].tolist(), batch.targets[row][own].tolist(), source))
    return out


@settings(deadline=None, max_examples=60)
@given(texts, layouts, st.integers(0, 3), st.integers(1, 3), st.booleans())
def test_an_epoch_shows_every_record_once_and_shifted_by_one(records, layout, epoch, accumulate, shuffle):
    store = TokenStore.from_lists(src=[text[::-1] for text in records], tgt=records)
    batches = Batches(store, Translation(START), layout, 48, accumulate, seed=7, shuffle=shuffle)
    examples = [
        example
        for n, step in enumerate(batches.plan(epoch))
        for batch in batches.shard(step, epoch, n)
        for example in undo_layout(batch)
    ]
    assert sorted(examples) == sorted(([START, *text[:-1]], text, text[::-1]) for text in records)


@settings(deadline=None, max_examples=40)
@given(layouts, st.integers(1, 4))
def test_a_batch_holds_no_more_than_its_budget_and_counts_what_is_asked(layout, accumulate):
    batches = Batches(pairs(150), Translation(START), layout, 96, accumulate)
    for n, step in enumerate(batches.plan(0)):
        assert len(step) <= accumulate
        for batch in batches.shard(step, 0, n):
            assert batch.inputs["tokens"].numel() <= 96
            assert batch.tokens == int((batch.targets != IGNORE_INDEX).sum())
            assert (batch.targets[batch.inputs["segments"] == 0] == IGNORE_INDEX).all()


@pytest.mark.parametrize("layout", [BucketedLayout(), PackedLayout(24), WindowLayout(16)], ids=str)
@settings(deadline=None, max_examples=15)
@given(st.integers(0, 60))
def test_the_order_can_be_resumed_at_any_step(layout, stop):
    store = pairs(80)
    if isinstance(layout, WindowLayout):
        batches = Batches(TokenStore({"text": store["tgt"]}), NextToken(START), layout, 64, seed=3)
    else:
        batches = Batches(store, Translation(START), layout, 64, 2, seed=3)
    uninterrupted = list(islice(batches.steps(), stop + 4))
    cursor = uninterrupted[stop - 1][0] if stop else BatchCursor()
    for (a, step), (b, resumed_step) in zip(uninterrupted[stop:], batches.steps(cursor), strict=False):
        assert a == b
        for x, y in zip(step, resumed_step, strict=True):
            assert x.identity == y.identity
            assert torch.equal(x.targets, y.targets)
            assert all(torch.equal(x.inputs[name], y.inputs[name]) for name in x.inputs)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 5), st.integers(1, 4))
def test_processes_share_a_step_out_and_keep_in_step(accumulate, world_size):
    single = Batches(pairs(60), Translation(START), BucketedLayout(), 64, accumulate, seed=5)
    shards = [replace(single, rank=rank, world_size=world_size) for rank in range(world_size)]
    shard_steps = [list(islice(shard.steps(), 6)) for shard in shards]
    for n, (cursor, step) in enumerate(islice(single.steps(), 6)):
        parts = [steps[n] for steps in shard_steps]
        assert {part[0] for part in parts} == {cursor}
        assert len({len(part[1]) for part in parts}) == 1  # all have as much to do
        identities = sorted(batch.identity for _, batches in parts for batch in batches if batch.tokens)
        assert identities == sorted(batch.identity for batch in step)


def test_epochs_differ_and_runs_do_not():
    def order(seed, epoch):
        batches = Batches(pairs(60), Translation(START), BucketedLayout(), 64, seed=seed)
        return [np.concatenate(micro).tolist() for step in batches.plan(epoch) for micro in step]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def test_windows_go_through_the_text_without_a_gap():
    text = list(range(5, 105))
    batches = Batches(
        TokenStore.from_lists(text=[text[:30], text[30:]]),
        NextToken(START),
        WindowLayout(9),
        27,
        shuffle=False,
    )
    inputs = [row for batch in batches.one_epoch() for row in batch.inputs["tokens"].tolist()]
    targets = [row for batch in batches.one_epoch() for row in batch.targets.tolist()]
    assert list(chain.from_iterable(inputs)) == text[:99]
    assert list(chain.from_iterable(targets)) == text[1:100]
    assert "segments" not in next(iter(batches.one_epoch())).inputs


def test_labels_go_with_their_texts():
    store = TokenStore.from_lists(text=[[1, n + 5, 2] for n in range(20)], label=[[n % 3] for n in range(20)])
    for batch in Batches(store, Classification(), BucketedLayout(8, fixed_height=True), 64).one_epoch():
        for row, label in zip(batch.inputs["tokens"].tolist(), batch.targets.tolist(), strict=True):
            assert label == ((row[1] - 5) % 3 if row[1] else IGNORE_INDEX)


def test_fixed_shapes_are_few():
    store = pairs(400)
    shapes = {
        tuple(batch.inputs["tokens"].shape)
        for batch in Batches(store, Translation(START), BucketedLayout(4, True), 96).one_epoch()
    }
    assert shapes <= {(96 // width, width) for width in (4, 8, 12)}


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(ValueError, match="record 0 has a text of 12 tokens, a batch holds 8"):
        Batches(TokenStore.from_lists(src=[[5]], tgt=[[6] * 12]), Translation(START), BucketedLayout(), 8)
    with pytest.raises(ValueError, match="fewer than one window of 16"):
        Batches(TokenStore.from_lists(text=[[5] * 10]), NextToken(START), WindowLayout(16), 64)
    with pytest.raises(ValueError, match="nothing to train on"):
        next(Batches(TokenStore.from_lists(text=[]), NextToken(START), BucketedLayout(), 64).steps())


def test_prefetching_keeps_order_and_errors():
    assert list(prefetch(range(20), 3)) == list(range(20))

    def broken():
        yield 1
        raise KeyError("lost")

    items = prefetch(broken())
    assert next(items) == 1
    with pytest.raises(KeyError, match="lost"):
        next(items)
    endless = prefetch(iter(int, 1), 2)
    assert next(endless) == 0
    endless.close()  # ends the thread
