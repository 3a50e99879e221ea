"""A tokenizer that hangs is stopped in the sandbox; only those who send such texts wait for it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

import keepleft as kl
from decoding.models import pair
from keepleft.data.tokenizer import BOS_TOKEN, EOS_TOKEN
from keepleft.disk.encode_text import EncodingError
from keepleft.pipelines.loading import LoadedModel
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.middleware.auth import APIKey, APIKeys
from keepleft.serving.http.sandbox.client import Sandbox
from serving.test_http_errors import refused
from serving.test_http_misbehaving_clients import wait_until
from serving.tiny_services import CHAT, TOKENS, client, decoder, encoder, running, service, talker, translator

pytestmark = pytest.mark.usefixtures("one_thread")
CUBIC = "a*a*(?<!a)$"  # minutes for HANGING
EXPONENTIAL = "(x|xx)+$"  # ends in a panic of the library
HANGING = "a" * 4000
PANICKING = "x" * 60 + "y"
KEYS = APIKeys([APIKey("attacker"), APIKey("bystander")])
QUICK_LIMITS = Limits(tokenize_seconds=0.5)


def hostile(pattern: str = CUBIC) -> Tokenizer:
    """TOKENS, which splits texts by another pattern first."""
    tokenizer = Tokenizer.from_str(TOKENS.to_str())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, TOKENS.pre_tokenizer])
    tokenizer.encode_special_tokens = TOKENS.encode_special_tokens
    return tokenizer


def with_tokenizer(loaded: LoadedModel, pattern: str = CUBIC) -> LoadedModel:
    return LoadedModel(loaded.model, hostile(pattern))


def post(port: int, key: str, prompt: str) -> httpx.Response:
    return httpx.post(
        f"http://127.0.0.1:{port}/v1/completions",
        json={"prompt": prompt, "max_tokens": 2, "temperature": 0},
        headers={"authorization": f"Bearer {key}"},
        timeout=60,
    )


def test_a_prompt_on_which_the_tokenizer_hangs_is_refused_while_others_go_on():
    with running(with_tokenizer(decoder()), keys=KEYS) as (port, service, _):
        post(port, "bystander", "the sea")  # starts the process
        with ThreadPoolExecutor(24) as threads:
            start = time.monotonic()
            refusals = [threads.submit(post, port, "attacker", HANGING) for _ in range(4)]
            wait_until(lambda: service.tokenizing.counts() == (2, 2))
            assert post(port, "bystander", "the sea is").status_code == 200
            assert time.monotonic() - start < 8
            assert not all(answer.done() for answer in refusals)
            for answer in refusals:
                refused(answer.result(), code="tokenizer_too_slow", message="longer than 2 seconds")
        assert service.preparation.counts()[0] == 0
        assert post(port, "attacker", "the sea").status_code == 200


@pytest.mark.parametrize(
    ("load", "route", "body"),
    [
        (decoder, "/v1/completions", {"prompt": ["a", HANGING]}),
        (decoder, "/v1/completions", {"prompt": "a", "prefix": HANGING}),
        (talker, "/v1/chat/completions", {"messages": [{"role": "user", "content": HANGING}]}),
        (talker, "/v1/chat/completions", {"messages": [{"role": "user", "content": f"</s>{HANGING}"}]}),
        (decoder, "/v1/score", {"input": HANGING}),
        (translator, "/v1/score", {"input": HANGING, "source": "a"}),
        (translator, "/v1/score", {"input": "a", "source": HANGING}),
        (translator, "/v1/translate", {"input": HANGING}),
        (translator, "/v1/translate", {"input": HANGING, "tag": "<s>"}),
        (decoder, "/v1/attention", {"input": HANGING}),
        (translator, "/v1/attention", {"input": HANGING, "source": "a"}),
        (translator, "/v1/attention", {"input": "a", "source": HANGING}),
        (encoder, "/v1/embeddings", {"input": ["a", HANGING]}),
        (lambda: encoder(kl.ClassificationHead(3)), "/v1/classify", {"input": HANGING}),
    ],
)
def test_every_route_refuses_a_text_on_which_the_tokenizer_hangs(load, route, body):
    with client(with_tokenizer(load()), limits=QUICK_LIMITS) as http_client:
        start = time.monotonic()
        refused(http_client.post(route, json=body), code="tokenizer_too_slow")
        assert time.monotonic() - start < 20  # the process has to start first


@pytest.mark.parametrize("as_source", [False, True])
def test_the_tokenizers_of_source_and_target_may_differ(as_source):
    model = pair(0, vocab=TOKENS.get_vocab_size())
    model.notes = {
        "decoder_start_token_id": TOKENS.token_to_id(BOS_TOKEN),
        "eos_token_id": TOKENS.token_to_id(EOS_TOKEN),
    }
    loaded = LoadedModel(model, *((TOKENS, hostile()) if as_source else (hostile(), TOKENS)))
    with client(loaded, limits=QUICK_LIMITS, max_model_len=64) as http_client:
        for body, is_slow in (
            ({"input": HANGING, "source": "a"}, not as_source),
            ({"input": "a", "source": HANGING}, as_source),
        ):
            answer = http_client.post("/v1/score", json=body)
            if is_slow:
                refused(answer, code="tokenizer_too_slow")
            else:  # it has more tokens than the model reads
                refused(answer, code="context_length_exceeded")


def test_a_panic_of_the_library_is_a_refusal(capfd):
    with client(with_tokenizer(talker(), EXPONENTIAL)) as http_client:
        for route, body in (
            ("/v1/completions", {"prompt": PANICKING}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": PANICKING}]}),
        ):
            refused(
                http_client.post(route, json=body),
                code="tokenizer_failed",
                message="the model's tokenizer cannot encode this text (Onig: Regex search error",
            )
        assert http_client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
    assert "panicked" not in capfd.readouterr().err


def test_a_panic_in_a_call_of_the_library_is_a_value_error(capfd):
    loaded = with_tokenizer(decoder(), EXPONENTIAL)
    with pytest.raises(EncodingError, match="the model's tokenizer cannot encode this text"):
        kl.generate(loaded.model, loaded.tokenizer, PANICKING)


def test_a_long_text_does_not_stop_the_other_threads(capfd):
    longest_pause = 0.0
    is_done = threading.Event()

    def watch():
        nonlocal longest_pause
        last = time.perf_counter()
        while not is_done.is_set():
            time.sleep(0.001)
            longest_pause = max(longest_pause, time.perf_counter() - last)
            last = time.perf_counter()

    text = "the sea is calm, and the ship sails on " * 20_000
    with service(decoder()) as running_service:
        encoder = replace(running_service.encoder, quick_length=len(text) + 1)
        thread = threading.Thread(target=watch)
        thread.start()
        (tokens,) = encoder.encode([text])
        is_done.set()
        thread.join()
        assert tokens == TOKENS.encode(text).ids  # 0.4 seconds in which no other thread runs
        assert encoder.encode([text], add_special_tokens=False)[0] == tokens
        encoder = replace(encoder, tokenizer=hostile(EXPONENTIAL))
        with pytest.raises(EncodingError, match="Onig"):
            encoder.encode([f"{'x' * 5000}y"])
    assert longest_pause < 0.1


def test_a_text_that_grows_beyond_all_bounds_is_refused():
    tokenizer = Tokenizer.from_str(TOKENS.to_str())
    tokenizer.normalizer = normalizers.Replace("a", "the " * 200)
    loaded = LoadedModel(decoder().model, tokenizer)
    with client(loaded, max_model_len=64) as http_client:
        refused(http_client.post("/v1/completions", json={"prompt": "a"}), code="context_length_exceeded")
        answer = http_client.post("/v1/completions", json={"prompt": "a" * 100_000})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] in ("tokenizer_failed", "tokenizer_too_slow")


def test_what_the_sandbox_encodes_is_what_the_tokenizer_encodes():
    chat = {"messages": [{"role": "user", "content": "</s> the <s>sea"}], "max_tokens": 3, "temperature": 0}
    texts = {"prompt": ["the sea is calm", "<s>", " आप", [5, 6]], "max_tokens": 3, "temperature": 0}
    # it matches nowhere, so the tokens are the same
    loaded = LoadedModel(talker().model, hostile("\ue000+\ue000+$"))
    with client(talker()) as quick_client, client(loaded) as slow_client:
        assert slow_client.service.encoder.quick_length == 0
        for route, body in (
            ("/v1/completions", {**texts, "prefix": " calm", "echo": True}),
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", {**chat, "messages": [{"role": "user", "content": "the sea"}]}),
            ("/v1/score", {"input": texts["prompt"][:3]}),
        ):
            quick, slow = (http.post(route, json=body).json() for http in (quick_client, slow_client))
            for fields in (quick, slow):
                fields.pop("id", None)
                fields.pop("created", None)
            assert quick == slow
        assert quick_client.service.encoder.sandboxes.sandboxes[0].process is None  # never started


def test_a_served_tokenizer_that_may_hang_is_loaded_before_the_first_request():
    with client(with_tokenizer(decoder())) as http_client:
        http_client.service.warm()
        assert any(sandbox.has_encoder for sandbox in http_client.service.encoder.sandboxes.sandboxes)


def test_the_sandbox_loads_the_tokenizer_again_after_its_process_died():
    sandbox = Sandbox(TOKENS)
    encode = lambda: sandbox.encode(["the sea"], 5.0, add_special_tokens=True, encode_special_tokens=True)
    try:
        tokens = encode()
        assert tokens == [TOKENS.encode("the sea").ids]
        sandbox.process.kill()
        sandbox.process.wait()
        assert encode() == tokens
    finally:
        sandbox.close()


def test_no_thread_is_left_behind():
    with client(with_tokenizer(decoder()), limits=QUICK_LIMITS) as http_client:
        http_client.post("/v1/completions", json={"prompt": HANGING})
    wait_until(lambda: not any(thread.name == "keepleft tokenizing" for thread in threading.enumerate()))


def test_the_template_is_rendered_and_the_chat_encoded_in_pools_of_their_own():
    loaded = with_tokenizer(decoder(chat_template=CHAT))
    with client(loaded, limits=QUICK_LIMITS) as http_client:
        body = {"messages": [{"role": "user", "content": HANGING}]}
        refused(http_client.post("/v1/chat/completions", json=body), code="tokenizer_too_slow")
        # the process that rendered was not killed
        assert any(sandbox.process for sandbox in http_client.service.template_sandboxes.sandboxes)
