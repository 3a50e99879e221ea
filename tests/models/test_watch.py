"""watch() collects every map by name, on any kernel, and keeps only what was asked for."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from keepleft.nn.attention import Attention
from strategies import designs, padding, random_model, tokens

GPT2 = kl.presets.gpt2.but(
    vocab=31, dim=24, heads=6, feedforward=kl.FeedForward(29, "gelu"), decoder=kl.StackDesign(2, (kl.causal,))
)


def run(model, sequences, **more):
    return (
        model(tokens(len(sequences), 7), sequences, **more)
        if isinstance(model, kl.EncoderDecoder)
        else model(sequences, **more)
    )


@given(designs(), st.data())
@settings(max_examples=40)
def test_maps_are_weights_and_the_output_stays_the_same(design, data):
    model, sequences = random_model(design), tokens(3, 11)
    seg = data.draw(padding(3, 11))
    want = run(model, sequences, segments=seg)
    with kl.watch(model) as maps:
        got = run(model, sequences, segments=seg)
    assert torch.equal(got, want)
    sides = [side for side in ("encoder", "decoder") if getattr(design, side)]
    names = {f"{side}.{n}.self" for side in sides for n in range(getattr(design, side).layers)}
    if len(sides) == 2:
        names |= {f"decoder.{n}.cross" for n in range(design.decoder.layers)}
    assert set(maps) == names
    for name, map_ in maps.items():
        keys = 7 if "cross" in name or (len(sides) == 2 and "encoder" in name) else 11
        heads = design.stack_attention(getattr(design, name.split(".")[0])).heads
        assert map_.shape == (3, heads, 7 if name.startswith("encoder") and len(sides) == 2 else 11, keys)
        total = map_.sum(-1)
        assert ((total - 1).abs() < 1e-9).logical_or(total == 0).all()
        if name.startswith("decoder") and "self" in name:
            mask = design.decoder.mask[int(name.split(".")[1]) % len(design.decoder.mask)]
            for row in range(3):
                real = seg[row] != 0
                n = int(real.sum())
                assert (map_[row][:, real][:, :, real][:, ~kl.mask_table(mask, n)] == 0).all()
                assert (map_[row][:, real][:, :, ~real] == 0).all()


@given(designs(), st.sampled_from(["reference", "sdpa", "flex"]))
@settings(max_examples=20)
def test_maps_are_the_same_on_every_kernel(design, backend):
    model, sequences = random_model(design), tokens(2, 7)
    with kl.watch(model) as want:
        run(model, sequences)
    for part in model.modules():
        if hasattr(part, "backend"):
            part.backend = backend
    with kl.watch(model) as got:
        run(model, sequences)
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=1e-6, rtol=1e-6)


def test_only_what_is_asked_for_is_kept():
    design = kl.presets.vaswani.but(
        vocab=31,
        dim=24,
        heads=6,
        feedforward=kl.FeedForward(29, "relu"),
        encoder=kl.StackDesign(2, (kl.full,)),
        decoder=kl.StackDesign(3, (kl.causal,)),
    )
    model, sequences = random_model(design), tokens(3, 11)
    with kl.watch(model) as everything:
        run(model, sequences)
    with kl.watch(model, "decoder.*.cross", heads=[4, 1], rows=[2], queries=[0, 10]) as some:
        run(model, sequences)
    assert list(some) == ["decoder.0.cross", "decoder.1.cross", "decoder.2.cross"]
    for name, map_ in some.items():
        assert torch.equal(map_, everything[name][2:3][:, [4, 1]][:, :, [0, 10]])
    with kl.watch(model, ["decoder.0.self", "encoder.1.self"]) as two:
        run(model, sequences)
    assert sorted(two) == ["decoder.0.self", "encoder.1.self"]


def test_nothing_is_left_behind_even_after_an_error():
    model = random_model(GPT2)
    with pytest.raises(RuntimeError, match="stop"), kl.watch(model):
        raise RuntimeError("stop")
    assert all(part.watcher is None for part in model.modules() if isinstance(part, Attention))


def test_steps_from_a_cache_can_be_watched_too():
    model = random_model(GPT2)
    sequences = tokens(2, 9)
    with kl.watch(model) as want:
        model(sequences)
    for kind in ("dynamic", "static"):
        _, state = model.start(sequences[:, :8], cache=kind, capacity=12)
        with kl.watch(model) as maps:
            model.step(sequences[:, 8:], state)
        for name in want:
            torch.testing.assert_close(maps[name], want[name][:, :, -1:], atol=1e-9, rtol=1e-9)


@pytest.mark.slow
def test_one_head_of_a_text_of_4096_tokens_costs_one_map():
    """In a process of its own, whose peak memory can be read: one (4096, 4096) map is 64 MiB in float32,
    twelve layers of twelve heads would be 9 GiB.
    """
    script = """
        import resource, torch, keepleft as kl
        feedforward = kl.FeedForward(96, "gelu")
        design = kl.presets.gpt2.but(vocab=97, dim=96, heads=12, feedforward=feedforward)
        design = design.but(position=kl.Rotary())
        model = kl.build(design).eval()
        sequences = torch.randint(97, (1, 4096))
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with torch.no_grad():
            model(sequences)
            before = peak()
            with kl.watch(model, "decoder.7.self", heads=[5]) as maps:
                model(sequences)
        assert maps["decoder.7.self"].shape == (1, 1, 4096, 4096)
        print((peak() - before) // 1024)
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert out.returncode == 0, out.stderr
    assert int(out.stdout) < 700  # MiB: the map, and the chunks it was worked out in
