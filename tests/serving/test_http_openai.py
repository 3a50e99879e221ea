"""OpenAI's own client, over a real socket."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess

import numpy as np
import openai
import pytest

import keepleft as kl
from keepleft.serving.http.middleware.auth import APIKeys
from serving.tiny_services import TOKENS, decoder, encoder, running, talker

pytestmark = pytest.mark.usefixtures("one_thread")
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the sea"}]
REQUEST = {"model": "tiny", "prompt": "the sea"}


def make_client(port, key="a-key", kind=openai.OpenAI):
    return kind(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def server():
    with running(talker(), keys=APIKeys(["a-key"])) as (port, service, _), make_client(port) as client:
        yield client, port, service


def test_models(server):
    client, _, service = server
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == service.max_model_len
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("gpt-4")
    assert error.value.code == "model_not_found"


def test_completions_with_everything(server):
    client, _, _ = server
    result = client.completions.create(
        **REQUEST, max_tokens=8, temperature=0, logprobs=2, echo=True, stop=["zzz"], user="ann"
    )
    (text,) = kl.generate(decoder().model, TOKENS, "the sea", max_new_tokens=8)
    assert result.choices[0].text == "the sea" + text
    assert len(result.choices[0].logprobs.tokens) == result.usage.total_tokens
    several = client.completions.create(
        **REQUEST, max_tokens=8, n=3, seed=5, best_of=4, logit_bias={"9": -100}
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    constrained = client.completions.create(
        **REQUEST, max_tokens=8, extra_body={"num_beams": 3, "regex": "[a-z]{3}"}
    )
    assert len(constrained.choices[0].text) == 3


def test_streams(server):
    client, _, _ = server
    fields = {**REQUEST, "max_tokens": 20, "seed": 9, "n": 2, "stop": ["a"]}
    complete = client.completions.create(**fields)
    pieces = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    for choice in complete.choices:
        assert (
            "".join(entry.text for piece in pieces for entry in piece.choices if entry.index == choice.index)
            == choice.text
        )
        assert "a" not in choice.text
    assert pieces[-1].usage == complete.usage
    assert complete.seed == 9


def test_chats(server):
    client, _, _ = server
    fields = dict(
        model="tiny", messages=CHAT, max_completion_tokens=12, seed=2, logprobs=True, top_logprobs=3
    )
    complete = client.chat.completions.create(**fields)
    assert complete.choices[0].message.role == "assistant"
    assert len(complete.choices[0].logprobs.content) == complete.usage.completion_tokens
    assert client.chat.completions.create(**fields).choices == complete.choices  # the seed repeats it
    pieces = list(client.chat.completions.create(**fields, stream=True))
    assert (
        "".join(piece.choices[0].delta.content or "" for piece in pieces)
        == complete.choices[0].message.content
    )
    form = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "integer", "minimum": 1, "maximum": 9}},
    }
    result = client.chat.completions.create(model="tiny", messages=CHAT, response_format=form, max_tokens=9)
    assert 1 <= json.loads(result.choices[0].message.content) <= 9
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(
            model="tiny", messages=CHAT, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert error.value.code == "tools_not_supported"
    assert error.value.param == "tools"


def test_errors_are_those_that_the_client_knows(server):
    client, port, _ = server
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="tiny", prompt=[20] * 9000)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError), make_client(port, "wrong") as other:
        other.models.list()
    with pytest.raises(openai.APIStatusError) as error:
        client.completions.create(model="tiny", prompt="a" * 5_000_000)
    assert error.value.status_code == 413


def test_many_at_once(server):
    _, port, service = server

    async def all_of_them():
        async with make_client(port, kind=openai.AsyncOpenAI) as client:
            request = lambda n: client.completions.create(
                model="tiny", prompt=f"the sea {n}", max_tokens=5, temperature=0
            )
            return await asyncio.gather(*map(request, range(24)))

    result = asyncio.run(all_of_them())
    expected = kl.generate(decoder().model, TOKENS, [f"the sea {n}" for n in range(24)], max_new_tokens=5)
    assert [entry.choices[0].text for entry in result] == expected
    assert len(service.engine_thread.in_flight) == 0


def test_embeddings():
    with running(encoder(kl.PoolingHead("mean", unit=True))) as (port, _, _), make_client(port) as client:
        # in base64, as the client likes it
        result = client.embeddings.create(model="tiny", input=["the sea", "a ship"])
        plain = client.embeddings.create(model="tiny", input=["the sea", "a ship"], encoding_format="float")
        for entry, other in zip(result.data, plain.data, strict=True):
            assert np.linalg.norm(entry.embedding) == pytest.approx(1, abs=1e-4)
            assert entry.embedding == pytest.approx(other.embedding, abs=1e-5)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl(server):
    _, port, _ = server
    run = lambda *words: (
        subprocess.run(
            ["curl", "-sS", "-N", "--max-time", "30", *words], capture_output=True, text=True, check=True
        ).stdout
    )
    assert json.loads(run(f"http://localhost:{port}/health")) == {"status": "ready"}
    arguments = [
        "-H",
        "authorization: Bearer a-key",
        "-H",
        "content-type: application/json",
        f"http://127.0.0.1:{port}/v1/completions",
        "-d",
    ]
    assert (
        json.loads(run(*arguments, '{"prompt": "the sea", "max_tokens": 3}'))["object"] == "text_completion"
    )
    assert run(*arguments, '{"prompt": "the sea", "max_tokens": 3, "stream": true}').endswith(
        "data: [DONE]\n\n"
    )
