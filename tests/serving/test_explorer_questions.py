"""Every question to every family: an answer of the shape that the page expects, or a message why not."""

from __future__ import annotations

import pytest
import torch

import keepleft as kl
from keepleft.serving.explorer.explorer import QUESTIONS, Explorer
from keepleft.serving.explorer.params import ExpiredError, error_payload
from serving.tiny_explorers import (
    FAMILIES,
    SOURCE,
    TEXT,
    ask,
    example_texts,
    make_explorer,
    make_model,
    tokenizer,
)

pytestmark = pytest.mark.usefixtures("one_thread")
TOKEN = {"id": int, "text": str, "special": bool}
NUMBER = (int, float)
NODE = {
    "id": int,
    "parent": int,
    "token": TOKEN,
    "score": NUMBER,
    "total": NUMBER,
    "ended": bool,
    "kept": bool,
    "best": bool,
}
# The contract with web/src/answers.ts: a type, a tuple of types, a list of one shape, or names with shapes
SHAPES = {
    "about": {
        "name": str,
        "family": str,
        "parameters": int,
        "dim": int,
        "vocab": int,
        "longest": (int, type(None)),
        "attentions": [{"name": str, "kind": str, "layers": int, "heads": int, "mask": str}],
        "views": [str],
        "example": dict,
        "version": str,
    },
    "attention": {
        "key": str,
        "tokens": dict,
        "shortened": (str, type(None)),
        "attentions": [
            {
                "name": str,
                "kind": str,
                "layers": int,
                "heads": int,
                "rows": int,
                "columns": int,
                "row_side": str,
                "column_side": str,
                "mask": [str],
            }
        ],
    },
    "overview": {"rows": int, "columns": int, "step": int, "map_u8": str, "top": NUMBER, "claim_bits": str},
    "tile": {"row": int, "column": int, "rows": int, "columns": int, "map_u8": str, "claim_bits": str},
    "reads": {"weights_f32": str},
    "summary": {
        "rows": int,
        "heads": [
            {
                "entropy": NUMBER,
                "distance": NUMBER,
                "first": NUMBER,
                "previous": NUMBER,
                "itself": NUMBER,
                "outside": NUMBER,
            }
        ],
    },
    "next": {"prompt": [TOKEN], "written": [TOKEN], "scores_f32": str, "ends": [int], "start": int},
    "spell": {"tokens": [TOKEN]},
    "vocabulary": {"words": [str]},
    "write": {"tokens": [TOKEN], "logprobs": [NUMBER], "ended": bool},
    "beam": {
        "steps": [[NODE]],
        "finished": [{"tokens": [TOKEN], "score": NUMBER, "step": int}],
        "best": {"tokens": [TOKEN], "score": NUMBER},
    },
    "alignment": {"source": [TOKEN], "written": [TOKEN], "weights_u8": str, "rows": int, "columns": int},
    "mask": {
        "mask": str,
        "seen_bits": str,
        "rows": int,
        "columns": int,
        "faults": [str],
        "cost": {"seen": int, "all": int, "share": NUMBER, "words": str},
    },
    "unmasked": {
        "tokens": [TOKEN],
        "with_f32": str,
        "without_f32": str,
        "words": str,
        "reads": {"rows": int, "columns": int, "before_u8": str, "after_u8": str},
    },
    "runs": {"runs": [dict]},
    "compare": {},
}
WRITING = {"next", "write", "beam", "unmasked"}


def check_shape(value, shape, path: str) -> None:
    if isinstance(shape, dict):
        assert value.keys() == shape.keys(), path
        for name, part in shape.items():
            check_shape(value[name], part, f"{path}.{name}")
    elif isinstance(shape, list):
        assert isinstance(value, list), path
        for part in value:
            check_shape(part, shape[0], path)
    else:
        assert isinstance(value, shape), f"{path} is {value!r}"
        assert shape is not int or not isinstance(value, bool), path


