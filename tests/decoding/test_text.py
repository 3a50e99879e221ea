"""Texts: stop strings, streams of whole characters, rules, prefixes, what a directory says."""

from __future__ import annotations

import json
import re
import time
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from decoding.models import pair
from decoding.words import byte_tokens, writer

TOKENS = byte_tokens()
MODEL = writer(TOKENS)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), begin=st.integers(0, 25), size=st.integers(1, 5))
def test_a_text_ends_at_a_string_wherever_tokens_begin_and_end(seed, begin, size):
    said = dict(
        do_sample=True, seed=seed, max_new_tokens=30, temperature=2.0, suppress_tokens=[0, 1, 2, 3, 4]
    )
    (whole,) = kl.generate(MODEL, TOKENS, "the sea", **said)
    string = whole[begin : begin + size]
    if not string or "\ufffd" in string:
        return
    (answer,) = kl.completions(MODEL, TOKENS, "the sea", stop_strings=["never, never", string], **said)[0]
    assert answer.ended
    assert string in answer.text
    assert whole.startswith(answer.text.rstrip("\ufffd"))
    assert string not in TOKENS.decode(answer.tokens[:-1])


def test_a_stop_string_that_never_comes_or_came_before_changes_nothing():
    (plain,) = kl.generate(MODEL, TOKENS, "the sea", max_new_tokens=12)
    for string in ("£££££", "sea"):
        assert string not in plain
        assert kl.generate(MODEL, TOKENS, "the sea", stop_strings=string, max_new_tokens=12) == [plain]


def test_any_stop_ends_a_text():
    said = dict(max_new_tokens=12, suppress_tokens=[2])
    (plain,) = kl.completions(MODEL, TOKENS, "the sea", **said)[0]
    first = TOKENS.decode(plain.tokens[:3])
    assert (
        kl.completions(MODEL, TOKENS, "the sea", stop_strings=first, max_time=600.0, **said)[0][0].tokens
        == plain.tokens[:3]
    )


def test_the_end_comes_where_it_may_and_not_before():
    """The end is the likeliest token throughout."""
    wish = lambda **said: (
        kl.completions(MODEL, TOKENS, [[20, 21]], logit_bias={2: 99.0}, max_new_tokens=8, **said)[0][0].tokens
    )
    assert wish() == [2]
    for said, count in (
        ({"min_new_tokens": 3}, 3),
        ({"min_length": 6}, 4),
        ({"begin_suppress_tokens": [2]}, 1),
    ):
        tokens = wish(**said)
        assert tokens[count:] == [2], said
        assert 2 not in tokens[:count], said


def test_the_first_and_the_last_token_may_be_told():
    model = pair(0)
    plain = kl.completions(model, None, [[3, 4]], max_new_tokens=4)[0][0].tokens
    first = (plain[0] + 1) % 11
    assert (
        kl.completions(model, None, [[3, 4]], max_new_tokens=4, forced_bos_token_id=first)[0][0].tokens[0]
        == first
    )
    assert kl.completions(model, None, [[3, 4]], max_new_tokens=4, forced_eos_token_id=first)[0][
        0
    ].tokens == [*plain[:3], first]


@pytest.mark.parametrize("seed", range(6))
def test_a_stream_is_the_text_in_pieces_of_whole_characters(seed):
    """The last piece may lack characters of which only some bytes were written."""
    said = dict(do_sample=True, seed=seed, max_new_tokens=40, temperature=1.5)
    (whole,) = kl.generate(MODEL, TOKENS, "आप", **said)
    pieces = list(kl.stream(MODEL, TOKENS, "आप", **said))
    assert whole.startswith("".join(pieces))
    assert set(whole[len("".join(pieces)) :]) <= {"\ufffd"}


def test_text_that_keeps_to_a_regular_expression():
    for seed in range(4):
        (text,) = kl.generate(
            MODEL, TOKENS, "the", regex="[ab]{2,4}-[0-9]+!", do_sample=True, seed=seed, max_new_tokens=40
        )
        assert re.fullmatch("[ab]{2,4}-[0-9]+!?", text)
    several = kl.completions(
        MODEL, TOKENS, "the", regex="(yes|no|maybe)", num_beams=3, num_return_sequences=3, max_new_tokens=8
    )[0]
    assert {answer.text for answer in several} <= {"yes", "no", "maybe"}


def test_text_that_keeps_to_a_json_schema():
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2, 3]}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    (text,) = kl.generate(MODEL, TOKENS, "the", json_schema=schema, max_new_tokens=60)
    assert json.loads(text)["n"] in (1, 2, 3)


