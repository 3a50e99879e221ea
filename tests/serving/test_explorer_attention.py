"""Pieces of a map are pieces of what kl.watch shows, in every family, and nothing else is kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from keepleft.serving.explorer.attention_store import store_attentions
from keepleft.serving.explorer.explorer import Explorer
from keepleft.serving.explorer.params import ExpiredError
from keepleft.serving.explorer.rollout import attention_rollout
from keepleft.serving.explorer.text_cache import TextCache, max_tokens
from keepleft.serving.explorer.unmasked import without_causal_mask
from serving.tiny_explorers import (
    FAMILIES,
    SOURCE,
    TEXT,
    ask,
    bits,
    explorer,
    f32,
    model,
    shades,
    texts,
    u8,
    words,
)
from strategies import MASKS, designs, made, tokens

pytestmark = pytest.mark.usefixtures("one_thread")


def given_to(net, length: int, other: int = 7) -> list[torch.Tensor]:
    return (
        [tokens(1, other), tokens(1, length)] if isinstance(net, kl.EncoderDecoder) else [tokens(1, length)]
    )


@given(designs(), st.data())
@settings(max_examples=40)
def test_weights_are_those_that_watch_shows(design, data):
    net, length = made(design), data.draw(st.sampled_from([1, 5, 13]))
    side = given_to(net, length)
    with torch.no_grad():
        with kl.watch(net) as maps:
            net.hidden_states(*side)
        kept = store_attentions(net, lambda: net.hidden_states(*side))
    assert kept.keys() == maps.keys()
    for name, layer in kept.items():
        whole = maps[name][0]
        heads = data.draw(st.lists(st.integers(0, layer.heads - 1), min_size=1, max_size=3, unique=True))
        rows = torch.tensor(
            data.draw(st.lists(st.integers(0, layer.rows - 1), min_size=1, max_size=4, unique=True))
        )
        torch.testing.assert_close(
            layer.weights(range(layer.heads), torch.arange(layer.rows)), whole, atol=1e-12, rtol=1e-9
        )
        torch.testing.assert_close(layer.weights(heads, rows), whole[heads][:, rows], atol=1e-12, rtol=1e-9)
        tall = data.draw(st.sampled_from([1, 3, 128]))
        for strip in layer.strips(heads, height=tall):
            part = whole[heads][:, strip.begin : strip.end]
            torch.testing.assert_close(
                strip.weights, part[..., strip.left : strip.right], atol=1e-12, rtol=1e-9
            )
            assert float(part.sum()) == pytest.approx(float(strip.weights.sum()))  # nothing lies beyond


@given(MASKS, st.sampled_from([1, 4, 9]))
@settings(max_examples=40)
def test_any_mask_is_kept_to_even_by_those_who_see_nothing(mask, length):
    net = made(
        kl.presets.small(kl.presets.llama).but(vocab=31, dim=24, heads=6, decoder=kl.StackDesign(2, (mask,)))
    )
    with torch.no_grad(), kl.watch(net) as maps:
        net.hidden_states(tokens(1, length))
    kept = store_attentions(net, lambda: net.hidden_states(tokens(1, length)))
    for name, layer in kept.items():
        rows = torch.arange(length)
        torch.testing.assert_close(layer.weights(range(6), rows), maps[name][0], atol=1e-12, rtol=1e-9)
        assert torch.equal(layer.claimed_table(range(6), rows), kl.mask_table(mask, length))


def plain_rollout(maps: list[torch.Tensor]) -> torch.Tensor:
    out = torch.eye(maps[0].shape[-1], dtype=maps[0].dtype)
    for heads in maps:
        step = heads.mean(0) + torch.eye(heads.shape[-1], dtype=heads.dtype)
        out = step / step.sum(-1, keepdim=True) @ out
    return out


@given(st.lists(MASKS, min_size=1, max_size=3), st.integers(1, 9))
@settings(max_examples=40)
def test_a_rollout_is_the_plain_product_and_its_claim_is_who_can_be_known_of(masks, length):
    net = made(
        kl.presets.small(kl.presets.llama).but(
            vocab=31, dim=24, heads=6, decoder=kl.StackDesign(3, tuple(masks))
        )
    )
    with torch.no_grad(), kl.watch(net) as maps:
        net.hidden_states(tokens(1, length))
    layers = list(store_attentions(net, lambda: net.hidden_states(tokens(1, length))).values())
    known, reach = None, torch.eye(length, dtype=torch.bool)
    for n in range(3):
        known = attention_rollout("decoder.self", layers, n, known)
        want = plain_rollout([maps[f"decoder.{m}.self"][0] for m in range(n + 1)])
        torch.testing.assert_close(known.weights, want, atol=1e-12, rtol=1e-9)
        step = kl.mask_table(masks[n % len(masks)], length) | torch.eye(length, dtype=torch.bool)
        reach = (step.double() @ reach.double()) > 0
        assert torch.equal(known.claim, reach)
        assert not (known.weights[~known.claim] != 0).any()
    back = attention_rollout(
        "decoder.self", layers, 0, known
    )  # one layer fewer is found again from the beginning
    torch.testing.assert_close(
        back.weights, plain_rollout([maps["decoder.0.self"][0]]), atol=1e-12, rtol=1e-9
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_and_rows_and_columns_are_parts_of_the_whole(family):
    asked = explorer(family)
    read = ask(asked, "attention", **texts(family))
    ids = [
        [token["id"] for token in read["tokens"][side]]
        for side in ("source", "text")
        if side in read["tokens"]
    ]
    with torch.no_grad(), kl.watch(asked.model) as maps:
        asked.model.hidden_states(*(torch.tensor([side]) for side in ids))
    for one in read["attentions"]:
        side, kind = one["name"].split(".")
        rows, columns = (len(read["tokens"][one[f"{axis}_side"]]) for axis in ("row", "column"))
        assert (one["rows"], one["columns"]) == (rows, columns)
        layers = [maps[f"{side}.{n}.{kind}"][0] for n in range(one["layers"])]
        for layer, whole in enumerate(layers):
            heads = {2: whole[2], "mean": whole.mean(0)}
            if kind == "self":
                heads["rollout"] = plain_rollout(layers[: layer + 1])
            for head, want in heads.items():
                which = dict(key=read["key"], name=one["name"], layer=layer, head=head)
                part = ask(asked, "tile", **which, row=1, column=2, size=3)
                assert (part["row"], part["column"]) == (1, 2)
                here = want[1:4, 2:5]
                assert (part["rows"], part["columns"]) == here.shape
                assert np.abs(u8(part["map_u8"], *here.shape) - shades(here)).max() <= 1
                claim = kl.mask_table(kl.causal if one["kind"] == "masked" else kl.full, max(rows, columns))[
                    :rows, :columns
                ]
                assert (bits(part["claim_bits"], *here.shape) == claim[1:4, 2:5].numpy()).all()
                reads, by = (
                    f32(ask(asked, "reads", **which, token=1, by=by)["weights_f32"]) for by in (False, True)
                )
                assert reads == pytest.approx(want[1].numpy(), abs=1e-6)
                assert by == pytest.approx(want[:, 1].numpy(), abs=1e-6)


@given(st.integers(1, 70), st.integers(1, 9), st.sampled_from([0, "mean", "rollout"]))
@settings(max_examples=40)
def test_an_overview_is_the_largest_of_each_cell(length, size, head):
    asked = LONG
    read = asked.text_cache.read(tokens(1, length)[0].tolist(), [])
    which = dict(key=read.key, name="decoder.self", layer=1, head=head)
    whole = torch.tensor(
        np.stack([f32(ask(asked, "reads", **which, token=n)["weights_f32"]) for n in range(length)])
    )
    found = ask(asked, "overview", **which, size=size)
    step = -(-length // size)
    cells = -(-length // step)
    assert (found["rows"], found["columns"], found["step"]) == (length, length, step)
    square = lambda table, row, column: table[
        row * step : (row + 1) * step, column * step : (column + 1) * step
    ]
    want = torch.tensor([[square(whole, q, k).max() for k in range(cells)] for q in range(cells)])
    claim = kl.mask_table(kl.causal if head == "rollout" else kl.causal & kl.window(5), length)
    assert found["top"] == pytest.approx(float(whole.max()))
    assert np.abs(u8(found["map_u8"], cells, cells) - shades(want, found["top"])).max() <= 1
    may = bits(found["claim_bits"], cells, cells)
    if head != "rollout":
        assert (
            may == np.array([[bool(square(claim, q, k).any()) for k in range(cells)] for q in range(cells)])
        ).all()
    assert not (u8(found["map_u8"], cells, cells)[~may] > 0).any()


BANDED = kl.presets.small(kl.presets.gpt3_small).but(
    vocab=31, decoder=kl.StackDesign(2, (kl.causal, kl.causal & kl.window(5)))
)
LONG = Explorer(kl.build(BANDED, generator=torch.Generator().manual_seed(1)), words())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_summary_says_of_each_head_what_its_map_says(family):
    asked = explorer(family)
    read = ask(asked, "attention", **texts(family))
    for one in read["attentions"]:
        found = ask(asked, "summary", key=read["key"], name=one["name"], layer=1)
        assert len(found["heads"]) == one["heads"]
        whole = (
            asked.text_cache[read["key"]]
            .attentions[one["name"]][1]
            .weights([3], torch.arange(one["rows"]))[0]
            .double()
        )
        here = found["heads"][3]
        q, k = torch.arange(one["rows"])[:, None], torch.arange(one["columns"])
        mean = lambda table, rows=one["rows"]: float(table.sum() / rows)
        assert here["entropy"] == pytest.approx(mean(-(whole * whole.clamp(min=1e-300).log2())), abs=1e-4)
        assert here["distance"] == pytest.approx(mean(whole * (q - k).abs()), abs=1e-4)
        assert here["first"] == pytest.approx(mean(whole[:, 0]), abs=1e-4)
        assert here["previous"] == pytest.approx(mean(whole * (q - k == 1)), abs=1e-4)
        assert here["itself"] == pytest.approx(mean(whole * (q == k)), abs=1e-4)
        assert here["outside"] == 0


def test_what_looks_beyond_its_claim_is_told():
    net = without_causal_mask(model("decoder"))
    asked = TextCache(net)
    read = asked.read(words().encode(TEXT).ids, [])
    asked_of = explorer("decoder")
    asked_of.text_cache = asked
    found = ask(asked_of, "summary", key=read.key, name="decoder.self", layer=1)
    assert max(head["outside"] for head in found["heads"]) > 0.1
    part = ask(
        asked_of, "tile", key=read.key, name="decoder.self", layer=0, head="mean", row=0, column=0, size=256
    )
    size = (part["rows"], part["columns"])
    assert u8(part["map_u8"], *size)[~bits(part["claim_bits"], *size)].max() > 0


def test_a_long_text_is_summed_up_from_some_of_its_rows():
    found = ask(
        LONG,
        "summary",
        key=LONG.text_cache.read(tokens(1, 300)[0].tolist(), []).key,
        name="decoder.self",
        layer=0,
    )
    assert found["rows"] == 256


def test_an_encoder_with_other_heads_than_its_decoder_is_told_with_its_own():
    stack = kl.StackDesign(2, (kl.full,), heads=12)
    asked = Explorer(model("encoder-decoder", encoder=stack), words())
    read = ask(asked, "attention", text=TEXT, source=SOURCE)
    heads = {"encoder.self": 12, "decoder.self": 6, "decoder.cross": 6}
    assert {each["name"]: each["heads"] for each in read["attentions"]} == heads
    assert {each["name"]: each["heads"] for each in ask(asked, "about")["attentions"]} == heads
    for name, count in heads.items():
        for head in ("mean", count - 1):
            ask(asked, "overview", key=read["key"], name=name, layer=1, head=head, size=64)
        assert len(ask(asked, "summary", key=read["key"], name=name, layer=0)["heads"]) == count


def test_a_pair_without_a_text_writes_one():
    asked = explorer("encoder-decoder")
    read = ask(asked, "attention", text="", source=SOURCE)
    shown = [token["id"] for token in read["tokens"]["text"]]
    want = kl.completions(asked.model, words(), SOURCE, max_new_tokens=128)[0][0]
    assert shown == [1, *(want.tokens[:-1] if want.ended else want.tokens)]
    assert read["tokens"]["text"][0] == {"id": 1, "text": "<s>", "special": True}


@given(designs(), st.sampled_from([1, 5, 13]))
@settings(max_examples=30)
def test_a_text_is_read_as_far_as_someone_looks_and_each_layer_is_that_of_a_whole_pass(design, length):
    net = made(design)
    side = given_to(net, length)
    with torch.no_grad():
        read = TextCache(net).read(side[-1][0].tolist(), side[0][0].tolist() if len(side) > 1 else [])
        whole = store_attentions(net, lambda: net.hidden_states(*side))
        lazy = not isinstance(design.position, kl.RelativeBias)
        for name, layers in read.attentions.items():
            assert (
                not lazy or name.endswith("cross") or not set(layers.names) & set(layers.forward_pass.layers)
            )
            for n, layer in enumerate(layers):
                want = whole[layers.names[n]]
                torch.testing.assert_close(layer.q, want.q, rtol=1e-9, atol=1e-9)
                torch.testing.assert_close(layer.k, want.k, rtol=1e-9, atol=1e-9)
                reached = set(layers.names) & set(layers.forward_pass.layers)
                assert not lazy or name.endswith("cross") or len(reached) == n + 1
    assert layers.forward_pass.layers.keys() == whole.keys()
    assert layers.forward_pass.iterator is None


def test_a_text_that_was_read_in_part_is_forgotten_when_the_weights_change():
    asked = explorer("decoder")
    key = ask(asked, "attention", text=TEXT)["key"]
    which = {"key": key, "name": "decoder.self", "head": "mean", "size": 64}
    ask(asked, "overview", **which, layer=0)
    with torch.no_grad():
        asked.model.token.weight.mul_(1.0)
    with pytest.raises(ExpiredError, match="the weights have changed since"):
        ask(asked, "overview", **which, layer=1)
    assert ask(asked, "attention", text=TEXT)["key"] != key


def test_only_a_few_texts_are_kept():
    asked = explorer("decoder")
    keys = [ask(asked, "attention", text=TEXT[:n])["key"] for n in range(3, 9)]
    assert len(set(keys)) == 6
    with pytest.raises(ExpiredError, match="no longer kept: ask for its attention again") as error:
        ask(asked, "summary", key=keys[0], name="decoder.self", layer=0)
    assert error.value.code == "forgotten"
    assert ask(asked, "attention", text=TEXT[:3])["key"] == keys[0]
    asked.text_cache.max_bytes = 1
    ask(asked, "attention", text=TEXT[:4])
    assert len(asked.text_cache.entries) == 1


def test_the_same_text_is_read_again_where_the_weights_have_changed():
    asked = explorer("decoder")
    before = ask(asked, "attention", text=TEXT)["key"]
    assert ask(asked, "attention", text=TEXT)["key"] == before
    with torch.no_grad():
        asked.model.token.weight.mul_(0.5)
    assert ask(asked, "attention", text=TEXT)["key"] != before


def test_a_long_text_is_cut_and_it_is_said():
    net = kl.build(
        kl.presets.small(kl.presets.gpt2).but(
            vocab=words().get_vocab_size(), position=kl.LearnedPositions(12)
        )
    )
    read = ask(Explorer(net, words()), "attention", text="sea " * 20)
    assert len(read["tokens"]["text"]) == 12
    assert read["shortened"] == "the text has 41 tokens, the first 12 are shown"


def test_room_is_made_for_as_many_tokens_as_fit():
    gpt2 = kl.presets.gpt2
    assert max_tokens(gpt2, 4, 1 << 29) == (1 << 29) // (12 * 24 * 64 * 4)
    assert max_tokens(kl.presets.llama3_1_405b, 2, 1 << 29) < 200
    assert max_tokens(kl.presets.t5_base, 4, 1 << 40) < 4096  # its biases are a table of all pairs


def test_nothing_is_left_on_the_model_and_it_may_be_trained():
    net = model("encoder-decoder").train()
    asked = Explorer(net, words())
    ask(asked, "attention", **texts("encoder-decoder"))
    ask(asked, "unmasked", **texts("encoder-decoder"))
    assert net.training
    assert all(part.requires_grad for part in net.parameters())
    assert net.decoder.masks == (kl.causal,)
    assert not any(getattr(part, "watcher", None) for part in net.modules())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "decoder.cross"}, "no name is called 'decoder.cross'"),
        ({"layer": 2}, "layer is 2: it must be a whole number from 0 to 1"),
        ({"layer": True}, "layer is True"),
        ({"head": 6}, "head is 6: it must be a whole number from 0 to 5"),
        ({"head": "max"}, "no head is called 'max': there are mean, rollout"),
        ({"size": 257}, "size is 257"),
        ({"row": -1}, "row is -1"),
        ({"column": 99}, "column is 99"),
        ({"key": 7}, "key is 7: it must be a text"),
        ({"row": None}, "tile needs row: give a whole number"),
        ({"path": "x"}, "tile takes no 'path'"),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_name(change, said):
    asked = explorer("decoder")
    key = ask(asked, "attention", text=TEXT)["key"]
    with pytest.raises(ValueError, match=said):
        ask(
            asked,
            "tile",
            **{**dict(key=key, name="decoder.self", layer=0, head=0, row=0, column=0, size=8), **change},
        )
