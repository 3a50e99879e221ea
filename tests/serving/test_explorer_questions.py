"""Every question on every family: an answer of the shape that the page expects, or a sentence that says why not."""

from __future__ import annotations

import pytest
import torch

import keepleft as kl
from keepleft.serving.explorer.explorer import QUESTIONS, Explorer
from keepleft.serving.explorer.params import ExpiredError, error_payload
from serving.tiny_explorers import FAMILIES, SOURCE, TEXT, ask, explorer, model, texts, words

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
SHAPES = {  # a type, a tuple of types, a list of one shape, or names with shapes; the contract with web/src/answers.ts
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


def fits(value, shape, where: str) -> None:
    if isinstance(shape, dict):
        assert value.keys() == shape.keys(), where
        for name, part in shape.items():
            fits(value[name], part, f"{where}.{name}")
    elif isinstance(shape, list):
        assert isinstance(value, list), where
        for part in value:
            fits(part, shape[0], where)
    else:
        assert isinstance(value, shape), f"{where} is {value!r}"
        assert shape is not int or not isinstance(value, bool), where


def givens(family: str, key: str, name: str) -> dict[str, dict]:
    which, both = {"key": key, "name": name, "layer": 1, "head": "mean"}, texts(family)
    return {
        "about": {},
        "attention": both,
        "overview": {**which, "size": 4},
        "summary": {"key": key, "name": name, "layer": 0},
        "tile": {**which, "row": 0, "column": 0, "size": 256},
        "reads": {**which, "token": 1, "by": True},
        "next": {**both, "tokens": [70], "unmasked": False},
        "spell": {"ids": [70, 2], "before": [71]},
        "vocabulary": {},
        "write": {
            **both,
            "tokens": [70],
            "options": {"do_sample": True, "top_k": 0, "top_p": 1, "min_p": 0},
            "limit": 4,
        },
        "beam": {**both, "width": 3, "limit": 4, "length_penalty": 1, "early_stopping": False},
        "alignment": {"source": SOURCE, "tokens": [70, 71], "layer": "mean", "head": "mean"},
        "mask": {"expression": "causal", "length": 9, "padding": {"left": 1, "right": 0}, "packing": [3]},
        "unmasked": both,
        "runs": {},
        "compare": {},
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_question_is_answered_in_its_shape(family):
    asked = explorer(family, name="mine")
    read = ask(asked, "attention", **texts(family))
    for one in read["attentions"]:
        for question, given in givens(family, read["key"], one["name"]).items():
            wrong = (question in WRITING and family == "encoder") or (
                question == "alignment" and family != "encoder-decoder"
            )
            if wrong:
                with pytest.raises(ValueError, match=r"only reads|reads no source"):
                    ask(asked, question, **given)
            else:
                fits(ask(asked, question, **given), SHAPES[question], question)
    assert QUESTIONS.keys() == SHAPES.keys() | {"leaks", "run"}  # these two have tests of their own


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_says_what_it_is(family):
    asked = explorer(family, name="mine")
    found = ask(asked, "about")
    assert (found["name"], found["family"], found["version"]) == ("mine", family, kl.__version__)
    assert found["parameters"] == sum(p.numel() for p in asked.model.parameters())
    kinds = {"encoder": ["self"], "decoder": ["masked"], "encoder-decoder": ["self", "masked", "cross"]}[
        family
    ]
    assert [one["kind"] for one in found["attentions"]] == kinds
    assert found["views"] == ["attention", *([] if family == "encoder" else ["decoding"]), "masks", "leaks"]
    read = ask(asked, "attention", **found["example"])
    assert [one["name"] for one in read["attentions"]] == [one["name"] for one in found["attentions"]]
    assert ("source" in read["tokens"]) == (family == "encoder-decoder") == ("source" in found["example"])


@pytest.mark.parametrize(
    ("question", "given", "said"),
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
def test_a_wrong_question_is_answered_by_a_sentence(question, given, said):
    with pytest.raises(ValueError, match=said):
        explorer("decoder").ask(question, given)


def test_an_error_travels_as_the_page_reads_it():
    assert error_payload(ValueError("no")) == {"error": {"message": "no"}}
    assert error_payload(ExpiredError("gone")) == {"error": {"message": "gone", "code": "forgotten"}}
    assert error_payload(OSError(2, "no such file")) == {"error": {"message": "[Errno 2] no such file"}}


def test_a_source_of_a_pair_cannot_be_left_out():
    with pytest.raises(ValueError, match="next needs source: give a text"):
        ask(explorer("encoder-decoder"), "next", text="", tokens=[])
    with pytest.raises(ValueError, match="the source is empty"):
        ask(explorer("encoder-decoder"), "attention", text=TEXT, source="")


def test_without_a_tokenizer_there_is_nothing_to_read():
    with pytest.raises(ValueError, match="there is no tokenizer: give the one"):
        Explorer(explorer("decoder").model, None)


def test_half_precision_is_explored_too():
    asked = Explorer(explorer("decoder").model.bfloat16(), words())
    read = ask(asked, "attention", text=TEXT)
    for head in ("mean", "rollout", 2):
        ask(asked, "overview", key=read["key"], name="decoder.self", layer=1, head=head, size=64)
    ask(asked, "next", text=TEXT, tokens=[])
    ask(asked, "unmasked", text=TEXT)


def test_a_broken_model_breaks_no_json():
    net = model("decoder")
    with torch.no_grad():
        net.token.weight[70] = float("nan")
    asked = Explorer(net, words())
    key = ask(asked, "attention", text="b sea")["key"]
    with pytest.raises(ValueError, match="some weights are NaN, and there is nothing to draw"):
        ask(asked, "overview", key=key, name="decoder.self", layer=0, head="mean", size=64)
    assert ask(asked, "summary", key=key, name="decoder.self", layer=0)["heads"][0]["entropy"] is None
    ask(asked, "next", text="b sea", tokens=[])
    with pytest.raises(ValueError, match="no token is left to choose from"):
        ask(asked, "write", text="b sea", tokens=[], options={}, limit=2)