def test_text_that_keeps_to_a_grammar():
    rule = 'start: "a" ("b" | "c")+ "."\n'
    (text,) = kl.generate(MODEL, TOKENS, "the", grammar=rule, max_new_tokens=30, do_sample=True, seed=1)
    assert re.fullmatch(r"a[bc]*\.?", text)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"regex": "(("}, r"^regex is '\(\(': it cannot be used; unclosed group$"),
        ({"grammar": "start: nothing"}, "^grammar is 'start: nothing': it cannot be used; "),
        ({"json_schema": {"type": "nonsense"}}, r"^json_schema is \{.*\}: it cannot be used; Invalid type"),
    ],
)
def test_a_rule_that_is_none_is_told(rule, message):
    with pytest.raises(ValueError, match=message):
        kl.generate(MODEL, TOKENS, "the", max_new_tokens=4, **rule)


def test_a_text_of_a_pair_begins_with_its_prefix():
    model = pair(0, vocab=TOKENS.get_vocab_size())
    plain = kl.completions(model, TOKENS, ["the sea", "calm"], max_new_tokens=6)
    texts = kl.generate(
        model, TOKENS, ["the sea", "calm"], max_new_tokens=6, prefix=["ship", "the ship sails"]
    )
    assert texts[0].startswith("ship")
    assert texts[1].startswith("the ship sails")
    assert len(plain) == 2


def test_what_the_directory_says_holds_unless_something_else_is_said():
    model = writer(TOKENS)
    model.notes["generation"] = {
        "max_new_tokens": 3,
        "do_sample": False,
        "repetition_penalty": 1.1,
        "_from": "5",
    }
    assert len(kl.completions(model, TOKENS, "the")[0][0].tokens) == 3
    assert len(kl.completions(model, TOKENS, "the", max_new_tokens=5)[0][0].tokens) == 5
    assert len(kl.completions(model, TOKENS, [[20, 21]], max_length=4)[0][0].tokens) == 2


def test_time_that_is_up_ends_a_text():
    began = time.monotonic()
    (answer,) = kl.completions(MODEL, TOKENS, "the", max_new_tokens=5000, max_time=0.2, suppress_tokens=[2])[
        0
    ]
    assert 0 < len(answer.tokens) < 5000
    assert time.monotonic() - began < 60


def test_bad_wishes_are_told():
    wish = lambda **said: kl.generate(MODEL, TOKENS, "the", **said)
    assert wish(max_new_tokens=0) == [""]
    with pytest.raises(ValueError, match="num_beams is 0: it must be a whole number, at least 1"):
        wish(num_beams=0)
    with pytest.raises(ValueError, match=r"top_p is 1.5: it must be above 0 and at most 1"):
        wish(top_p=1.5)
    with pytest.raises(ValueError, match="there is no option 'top_pp': did you mean top_p"):
        wish(top_pp=0.5)
    with pytest.raises(ValueError, match="num_return_sequences is 3, but there is one way to be greedy"):
        wish(num_return_sequences=3)
    with pytest.raises(ValueError, match="min_new_tokens is 9 and max_new_tokens 3"):
        wish(min_new_tokens=9, max_new_tokens=3)
    with pytest.raises(ValueError, match="no cache is called 'paper'"):
        wish(cache_implementation="paper")
    with pytest.raises(ValueError, match="token 9999 is not one of the"):
        wish(suppress_tokens=[9999], max_new_tokens=2)
    with pytest.raises(ValueError, match="give one of them"):
        wish(regex="a", grammar="b")
    with pytest.raises(ValueError, match="prompt 0 holds token 100000, and the model knows"):
        kl.generate(MODEL, TOKENS, [[100_000]], max_new_tokens=2)
    with pytest.warns(UserWarning, match=r"do_sample is not set, so top_p=0.5 changes nothing"):
        wish(top_p=0.5, max_new_tokens=2)
    with pytest.warns(UserWarning, match="num_beams is 1, so length_penalty=2.0 changes nothing"):
        wish(length_penalty=2.0, max_new_tokens=2)


