"""Responses follow /openapi.json, whatever is sent."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import keepleft as kl
from keepleft.serving.engine.continuous import ContinuousBatchingEngine
from keepleft.serving.http.limits import Limits
from serving.tiny_services import client, encoder, talker, translator

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis import checks

pytestmark = pytest.mark.usefixtures("one_thread")
CHECKS = [
    checks.not_a_server_error,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.status_code_conformance,
    checks.unsupported_method,
    checks.negative_data_rejection,
]
LIMITS = Limits(new_tokens=8, choices=8, n=4, beams=4, prompts=4, inputs=4, characters=2000)


@pytest.mark.parametrize(
    "load",
    [talker, translator, lambda: encoder(kl.ClassificationHead(3))],
    ids=["decoder", "encoder-decoder", "encoder"],
)
def test_every_response_is_documented(load):
    with client(load(), limits=LIMITS) as http_client:
        schema = schemathesis.openapi.from_asgi("/openapi.json", http_client.app)
        routes = [operation.ok() for operation in schema.get_all_operations()]
        assert len(routes) == 15
        for route in routes:
            check_route(route)


def check_route(route):
    @settings(
        max_examples=12,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=route.as_strategy())
    def check(case):
        case.call_and_validate(checks=CHECKS)

    check()


TOKEN = st.integers(0, 320)
TOKEN_LISTS = st.lists(TOKEN, max_size=3)
FIELDS = {
    "max_tokens": st.integers(0, 8),
    "temperature": st.sampled_from([0, 0.01, 1, 2]),
    "top_p": st.sampled_from([1e-9, 0.5, 1]),
    "n": st.integers(1, 4),
    "best_of": st.integers(1, 4),
    "stream": st.booleans(),
    "logprobs": st.integers(0, 20),
    "echo": st.booleans(),
    "stop": st.lists(st.text("ae \ufffdक", min_size=1, max_size=3), max_size=3),
    "seed": st.integers(-9, 9),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "num_beams": st.integers(1, 4),
    "logit_bias": st.dictionaries(TOKEN.map(str), st.floats(-100, 100), max_size=3),
    "min_new_tokens": st.integers(0, 5),
    "do_sample": st.booleans(),
    "num_beam_groups": st.integers(1, 2),
    "diversity_penalty": st.floats(0, 5),
    "early_stopping": st.sampled_from([True, False, "never"]),
    "length_penalty": st.floats(-10, 10),
    "penalty_alpha": st.floats(0, 1),
    "top_k": st.integers(0, 400),
    "min_p": st.floats(0, 1),
    "top_h": st.floats(0.001, 1),
    "typical_p": st.floats(0.001, 1),
    "epsilon_cutoff": st.floats(0, 0.99),
    "eta_cutoff": st.floats(0, 0.99),
    "repetition_penalty": st.floats(0.01, 100),
    "no_repeat_ngram_size": st.integers(0, 4),
    "bad_words_ids": st.lists(TOKEN_LISTS, max_size=2),
    "encoder_repetition_penalty": st.floats(0.01, 100),
    "encoder_no_repeat_ngram_size": st.integers(0, 4),
    "sequence_bias": st.lists(st.tuples(TOKEN_LISTS, st.floats(-100, 100)), max_size=2),
    "suppress_tokens": TOKEN_LISTS,
    "begin_suppress_tokens": TOKEN_LISTS,
    "shortlist": TOKEN_LISTS,
    "forced_bos_token_id": TOKEN,
    "forced_eos_token_id": TOKEN,
    "eos_token_id": TOKEN_LISTS,
    "prefix": st.text("the sea", max_size=5),
    "max_time": st.sampled_from([1e-9, 9.0]),
    "regex": st.sampled_from(["a|b", "[a-z]+", "((", "x{2}", ""]),
    "json_schema": st.sampled_from([{}, {"type": "integer"}, {"type": "x"}, {"enum": []}]),
}


@pytest.mark.parametrize("load", [talker, translator], ids=["decoder", "encoder-decoder"])
def test_no_combination_of_fields_breaks_the_server(load):
    with client(load(), ContinuousBatchingEngine, limits=LIMITS) as http_client:

        @settings(max_examples=150)
        @given(prompt=st.sampled_from(["the sea", "", [20, 21], ["a", "b c"]]), data=st.data())
        def check(prompt, data):
            names = data.draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=6, unique=True))
            body = {
                "prompt": prompt,
                "max_tokens": 4,
                **{name: data.draw(FIELDS[name], label=name) for name in names},
            }
            answer = http_client.post("/v1/completions", json=body)
            assert answer.status_code in (200, 400), answer.text
            if answer.status_code == 200 and body.get("stream"):
                assert "model_failed" not in answer.text
                assert "internal_error" not in answer.text

        check()
