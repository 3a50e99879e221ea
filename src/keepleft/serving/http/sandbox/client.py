"""A second process for what might never end: rules that are compiled, chat templates that are filled in.

It can be killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from keepleft.serving.engine.request import OverloadedError
from keepleft.serving.http.errors import APIError

START_TIMEOUT_SECONDS = 30.0  # seconds in which it must be there
MAX_TOKENIZERS = 4  # tokenizers that it holds at a time: one for each token that a text may end with


class Sandbox:
    """Started when first needed, and again after it was killed. `max_waiting` may wait for it.

    What is asked takes time: ask from a thread.
    """

    def __init__(self, tokenizer: Any, *, max_waiting: int) -> None:
        self.tokenizer = tokenizer
        self.max_waiting = max_waiting
        self.lock = threading.Lock()
        self.waiting = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.loaded_eos: list[int] = []  # ends for which it has a tokenizer

    @contextmanager
    def _queue(self) -> Iterator[None]:
        if self.waiting >= self.max_waiting:
            raise OverloadedError(
                "others wait for the same kind of work already: try again in a moment",
                retry_after=START_TIMEOUT_SECONDS / 10,
            )
        self.waiting += 1
        try:
            with self.lock:
                yield
        finally:
            self.waiting -= 1

    def check_grammar(self, grammar: str, eos_token_id: int, seconds: float) -> None:
        """An APIError where a rule cannot be compiled, or not in time."""
        with self._queue():
            if eos_token_id not in self.loaded_eos:
                request = {
                    "task": "tokenizer",
                    "tokenizer": self.tokenizer.to_str(),
                    "vocab_size": self.tokenizer.get_vocab_size(),
                    "eos_token_id": eos_token_id,
                    "max_tokenizers": MAX_TOKENIZERS,
                }
                if (response := self._call(request, START_TIMEOUT_SECONDS)) is None or "error" in response:
                    raise APIError(
                        400, "rules cannot be kept to with this model's tokenizer", code="grammar_unavailable"
                    )
                self.loaded_eos = [*self.loaded_eos[1 - MAX_TOKENIZERS :], eos_token_id]
            response = self._call(
                {"task": "grammar", "grammar": grammar, "eos_token_id": eos_token_id}, seconds
            )
        if response is None:
            raise APIError(
                400,
                f"the rule could not be compiled within {seconds:g} seconds: make it simpler",
                code="grammar_too_complex",
            )
        if "error" in response:
            raise APIError(400, f"the rule cannot be used: {response['error']}", code="invalid_grammar")

    def render(self, template: str, variables: dict[str, Any], max_characters: int, seconds: float) -> str:
        """A chat as one text."""
        with self._queue():
            if self.process is None:
                self._call({"task": "ping"}, START_TIMEOUT_SECONDS)
            response = self._call(
                {
                    "task": "render",
                    "template": template,
                    "variables": variables,
                    "max_characters": max_characters,
                },
                seconds,
            )
        if response is None:
            raise APIError(
                400,
                f"the chat template took longer than {seconds:g} seconds: send fewer or shorter messages",
                code="template_too_slow",
            )
        if "error" in response:
            raise APIError(
                400,
                f"the model's chat template does not take these messages: {response['error']}",
                param="messages",
                code="invalid_messages",
            )
        return str(response["text"])

    def warm(self) -> None:
        """Be there before the first question."""
        with self._queue():
            self._call({"task": "ping"}, START_TIMEOUT_SECONDS)

    def close(self) -> None:
        with self.lock:
            self._kill()

    def _call(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """Its answer; None where it took too long, or did not live to give one."""
        if self.process is None or self.process.poll() is not None:
            self._kill()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "keepleft.serving.http.sandbox.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        process = self.process
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            self._kill()
            return None
        response: dict[str, Any] = json.loads(line)
        return response

    def _kill(self) -> None:
        process = self.process
        self.process = None
        self.loaded_eos = []
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except OSError:  # what was not taken is lost
                        continue
            process.wait()
