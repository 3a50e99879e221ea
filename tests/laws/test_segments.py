"""Padding is invisible, left or right, any amount, any content; packing equals alone; rows are strangers."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from strategies import VOCAB, designs, padding, random_model, segments, tokens

T = 11


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


@given(designs("decoder") | designs("encoder"), st.data())
@settings(max_examples=60)
def test_padding_of_any_amount_and_content_is_invisible(design, data):
    model, sequences = random_model(design), tokens(3, T)
    seg = data.draw(padding(3, T))
    out = model(sequences, segments=seg)
    noise = torch.where(seg == 0, (sequences + 5) % VOCAB, sequences)
    assert torch.equal(
        model(noise, segments=seg)[seg != 0], out[seg != 0]
    )  # the content of padding: bit for bit
    for row in range(3):
        real = seg[row] != 0
        same(out[row, real], model(sequences[row, real][None])[0])


@given(designs("decoder") | designs("encoder"), st.data())
@settings(max_examples=60)
def test_packed_sequences_are_each_as_if_alone(design, data):
    model, sequences = random_model(design), tokens(2, T)
    seg = data.draw(segments(2, T))
    out = model(sequences, segments=seg)
    for row in range(2):
        for number in seg[row].unique():
            if number:
                selected = seg[row] == number
                same(out[row, selected], model(sequences[row, selected][None])[0])


@given(designs("both"), st.data())
@settings(max_examples=60)
def test_packed_pairs_are_each_as_if_alone(design, data):
    model = random_model(design)
    sources = tokens(2, 7)
    targets = tokens(2, T)
    source_ids, target_ids = data.draw(segments(2, 7)), data.draw(segments(2, T))
    out = model(sources, targets, source_segments=source_ids, segments=target_ids)
    for row in range(2):
        for number in target_ids[row].unique():
            if number and (source_ids[row] == number).any():
                selected = target_ids[row] == number
                alone = model(sources[row, source_ids[row] == number][None], targets[row, selected][None])
                same(out[row, selected], alone[0])


@given(designs("both"), st.data())
@settings(max_examples=40)
def test_padding_of_a_source_is_invisible(design, data):
    model = random_model(design)
    sources = tokens(3, 7)
    targets = tokens(3, T)
    seg = data.draw(padding(3, 7))
    out = model(sources, targets, source_segments=seg)
    for row in range(3):
        same(out[row], model(sources[row, seg[row] != 0][None], targets[row][None])[0])


@given(designs())
@settings(max_examples=40)
def test_rows_are_strangers(design):
    model, sequences = random_model(design), tokens(3, T)
    other = sequences.clone()
    other[1:] = (other[1:] + 7) % VOCAB
    run = lambda x: model(x, x) if isinstance(model, kl.EncoderDecoder) else model(x)
    assert torch.equal(run(sequences)[0], run(other)[0])


@given(designs("decoder") | designs("both"), st.integers(1, T - 1))
@settings(max_examples=40)
def test_no_position_reads_its_future(design, cut):
    model, sequences = random_model(design), tokens(2, T)
    other = sequences.clone()
    other[:, cut:] = (other[:, cut:] + 7) % VOCAB
    source = tokens(2, 7)
    run = lambda x: model(source, x) if isinstance(model, kl.EncoderDecoder) else model(x)
    assert torch.equal(run(sequences)[:, :cut], run(other)[:, :cut])


@given(
    designs("decoder"),
    st.integers(1, T - 1),
    st.lists(st.lists(st.integers(0, 3), min_size=T, max_size=T), min_size=2, max_size=2),
)
@settings(max_examples=60)
def test_no_position_reads_its_future_however_sequences_lie(design, cut, numbers):
    """Sequences in several pieces, padding in the middle, a number that returns: any segments at all."""
    model = random_model(design)
    sequences = tokens(2, T)
    seg = torch.tensor(numbers)
    other = sequences.clone()
    other[:, cut:] = (other[:, cut:] + 7) % VOCAB
    assert torch.equal(model(sequences, segments=seg)[:, :cut], model(other, segments=seg)[:, :cut])


@given(st.data())
def test_positions_count_each_segment_from_zero(data):
    seg = data.draw(segments(3, T))
    pos = kl.positions_from_segments(seg)
    for row in range(3):
        for number in seg[row].unique():
            selected = seg[row] == number
            assert pos[row, selected].tolist() == (
                [0] * int(selected.sum()) if number == 0 else list(range(int(selected.sum())))
            )
