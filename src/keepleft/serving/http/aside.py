"""A second process for what might never end: rules that are compiled, chat templates that are filled in. It can be killed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from keepleft.serving.asks import FullError
from keepleft.serving.http.errors import RefusedError

START = 30.0  # seconds in which it must be there
ENDS = 4      # tokenizers that it holds at a time: one for each token that a text may end with


class Aside:
    """Started when first needed, and again after it was killed. `most` may wait for it. What is asked takes time: ask from a
    thread."""

    def __init__(self, tokenizer: Any, *, most: int) -> None:
        self.tokenizer, self.most = tokenizer, most
        self.lock, self.waiting = threading.Lock(), 0
        self.process: subprocess.Popen[bytes] | None = None
        self.told: list[int] = []  # ends for which it has a tokenizer

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if self.waiting >= self.most:
            raise FullError("others wait for the same kind of work already: try again in a moment", again=START / 10)
        self.waiting += 1
        try:
            with self.lock:
                yield
        finally:
            self.waiting -= 1

    def rule(self, rule: str, end: int, seconds: float) -> None:
        """A RefusedError where a rule cannot be compiled, or not in time."""
        with self._turn():
            if end not in self.told:
                words = {"do": "words", "tokenizer": self.tokenizer.to_str(), "vocab": self.tokenizer.get_vocab_size(),
                         "end": end, "most": ENDS}
                if (found := self._ask(words, START)) is None or "error" in found:
                    raise RefusedError(400, "rules cannot be kept to with this model's tokenizer", code="rules_unavailable")
                self.told = [*self.told[1 - ENDS:], end]
            found = self._ask({"do": "rule", "rule": rule, "end": end}, seconds)
        if found is None:
            raise RefusedError(400, f"the rule could not be compiled within {seconds:g} seconds: make it simpler",
                               code="rule_too_complex")
        if "error" in found:
            raise RefusedError(400, f"the rule cannot be used: {found['error']}", code="invalid_rule")

    def render(self, template: str, given: dict[str, Any], most: int, seconds: float) -> str:
        """A chat as one text."""
        with self._turn():
            if self.process is None:
                self._ask({"do": "nothing"}, START)
            found = self._ask({"do": "render", "template": template, "given": given, "most": most}, seconds)
        if found is None:
            raise RefusedError(400, f"the chat template took longer than {seconds:g} seconds: send fewer or shorter messages",
                               code="template_too_slow")
        if "error" in found:
            raise RefusedError(400, f"the model's chat template does not take these messages: {found['error']}",
                               param="messages", code="invalid_messages")
        return str(found["text"])

    def warm(self) -> None:
        """Be there before the first question."""
        with self._turn():
            self._ask({"do": "nothing"}, START)

    def close(self) -> None:
        with self.lock:
            self._kill()

    def _ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """Its answer; None where it took too long, or did not live to give one."""
        if self.process is None or self.process.poll() is not None:
            self._kill()
            self.process = subprocess.Popen([sys.executable, "-m", "keepleft.serving.http.apart"], stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        process = self.process
        late = threading.Timer(seconds, process.kill)
        late.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        finally:
            late.cancel()
        if not line.endswith(b"\n"):
            self._kill()
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _kill(self) -> None:
        process, self.process = self.process, None
        self.told = []
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except OSError:  # what was not taken is lost
                        continue
            process.wait()
