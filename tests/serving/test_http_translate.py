"""POST /v1/translate with `to`: what `keepleft translate --to` writes, sentence by sentence."""

from __future__ import annotations

import pytest

from keepleft.data.tokenizer import BOS_TOKEN, EOS_TOKEN, train_tokenizer
from keepleft.decoding.generation_config import GenerationConfig
from keepleft.pipelines.loading import LoadedModel
from keepleft.pipelines.placeholders import PLACEHOLDERS
from keepleft.pipelines.text_generation import TextGenerator
from keepleft.pipelines.translator import Translator
from keepleft.serving.engine.continuous import ContinuousBatchingEngine
from keepleft.serving.http.limits import Limits
from serving.tiny_explorers import make_model
from serving.tiny_services import client

TEXTS = ["The sea is calm.  It is 12 years old.\n\nWhere?", "", "The sea."]


def multilingual() -> LoadedModel:
    texts = [f"the sea {mark} is calm" for mark in PLACEHOLDERS] * 9
    tokenizer = train_tokenizer("bpe", texts, 290, extra_special_tokens=["<2en>", "<2fr>"])
    model = make_model("encoder-decoder")
    model.notes = {
        "decoder_start_token_id": tokenizer.token_to_id(BOS_TOKEN),
        "eos_token_id": tokenizer.token_to_id(EOS_TOKEN),
        "generation": {"max_new_tokens": 7},
    }
    return LoadedModel(model, tokenizer)


@pytest.fixture(scope="module")
def http_client():
    with client(multilingual(), ContinuousBatchingEngine, Limits(inputs=8)) as open_client:
        yield open_client


def translate(http_client, **body):
    answer = http_client.post("/v1/translate", json=body)
    return answer.status_code, answer.json()


def test_texts_are_what_the_translator_makes_of_them(http_client):
    status, result = translate(http_client, input=TEXTS, to="fr")
    assert status == 200
    translator = Translator(TextGenerator(*multilingual()), "fr")
    expected = translator.generate(TEXTS, translator.resolve(GenerationConfig()))
    assert [entry["text"] for entry in result["data"]] == [row[0].text for row in expected]
    assert [entry["score"] for entry in result["data"]] == pytest.approx(
        [row[0].score for row in expected], abs=1e-3
    )
    assert result["usage"]["completion_tokens"] > 0


def test_several_translations_are_of_the_whole_text(http_client):
    status, result = translate(http_client, input="The sea. It is calm.", to="fr", num_return_sequences=2)
    assert status == 200
    assert len(result["data"][0]["n_best"]) == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"to": "xx"}, "this model does not write 'xx': there are"),
        ({"to": "fr", "tag": "<2fr>"}, "to is 'fr' and tag '<2fr>'"),
        ({"to": "fr", "input": " ".join(f"Sea number {n}." for n in "abcdefghij")}, "input"),
    ],
)
def test_wrong_requests_name_the_field(http_client, body, message):
    status, result = translate(http_client, **{"input": "The sea.", **body})
    assert status == 400
    assert message in result["error"]["message"]


def test_a_model_of_several_languages_is_told_which_one_to_write(http_client):
    status, result = translate(http_client, input=["The sea.", "<2fr> The sea."])
    assert status == 400
    assert result["error"] == {
        "message": "this model writes en (English), fr (French): say which language to write, as in "
        '"to": "fr"',
        "type": "invalid_request_error",
        "param": "to",
        "code": None,
    }


@pytest.mark.parametrize(
    "body", [{"input": "The sea.", "tag": "<2fr>"}, {"input": ["<2fr> The sea.", "<2en> La mer.", ""]}]
)
def test_a_tag_says_the_language_too(http_client, body):
    assert translate(http_client, **body)[0] == 200


def test_a_response_warns_of_a_text_that_the_model_does_not_translate_into_that_language():
    with client(multilingual(), ContinuousBatchingEngine, pivot="en") as http_client:
        _, result = translate(http_client, input=["The sea.", "Ich habe Hunger"], to="fr")
        assert result["warnings"] == [
            "'Ich habe Hunger' looks like German, and this model translates to and from English only: "
            "translate to en first, and the result to fr"
        ]
        assert translate(http_client, input="The sea is calm.", to="fr")[1]["warnings"] == []


def test_nothing_is_said_of_languages_for_a_model_whose_pairs_are_not_known(http_client):
    assert translate(http_client, input="Ich habe Hunger", to="fr")[1]["warnings"] == []
