"""The choices behind a text are those that were made, and the picture shows each of them."""

from __future__ import annotations

import math
import re
from functools import cache
from xml.etree import ElementTree

import pytest
import torch

import keepleft as kl
from keepleft.data.tokenizer import learn, span
from keepleft.decoding import filters, transforms
from keepleft.runs.choices import Choice, distributions, watched
from keepleft.runs.spelled import in_turn, read, spelled

SVG = "{http://www.w3.org/2000/svg}"
TEXTS = ["Il a mangé du pain & du lait <hier>\n", "वह समुद्र तट पर सोता है", "she sleeps on the beach every morning"] * 3


@cache
def lesson(kind="decoder"):
    tokenizer = learn("bpe", TEXTS, 300, running=True)
    design = kl.presets.small({"decoder": kl.presets.llama, "both": kl.presets.marian}[kind]).but(vocab=span(tokenizer))
    return kl.build(design, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).eval(), tokenizer


def said(path):
    return ["".join(text.itertext()) for text in ElementTree.fromstring(path.read_text("utf-8")).iter(f"{SVG}text")]


@pytest.mark.parametrize("kind", ["decoder", "both"])
def test_one_pass_finds_the_very_probabilities_that_a_text_was_drawn_with(kind):
    model, tokenizer = lesson(kind)
    given = {} if kind == "decoder" else {"decoder_start_token_id": 1}
    answer = kl.answers(model, tokenizer, [TEXTS[1]], max_new_tokens=11, do_sample=True, temperature=0.7, top_k=9, seed=5,
                        repetition_penalty=1.3, **given)[0][0]
    before = answer.prompt if kind == "decoder" else [1]
    steps = watched(model, tokenizer, [*before, *answer.tokens], len(before), few=12,
                    source=None if kind == "decoder" else answer.prompt,
                    transforms=[transforms.repetition(1.3), filters.temperature(0.7), filters.top_k(9)])
    assert math.isclose(sum(math.log(step.after[step.chosen]) for step in steps), answer.score, rel_tol=1e-4)
    assert [step.tokens[step.chosen] for step in steps] == in_turn(tokenizer, [*before, *answer.tokens], len(before))
    for step in steps:
        assert len(step.tokens) == len(step.before) == len(step.after) >= 12
        assert math.isclose(sum(step.after), 1.0, rel_tol=1e-6)  # the nine that were left are among the twelve
        assert sum(share == 0 for share in step.after) == len(step.after) - 9
        assert sum(step.before) < 1
        assert list(step.before) == sorted(step.before, reverse=True)


def test_without_transforms_nothing_changes_and_the_greedy_choice_is_the_first():
    model, tokenizer = lesson()
    answer = kl.answers(model, tokenizer, ["she sleeps"], max_new_tokens=7)[0][0]
    steps = watched(model, tokenizer, answer.prompt + answer.tokens, len(answer.prompt), few=3)
    assert [step.chosen for step in steps] == [0] * 7
    assert all(step.before == step.after and len(step.tokens) == 3 for step in steps)
    assert steps[0].text == "she sleeps"
    assert watched(model, tokenizer, answer.prompt, len(answer.prompt)) == []


def test_the_model_is_left_as_it_was():
    model, tokenizer = lesson()
    model.train()
    try:
        watched(model, tokenizer, [5, 6, 7], 1)
        assert model.training
    finally:
        model.eval()


def test_every_token_is_in_the_picture_and_marked(tmp_path):
    steps = [Choice("", ("वह", "<b>&", " a b"), (0.5, 0.3, 0.2), (0.0, 0.75, 0.25), 1),
             Choice("<b>&", ("\n", "é"), (0.6, 0.4), (0.6, 0.4), 0)]
    path = distributions(tmp_path / "a.svg", steps, title="a < b")
    words = said(path)
    assert {"a < b", "वह", "<b>&", "␣a␣b", "↵", "é", "<b>&↵"} <= set(words)
    assert words.count("▶") == 2
    root = ElementTree.fromstring(path.read_text("utf-8"))
    texts = {"".join(text.itertext()): text for text in root.iter(f"{SVG}text")}
    assert texts["वह"].get("text-decoration") == "line-through"
    assert "0.500 → ruled out" in texts
    assert texts["↵"].get("font-weight") == "bold"
    wide = {bar.find(f"{SVG}title").text.split(":")[0]: float(bar.get("width")) for bar in root.findall(f"{SVG}rect")
            if bar.get("fill-opacity")}
    assert math.isclose(wide["<b>&"], 3 * wide["␣a␣b"], rel_tol=0.01)
    assert wide["वह"] <= 1


def test_a_long_text_is_cut_and_says_so(tmp_path):
    steps = [Choice("x" * 5000, ("y" * 5000, "z"), (0.9, 0.1), (0.9, 0.1), 0)] * 500
    path = distributions(tmp_path / "a.svg", steps, title="long", most=20)
    root = ElementTree.fromstring(path.read_text("utf-8"))
    assert float(root.get("height")) < 20 * 60
    assert "… 480 more steps are not shown" in said(path)
    assert max(map(len, said(path))) < 120


def test_tokens_read_as_they_add_to_the_text():
    _, tokenizer = lesson()
    row = tokenizer.encode("a मोर 🦚 é").ids
    parts = in_turn(tokenizer, row)
    assert any("\\x" in part for part in parts)  # the bird is not in the vocabulary: bytes
    assert re.sub(r"\\x[0-9a-f]{2}", "", "".join(parts)) == read(tokenizer, row)
    assert spelled(None, [], [3, 4]) == ["#3", "#4"]
    assert spelled(tokenizer, [], [10 ** 6]) == ["#1000000"]
    words = learn("word", TEXTS, 100)
    assert in_turn(words, words.encode("she sleeps every").ids) == ["she", "sleeps", "every"]


def test_what_cannot_be_watched_is_refused_by_name():
    model, tokenizer = lesson()
    with pytest.raises(ValueError, match="begin is 0"):
        watched(model, tokenizer, [3, 4], 0)
    with pytest.raises(ValueError, match="few is 0"):
        watched(model, tokenizer, [3, 4], 1, few=0)
    with pytest.raises(ValueError, match="leave it out"):
        watched(model, tokenizer, [3, 4], 1, source=[3])
    with pytest.raises(ValueError, match="needs the source"):
        watched(*lesson("both"), [3, 4], 1)
    with pytest.raises(ValueError, match="only reads"):
        watched(kl.build(kl.presets.small(kl.presets.bert)), tokenizer, [3, 4], 1)
