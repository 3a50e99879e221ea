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
