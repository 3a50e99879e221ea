"""Grammars are compiled beside the engine: once for a request, with one tokenizer for all end tokens."""

from __future__ import annotations

import threading
from typing import Any

import llguidance
import pytest

from keepleft.decoding import grammar
from serving.tiny_services import client, decoder

pytestmark = pytest.mark.usefixtures("one_thread")


class RecordedClass:
    """A class of llguidance that notes the thread in which each of its objects is made."""

    def __init__(self, recorded: Any) -> None:
        self.recorded = recorded
        self.threads: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        return self.recorded(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.recorded, name)


def record_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    recorded = RecordedClass(getattr(llguidance, name))
    monkeypatch.setattr(llguidance, name, recorded)
    return recorded.threads


def test_a_grammar_is_compiled_once_for_all_prompts_and_never_by_the_engine(monkeypatch):
    threads = record_threads(monkeypatch, "LLMatcher")
    with client(decoder()) as http_client:
        body = {"prompt": ["a", "b", "c", "d", "e"], "regex": "(ab|cd)e", "max_tokens": 8, "n": 2}
        answer = http_client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert {choice["text"] for choice in answer.json()["choices"]} <= {"abe", "cde"}
    assert len(threads) == 1
    assert "engine" not in threads[0]


def test_end_tokens_share_one_tokenizer(monkeypatch):
    grammar._llg_tokenizer.cache_clear()
    threads = record_threads(monkeypatch, "LLTokenizer")
    with client(decoder()) as http_client:
        sandbox_tasks = []
        for sandbox in http_client.service.grammar_sandboxes.sandboxes:
            call = sandbox._call
            monkeypatch.setattr(
                sandbox,
                "_call",
                lambda request, seconds, call=call: (
                    sandbox_tasks.append(request["task"]) or call(request, seconds)
                ),
            )
        for eos_token_id in range(5, 13):
            body = {"prompt": "a", "regex": "[xyz]{2}", "max_tokens": 8, "eos_token_id": eos_token_id}
            answer = http_client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["finish_reason"] == "stop"
    assert len(threads) <= 1
    assert sandbox_tasks.count("tokenizer") <= len(http_client.service.grammar_sandboxes.sandboxes)
    assert sandbox_tasks.count("grammar") == 8
