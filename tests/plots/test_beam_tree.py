"""The tree of a beam search has the search's parents, its best text, and a box for each text that fits."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch

import keepleft as kl
from keepleft.data.tokenizer import train_tokenizer, vocab_size
from keepleft.decoding.beam import EXCLUDED_SCORE, Beam
from keepleft.plots.beam_tree import LEGEND, beam_nodes, plot_beam_tree

SVG = "{http://www.w3.org/2000/svg}"
TOKENIZER = train_tokenizer("char", ["abcdefgh <&>\nकिé"], 40, min_frequency=1)
MODEL = kl.build(
    kl.presets.small(kl.presets.llama).but(vocab=vocab_size(TOKENIZER)),
    dtype=torch.float64,
    generator=torch.Generator().manual_seed(4),
).eval()
PROMPT, SEGMENTS = torch.tensor([[0, 7, 8], [9, 6, 11]]), torch.tensor([[0, 1, 1], [1, 1, 1]])


class RecordingBeam:
    """A beam that records the row that each hypothesis continues."""

    def __init__(self, strategy):
        self.strategy = strategy
        self.begin = strategy.begin
        self.parents = []

    def choose(self, logits, hypotheses):
        out, rows = self.strategy.choose(logits, hypotheses)
        self.parents.append(rows.tolist())
        return out, rows


def search(limit=7, **choices):
    strategy = RecordingBeam(
        Beam(**{"width": 4, "eos_ids": (8,), "num_sequences": choices.get("width", 4), **choices})
    )
    return list(kl.decode(MODEL, PROMPT, strategy, max_new_tokens=limit, segments=SEGMENTS)), strategy


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"width": 1},
        {"width": 6, "early_stopping": True},
        {"width": 6, "groups": 3, "diversity_penalty": 0.4},
        {"width": 5, "early_stopping": "never", "length_penalty": 0.3, "eos_ids": (8, 9, 10, 11)},
        {"seeds": torch.tensor([3, 4])},
        {"eos_ids": ()},
        {"width": 13, "limit": 2},
    ],
)
def test_parents_are_those_of_the_search(choices, row):
    steps, strategy = search(**choices)
    width, groups = strategy.strategy.width, strategy.strategy.groups
    size = width // groups
    previous, parents = [()] * width, {}  # by following rows, without comparing tokens
    for hypotheses, rows in zip(steps, strategy.parents, strict=True):
        current = []
        for n in range(width):
            beam = row * width + n
            parent = previous[rows[beam] - row * width]
            current.append((*parent, int(hypotheses.tokens[beam, -1])))
            if hypotheses.score[beam] > EXCLUDED_SCORE / 2:
                assert (rows[beam] - row * width) // size == n // size
                parents[n // size, current[-1]] = (n // size, parent)
        previous = current
    nodes = beam_nodes(steps, row)
    live = {node.key: node.parent for node in nodes if not node.finished}
    assert live == parents
    assert all(node.parent in parents or len(node.tokens) == 1 for node in nodes)
    results = strategy.strategy.results(steps[-1])[row]
    best = [node for node in nodes if node.best]
    assert [node.tokens for node in best] == [
        tuple(results[0].tokens[: n + 1]) for n in range(len(results[0].tokens))
    ]
    if any(node.finished for node in nodes):
        ended = {
            node.tokens: node.score
            for node in sorted(nodes, key=lambda node: node.score)
            if node.finished and node.survives
        }
        assert ended == {tuple(result.tokens): result.score for result in results}


def test_a_search_that_goes_on_has_a_best_text_too():
    steps, _ = search(eos_ids=())
    nodes = beam_nodes(steps[:3])
    assert not any(node.finished for node in nodes)
    assert [node.tokens for node in nodes if node.best][-1] == tuple(
        steps[2].tokens[steps[2].score[:4].argmax(), 3:].tolist()
    )


def test_every_text_has_a_box_and_every_parent_a_line(tmp_path):
    steps, _ = search(width=5, early_stopping="never")
    nodes = beam_nodes(steps)
    root = ElementTree.fromstring(
        plot_beam_tree(tmp_path / "a.svg", steps, TOKENIZER, title="a < b").read_text("utf-8")
    )
    assert len(root.findall(f"{SVG}rect")) == 1 + len(nodes) + sum(node.finished for node in nodes)
    assert len(root.findall(f"{SVG}path")) == sum(len(node.tokens) > 1 for node in nodes)
    assert (
        sum(line.get("stroke-width") == "2.6" for line in root.findall(f"{SVG}path"))
        == sum(node.best for node in nodes) - 1
    )
    texts = ["".join(text.itertext()) for text in root.findall(f"{SVG}text")]
    for node in nodes:
        assert (f"= {node.score:.2f}" if node.finished else f"{node.score:.2f}") in texts
    assert {"a < b", *LEGEND} <= set(texts)
    corners = [(box.get("x"), box.get("y")) for box in root.findall(f"{SVG}rect")[1:]]
    assert len(set(corners)) == len(corners)
    width, height = float(root.get("width")), float(root.get("height"))
    for box in root.findall(f"{SVG}rect")[1:]:
        assert float(box.get("x")) + float(box.get("width")) <= width
        assert float(box.get("y")) + float(box.get("height")) <= height


def test_lines_do_not_cross(tmp_path):
    steps, _ = search(width=6, eos_ids=(8, 9), early_stopping="never")
    root = ElementTree.fromstring(
        plot_beam_tree(tmp_path / "a.svg", steps, TOKENIZER, title="t").read_text("utf-8")
    )
    columns = {}
    for line in root.findall(f"{SVG}path"):
        _, x, y, *_, level = line.get("d").split()
        columns.setdefault(x, []).append((float(y), float(level)))
    assert len(columns) > 3
    for lines in columns.values():
        lines.sort()
        assert [level for _, level in lines] == sorted(level for _, level in lines)


def test_a_large_tree_stays_small_and_says_what_is_missing(tmp_path):
    steps, _ = search(width=12, eos_ids=(), limit=40)
    nodes = beam_nodes(steps)
    root = ElementTree.fromstring(
        plot_beam_tree(tmp_path / "a.svg", steps, TOKENIZER, title="t", max_columns=9, max_rows=5).read_text(
            "utf-8"
        )
    )
    texts = ["".join(text.itertext()) for text in root.findall(f"{SVG}text")]
    shown = len(root.findall(f"{SVG}rect")) - 1
    assert shown <= 45
    missing = sum(len(node.tokens) <= 9 for node in nodes) - shown
    assert f"… 31 later steps and {missing} texts are not shown" in texts
    assert float(root.get("width")) < 1600


def test_what_has_no_tree_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="no steps"):
        beam_nodes([])
    steps, _ = search()
    with pytest.raises(ValueError, match="prompt 2 was asked for"):
        plot_beam_tree(tmp_path / "a.svg", steps, TOKENIZER, title="t", row=2)
    with pytest.raises(TypeError, match="only beam search"):
        beam_nodes(list(kl.decode(MODEL, PROMPT, kl.greedy(), max_new_tokens=2)))