def test_a_prompt_that_fills_max_length_is_told_once():
    prompts = [[20, 21], [20] * 6, [20] * 9, [20] * 7]
    told = "max_length is 6, and a prompt has 9 tokens, .* give max_new_tokens"
    with pytest.warns(UserWarning, match=told) as notes:
        texts = kl.completions(MODEL, TOKENS, prompts, max_length=6)
    assert len(notes) == 1
    assert [len(several[0].tokens) for several in texts] == [4, 0, 0, 0]
    with pytest.warns(UserWarning, match=told):
        assert list(kl.stream(MODEL, TOKENS, [20] * 9, max_length=6)) == []
    with pytest.warns(UserWarning, match="max_length is 9, and a prompt has 9 tokens"):
        kl.generate(MODEL, TOKENS, prompts, max_length=9)
    with pytest.warns(
        UserWarning, match=f"max_length is 4, and a prompt has {2 + len(TOKENS.encode(' calm').ids)} tokens"
    ):
        assert kl.generate(MODEL, TOKENS, [[20, 21]], prefix=" calm", max_length=4) == [" calm"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kl.generate(MODEL, TOKENS, prompts, max_length=6, max_new_tokens=1)
        kl.generate(MODEL, TOKENS, prompts, max_length=10)  # one more than the longest
        kl.generate(pair(0), None, [[5] * 9], max_length=4)  # a source does not count


def test_an_empty_prompt_is_the_beginning_of_a_text_where_there_is_such_a_thing():
    assert kl.generate(MODEL, TOKENS, "", max_new_tokens=4) == kl.generate(
        MODEL, TOKENS, [[1]], max_new_tokens=4
    )
    bare = writer(TOKENS)
    bare.notes = {}
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        kl.generate(bare, TOKENS, "", max_new_tokens=4)


def test_a_model_with_an_end_of_its_positions_stops_there():
    model = kl.build(
        kl.presets.small(kl.presets.gpt2).but(vocab=TOKENS.get_vocab_size(), position=kl.LearnedPositions(12))
    ).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (answer,) = kl.completions(model, TOKENS, [[5, 6, 7]], max_new_tokens=10**9)[0]
    assert len(answer.tokens) == 9
    with pytest.raises(ValueError, match="prompt 0 has 13 tokens, and the model reaches 12"):
        kl.generate(model, TOKENS, [[5] * 13], max_new_tokens=2)


def test_a_decoder_goes_on_from_its_prefix():
    (begun,) = kl.completions(MODEL, TOKENS, "the sea", prefix=" is", max_new_tokens=5)[0]
    (plain,) = kl.completions(
        MODEL, TOKENS, [TOKENS.encode("the sea").ids + TOKENS.encode(" is").ids], max_new_tokens=5
    )[0]
    assert begun.tokens == [*TOKENS.encode(" is").ids, *plain.tokens]
    assert kl.generate(MODEL, TOKENS, "the sea", prefix=" is", max_new_tokens=0) == [" is"]


def test_contradictions_are_told_and_not_written_through():
    wish = lambda **said: kl.generate(MODEL, TOKENS, "the", max_new_tokens=6, **said)
    for said in (
        {"shortlist": [7], "suppress_tokens": [7]},
        {"shortlist": [7], "suppress_tokens": [7], "num_beams": 2},
    ):
        with pytest.raises(ValueError, match="no token is left to choose from"):
            wish(**said)
    with pytest.raises(ValueError, match="write the beginning into the grammar"):
        wish(prefix="y", regex="yes|no")
    with pytest.raises(ValueError, match="draws none"):
        wish(penalty_alpha=0.5, do_sample=True)
    with pytest.raises(ValueError, match="2 seeds were given for 1 prompts"):
        wish(do_sample=True, seed=[1, 2])
    with pytest.raises(ValueError, match="the draft knows"):
        wish(draft_model=pair(0))
    with pytest.raises(ValueError, match="num_return_sequences is 4"):
        wish(do_sample=True, num_beams=2, num_return_sequences=4)
    with pytest.raises(ValueError, match="a static cache for 1,000,000,000,001 tokens is too large"):
        kl.generate(MODEL, TOKENS, "the", max_new_tokens=10**12, cache_implementation="static")
    assert wish(begin_suppress_tokens=[]) == wish()
    assert wish(num_beams=2.0) == wish(num_beams=2)


def test_without_a_seed_equal_prompts_are_drawn_apart():
    assert (
        len(set(kl.generate(MODEL, TOKENS, ["the"] * 4, do_sample=True, temperature=2.0, max_new_tokens=12)))
        > 1
    )


def test_a_text_that_has_ended_does_not_trouble_the_rule_of_the_others():
    texts = kl.generate(
        MODEL,
        TOKENS,
        "the",
        regex="(ax|by)z{5}",
        stop_strings="x",
        do_sample=True,
        seed=1,
        num_return_sequences=8,
        max_new_tokens=12,
    )
    assert {text[:2] for text in texts} <= {"ax", "by"}


def test_least_lengths_belong_to_each_prompt():
    said = dict(min_length=9, max_new_tokens=12)
    together = kl.completions(MODEL, TOKENS, [[5] * 9, [6, 7]], **said)
    assert [several[0].tokens for several in together] == [
        kl.completions(MODEL, TOKENS, [prompt], **said)[0][0].tokens for prompt in ([5] * 9, [6, 7])
    ]


def test_numbers_that_are_equal_but_of_another_kind_are_told_apart():
    kl.generate(MODEL, TOKENS, "the sea", logit_bias={7: 9.0}, max_new_tokens=2)  # keeps 9.0 at hand
    (answer,) = kl.completions(MODEL, TOKENS, "the sea", forced_eos_token_id=9, max_new_tokens=2)[0]
    assert answer.tokens[-1] == 9
