"""Embeddings, labels, scores and attention maps: those of the library, whoever asks at the same time."""

from __future__ import annotations

import base64
from dataclasses import replace
from math import exp

import numpy as np
import pytest
import torch

import keepleft as kl
from keepleft.pipelines.predictor import Predictor
from serving.tiny_services import TOKENS, client, decoder, encoder, translator

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = ["the sea is calm", "a ship", "12 345", "आप कैसे हैं"]


def post(http_client, where, body):
    answer = http_client.post(where, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def alone(loaded, text):
    """One text, without padding."""
    return Predictor(*loaded).embed([TOKENS.encode(text).ids])[0].tolist()


@pytest.mark.parametrize(
    "load",
    [
        lambda: encoder(kl.PoolingHead("mean", unit=True)),
        lambda: encoder(kl.PoolingHead("first")),
        encoder,
        decoder,
        translator,
    ],
)
def test_embeddings_are_the_models(load):
    with client(load()) as http_client:
        result = post(http_client, "/v1/embeddings", {"input": TEXTS})
        assert [entry["index"] for entry in result["data"]] == [0, 1, 2, 3]
        for entry, text in zip(result["data"], TEXTS, strict=True):
            assert entry["embedding"] == pytest.approx(alone(load(), text), abs=1e-4)
        assert result["usage"]["prompt_tokens"] == sum(len(TOKENS.encode(text).ids) for text in TEXTS)
        coded = post(http_client, "/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"})["data"][
            0
        ]["embedding"]
        assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == pytest.approx(
            result["data"][0]["embedding"], abs=1e-4
        )
        tokens = post(http_client, "/v1/embeddings", {"input": TOKENS.encode(TEXTS[0]).ids})["data"][0][
            "embedding"
        ]
        assert tokens == pytest.approx(result["data"][0]["embedding"], abs=1e-4)


def test_a_pooled_vector_is_the_mean_of_the_states():
    model, tokenizer, _ = encoder()
    with torch.no_grad():
        expected = model.hidden_states(torch.tensor([tokenizer.encode("the sea").ids]))[0].mean(0)
    assert alone(encoder(), "the sea") == pytest.approx(expected.tolist(), abs=1e-5)


def test_labels_are_the_models():
    loaded = encoder(kl.ClassificationHead(3))
    with client(loaded) as http_client:
        result = post(http_client, "/v1/classify", {"input": TEXTS})
        expected = Predictor(*loaded).classify(TEXTS)
        for entry, row in zip(result["data"], expected, strict=True):
            assert list(entry["probabilities"]) == ["calm", "rough", "none"]
            assert list(entry["probabilities"].values()) == pytest.approx(row.tolist(), abs=1e-4)
            assert entry["label"] == ["calm", "rough", "none"][int(row.argmax())]


@pytest.mark.parametrize(("load", "source"), [(decoder, None), (translator, "the ship sails")])
def test_scores_are_the_models(load, source):
    with client(load()) as http_client:
        fields = {} if source is None else {"source": [source] * 2}
        result = post(http_client, "/v1/score", {"input": TEXTS[:2], **fields})
        for entry, text in zip(result["data"], TEXTS, strict=False):
            expected = [scored.logprob for scored in Predictor(*load()).score(text, source)]
            assert [token["logprob"] for token in entry["tokens"]] == pytest.approx(expected, abs=1e-4)
            assert entry["logprob"] == pytest.approx(sum(expected), abs=1e-3)
            assert entry["perplexity"] == pytest.approx(exp(-sum(expected) / len(expected)), rel=1e-3)


def test_attention_maps_are_the_models():
    loaded = translator()
    with client(loaded) as http_client:
        result = post(
            http_client,
            "/v1/attention",
            {
                "input": "the sea",
                "source": "a ship sails",
                "heads": [1],
                "layers": ["decoder.0.*", "encoder.1.self"],
            },
        )
        assert set(result["maps"]) == {"decoder.0.self", "decoder.0.cross", "encoder.1.self"}
        source, tokens = TOKENS.encode("a ship sails").ids, [1, *TOKENS.encode("the sea").ids]
        with kl.watch(loaded.model) as maps, torch.no_grad():
            loaded.model(torch.tensor([source]), torch.tensor([tokens]))
        for name, rows in result["maps"].items():
            assert torch.allclose(torch.tensor(rows), maps[name][0, 1:2], atol=1e-4)
            assert result["heads"][name] == [1]
        assert len(result["tokens"]) == len(tokens)
        assert len(result["source"]) == len(source)
    with client(decoder()) as http_client:
        result = post(http_client, "/v1/attention", {"input": "the sea"})
        assert set(result["maps"]) == {"decoder.0.self", "decoder.1.self"}
        assert all(head[0][1] == 0 for head in result["maps"]["decoder.0.self"])  # causal


def test_attention_heads_are_those_of_each_stack():
    loaded = translator()
    design = loaded.model.design
    more = design.but(encoder=replace(design.encoder, heads=2 * design.heads))
    model = kl.build(more, generator=torch.Generator().manual_seed(1)).eval()
    model.notes = loaded.model.notes
    loaded = loaded._replace(model=model)
    body = {"input": "the sea", "source": "a ship sails"}
    with client(loaded) as http_client:
        result = post(http_client, "/v1/attention", body)
        for name, heads in result["heads"].items():
            count = design.heads * (2 if name.startswith("encoder") else 1)
            assert heads == list(range(count))
            assert len(result["maps"][name]) == count
        last = {"heads": [2 * design.heads - 1]}
        post(http_client, "/v1/attention", body | last | {"layers": ["encoder.*"]})
        refused = http_client.post("/v1/attention", json=body | last)
        assert refused.status_code == 400
        assert f"decoder.0.self has {design.heads}" in refused.json()["error"]["message"]