def all_params(family: str, key: str, name: str) -> dict[str, dict]:
    map_params, texts = {"key": key, "name": name, "layer": 1, "head": "mean"}, example_texts(family)
    return {
        "about": {},
        "attention": texts,
        "overview": {**map_params, "size": 4},
        "summary": {"key": key, "name": name, "layer": 0},
        "tile": {**map_params, "row": 0, "column": 0, "size": 256},
        "reads": {**map_params, "token": 1, "by": True},
        "next": {**texts, "tokens": [70], "unmasked": False},
        "spell": {"ids": [70, 2], "before": [71]},
        "vocabulary": {},
        "write": {
            **texts,
            "tokens": [70],
            "options": {"do_sample": True, "top_k": 0, "top_p": 1, "min_p": 0},
            "limit": 4,
        },
        "beam": {**texts, "width": 3, "limit": 4, "length_penalty": 1, "early_stopping": False},
        "alignment": {"source": SOURCE, "tokens": [70, 71], "layer": "mean", "head": "mean"},
        "mask": {"expression": "causal", "length": 9, "padding": {"left": 1, "right": 0}, "packing": [3]},
        "unmasked": texts,
        "runs": {},
        "compare": {},
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_question_is_answered_in_its_shape(family):
    explorer = make_explorer(family, name="mine")
    reading = ask(explorer, "attention", **example_texts(family))
    for attention in reading["attentions"]:
        for question, params in all_params(family, reading["key"], attention["name"]).items():
            wrong = (question in WRITING and family == "encoder") or (
                question == "alignment" and family != "encoder-decoder"
            )
            if wrong:
                with pytest.raises(ValueError, match=r"only reads|reads no source"):
                    ask(explorer, question, **params)
            else:
                check_shape(ask(explorer, question, **params), SHAPES[question], question)
    assert QUESTIONS.keys() == SHAPES.keys() | {"leaks", "run"}  # these two have tests of their own


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_says_what_it_is(family):
    explorer = make_explorer(family, name="mine")
    answer = ask(explorer, "about")
    assert (answer["name"], answer["family"], answer["version"]) == ("mine", family, kl.__version__)
    assert answer["parameters"] == sum(p.numel() for p in explorer.model.parameters())
    kinds = {"encoder": ["self"], "decoder": ["masked"], "encoder-decoder": ["self", "masked", "cross"]}[
        family
    ]
    assert [attention["kind"] for attention in answer["attentions"]] == kinds
    assert answer["views"] == ["attention", *([] if family == "encoder" else ["decoding"]), "masks", "leaks"]
    reading = ask(explorer, "attention", **answer["example"])
    assert [attention["name"] for attention in reading["attentions"]] == [
        attention["name"] for attention in answer["attentions"]
    ]
    assert ("source" in reading["tokens"]) == (family == "encoder-decoder") == ("source" in answer["example"])


@pytest.mark.parametrize(
    ("question", "params", "message"),
    [
        ("abuot", {}, "there is no question 'abuot': did you mean about?"),
        ("__init__", {}, "there is no question '__init__'"),
        (["about"], {}, r"there is no question \['about'\]"),
        ("about", {"x": 1}, "about takes no 'x': leave it out"),
        ("attention", {"txt": "a"}, "attention takes no 'txt': did you mean text?"),
        ("attention", {}, "attention needs text: give a text"),
        ("attention", {"text": ["a"]}, r"text is \['a'\]: it must be a text"),
        (
            "attention",
            "a text",
            "attention was asked with 'a text': give an object of names and values, with text, source",
        ),
        ("spell", {"ids": [1e9]}, "ids holds 1000000000.0"),
        ("leaks", {"wait": "yes"}, "wait is 'yes': it must be true or false"),
        ("run", {"name": "x", "after": -1}, "after is -1"),
    ],
)
def test_a_wrong_question_is_answered_by_a_sentence(question, params, message):
    with pytest.raises(ValueError, match=message):
        make_explorer("decoder").ask(question, params)


def test_an_error_travels_as_the_page_reads_it():
    assert error_payload(ValueError("no")) == {"error": {"message": "no"}}
    assert error_payload(ExpiredError("gone")) == {"error": {"message": "gone", "code": "forgotten"}}
    assert error_payload(OSError(2, "no such file")) == {"error": {"message": "[Errno 2] no such file"}}


def test_a_source_of_a_pair_cannot_be_left_out():
    with pytest.raises(ValueError, match="next needs source: give a text"):
        ask(make_explorer("encoder-decoder"), "next", text="", tokens=[])
    with pytest.raises(ValueError, match="the source is empty"):
        ask(make_explorer("encoder-decoder"), "attention", text=TEXT, source="")


def test_without_a_tokenizer_there_is_nothing_to_read():
    with pytest.raises(ValueError, match="there is no tokenizer: give the one"):
        Explorer(make_explorer("decoder").model, None)


def test_half_precision_is_explored_too():
    explorer = Explorer(make_explorer("decoder").model.bfloat16(), tokenizer())
    reading = ask(explorer, "attention", text=TEXT)
    for head in ("mean", "rollout", 2):
        ask(explorer, "overview", key=reading["key"], name="decoder.self", layer=1, head=head, size=64)
    ask(explorer, "next", text=TEXT, tokens=[])
    ask(explorer, "unmasked", text=TEXT)


def test_a_broken_model_breaks_no_json():
    model = make_model("decoder")
    with torch.no_grad():
        model.token.weight[70] = float("nan")
    explorer = Explorer(model, tokenizer())
    key = ask(explorer, "attention", text="b sea")["key"]
    with pytest.raises(ValueError, match="some weights are NaN, and there is nothing to draw"):
        ask(explorer, "overview", key=key, name="decoder.self", layer=0, head="mean", size=64)
    assert ask(explorer, "summary", key=key, name="decoder.self", layer=0)["heads"][0]["entropy"] is None
    ask(explorer, "next", text="b sea", tokens=[])
    with pytest.raises(ValueError, match="no token is left to choose from"):
        ask(explorer, "write", text="b sea", tokens=[], options={}, limit=2)
