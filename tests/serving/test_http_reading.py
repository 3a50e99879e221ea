"""Embeddings, labels, scores and attention maps: those of the library, whoever asks at the same time."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from math import exp

import numpy as np
import pytest
import torch

import keepleft as kl
from keepleft.pipelines.predictor import Predictor
from keepleft.serving.http.limits import Limits
from serving.tiny_services import TOKENS, client, decoder, encoder, service, translator

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = ["the sea is calm", "a ship", "12 345", "आप कैसे हैं"]


def post(made, where, body):
    answer = made.post(where, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def alone(opened, text):
    """One text, without padding."""
    return Predictor(*opened).embed([TOKENS.encode(text).ids])[0].tolist()


@pytest.mark.parametrize(
    "opened",
    [
        lambda: encoder(kl.PoolingHead("mean", unit=True)),
        lambda: encoder(kl.PoolingHead("first")),
        encoder,
        decoder,
        translator,
    ],
)
def test_embeddings_are_the_models(opened):
    with client(opened()) as made:
        found = post(made, "/v1/embeddings", {"input": TEXTS})
        assert [one["index"] for one in found["data"]] == [0, 1, 2, 3]
        for one, text in zip(found["data"], TEXTS, strict=True):
            assert one["embedding"] == pytest.approx(alone(opened(), text), abs=1e-4)
        assert found["usage"]["prompt_tokens"] == sum(len(TOKENS.encode(text).ids) for text in TEXTS)
        coded = post(made, "/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"})["data"][0][
            "embedding"
        ]
        assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == pytest.approx(
            found["data"][0]["embedding"], abs=1e-4
        )
        tokens = post(made, "/v1/embeddings", {"input": TOKENS.encode(TEXTS[0]).ids})["data"][0]["embedding"]
        assert tokens == pytest.approx(found["data"][0]["embedding"], abs=1e-4)


def test_a_pooled_vector_is_the_mean_of_the_states():
    model, tokenizer, _ = encoder()
    with torch.no_grad():
        want = model.hidden_states(torch.tensor([tokenizer.encode("the sea").ids]))[0].mean(0)
    assert alone(encoder(), "the sea") == pytest.approx(want.tolist(), abs=1e-5)


def test_labels_are_the_models():
    opened = encoder(kl.ClassificationHead(3))
    with client(opened) as made:
        found = post(made, "/v1/classify", {"input": TEXTS})
        want = Predictor(*opened).classify(TEXTS)
        for one, row in zip(found["data"], want, strict=True):
            assert list(one["probabilities"]) == ["calm", "rough", "none"]
            assert list(one["probabilities"].values()) == pytest.approx(row.tolist(), abs=1e-4)
            assert one["label"] == ["calm", "rough", "none"][int(row.argmax())]


@pytest.mark.parametrize(("opened", "source"), [(decoder, None), (translator, "the ship sails")])
def test_scores_are_the_models(opened, source):
    with client(opened()) as made:
        said = {} if source is None else {"source": [source] * 2}
        found = post(made, "/v1/score", {"input": TEXTS[:2], **said})
        for one, text in zip(found["data"], TEXTS, strict=False):
            want = [thought.logprob for thought in Predictor(*opened()).score(text, source)]
            assert [token["logprob"] for token in one["tokens"]] == pytest.approx(want, abs=1e-4)
            assert one["logprob"] == pytest.approx(sum(want), abs=1e-3)
            assert one["perplexity"] == pytest.approx(exp(-sum(want) / len(want)), rel=1e-3)


def test_attention_maps_are_the_models():
    opened = translator()
    with client(opened) as made:
        found = post(
            made,
            "/v1/attention",
            {
                "input": "the sea",
                "source": "a ship sails",
                "heads": [1],
                "layers": ["decoder.0.*", "encoder.1.self"],
            },
        )
        assert set(found["maps"]) == {"decoder.0.self", "decoder.0.cross", "encoder.1.self"}
        source, tokens = TOKENS.encode("a ship sails").ids, [1, *TOKENS.encode("the sea").ids]
        with kl.watch(opened.model) as maps, torch.no_grad():
            opened.model(torch.tensor([source]), torch.tensor([tokens]))
        for name, rows in found["maps"].items():
            assert torch.allclose(torch.tensor(rows), maps[name][0, 1:2], atol=1e-4)
            assert found["heads"][name] == [1]
        assert len(found["tokens"]) == len(tokens)
        assert len(found["source"]) == len(source)
    with client(decoder()) as made:
        found = post(made, "/v1/attention", {"input": "the sea"})
        assert set(found["maps"]) == {"decoder.0.self", "decoder.1.self"}
        assert all(head[0][1] == 0 for head in found["maps"]["decoder.0.self"])  # nobody looks ahead


def test_attention_heads_are_those_of_each_stack():
    opened = translator()
    design = opened.model.design
    more = design.but(encoder=replace(design.encoder, heads=2 * design.heads))
    model = kl.build(more, generator=torch.Generator().manual_seed(1)).eval()
    model.notes = opened.model.notes
    opened = opened._replace(model=model)
    body = {"input": "the sea", "source": "a ship sails"}
    with client(opened) as made:
        found = post(made, "/v1/attention", body)
        for name, heads in found["heads"].items():
            count = design.heads * (2 if name.startswith("encoder") else 1)
            assert heads == list(range(count))
            assert len(found["maps"][name]) == count
        last = {"heads": [2 * design.heads - 1]}
        post(made, "/v1/attention", body | last | {"layers": ["encoder.*"]})
        refused = made.post("/v1/attention", json=body | last)
        assert refused.status_code == 400
        assert f"decoder.0.self has {design.heads}" in refused.json()["error"]["message"]


def test_texts_of_many_callers_are_read_together():
    opened = encoder(kl.PoolingHead("mean"))
    rows = [TOKENS.encode(text).ids for text in TEXTS * 5]

    async def ask_all(gathered):
        return await asyncio.gather(*(gathered.submit([row]) for row in rows))

    with service(opened, limits=Limits(batch_tokens=60)) as made:
        # so that all of them wait
        held = made.engine_thread.run_between_steps(lambda: asyncio.run(asyncio.sleep(0.2)))
        found = asyncio.run(ask_all(made.embedding_batcher))
        held.result()
        assert 1 < made.embedding_batcher.num_batches < len(rows)
        for row, (vector,) in zip(rows, found, strict=True):
            assert vector.tolist() == pytest.approx(Predictor(*opened).embed([row])[0].tolist(), abs=1e-4)


def test_one_who_leaves_takes_nobody_along():
    opened = encoder(kl.PoolingHead("mean"))

    async def two(made):
        made.engine_thread.run_between_steps(lambda: asyncio.run(asyncio.sleep(0.2)))
        first = asyncio.ensure_future(made.embedding_batcher.submit([[5, 6]]))
        second = asyncio.ensure_future(made.embedding_batcher.submit([[7]]))
        await asyncio.sleep(0.05)
        first.cancel()
        return await second

    with service(opened) as made:
        (vector,) = asyncio.run(two(made))
        assert vector.tolist() == pytest.approx(Predictor(*opened).embed([[7]])[0].tolist(), abs=1e-5)
        assert not made.embedding_batcher.waiting


def test_a_batch_that_fails_is_told_to_all_and_the_next_is_read():
    with service(encoder(kl.PoolingHead("mean"))) as made:
        work = made.embedding_batcher.batch_function
        made.embedding_batcher.batch_function = lambda rows: 1 / 0
        with pytest.raises(ZeroDivisionError):
            asyncio.run(made.embedding_batcher.submit([[5], [6]]))
        made.embedding_batcher.batch_function = work
        assert len(asyncio.run(made.embedding_batcher.submit([[5], [6]]))) == 2
