"""Alignments are the cross-attention weights of the model while it generated."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch

import keepleft as kl
from keepleft.demo import translator
from keepleft.plots.cross_attention import alignment_weights, pharaoh_pairs, plot_alignment

SVG = "{http://www.w3.org/2000/svg}"
MODEL = kl.build(kl.presets.small(kl.presets.marian), generator=torch.Generator().manual_seed(6)).eval()
SOURCE, TOKENS = [5, 9, 13, 7, 2], [1, 8, 11, 3]


def test_a_row_is_the_cross_attention_of_the_step_that_generated_its_token():
    weights = alignment_weights(MODEL, SOURCE, TOKENS)
    assert weights.shape == (3, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3))
    last = len(MODEL.decoder.layers) - 1
    with torch.no_grad(), kl.watch(MODEL, f"decoder.{last}.cross") as maps:
        _, state = MODEL.start(torch.tensor([TOKENS[:1]]), memory=MODEL.encode_memory(torch.tensor([SOURCE])))
        for n, token in enumerate(TOKENS[1:]):
            attended = maps[f"decoder.{last}.cross"][0, :, -1].mean(0)
            torch.testing.assert_close(weights[n], attended)
            MODEL.step(torch.tensor([[token]]), state)


def test_layers_and_source_tokens_can_be_chosen():
    by_layer = [
        alignment_weights(MODEL, SOURCE, TOKENS, layers=[n]) for n in range(len(MODEL.decoder.layers))
    ]
    assert len(by_layer) > 1
    torch.testing.assert_close(
        alignment_weights(MODEL, SOURCE, TOKENS, layers=range(len(by_layer))), torch.stack(by_layer).mean(0)
    )
    torch.testing.assert_close(alignment_weights(MODEL, SOURCE, TOKENS), by_layer[-1])
    inner = alignment_weights(MODEL, SOURCE, TOKENS, source_slice=slice(1, -1))
    torch.testing.assert_close(inner, by_layer[-1][:, 1:-1] / by_layer[-1][:, 1:-1].sum(-1, keepdim=True))
    torch.testing.assert_close(alignment_weights(MODEL, SOURCE, TOKENS, begin=2), by_layer[-1][1:])
    assert alignment_weights(MODEL, SOURCE, TOKENS[:1]).shape == (0, 5)


def test_each_target_token_has_one_source_token():
    assert pharaoh_pairs(torch.tensor([[0.1, 0.9], [0.7, 0.3], [0.0, 1.0]])) == [(1, 0), (0, 1), (1, 2)]
    assert pharaoh_pairs(torch.zeros(0, 4)) == pharaoh_pairs(torch.zeros(2, 0)) == []


def test_the_demo_draws_the_same_matrix(tmp_path):
    task = translator.prepare_demo(test_size=3, dim=16, layers=2, width=16)
    source, target, weights = translator.alignment(task, "hi", "He sleeps on the beach")
    assert source == ["He", "sleeps", "on", "the", "beach"]
    assert weights.shape == (len(target), 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(len(target)))
    path = translator.plot_alignment(source, target, weights, str(tmp_path / "new"))
    texts = [
        "".join(text.itertext())
        for text in ElementTree.fromstring(path.read_text("utf-8")).iter(f"{SVG}text")
    ]
    assert set(source) <= set(texts)


def test_every_token_is_in_the_picture_with_a_cell_for_each_pair(tmp_path):
    weights = torch.tensor([[0.7, 0.2, 0.1], [0.0, 0.0, 1.0]])
    path = plot_alignment(tmp_path / "a.svg", ["<2hi>", "a&b", " c"], ["समुद्र", "été"], weights, title="a < b")
    root = ElementTree.fromstring(path.read_text("utf-8"))
    texts = {"".join(text.itertext()) for text in root.iter(f"{SVG}text")}
    assert texts == {"a < b", "<2hi>", "a&b", "␣c", "समुद्र", "été"}
    cells = root.findall(f"{SVG}rect")[1:]
    assert [cell.find(f"{SVG}title").text for cell in cells][:2] == ["समुद्र ← <2hi>: 0.70", "समुद्र ← a&b: 0.20"]
    assert len(cells) == 6
    assert len(root.findall(f"{SVG}circle")) == 2


def test_a_long_text_is_cut_and_says_so(tmp_path):
    weights = torch.full((300, 200), 1 / 200)
    path = plot_alignment(
        tmp_path / "a.svg", ["s" * 90] * 200, ["w"] * 300, weights, title="t", max_tokens=30
    )
    root = ElementTree.fromstring(path.read_text("utf-8"))
    assert len(root.findall(f"{SVG}rect")) == 1 + 900
    assert float(root.get("height")) < 1300
    assert any(
        "… 270 written and 170 source tokens more" in "".join(text.itertext())
        for text in root.iter(f"{SVG}text")
    )


def test_what_cannot_be_aligned_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="does not write from a source"):
        alignment_weights(kl.build(kl.presets.small(kl.presets.llama)), SOURCE, TOKENS)
    with pytest.raises(ValueError, match="layers are"):
        alignment_weights(MODEL, SOURCE, TOKENS, layers=[9])
    with pytest.raises(ValueError, match="begin is 5"):
        alignment_weights(MODEL, SOURCE, TOKENS, begin=5)
    with pytest.raises(ValueError, match="a row is a written one"):
        plot_alignment(tmp_path / "a.svg", ["a"], ["b"], torch.zeros(2, 2), title="t")
