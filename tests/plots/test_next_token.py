"""The recomputed distributions are those that the text was sampled from, and the picture shows each step."""

from __future__ import annotations

import math
import re
from functools import cache
from xml.etree import ElementTree

import pytest
import torch

import keepleft as kl
from keepleft.data.token_text import decode_with_special, token_pieces, token_texts
from keepleft.data.tokenizer import train_tokenizer, vocab_size
from keepleft.decoding import filters, logits_processors
from keepleft.plots.next_token import StepDistribution, plot_distributions, step_distributions

SVG = "{http://www.w3.org/2000/svg}"
TEXTS = [
    "Il a mangé du pain & du lait <hier>\n",
    "वह समुद्र तट पर सोता है",
    "she sleeps on the beach every morning",
] * 3


@cache
def model_and_tokenizer(kind="decoder"):
    tokenizer = train_tokenizer("bpe", TEXTS, 300, running_text=True)
    design = kl.presets.small({"decoder": kl.presets.llama, "both": kl.presets.marian}[kind]).but(
        vocab=vocab_size(tokenizer)
    )
    return kl.build(design, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).eval(), tokenizer


def texts_of(path):
    return [
        "".join(text.itertext())
        for text in ElementTree.fromstring(path.read_text("utf-8")).iter(f"{SVG}text")
    ]


@pytest.mark.parametrize("kind", ["decoder", "both"])
def test_one_pass_finds_the_very_probabilities_that_a_text_was_sampled_with(kind):
    model, tokenizer = model_and_tokenizer(kind)
    options = {} if kind == "decoder" else {"decoder_start_token_id": 1}
    completion = kl.completions(
        model,
        tokenizer,
        [TEXTS[1]],
        max_new_tokens=11,
        do_sample=True,
        temperature=0.7,
        top_k=9,
        seed=5,
        repetition_penalty=1.3,
        **options,
    )[0][0]
    context = completion.prompt if kind == "decoder" else [1]
    steps = step_distributions(
        model,
        tokenizer,
        [*context, *completion.tokens],
        len(context),
        top_k=12,
        source=None if kind == "decoder" else completion.prompt,
        processors=[logits_processors.repetition_penalty(1.3), filters.temperature(0.7), filters.top_k(9)],
    )
    assert math.isclose(
        sum(math.log(step.probs_after[step.chosen]) for step in steps), completion.score, rel_tol=1e-4
    )
    assert [step.tokens[step.chosen] for step in steps] == token_pieces(
        tokenizer, [*context, *completion.tokens], len(context)
    )
    for step in steps:
        assert len(step.tokens) == len(step.probs_before) == len(step.probs_after) >= 12
        # the nine tokens that are left are among the twelve
        assert math.isclose(sum(step.probs_after), 1.0, rel_tol=1e-6)
        assert sum(probability == 0 for probability in step.probs_after) == len(step.probs_after) - 9
        assert sum(step.probs_before) < 1
        assert list(step.probs_before) == sorted(step.probs_before, reverse=True)


def test_without_processors_nothing_changes_and_the_greedy_choice_is_the_first():
    model, tokenizer = model_and_tokenizer()
    completion = kl.completions(model, tokenizer, ["she sleeps"], max_new_tokens=7)[0][0]
    steps = step_distributions(
        model, tokenizer, completion.prompt + completion.tokens, len(completion.prompt), top_k=3
    )
    assert [step.chosen for step in steps] == [0] * 7
    assert all(step.probs_before == step.probs_after and len(step.tokens) == 3 for step in steps)
    assert steps[0].context == "she sleeps"
    assert step_distributions(model, tokenizer, completion.prompt, len(completion.prompt)) == []


def test_the_model_is_left_as_it_was():
    model, tokenizer = model_and_tokenizer()
    model.train()
    try:
        step_distributions(model, tokenizer, [5, 6, 7], 1)
        assert model.training
    finally:
        model.eval()


def test_every_token_is_in_the_picture_and_marked(tmp_path):
    steps = [
        StepDistribution("", ("वह", "<b>&", " a b"), (0.5, 0.3, 0.2), (0.0, 0.75, 0.25), 1),
        StepDistribution("<b>&", ("\n", "é"), (0.6, 0.4), (0.6, 0.4), 0),
    ]
    path = plot_distributions(tmp_path / "a.svg", steps, title="a < b")
    texts = texts_of(path)
    assert {"a < b", "वह", "<b>&", "␣a␣b", "↵", "é", "<b>&↵"} <= set(texts)
    assert texts.count("▶") == 2
    root = ElementTree.fromstring(path.read_text("utf-8"))
    elements = {"".join(text.itertext()): text for text in root.iter(f"{SVG}text")}
    assert elements["वह"].get("text-decoration") == "line-through"
    assert "0.500 → ruled out" in elements
    assert elements["↵"].get("font-weight") == "bold"
    widths = {
        bar.find(f"{SVG}title").text.split(":")[0]: float(bar.get("width"))
        for bar in root.findall(f"{SVG}rect")
        if bar.get("fill-opacity")
    }
    assert math.isclose(widths["<b>&"], 3 * widths["␣a␣b"], rel_tol=0.01)
    assert widths["वह"] <= 1


def test_a_long_text_is_cut_and_says_so(tmp_path):
    steps = [StepDistribution("x" * 5000, ("y" * 5000, "z"), (0.9, 0.1), (0.9, 0.1), 0)] * 500
    path = plot_distributions(tmp_path / "a.svg", steps, title="long", max_steps=20)
    root = ElementTree.fromstring(path.read_text("utf-8"))
    assert float(root.get("height")) < 20 * 60
    assert "… 480 more steps are not shown" in texts_of(path)
    assert max(map(len, texts_of(path))) < 120


def test_tokens_read_as_they_add_to_the_text():
    _, tokenizer = model_and_tokenizer()
    row = tokenizer.encode("a मोर 🦚 é").ids
    pieces = token_pieces(tokenizer, row)
    assert any("\\x" in piece for piece in pieces)  # the bird is not in the vocabulary: bytes
    assert re.sub(r"\\x[0-9a-f]{2}", "", "".join(pieces)) == decode_with_special(tokenizer, row)
    assert token_texts(None, [], [3, 4]) == ["#3", "#4"]
    assert token_texts(tokenizer, [], [10**6]) == ["#1000000"]
    word_tokenizer = train_tokenizer("word", TEXTS, 100)
    assert token_pieces(word_tokenizer, word_tokenizer.encode("she sleeps every").ids) == [
        "she",
        "sleeps",
        "every",
    ]


def test_what_cannot_be_recomputed_is_refused_by_name():
    model, tokenizer = model_and_tokenizer()
    with pytest.raises(ValueError, match="begin is 0"):
        step_distributions(model, tokenizer, [3, 4], 0)
    with pytest.raises(ValueError, match="top_k is 0"):
        step_distributions(model, tokenizer, [3, 4], 1, top_k=0)
    with pytest.raises(ValueError, match="leave it out"):
        step_distributions(model, tokenizer, [3, 4], 1, source=[3])
    with pytest.raises(ValueError, match="needs the source"):
        step_distributions(*model_and_tokenizer("both"), [3, 4], 1)
    with pytest.raises(ValueError, match="is an encoder and generates nothing"):
        step_distributions(kl.build(kl.presets.small(kl.presets.bert)), tokenizer, [3, 4], 1)
