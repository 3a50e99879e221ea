"""Tiles, rows and overviews of a map are those of what kl.watch shows, in every family."""

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
    example_texts,
    f32,
    make_explorer,
    make_model,
    quantize,
    tokenizer,
    u8,
)
from strategies import MASKS, designs, random_model, tokens

pytestmark = pytest.mark.usefixtures("one_thread")


def model_inputs(model, length: int, other: int = 7) -> list[torch.Tensor]:
    return (
        [tokens(1, other), tokens(1, length)] if isinstance(model, kl.EncoderDecoder) else [tokens(1, length)]
    )


@given(designs(), st.data())
@settings(max_examples=40)
def test_weights_are_those_that_watch_shows(design, data):
    model, length = random_model(design), data.draw(st.sampled_from([1, 5, 13]))
    inputs = model_inputs(model, length)
    with torch.no_grad():
        with kl.watch(model) as maps:
            model.hidden_states(*inputs)
        stored = store_attentions(model, lambda: model.hidden_states(*inputs))
    assert stored.keys() == maps.keys()
    for name, layer in stored.items():
        full_map = maps[name][0]
        heads = data.draw(st.lists(st.integers(0, layer.heads - 1), min_size=1, max_size=3, unique=True))
        rows = torch.tensor(
            data.draw(st.lists(st.integers(0, layer.rows - 1), min_size=1, max_size=4, unique=True))
        )
        torch.testing.assert_close(
            layer.weights(range(layer.heads), torch.arange(layer.rows)), full_map, atol=1e-12, rtol=1e-9
        )
        torch.testing.assert_close(
            layer.weights(heads, rows), full_map[heads][:, rows], atol=1e-12, rtol=1e-9
        )
        tall = data.draw(st.sampled_from([1, 3, 128]))
        for strip in layer.strips(heads, height=tall):
            part = full_map[heads][:, strip.begin : strip.end]
            torch.testing.assert_close(
                strip.weights, part[..., strip.left : strip.right], atol=1e-12, rtol=1e-9
            )
            assert float(part.sum()) == pytest.approx(float(strip.weights.sum()))  # nothing lies beyond


