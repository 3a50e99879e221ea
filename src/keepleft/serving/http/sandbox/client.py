"""Client of the sandbox: a process for grammars, templates and tokenizers, killed if it takes too long."""

from __future__ import annotations

import json
import subprocess  # nosec B404 # its only command is this Python with a module of ours
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from keepleft.decoding.grammar import add_end_token
from keepleft.serving.engine.request import ShuttingDownError
from keepleft.serving.http.errors import APIError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

START_TIMEOUT_SECONDS = 30.0  # for the process to start and answer


class Sandbox:
    """The client of one sandbox process, which starts when first needed, and again after it was killed.

    Calls block: make them from a thread, one at a time.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.closed = False
        self.has_grammar_tokenizer = False  # whether the process has the tokenizer for grammars
        self.has_encoder = False  # whether the process has the tokenizer for texts

    def check_grammar(self, grammar: str, seconds: float) -> None:
        """Raise APIError if a grammar cannot be compiled, or not in time."""
        with self.lock:
            if not self.has_grammar_tokenizer:
                tokenizer_json, end_token = add_end_token(self.tokenizer.to_str())
                request = {"task": "tokenizer", "tokenizer": tokenizer_json, "end_token": end_token}
                if (response := self._call(request, START_TIMEOUT_SECONDS)) is None or "error" in response:
                    message = "structured output does not work with this model's tokenizer"
                    raise APIError(400, message, code="grammar_unavailable")
                self.has_grammar_tokenizer = True
            response = self._call({"task": "grammar", "grammar": grammar}, seconds)
        if response is None:
            raise APIError(
                400,
                f"the grammar could not be compiled within {seconds:g} seconds: make it simpler",
                code="grammar_too_complex",
            )
        if "error" in response:
            raise APIError(400, f"the grammar is invalid: {response['error']}", code="invalid_grammar")

    def render(self, template: str, variables: dict[str, Any], max_characters: int, seconds: float) -> str:
        """The rendered chat template. Raises APIError if it fails, takes too long or gets too long."""
        with self.lock:
            if self.process is None:
                self._call({"task": "ping"}, START_TIMEOUT_SECONDS)
            request = {
                "task": "render",
                "template": template,
                "variables": variables,
                "max_characters": max_characters,
            }
            response = self._call(request, seconds)
        if response is None:
            raise APIError(
                400,
                f"the chat template took longer than {seconds:g} seconds: send fewer or shorter messages",
                code="template_too_slow",
            )
        if "error" in response:
            raise APIError(
                400,
                f"the model's chat template rejects these messages: {response['error']}",
                param="messages",
                code="invalid_messages",
            )
        return str(response["text"])

    def encode(
        self, texts: Sequence[str], seconds: float, *, add_special_tokens: bool, encode_special_tokens: bool
    ) -> list[list[int]]:
        """The tokens of each text. Raises APIError if that fails or takes too long."""
        with self.lock:
            self._load_encoder()
            request = {
                "task": "encode",
                "texts": list(texts),
                "add_special_tokens": add_special_tokens,
                "encode_special_tokens": encode_special_tokens,
            }
            response = self._call(request, seconds)
        if response is None:
            raise APIError(
                400,
                f"the model's tokenizer took longer than {seconds:g} seconds: send shorter texts, or serve a "
                "model with another tokenizer",
                code="tokenizer_too_slow",
            )
        if "error" in response:
            raise APIError(400, response["error"], code="tokenizer_failed")
        rows: list[list[int]] = response["rows"]
        return rows

    def warm(self, *, with_encoder: bool = False) -> None:
        """Start the process before it is needed."""
        with self.lock:
            self._call({"task": "ping"}, START_TIMEOUT_SECONDS)
            if with_encoder:
                self._load_encoder()

    def close(self) -> None:
        """Kill the process. A call under way, like any later one, raises ShuttingDownError at once."""
        self.closed = True
        process = self.process
        if process is not None:
            process.kill()
        with self.lock:
            self._kill()

    def _load_encoder(self) -> None:
        if self.has_encoder and self.process is not None and self.process.poll() is None:
            return
        request = {"task": "encoder", "tokenizer": self.tokenizer.to_str()}
        response = self._call(request, START_TIMEOUT_SECONDS)
        if response is None or "error" in response:
            message = "the sandbox process cannot load the model's tokenizer: serve a model with another one"
            raise APIError(500, message, code="tokenizer_failed")
        self.has_encoder = True

    def _call(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """The response of the process; None if it took too long, or died. Raises ShuttingDownError."""
        if self.closed:
            raise ShuttingDownError()
        if self.process is None or self.process.poll() is not None:
            self._kill()
            self.process = subprocess.Popen(  # nosec B603 # no shell, and nothing of a request is in it
                [sys.executable, "-m", "keepleft.serving.http.sandbox.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            if self.closed:  # meanwhile
                self.process.kill()
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
            if self.closed:
                raise ShuttingDownError()
            return None
        response: dict[str, Any] = json.loads(line)
        return response

    def _kill(self) -> None:
        process = self.process
        self.process = None
        self.has_grammar_tokenizer = False
        self.has_encoder = False
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except OSError:  # unsent data is lost
                        continue
            process.wait()


class SandboxPool:
    """A few sandboxes; each call borrows one."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.sandboxes = [Sandbox(tokenizer) for _ in range(size)]
        self.free: SimpleQueue[Sandbox] = SimpleQueue()
        for sandbox in self.sandboxes:
            self.free.put(sandbox)

    @contextmanager
    def borrow(self) -> Iterator[Sandbox]:
        """Wait for a sandbox that nobody uses."""
        sandbox = self.free.get()
        try:
            yield sandbox
        finally:
            self.free.put(sandbox)

    def warm(self, *, with_encoder: bool = False) -> None:
        """Start the first process before it is needed."""
        with self.borrow() as sandbox:
            sandbox.warm(with_encoder=with_encoder)

    def close(self) -> None:
        """Kill the processes; calls that are under way fail."""
        for sandbox in self.sandboxes:
            sandbox.close()
