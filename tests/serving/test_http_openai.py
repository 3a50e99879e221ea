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
SAID = {"model": "tiny", "prompt": "the sea"}


def ask(port, key="a-key", kind=openai.OpenAI):
    return kind(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def there():
    with running(talker(), keys=APIKeys(["a-key"])) as (port, service, _), ask(port) as made:
        yield made, port, service


def test_models(there):
    made, _, service = there
    assert [model.id for model in made.models.list()] == ["tiny"]
    assert made.models.retrieve("tiny").max_model_len == service.max_model_len
    with pytest.raises(openai.NotFoundError) as told:
        made.models.retrieve("gpt-4")
    assert told.value.code == "model_not_found"


def test_completions_with_everything(there):
    made, _, _ = there
    found = made.completions.create(
        **SAID, max_tokens=8, temperature=0, logprobs=2, echo=True, stop=["zzz"], user="ann"
    )
    (text,) = kl.generate(decoder().model, TOKENS, "the sea", max_new_tokens=8)
    assert found.choices[0].text == "the sea" + text
    assert len(found.choices[0].logprobs.tokens) == found.usage.total_tokens
    several = made.completions.create(**SAID, max_tokens=8, n=3, seed=5, best_of=4, logit_bias={"9": -100})
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    own = made.completions.create(**SAID, max_tokens=8, extra_body={"num_beams": 3, "regex": "[a-z]{3}"})
    assert len(own.choices[0].text) == 3


def test_streams(there):
    made, _, _ = there
    said = {**SAID, "max_tokens": 20, "seed": 9, "n": 2, "stop": ["a"]}
    whole = made.completions.create(**said)
    pieces = list(made.completions.create(**said, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        assert (
            "".join(one.text for piece in pieces for one in piece.choices if one.index == choice.index)
            == choice.text
        )
        assert "a" not in choice.text
    assert pieces[-1].usage == whole.usage
    assert whole.seed == 9


def test_chats(there):
    made, _, _ = there
    said = dict(model="tiny", messages=CHAT, max_completion_tokens=12, seed=2, logprobs=True, top_logprobs=3)
    whole = made.chat.completions.create(**said)
    assert whole.choices[0].message.role == "assistant"
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    assert made.chat.completions.create(**said).choices == whole.choices  # the seed repeats it
    pieces = list(made.chat.completions.create(**said, stream=True))
    assert (
        "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    )
    form = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "integer", "minimum": 1, "maximum": 9}},
    }
    found = made.chat.completions.create(model="tiny", messages=CHAT, response_format=form, max_tokens=9)
    assert 1 <= json.loads(found.choices[0].message.content) <= 9
    with pytest.raises(openai.BadRequestError) as told:
        made.chat.completions.create(
            model="tiny", messages=CHAT, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert told.value.code == "tools_not_supported"
    assert told.value.param == "tools"


def test_errors_are_those_that_the_client_knows(there):
    made, port, _ = there
    with pytest.raises(openai.BadRequestError) as told:
        made.completions.create(model="tiny", prompt=[20] * 9000)
    assert told.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError), ask(port, "wrong") as other:
        other.models.list()
    with pytest.raises(openai.APIStatusError) as told:
        made.completions.create(model="tiny", prompt="a" * 5_000_000)
    assert told.value.status_code == 413


def test_many_at_once(there):
    _, port, service = there

    async def all_of_them():
        async with ask(port, kind=openai.AsyncOpenAI) as made:
            one = lambda n: made.completions.create(
                model="tiny", prompt=f"the sea {n}", max_tokens=5, temperature=0
            )
            return await asyncio.gather(*map(one, range(24)))

    found = asyncio.run(all_of_them())
    want = kl.generate(decoder().model, TOKENS, [f"the sea {n}" for n in range(24)], max_new_tokens=5)
    assert [one.choices[0].text for one in found] == want
    assert service.engine_thread.stats()["in_flight"] == 0


def test_embeddings():
    with running(encoder(kl.PoolingHead("mean", unit=True))) as (port, _, _), ask(port) as made:
        # in base64, as the client likes it
        found = made.embeddings.create(model="tiny", input=["the sea", "a ship"])
        plain = made.embeddings.create(model="tiny", input=["the sea", "a ship"], encoding_format="float")
        for one, other in zip(found.data, plain.data, strict=True):
            assert np.linalg.norm(one.embedding) == pytest.approx(1, abs=1e-4)
            assert one.embedding == pytest.approx(other.embedding, abs=1e-5)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl(there):
    _, port, _ = there
    run = lambda *words: (
        subprocess.run(
            ["curl", "-sS", "-N", "--max-time", "30", *words], capture_output=True, text=True, check=True
        ).stdout
    )
    assert json.loads(run(f"http://localhost:{port}/health")) == {"status": "ready"}
    said = [
        "-H",
        "authorization: Bearer a-key",
        "-H",
        "content-type: application/json",
        f"http://127.0.0.1:{port}/v1/completions",
        "-d",
    ]
    assert json.loads(run(*said, '{"prompt": "the sea", "max_tokens": 3}'))["object"] == "text_completion"
    assert run(*said, '{"prompt": "the sea", "max_tokens": 3, "stream": true}').endswith("data: [DONE]\n\n")