@given(MASKS, st.sampled_from([1, 4, 9]))
@settings(max_examples=40)
def test_any_mask_is_kept_to_even_by_those_who_see_nothing(mask, length):
    model = random_model(
        kl.presets.small(kl.presets.llama).but(vocab=31, dim=24, heads=6, decoder=kl.StackDesign(2, (mask,)))
    )
    with torch.no_grad(), kl.watch(model) as maps:
        model.hidden_states(tokens(1, length))
    stored = store_attentions(model, lambda: model.hidden_states(tokens(1, length)))
    for name, layer in stored.items():
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
    model = random_model(
        kl.presets.small(kl.presets.llama).but(
            vocab=31, dim=24, heads=6, decoder=kl.StackDesign(3, tuple(masks))
        )
    )
    with torch.no_grad(), kl.watch(model) as maps:
        model.hidden_states(tokens(1, length))
    layers = list(store_attentions(model, lambda: model.hidden_states(tokens(1, length))).values())
    rollout, reach = None, torch.eye(length, dtype=torch.bool)
    for n in range(3):
        rollout = attention_rollout("decoder.self", layers, n, rollout)
        expected = plain_rollout([maps[f"decoder.{m}.self"][0] for m in range(n + 1)])
        torch.testing.assert_close(rollout.weights, expected, atol=1e-12, rtol=1e-9)
        step = kl.mask_table(masks[n % len(masks)], length) | torch.eye(length, dtype=torch.bool)
        reach = (step.double() @ reach.double()) > 0
        assert torch.equal(rollout.claim, reach)
        assert not (rollout.weights[~rollout.claim] != 0).any()
    # one layer fewer is found again from the beginning
    back = attention_rollout("decoder.self", layers, 0, rollout)
    torch.testing.assert_close(
        back.weights, plain_rollout([maps["decoder.0.self"][0]]), atol=1e-12, rtol=1e-9
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_and_rows_and_columns_are_parts_of_the_whole(family):
    explorer = make_explorer(family)
    reading = ask(explorer, "attention", **example_texts(family))
    ids = [
        [token["id"] for token in reading["tokens"][side]]
        for side in ("source", "text")
        if side in reading["tokens"]
    ]
    with torch.no_grad(), kl.watch(explorer.model) as maps:
        explorer.model.hidden_states(*(torch.tensor([side]) for side in ids))
    for attention in reading["attentions"]:
        side, kind = attention["name"].split(".")
        rows, columns = (len(reading["tokens"][attention[f"{axis}_side"]]) for axis in ("row", "column"))
        assert (attention["rows"], attention["columns"]) == (rows, columns)
        layers = [maps[f"{side}.{n}.{kind}"][0] for n in range(attention["layers"])]
        for layer, full_map in enumerate(layers):
            heads = {2: full_map[2], "mean": full_map.mean(0)}
            if kind == "self":
                heads["rollout"] = plain_rollout(layers[: layer + 1])
            for head, expected in heads.items():
                map_params = dict(key=reading["key"], name=attention["name"], layer=layer, head=head)
                part = ask(explorer, "tile", **map_params, row=1, column=2, size=3)
                assert (part["row"], part["column"]) == (1, 2)
                expected_tile = expected[1:4, 2:5]
                assert (part["rows"], part["columns"]) == expected_tile.shape
                assert np.abs(u8(part["map_u8"], *expected_tile.shape) - quantize(expected_tile)).max() <= 1
                mask = kl.causal if attention["kind"] == "masked" else kl.full
                claim = kl.mask_table(mask, max(rows, columns))[:rows, :columns]
                assert (bits(part["claim_bits"], *expected_tile.shape) == claim[1:4, 2:5].numpy()).all()
                for incoming, expected_weights in ((False, expected[1]), (True, expected[:, 1])):
                    answer = ask(explorer, "token_attention", **map_params, token=1, incoming=incoming)
                    assert f32(answer["weights_f32"]) == pytest.approx(expected_weights.numpy(), abs=1e-6)


@given(st.integers(1, 70), st.integers(1, 9), st.sampled_from([0, "mean", "rollout"]))
@settings(max_examples=40)
def test_an_overview_is_the_largest_of_each_cell(length, size, head):
    explorer = LONG
    reading = explorer.text_cache.read(tokens(1, length)[0].tolist(), [])
    map_params = dict(key=reading.key, name="decoder.self", layer=1, head=head)
    full_map = torch.tensor(
        np.stack(
            [
                f32(ask(explorer, "token_attention", **map_params, token=n)["weights_f32"])
                for n in range(length)
            ]
        )
    )
    answer = ask(explorer, "overview", **map_params, size=size)
    step = -(-length // size)
    cells = -(-length // step)
    assert (answer["rows"], answer["columns"], answer["cell_size"]) == (length, length, step)
    square = lambda table, row, column: table[
        row * step : (row + 1) * step, column * step : (column + 1) * step
    ]
    expected = torch.tensor([[square(full_map, q, k).max() for k in range(cells)] for q in range(cells)])
    claim = kl.mask_table(kl.causal if head == "rollout" else kl.causal & kl.window(5), length)
    assert answer["max_weight"] == pytest.approx(float(full_map.max()))
    assert np.abs(u8(answer["map_u8"], cells, cells) - quantize(expected, answer["max_weight"])).max() <= 1
    claim_cells = bits(answer["claim_bits"], cells, cells)
    if head != "rollout":
        assert (
            claim_cells
            == np.array([[bool(square(claim, q, k).any()) for k in range(cells)] for q in range(cells)])
        ).all()
    assert not (u8(answer["map_u8"], cells, cells)[~claim_cells] > 0).any()


BANDED = kl.presets.small(kl.presets.gpt3_small).but(
    vocab=31, decoder=kl.StackDesign(2, (kl.causal, kl.causal & kl.window(5)))
)
LONG = Explorer(kl.build(BANDED, generator=torch.Generator().manual_seed(1)), tokenizer())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_summary_says_of_each_head_what_its_map_says(family):
    explorer = make_explorer(family)
    reading = ask(explorer, "attention", **example_texts(family))
    for attention in reading["attentions"]:
        answer = ask(explorer, "head_stats", key=reading["key"], name=attention["name"], layer=1)
        assert len(answer["heads"]) == attention["heads"]
        full_map = (
            explorer.text_cache.get(reading["key"])
            .attentions[attention["name"]][1]
            .weights([3], torch.arange(attention["rows"]))[0]
            .double()
        )
        stats = answer["heads"][3]
        q, k = torch.arange(attention["rows"])[:, None], torch.arange(attention["columns"])
        mean = lambda table, rows=attention["rows"]: float(table.sum() / rows)
        assert stats["entropy"] == pytest.approx(
            mean(-(full_map * full_map.clamp(min=1e-300).log2())), abs=1e-4
        )
        assert stats["distance"] == pytest.approx(mean(full_map * (q - k).abs()), abs=1e-4)
        assert stats["first"] == pytest.approx(mean(full_map[:, 0]), abs=1e-4)
        assert stats["previous"] == pytest.approx(mean(full_map * (q - k == 1)), abs=1e-4)
        assert stats["itself"] == pytest.approx(mean(full_map * (q == k)), abs=1e-4)
        assert stats["outside"] == 0


def test_what_looks_beyond_its_claim_is_told():
    model = without_causal_mask(make_model("decoder"))
    explorer = make_explorer("decoder")
    explorer.text_cache = TextCache(model)
    reading = explorer.text_cache.read(tokenizer().encode(TEXT).ids, [])
    answer = ask(explorer, "head_stats", key=reading.key, name="decoder.self", layer=1)
    assert max(head["outside"] for head in answer["heads"]) > 0.1
    part = ask(
        explorer,
        "tile",
        key=reading.key,
        name="decoder.self",
        layer=0,
        head="mean",
        row=0,
        column=0,
        size=256,
    )
    size = (part["rows"], part["columns"])
    assert u8(part["map_u8"], *size)[~bits(part["claim_bits"], *size)].max() > 0


def test_a_long_text_is_summed_up_from_some_of_its_rows():
    answer = ask(
        LONG,
        "head_stats",
        key=LONG.text_cache.read(tokens(1, 300)[0].tolist(), []).key,
        name="decoder.self",
        layer=0,
    )
    assert answer["rows"] == 256


def test_an_encoder_with_other_heads_than_its_decoder_is_told_with_its_own():
    stack = kl.StackDesign(2, (kl.full,), heads=12)
    explorer = Explorer(make_model("encoder-decoder", encoder=stack), tokenizer())
    reading = ask(explorer, "attention", text=TEXT, source=SOURCE)
    heads = {"encoder.self": 12, "decoder.self": 6, "decoder.cross": 6}
    assert {attention["name"]: attention["heads"] for attention in reading["attentions"]} == heads
    assert {
        attention["name"]: attention["heads"] for attention in ask(explorer, "model_info")["attentions"]
    } == heads
    for name, count in heads.items():
        for head in ("mean", count - 1):
            ask(explorer, "overview", key=reading["key"], name=name, layer=1, head=head, size=64)
        assert len(ask(explorer, "head_stats", key=reading["key"], name=name, layer=0)["heads"]) == count


def test_a_pair_without_a_text_writes_one():
    explorer = make_explorer("encoder-decoder")
    reading = ask(explorer, "attention", text="", source=SOURCE)
    token_ids = [token["id"] for token in reading["tokens"]["text"]]
    expected = kl.completions(explorer.model, tokenizer(), SOURCE, max_new_tokens=128)[0][0]
    assert token_ids == [1, *(expected.tokens[:-1] if expected.ended else expected.tokens)]
    assert reading["tokens"]["text"][0] == {"id": 1, "text": "<s>", "special": True}


@given(designs(), st.sampled_from([1, 5, 13]))
@settings(max_examples=30)
def test_a_text_is_read_as_far_as_someone_looks_and_each_layer_is_that_of_a_whole_pass(design, length):
    model = random_model(design)
    inputs = model_inputs(model, length)
    with torch.no_grad():
        reading = TextCache(model).read(
            inputs[-1][0].tolist(), inputs[0][0].tolist() if len(inputs) > 1 else []
        )
        stored = store_attentions(model, lambda: model.hidden_states(*inputs))
        lazy = not isinstance(design.position, kl.RelativeBias)
        for name, layers in reading.attentions.items():
            assert (
                not lazy or name.endswith("cross") or not set(layers.names) & set(layers.forward_pass.layers)
            )
            for n, layer in enumerate(layers):
                expected = stored[layers.names[n]]
                torch.testing.assert_close(layer.q, expected.q, rtol=1e-9, atol=1e-9)
                torch.testing.assert_close(layer.k, expected.k, rtol=1e-9, atol=1e-9)
                reached = set(layers.names) & set(layers.forward_pass.layers)
                assert not lazy or name.endswith("cross") or len(reached) == n + 1
    assert layers.forward_pass.layers.keys() == stored.keys()
    assert layers.forward_pass.iterator is None


def test_a_text_that_was_read_in_part_is_forgotten_when_the_weights_change():
    explorer = make_explorer("decoder")
    key = ask(explorer, "attention", text=TEXT)["key"]
    map_params = {"key": key, "name": "decoder.self", "head": "mean", "size": 64}
    ask(explorer, "overview", **map_params, layer=0)
    with torch.no_grad():
        explorer.model.token.weight.mul_(1.0)
    with pytest.raises(ExpiredError, match="the weights have changed since"):
        ask(explorer, "overview", **map_params, layer=1)
    assert ask(explorer, "attention", text=TEXT)["key"] != key


def test_only_a_few_texts_are_kept():
    explorer = make_explorer("decoder")
    keys = [ask(explorer, "attention", text=TEXT[:n])["key"] for n in range(3, 9)]
    assert len(set(keys)) == 6
    with pytest.raises(ExpiredError, match="no longer kept: ask for its attention again") as error:
        ask(explorer, "head_stats", key=keys[0], name="decoder.self", layer=0)
    assert error.value.code == "expired"
    assert ask(explorer, "attention", text=TEXT[:3])["key"] == keys[0]
    explorer.text_cache.max_bytes = 1
    ask(explorer, "attention", text=TEXT[:4])
    assert len(explorer.text_cache.entries) == 1


def test_a_text_is_kept_for_its_tenant_alone():
    explorer = make_explorer("decoder")
    ask_as = lambda tenant, question, **params: explorer.ask(question, params, tenant)
    key = ask_as("a", "attention", text=TEXT)["key"]
    params = {"key": key, "name": "decoder.self", "layer": 0}
    with pytest.raises(ExpiredError):
        ask_as("b", "head_stats", **params)
    assert ask_as("b", "attention", text=TEXT)["key"] != key
    assert make_explorer("decoder").ask("attention", {"text": TEXT}, "a")["key"] != key  # of another process
    for n in range(3, 12):
        ask_as("b", "attention", text=TEXT[:n])
    assert ask_as("a", "head_stats", **params)["heads"]


def test_a_tenant_evicts_its_own_texts_first_and_the_last_one_of_another_at_the_end():
    explorer = make_explorer("decoder")
    cache = explorer.text_cache
    size = cache.read([3, 4], [], "a").bytes
    cache.max_bytes = 4 * size
    for text, tenant in (([5, 6], "a"), ([3, 4], "b"), ([5, 6], "b"), ([7, 8], "b")):
        cache.read(text, [], tenant)
    kept = lambda: [(entry.tenant, entry.tokens) for entry in cache.entries.values()]
    assert kept() == [("a", [3, 4]), ("a", [5, 6]), ("b", [5, 6]), ("b", [7, 8])]
    cache.read([3, 4], [], "c")
    assert kept() == [("a", [5, 6]), ("b", [5, 6]), ("b", [7, 8]), ("c", [3, 4])]
    cache.read([3, 4], [], "d")
    assert kept() == [("a", [5, 6]), ("b", [7, 8]), ("c", [3, 4]), ("d", [3, 4])]
    cache.read([3, 4], [], "e")  # nobody has two
    assert kept() == [("b", [7, 8]), ("c", [3, 4]), ("d", [3, 4]), ("e", [3, 4])]


def test_the_keys_and_values_of_a_prefix_are_those_of_one_tenant():
    explorer = make_explorer("decoder")
    scorers = []
    for tenant in ("a", "a", "b", "a"):
        explorer.ask("next_token", {"text": TEXT}, tenant)
        scorers.append(explorer.scorer)
    assert [scorer is scorers[0] for scorer in scorers] == [True, True, False, False]


def test_the_same_text_is_read_again_where_the_weights_have_changed():
    explorer = make_explorer("decoder")
    before = ask(explorer, "attention", text=TEXT)["key"]
    assert ask(explorer, "attention", text=TEXT)["key"] == before
    with torch.no_grad():
        explorer.model.token.weight.mul_(0.5)
    assert ask(explorer, "attention", text=TEXT)["key"] != before


def test_a_long_text_is_cut_and_it_is_said():
    model = kl.build(
        kl.presets.small(kl.presets.gpt2).but(
            vocab=tokenizer().get_vocab_size(), position=kl.LearnedPositions(12)
        )
    )
    reading = ask(Explorer(model, tokenizer()), "attention", text="sea " * 20)
    assert len(reading["tokens"]["text"]) == 12
    assert reading["truncated"] == "the text has 41 tokens, the first 12 are shown"


def test_room_is_made_for_as_many_tokens_as_fit():
    gpt2 = kl.presets.gpt2
    assert max_tokens(gpt2, 4, 1 << 29) == (1 << 29) // (12 * 24 * 64 * 4)
    assert max_tokens(kl.presets.llama3_1_405b, 2, 1 << 29) < 200
    assert max_tokens(kl.presets.t5_base, 4, 1 << 40) < 4096  # its biases are a table of all pairs


def test_nothing_is_left_on_the_model_and_it_may_be_trained():
    model = make_model("encoder-decoder").train()
    explorer = Explorer(model, tokenizer())
    ask(explorer, "attention", **example_texts("encoder-decoder"))
    ask(explorer, "unmasked", **example_texts("encoder-decoder"))
    assert model.training
    assert all(part.requires_grad for part in model.parameters())
    assert model.decoder.masks == (kl.causal,)
    assert not any(getattr(part, "watcher", None) for part in model.modules())


@pytest.mark.parametrize(
    ("change", "message"),
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
def test_what_is_out_of_bounds_is_refused_by_name(change, message):
    explorer = make_explorer("decoder")
    key = ask(explorer, "attention", text=TEXT)["key"]
    with pytest.raises(ValueError, match=message):
        ask(
            explorer,
            "tile",
            **{**dict(key=key, name="decoder.self", layer=0, head=0, row=0, column=0, size=8), **change},
        )
