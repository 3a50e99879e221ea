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
    "logprob": NUMBER,
    "score": NUMBER,
    "finished": bool,
    "survives": bool,
    "best": bool,
}
# The contract with web/src/api.ts: a type, a tuple of types, a list of one shape, or names with shapes
SHAPES = {
    "model_info": {
        "name": str,
        "family": str,
        "parameters": int,
        "dim": int,
        "vocab_size": int,
        "max_positions": (int, type(None)),
        "attentions": [{"name": str, "kind": str, "layers": int, "heads": int, "mask": str}],
        "views": [str],
        "languages": dict,
        "example": dict,
        "version": str,
    },
    "attention": {
        "key": str,
        "tokens": dict,
        "truncated": (str, type(None)),
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
    "overview": {
        "rows": int,
        "columns": int,
        "cell_size": int,
        "map_u8": str,
        "max_weight": NUMBER,
        "claim_bits": str,
    },
    "tile": {"row": int, "column": int, "rows": int, "columns": int, "map_u8": str, "claim_bits": str},
    "token_attention": {"weights_f32": str},
    "head_stats": {
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
    "next_token": {
        "prompt": [TOKEN],
        "new_tokens": [TOKEN],
        "logits_f32": str,
        "eos_ids": [int],
        "decoder_start_token_id": int,
    },
    "token_texts": {"tokens": [TOKEN]},
    "vocabulary": {"tokens": [str]},
    "continue_text": {"tokens": [TOKEN], "logprobs": [NUMBER], "finished": bool},
    "beam": {
        "steps": [[NODE]],
        "finished": [{"tokens": [TOKEN], "score": NUMBER, "step": int}],
        "best": {"tokens": [TOKEN], "score": NUMBER},
    },
    "translate": {"text": str, "sentences": [{"source": str, "target": str, "input": str}]},
    "alignment": {"source": [TOKEN], "target": [TOKEN], "weights_u8": str, "rows": int, "columns": int},
    "mask": {
        "mask": str,
        "visible_bits": str,
        "rows": int,
        "columns": int,
        "faults": [str],
        "cost": {"visible": int, "total": int, "fraction": NUMBER, "note": str},
    },
    "unmasked": {
        "tokens": [TOKEN],
        "masked_loss_f32": str,
        "unmasked_loss_f32": str,
        "note": str,
        "maps": {"rows": int, "columns": int, "masked_u8": str, "unmasked_u8": str},
    },
    "runs": {"runs": [dict]},
    "compare": {},
}
WRITING = {"next_token", "continue_text", "beam", "unmasked"}


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
        "model_info": {},
        "attention": texts,
        "overview": {**map_params, "size": 4},
        "head_stats": {"key": key, "name": name, "layer": 0},
        "tile": {**map_params, "row": 0, "column": 0, "size": 256},
        "token_attention": {**map_params, "token": 1, "incoming": True},
        "next_token": {**texts, "tokens": [70], "unmasked": False},
        "token_texts": {"ids": [70, 2], "context": [71]},
        "vocabulary": {},
        "continue_text": {
            **texts,
            "tokens": [70],
            "options": {"do_sample": True, "top_k": 0, "top_p": 1, "min_p": 0},
            "max_new_tokens": 4,
        },
        "beam": {**texts, "num_beams": 3, "max_new_tokens": 4, "length_penalty": 1, "early_stopping": False},
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
    assert QUESTIONS.keys() == SHAPES.keys() | {"audit", "run"}  # these two have tests of their own


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_says_what_it_is(family):
    explorer = make_explorer(family, name="mine")
    answer = ask(explorer, "model_info")
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
        ("model_inof", {}, "there is no question 'model_inof': did you mean model_info?"),
        ("__init__", {}, "there is no question '__init__'"),
        (["model_info"], {}, r"there is no question \['model_info'\]"),
        ("model_info", {"x": 1}, "model_info takes no 'x': leave it out"),
        ("attention", {"txt": "a"}, "attention takes no 'txt': did you mean text?"),
        ("attention", {}, "attention needs text: give a text"),
        ("attention", {"text": ["a"]}, r"text is \['a'\]: it must be a text"),
        (
            "attention",
            "a text",
            "attention was asked with 'a text': give an object of names and values, with text, source",
        ),
        ("token_texts", {"ids": [1e9]}, "ids holds 1000000000.0"),
        ("audit", {"wait": "yes"}, "wait is 'yes': it must be true or false"),
        ("audit", {"budget": "fulls"}, "no budget is called 'fulls': did you mean full?"),
        ("audit", {"action": "begin"}, "no action is called 'begin': there are poll, start, stop"),
        ("audit", {"client": "x" * 65}, "client has 65 characters: give at most 64"),
        ("run", {"name": "x", "from_line": -1}, "from_line is -1"),
    ],
)
def test_a_wrong_question_is_answered_by_a_sentence(question, params, message):
    with pytest.raises(ValueError, match=message):
        make_explorer("decoder").ask(question, params)


def test_an_error_travels_as_the_page_reads_it():
    assert error_payload(ValueError("no")) == {"error": {"message": "no"}}
    assert error_payload(ExpiredError("gone")) == {"error": {"message": "gone", "code": "expired"}}
    assert error_payload(OSError(2, "no such file")) == {"error": {"message": "[Errno 2] no such file"}}


def test_a_source_of_a_pair_cannot_be_left_out():
    with pytest.raises(ValueError, match="next_token needs source: give a text"):
        ask(make_explorer("encoder-decoder"), "next_token", text="", tokens=[])
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
    ask(explorer, "next_token", text=TEXT, tokens=[])
    ask(explorer, "unmasked", text=TEXT)


def test_a_broken_model_breaks_no_json():
    model = make_model("decoder")
    with torch.no_grad():
        model.token.weight[70] = float("nan")
    explorer = Explorer(model, tokenizer())
    key = ask(explorer, "attention", text="b sea")["key"]
    with pytest.raises(ValueError, match="some weights are NaN, and there is nothing to draw"):
        ask(explorer, "overview", key=key, name="decoder.self", layer=0, head="mean", size=64)
    assert ask(explorer, "head_stats", key=key, name="decoder.self", layer=0)["heads"][0]["entropy"] is None
    ask(explorer, "next_token", text="b sea", tokens=[])
    with pytest.raises(ValueError, match="no token is left to choose from"):
        ask(explorer, "continue_text", text="b sea", tokens=[], options={}, max_new_tokens=2)
