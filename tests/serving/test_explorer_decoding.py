"""What the page shows of decoding is what decoding does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from keepleft.data.token_text import token_pieces
from keepleft.decoding.batch import DecodeBatch
from keepleft.decoding.generate import resolve_options
from keepleft.decoding.processor_table import make_processors
from keepleft.decoding.sampling import derive_seeds, sample_tokens, uniform
from keepleft.serving.explorer.explorer import Explorer
from serving.tiny_explorers import (
    SOURCE,
    TEXT,
    ask,
    example_texts,
    f32,
    make_explorer,
    make_model,
    quantize,
    tokenizer,
    u8,
)

pytestmark = pytest.mark.usefixtures("one_thread")
WRITERS = ("decoder", "encoder-decoder")
EXPLORERS = {family: make_explorer(family) for family in WRITERS}
TOKENS = st.lists(st.integers(5, tokenizer().get_vocab_size() - 1), max_size=5)


def full_pass_logits(explorer: Explorer, tokens: list[int]) -> torch.Tensor:
    """(V,) logits by one pass over all tokens."""
    with torch.no_grad():
        if explorer.generator.is_encoder_decoder:
            return explorer.model(
                torch.tensor([tokenizer().encode(SOURCE).ids]), torch.tensor([[1, *tokens]])
            )[0, -1]
        return explorer.model(torch.tensor([[*tokenizer().encode(TEXT).ids, *tokens]]))[0, -1]


@given(st.sampled_from(WRITERS), st.lists(TOKENS, min_size=1, max_size=5))
@settings(max_examples=30)
def test_scores_are_those_of_one_pass_however_one_got_there(family, path):
    explorer = EXPLORERS[family]
    for tokens in path:
        answer = ask(explorer, "next_token", **example_texts(family), tokens=tokens, unmasked=False)
        torch.testing.assert_close(
            torch.tensor(f32(answer["logits_f32"])), full_pass_logits(explorer, tokens), atol=1e-4, rtol=1e-4
        )
        assert [token["id"] for token in answer["new_tokens"]] == tokens
    assert answer["eos_ids"] == [2]
    assert answer["decoder_start_token_id"] == (1 if explorer.generator.is_encoder_decoder else -1)
    prompt = SOURCE if explorer.generator.is_encoder_decoder else TEXT
    assert [token["text"] for token in answer["prompt"]] == token_pieces(
        tokenizer(), tokenizer().encode(prompt).ids
    )


def test_a_further_token_costs_one_step(monkeypatch):
    explorer = make_explorer("decoder")
    ask(explorer, "next_token", text=TEXT, tokens=[7, 8])
    monkeypatch.setattr(explorer.generator.model, "start", None)
    for tokens in ([7, 8, 9], [7], [7, 8, 9, 10], [7, 8, 9, 10]):
        ask(explorer, "next_token", text=TEXT, tokens=tokens)
    torch.testing.assert_close(
        explorer.scorer.logits, full_pass_logits(explorer, [7, 8, 9, 10]), atol=1e-4, rtol=1e-4
    )


def test_what_is_refused_leaves_no_state_behind():
    model = kl.build(
        kl.presets.small(kl.presets.gpt2).but(
            vocab=tokenizer().get_vocab_size(), position=kl.LearnedPositions(8)
        )
    )
    explorer = Explorer(model, tokenizer())
    ask(explorer, "next_token", text="the", tokens=[7])
    with pytest.raises(ValueError, match="at most 8 fit: shorten it"):
        ask(explorer, "next_token", text="the", tokens=[7] * 9)
    with pytest.raises(ValueError, match="reaches 8: shorten it"):
        ask(explorer, "next_token", text="the " * 9, tokens=[])
    assert len(ask(explorer, "next_token", text="the", tokens=[7, 8])["new_tokens"]) == 2


def test_learning_on_is_noticed():
    explorer = make_explorer("decoder")
    before = ask(explorer, "next_token", text=TEXT, tokens=[7])["logits_f32"]
    with torch.no_grad():
        explorer.model.token.weight.mul_(0.5)
    answer = ask(explorer, "next_token", text=TEXT, tokens=[7])["logits_f32"]
    assert answer != before
    torch.testing.assert_close(
        torch.tensor(f32(answer)), full_pass_logits(explorer, [7]), atol=1e-4, rtol=1e-4
    )


FILTERS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.5, 1.7]),
        "top_k": st.sampled_from([1, 5, 40]),
        "top_p": st.sampled_from([0.2, 0.7]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5]),
    },
)


@given(st.sampled_from(WRITERS), FILTERS, TOKENS, st.integers(0, 1 << 40))
@settings(max_examples=30)
def test_what_is_drawn_is_drawn_from_these_scores(family, filters, tokens, seed):
    """temperature, top_k, top_p, min_p in this order, as the page applies them, then one random number."""
    explorer = EXPLORERS[family]
    logits = torch.tensor(
        f32(ask(explorer, "next_token", **example_texts(family), tokens=tokens)["logits_f32"])
    )
    scores = logits[None]
    options = resolve_options(explorer.model, None, {"do_sample": True, **filters})
    prompt = SOURCE if explorer.generator.is_encoder_decoder else TEXT
    batch = DecodeBatch.build(explorer.model, [tokenizer().encode(prompt).ids], options)
    for processor in make_processors(options, batch.prompt_context()):
        scores = processor(scores, None)
    token = sample_tokens(scores, uniform(derive_seeds(seed, torch.arange(1)), len(tokens)))
    answer = ask(
        explorer,
        "continue_text",
        **example_texts(family),
        tokens=tokens,
        options={"do_sample": True, "seed": seed, **filters},
        max_new_tokens=1,
    )
    assert [generated["id"] for generated in answer["tokens"]] == token.tolist()


@given(
    st.sampled_from(WRITERS),
    FILTERS,
    st.integers(1, 7),
    st.sampled_from([{}, {"presence_penalty": 0.7}, {"repetition_penalty": 1.4, "min_new_tokens": 4}]),
)
@settings(max_examples=10)
def test_a_text_is_the_same_at_once_or_in_pieces_and_is_what_generate_writes(family, filters, cut, penalties):
    explorer = EXPLORERS[family]
    options = {"do_sample": True, "seed": 7, **filters, **penalties}
    at_once = ask(
        explorer, "continue_text", **example_texts(family), tokens=[], options=options, max_new_tokens=9
    )
    ids = [token["id"] for token in at_once["tokens"]]
    first = ask(
        explorer, "continue_text", **example_texts(family), tokens=[], options=options, max_new_tokens=cut
    )
    first_ids = [token["id"] for token in first["tokens"]]
    if first["finished"]:
        assert first_ids == ids
    else:
        rest = ask(
            explorer,
            "continue_text",
            **example_texts(family),
            tokens=first_ids,
            options=options,
            max_new_tokens=9 - cut,
        )
        assert first_ids + [token["id"] for token in rest["tokens"]] == ids
        assert first["logprobs"] + rest["logprobs"] == pytest.approx(at_once["logprobs"], abs=1e-4)
    (expected,) = kl.completions(
        explorer.model,
        tokenizer(),
        SOURCE if explorer.generator.is_encoder_decoder else TEXT,
        max_new_tokens=9,
        **options,
    )[0]
    assert ids == expected.tokens
    assert at_once["finished"] == expected.ended
    for n, (token, logprob) in enumerate(zip(ids, at_once["logprobs"], strict=True)):
        logprobs = full_pass_logits(explorer, ids[:n]).log_softmax(-1)
        assert float(logprobs[token]) == pytest.approx(logprob, abs=1e-4)


def test_greedy_is_greedy_whatever_the_directory_wishes():
    model = make_model("encoder-decoder")
    model.notes["generation"] = {
        "num_beams": 4,
        "forced_eos_token_id": 2,
        "max_length": 5,
        "num_return_sequences": 2,
    }
    explorer = Explorer(model, tokenizer())
    answer = ask(
        explorer,
        "continue_text",
        text="",
        source=SOURCE,
        tokens=[],
        options={"do_sample": False},
        max_new_tokens=7,
    )
    plain = ask(
        EXPLORERS["encoder-decoder"],
        "continue_text",
        text="",
        source=SOURCE,
        tokens=[],
        options={},
        max_new_tokens=7,
    )
    assert answer == plain


def test_a_text_that_fills_the_model_goes_no_further():
    model = kl.build(
        kl.presets.small(kl.presets.gpt2).but(
            vocab=tokenizer().get_vocab_size(), position=kl.LearnedPositions(8)
        )
    )
    answer = ask(
        Explorer(model, tokenizer()),
        "continue_text",
        text="the",
        tokens=[7] * 7,
        options={},
        max_new_tokens=9,
    )
    assert answer == {"tokens": [], "logprobs": [], "finished": False}


@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.parametrize(
    ("width", "penalty", "early"), [(1, 1.0, False), (4, 1.0, False), (5, 0.3, True), (16, 0, False)]
)
def test_the_best_beam_is_what_generate_writes(family, width, penalty, early):
    explorer = EXPLORERS[family]
    answer = ask(
        explorer,
        "beam",
        **example_texts(family),
        num_beams=width,
        max_new_tokens=8,
        length_penalty=penalty,
        early_stopping=early,
    )
    prompt = SOURCE if explorer.generator.is_encoder_decoder else TEXT
    options = {"length_penalty": float(penalty), "early_stopping": early} if width > 1 else {}
    completions = kl.completions(
        explorer.model,
        tokenizer(),
        prompt,
        max_new_tokens=8,
        num_beams=width,
        num_return_sequences=width,
        **options,
    )[0]
    assert [[token["id"] for token in result["tokens"]] for result in answer["finished"]] == [
        result.tokens for result in completions
    ]
    assert [result["score"] for result in answer["finished"]] == pytest.approx(
        [result.score if width > 1 else result.score / len(result.tokens) for result in completions], abs=1e-5
    )
    assert answer["best"] == {
        "tokens": answer["finished"][0]["tokens"],
        "score": answer["finished"][0]["score"],
    }
    assert [result["step"] for result in answer["finished"]] == [
        len(result.tokens) - 1 for result in completions
    ]


@pytest.mark.parametrize("family", WRITERS)
def test_the_tree_adds_up(family):
    explorer = EXPLORERS[family]
    answer = ask(
        explorer,
        "beam",
        **example_texts(family),
        num_beams=4,
        max_new_tokens=8,
        length_penalty=0.7,
        early_stopping=False,
    )
    previous, totals = [[]], [0.0]
    numbers = [node["id"] for step in answer["steps"] for node in step]
    assert numbers == list(range(len(numbers)))
    for step in answer["steps"]:
        current = []
        for node in step:
            parent = node["parent"] if node["parent"] >= 0 else 0
            current.append([*previous[parent], node["token"]["id"]])
            assert node["score"] == pytest.approx(totals[parent] + node["logprob"], abs=1e-5)
            logprob = full_pass_logits(explorer, previous[parent]).log_softmax(-1)[node["token"]["id"]]
            assert node["logprob"] == pytest.approx(float(logprob), abs=1e-3)
        previous, totals = current, [node["score"] for node in step]
    path = [node["token"]["id"] for step in answer["steps"] for node in step if node["best"]]
    assert path == [token["id"] for token in answer["best"]["tokens"]]


@pytest.mark.parametrize(("layer", "head"), [("mean", "mean"), (1, "mean"), ("mean", 3), (0, 5)])
def test_an_alignment_is_the_cross_attention_behind_each_token(layer, head):
    explorer = EXPLORERS["encoder-decoder"]
    tokens = [70, 71, 72]
    answer = ask(explorer, "alignment", source=SOURCE, tokens=tokens, layer=layer, head=head)
    source = tokenizer().encode(SOURCE).ids
    with torch.no_grad(), kl.watch(explorer.model, "decoder.*.cross") as maps:
        explorer.model.hidden_states(torch.tensor([source]), torch.tensor([[1, *tokens[:-1]]]))
    maps_used = torch.stack(
        [map_[0] for name, map_ in maps.items() if layer == "mean" or name == f"decoder.{layer}.cross"]
    )
    expected = (maps_used.mean(1) if head == "mean" else maps_used[:, head]).mean(0)
    assert (answer["rows"], answer["columns"]) == (3, len(source))
    assert abs(u8(answer["weights_u8"], *expected.shape) - quantize(expected)).max() <= 1
    assert [token["id"] for token in answer["target"]] == tokens
    assert ask(explorer, "alignment", source=SOURCE, tokens=[], layer="mean", head="mean")["rows"] == 0


def test_tokens_are_spelt_one_after_the_other_and_words_with_their_spaces():
    explorer = EXPLORERS["decoder"]
    ids = tokenizer().encode("the sea आप").ids
    assert [
        token["text"] for token in ask(explorer, "token_texts", ids=ids, context=[])["tokens"]
    ] == token_pieces(tokenizer(), ids)
    assert ask(explorer, "token_texts", ids=[2], context=ids)["tokens"] == [
        {"id": 2, "text": "</s>", "special": True}
    ]
    answer = ask(explorer, "vocabulary")["tokens"]
    assert len(answer) == explorer.model.design.vocab
    assert " the" in answer
    assert "the" in answer


def test_a_source_may_begin_with_a_tag():
    from keepleft.data.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(
        "word", [SOURCE, "la mer"], 40, extra_special_tokens=("<2fr>",), min_frequency=1
    )
    model = kl.build(kl.presets.small(kl.presets.pegasus).but(vocab=tokenizer.get_vocab_size()))
    model.notes = {"decoder_start_token_id": 1, "eos_token_id": 2}
    explorer = Explorer(model, tokenizer)
    assert ask(explorer, "model_info")["example"] == {"text": "", "source": "<2fr> The sea is calm today."}
    tag = tokenizer.token_to_id("<2fr>")
    assert ask(explorer, "next_token", text="", source="<2fr> ship on", tokens=[])["prompt"][0]["id"] == tag
    answer = ask(explorer, "attention", text="la mer", source="<2fr> ship on")
    assert answer["tokens"]["source"][0] == {"id": tag, "text": "<2fr>", "special": True}
    unknown_tag = ask(explorer, "attention", text="la mer", source="<2de> ship")
    assert tag not in [token["id"] for token in unknown_tag["tokens"]["source"]]


@pytest.mark.parametrize(
    ("question", "change", "message"),
    [
        (
            "continue_text",
            {"max_new_tokens": 65},
            "max_new_tokens is 65: it must be a whole number from 1 to 64",
        ),
        ("continue_text", {"options": {"num_beams": 3}}, "options takes no 'num_beams'"),
        ("continue_text", {"options": {"regex": "(a+)+"}}, "options takes no 'regex'"),
        ("continue_text", {"options": {"temperature": 0}}, "temperature is 0: it must be a number above 0"),
        (
            "continue_text",
            {"options": {"top_k": "many"}},
            "top_k is 'many': it must be a whole number, at least 0",
        ),
        ("continue_text", {"options": {"do_sample": 1}}, "do_sample is 1: it must be true or false"),
        ("continue_text", {"options": {"seed": 1 << 60}}, "seed is"),
        ("continue_text", {"options": []}, r"options is \[\]: it must be an object"),
        ("next_token", {"tokens": [999]}, "tokens holds 999: each must be a whole number from 0 to"),
        ("next_token", {"tokens": [True]}, "tokens holds True"),
        ("next_token", {"tokens": [5] * 4097}, "tokens has 4,097 numbers: give at most 4,096"),
        ("next_token", {"tokens": "abc"}, "tokens is 'abc': it must be a list"),
        ("next_token", {"source": "x"}, "source is 'x', and this model reads none: leave it out"),
        ("next_token", {"text": "a" * 200_001}, "text has 200,001 characters: give at most 200,000"),
        ("next_token", {"text": "a" * 9000}, "the text has [0-9,]+ tokens: give at most 4,096"),
        ("next_token", {"text": "\ud800"}, "lone surrogate"),
        ("beam", {"num_beams": 17}, "num_beams is 17"),
        ("beam", {"num_beams": 2.5}, "num_beams is 2.5"),
        ("beam", {"length_penalty": float("nan")}, "length_penalty is nan"),
        ("beam", {"max_new_tokens": 0}, "max_new_tokens is 0"),
        (
            "beam",
            {"text": "a" * 2000, "num_beams": 16, "max_new_tokens": 48},
            r"16 beams of 2,00\d \+ 48 tokens are 32,\d+ tokens, and at most 16,384 are kept",
        ),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_name(question, change, message):
    usual = {
        "next_token": {"tokens": []},
        "continue_text": {"tokens": [], "options": {}, "max_new_tokens": 3},
        "beam": {"num_beams": 2, "max_new_tokens": 3},
    }
    with pytest.raises(ValueError, match=message):
        EXPLORERS["decoder"].ask(question, {"text": TEXT, **usual[question], **change})
