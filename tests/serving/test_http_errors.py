"""Errors have one format, say what to do about them, and reveal nothing else."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import keepleft as kl
from keepleft.serving.engine.request import OverloadedError
from keepleft.serving.engine.sequential import SequentialEngine
from keepleft.serving.http.errors import APIError
from keepleft.serving.http.json_body import parse_json
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.middleware import admission
from serving.tiny_services import Slow, client, decoder, encoder, talker, translator

pytestmark = pytest.mark.usefixtures("one_thread")
LIMITS = Limits(
    body=20_000,
    depth=8,
    prompts=3,
    choices=4,
    n=3,
    beams=2,
    new_tokens=50,
    characters=500,
    logprobs=2,
    stop_strings=2,
    stop_characters=5,
    tokens=4,
    messages=3,
    grammar=100,
    inputs=3,
    cells=200,
    user=8,
)


@pytest.fixture(scope="module")
def limited_client():
    with client(talker(), limits=LIMITS, max_model_len=64) as http_client:
        yield http_client


def refused(answer, status=400, code=None, param=None, message=""):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(answer.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert code is None or error["code"] == code
    assert param is None or error["param"] == param
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-request-id"].startswith("req_")
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 51}, "max_tokens"),
        ({"max_new_tokens": 51}, "max_tokens"),
        ({"n": 4}, "n"),
        ({"best_of": 4}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"prompt": ["a"] * 4}, "prompt"),
        ({"prompt": ["a"] * 3, "n": 2}, "n"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"num_beams": 3}, "num_beams"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"stop": ["a", "b", "c"]}, "stop"),
        ({"stop": "abcdef"}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"logit_bias": {str(n): 1 for n in range(5)}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, None),
        ({"logit_bias": {"5": 101}}, None),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"suppress_tokens": [1, 2, 3, 4, 5]}, "suppress_tokens"),
        ({"suppress_tokens": [9999]}, "suppress_tokens"),
        ({"bad_words_ids": [[1, 2], [3, 4, 5]]}, "bad_words_ids"),
        ({"sequence_bias": [[[9999], 1.0]]}, "sequence_bias"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"temperature": 0, "do_sample": True}, "temperature"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"n": True}, "n"),
        ({"suffix": "end"}, "suffix"),
        ({"user": "u" * 9}, "user"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"max_tokens": 1, "max_new_tokens": 1}, "max_new_tokens"),
        ({"regex": "a" * 101}, "regex"),
        ({"json_schema": {"enum": ["a" * 101]}}, "json_schema"),
        ({"min_new_tokens": 20, "max_tokens": 10}, "min_new_tokens"),
        ({"eos_token_id": [9999]}, "eos_token_id"),
        ({"prompt": "a" * 501}, None),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"stream": 1}, "stream"),
    ],
)
def test_what_is_beyond_a_limit_is_refused_by_name(limited_client, fields, param):
    refused(limited_client.post("/v1/completions", json={"prompt": "the sea", **fields}), param=param)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_pp": 0.5}, "there is no field 'top_pp': did you mean top_p?"),
        ({"xyzzy": 1}, "there is no field 'xyzzy': leave it out"),
        (
            {"num_beams": 2, "num_beam_groups": 3},
            "num_beams is 2 and num_beam_groups 3: the second must divide the first",
        ),
        ({"regex": "a", "grammar": "b"}, "give one of them"),
        ({"regex": "(("}, "the grammar is invalid"),
        ({"grammar": "start: nothing"}, "the grammar is invalid"),
        ({"shortlist": [7], "suppress_tokens": [7]}, "no token is left to choose from"),
        ({"shortlist": []}, "shortlist is empty"),
        ({"penalty_alpha": 0.5, "n": 2, "do_sample": True}, "penalty_alpha is contrastive search"),
        ({"prompt": [9999]}, "prompt 0 holds token 9999, and the model knows"),
    ],
)
def test_contradictions_are_explained(limited_client, fields, message):
    refused(limited_client.post("/v1/completions", json={"prompt": "the sea", **fields}), message=message)


def test_a_prompt_that_is_longer_than_the_model_has_its_own_code(limited_client):
    for prompt in ([20] * 65, "the sea is calm " * 30):
        error = refused(
            limited_client.post("/v1/completions", json={"prompt": prompt}), code="context_length_exceeded"
        )
        assert "64" in error["message"]
    messages = [{"role": "user", "content": "a ship " * 40}]
    refused(
        limited_client.post("/v1/chat/completions", json={"messages": messages}),
        code="context_length_exceeded",
    )
    refused(limited_client.post("/v1/embeddings", json={"input": [20] * 65}), code="context_length_exceeded")
    refused(
        limited_client.post("/v1/score", json={"input": "the sea is calm " * 20}),
        code="context_length_exceeded",
    )
    refused(
        limited_client.post("/v1/attention", json={"input": "the sea is calm " * 20}),
        code="context_length_exceeded",
    )


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tools_not_supported"),
        ({"tool_choice": "required"}, "tool_choice", "tools_not_supported"),
        ({"functions": [{}]}, None, "tools_not_supported"),
        ({"messages": []}, "messages", None),
        ({"messages": [{"role": "user", "content": "a"}] * 4}, "messages", None),
        ({"messages": [{"role": "user", "content": "a" * 501}]}, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "u u", "content": "a"}]}, "messages.0.role", None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
            None,
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", None),
        ({"top_logprobs": 2}, "top_logprobs", None),
        ({"logprobs": True, "top_logprobs": 3}, "logprobs", None),
        ({"response_format": {"type": "json_schema"}}, "response_format", None),
        ({"response_format": {"type": "xml"}}, None, None),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format", None),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", None),
        ({"max_completion_tokens": 0}, None, None),
        ({"max_completion_tokens": 51}, "max_completion_tokens", None),
    ],
)
def test_what_a_chat_cannot_do_is_rejected(limited_client, fields, param, code):
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    refused(limited_client.post("/v1/chat/completions", json=body), param=param, code=code)


def test_the_message_of_a_template_that_rejects_is_passed_on():
    loaded = decoder(
        chat_template="{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}"
        "{% endif %}x"
    )
    with client(loaded) as http_client:
        answer = http_client.post(
            "/v1/chat/completions", json={"messages": [{"role": "system", "content": "a"}]}
        )
        refused(answer, code="invalid_messages", message="begin with the user")


def test_a_template_that_never_ends_or_grows_without_end_is_stopped():
    endless = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    with client(decoder(chat_template=endless), limits=Limits(template_seconds=0.3)) as http_client:
        refused(http_client.post("/v1/chat/completions", json=body), code="template_too_slow")
        # the sandbox has been started again
        refused(http_client.post("/v1/chat/completions", json=body), code="template_too_slow")
    with client(
        decoder(chat_template="{% for a in range(99999) %}{{ 'long ' * 999 }}{% endfor %}")
    ) as http_client:
        refused(http_client.post("/v1/chat/completions", json=body), message="characters")
    with client(decoder(chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")) as http_client:
        refused(http_client.post("/v1/chat/completions", json=body), code="invalid_messages")


def test_a_grammar_that_takes_too_long_is_stopped():
    with client(decoder(), limits=Limits(grammar_seconds=1e-9)) as http_client:
        regex = "(" + "|".join("ab" * n for n in range(1, 200)) + "){9}"
        refused(
            http_client.post("/v1/completions", json={"prompt": "a", "regex": regex}),
            code="grammar_too_complex",
        )


@pytest.mark.parametrize(
    ("load", "route", "code"),
    [
        (decoder, "/v1/chat/completions", "no_chat_template"),
        (decoder, "/v1/translate", "model_not_suited"),
        (decoder, "/v1/classify", "model_not_suited"),
        (encoder, "/v1/completions", "model_not_suited"),
        (encoder, "/v1/score", "model_not_suited"),
        (translator, "/v1/classify", "model_not_suited"),
        (translator, "/v1/chat/completions", "no_chat_template"),
        (lambda: encoder(kl.ClassificationHead(3)), "/v1/score", "model_not_suited"),
    ],
)
def test_a_model_that_is_for_something_else_says_for_what(load, route, code):
    body = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/completions": {"prompt": "a"},
    }
    with client(load()) as http_client:
        refused(http_client.post(route, json=body.get(route, {"input": "a"})), code=code)


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        ("/v1/embeddings", {"input": ["a"] * 4}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "prompt"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": [9999]}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 8}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "x"}, None),
        ("/v1/score", {"input": ["a"] * 4}, "input"),
        ("/v1/score", {"input": []}, "input"),
        ("/v1/score", {"input": ""}, "input"),
        ("/v1/score", {"input": "a", "source": "b"}, "source"),
        ("/v1/attention", {"input": "the sea is calm and the ship"}, "layers"),
        ("/v1/attention", {"input": "a", "layers": ["encoder.9.self"]}, "layers"),
        ("/v1/attention", {"input": "a", "layers": []}, "layers"),
        ("/v1/attention", {"input": "a", "heads": [99]}, "heads"),
        ("/v1/attention", {"input": "a", "source": "b"}, "source"),
    ],
)
def test_other_routes_have_limits_too(limited_client, route, fields, param):
    refused(limited_client.post(route, json=fields), param=param)


def test_an_encoder_decoder_needs_its_source():
    with client(translator()) as http_client:
        refused(http_client.post("/v1/score", json={"input": "a"}), param="source")
        refused(http_client.post("/v1/score", json={"input": ["a", "b"], "source": "c"}), param="source")
        refused(http_client.post("/v1/attention", json={"input": "a"}), param="source")
        refused(
            http_client.post("/v1/translate", json={"input": "a", "tag": "<2xx>"}),
            message="the model has no tag '<2xx>'",
        )
        refused(
            http_client.post("/v1/translate", json={"input": "a", "tag": "sea"}),
            message="the model has no tag 'sea': leave it out",
        )
        for wrong in ("text", "texts", "source"):
            refused(
                http_client.post("/v1/translate", json={wrong: "a"}),
                message=f"there is no field '{wrong}': did you mean input?",
            )
        refused(
            http_client.post("/v1/completions", json={"prompt": "a", "echo": True, "logprobs": 1}),
            param="echo",
        )


def test_another_model_is_not_here(limited_client):
    bodies = {
        "/v1/completions": {"prompt": "a"},
        "/v1/embeddings": {"input": "a"},
        "/v1/attention": {"input": "a"},
    }
    for route, body in bodies.items():
        refused(limited_client.post(route, json={**body, "model": "gpt-4"}), 404, "model_not_found", "model")
        assert limited_client.post(route, json={**body, "model": "tiny"}).status_code == 200
    refused(limited_client.get("/v1/models/gpt-4"), 404, "model_not_found")


def test_unknown_routes_and_methods(limited_client):
    for path in (
        "/nowhere",
        "/v1",
        "/docs",
        "/redoc",
        "/v1/models/",
        "/v1/completions/",
        "/explore/../x",
        "/..%2f..%2fetc/passwd",
    ):
        refused(limited_client.get(path), 404)
    answer = limited_client.get("/v1/completions")
    refused(answer, 405)
    assert answer.headers["allow"] == "POST"
    for method in ("PUT", "DELETE", "PATCH", "TRACE", "OPTIONS"):
        assert limited_client.request(method, "/v1/models").status_code in (405, 415)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"nothing", "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_json"),
        (b'{"prompt": NaN}', "invalid_json"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_unicode"),
        (b'{"\\udfff": 1}', "invalid_unicode"),
        (b'{"prompt": ' + b"[" * 9 + b"]" * 9 + b"}", "too_deep"),
        (b"[" * 5000 + b"]" * 5000, "too_deep"),
        (b"[" * 9000 + b"]" * 9000, "too_many_values"),
        (b"[]", None),
        (b'"a"', None),
        (b"null", None),
        (b'{"prompt": "a", "temperature": 1e999}', None),
        (b'{"prompt": "a", "seed": 1e30}', None),
        (b'{"prompt": "a", "seed": 99999999999999999999999}', None),
        (b'{"prompt": [99999999999999999999999]}', None),
    ],
)
def test_a_body_that_is_no_sound_json(limited_client, body, code):
    refused(
        limited_client.post("/v1/completions", content=body, headers={"content-type": "application/json"}),
        code=code,
    )


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": "hot"}, "temperature", 'temperature is "hot": it should be a valid number'),
        ({"max_tokens": -3}, "max_tokens", "max_tokens is -3: it should be greater than or equal to 0"),
        ({"temperature": "hot " * 50}, "temperature", "temperature: it should be a valid number"),
        ({"temprature": 1}, "temprature", "there is no field 'temprature': did you mean temperature?"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_if_that_is_short(limited_client, fields, param, message):
    error = limited_client.post("/v1/completions", json={"prompt": "a", **fields}).json()["error"]
    assert (error["param"], error["message"][: len(message)]) == (param, message)


def test_nesting_up_to_the_limit_is_fine():
    parse_json(b"[" * 8 + b"]" * 8, Limits(depth=8))
    with pytest.raises(APIError):
        parse_json(b"[" * 10 + b"]" * 10, Limits(depth=8))


def test_a_body_that_is_too_large_or_no_json_is_refused_by_its_headers(limited_client):
    refused(limited_client.post("/v1/completions", json={"prompt": "a" * 30_000}), 413, "too_large")
    refused(
        limited_client.post(
            "/v1/completions", content=iter([b"a" * 9000] * 5), headers={"content-type": "application/json"}
        ),
        413,
    )
    refused(limited_client.post("/v1/completions", content=b"{}"), 415)
    refused(
        limited_client.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}), 415
    )
    packed = {"content-type": "application/json", "content-encoding": "gzip"}
    refused(limited_client.post("/v1/completions", content=b"{}", headers=packed), 415)


def test_our_bugs_are_reported_by_request_id_alone(monkeypatch):
    lines = []
    with client(decoder(), log=lambda level, fields: lines.append((level, fields))) as http_client:
        monkeypatch.setattr(
            "keepleft.serving.http.routes.completions.resolve_options",
            lambda *_, **__: Path("/secret/place").read_text(),
        )
        answer = http_client.post("/v1/completions", json={"prompt": "a private thing"})
    error = refused(answer, 500, "internal_error")
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] in error["message"]
    fault = next(fields for level, fields in lines if level == "error")
    assert fault["id"] == answer.headers["x-request-id"]
    assert fault["error"] == "FileNotFoundError"
    assert any("test_http_errors.py" in line for line in fault["where"])
    assert "private" not in json.dumps(lines)


class Broken(SequentialEngine):
    """An engine whose steps fail."""

    times = 2

    def step(self):
        if self.times:
            raise ZeroDivisionError("at a secret place")
        return super().step()


def test_an_engine_failure_is_reported_and_the_next_request_is_served():
    with client(decoder(), Broken) as http_client:
        refused(
            http_client.post("/v1/completions", json={"prompt": "the"}),
            500,
            "model_failed",
            message="ZeroDivisionError",
        )
        text = http_client.post("/v1/completions", json={"prompt": "the", "stream": True}).text
        assert '"code":"model_failed"' in text
        assert "secret" not in text
        assert "[DONE]" not in text
        Broken.times = 0
        assert http_client.post("/v1/completions", json={"prompt": "the"}).status_code == 200


def test_a_full_engine_says_when_to_retry(monkeypatch):
    monkeypatch.setattr(admission, "REFUSAL_SECONDS", 0.1)
    with client(decoder(), limits=Limits(requests=2)) as http_client:
        start = time.monotonic()
        answer = http_client.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
        assert time.monotonic() - start >= 0.1  # a client that retries at once costs little
        refused(answer, 429, "rate_limit_exceeded")
        assert answer.headers["retry-after"] == "1"
        assert (
            http_client.post("/v1/completions", json={"prompt": ["a", "b"]}).status_code == 200
        )  # those two were let go

        def full(*_):
            raise OverloadedError("no room", retry_after=6.2)

        monkeypatch.setattr("keepleft.serving.engine.thread.EngineThread.submit", full)
        answer = http_client.post("/v1/embeddings", json={"input": "a"})
        refused(answer, 429)
        assert answer.headers["retry-after"] == "7"


def test_a_server_that_shuts_down_says_so():
    with client(decoder()) as http_client:
        assert http_client.get("/health").json() == {"status": "ready"}
        http_client.service.drain(1.0)
        answer = http_client.post("/v1/completions", json={"prompt": "a"})
        refused(answer, 503, "shutting_down")
        assert int(answer.headers["retry-after"]) > 0
        answer = http_client.get("/health")
        assert answer.status_code == 503
        assert answer.json() == {"status": "draining"}
        assert http_client.get("/metrics").status_code == 200


def test_a_request_that_takes_too_long_is_cancelled():
    with client(decoder(), Slow, limits=Limits(seconds=0.2)) as http_client:
        body = {"prompt": "a", "max_tokens": 4000, "logit_bias": {"2": -100}}
        refused(http_client.post("/v1/completions", json=body), 504, "timeout")
        text = http_client.post("/v1/completions", json={**body, "stream": True}).text
        assert '"finish_reason":"cancelled"' in text
        assert '"code":"timeout"' in text


def test_limits_must_be_limits():
    with pytest.raises(ValueError, match="the limit body is 0: it must be above 0"):
        Limits(body=0)
