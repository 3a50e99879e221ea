"""Texts of requests to tokens: here if that is quick, in a sandbox process if it might never end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keepleft.disk.encode_text import encode_text
from keepleft.serving.http.sandbox.client import SandboxPool

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_GIL_CHARACTERS = 4096  # of a text that is encoded while all other threads wait: about a millisecond


@dataclass(frozen=True)
class TextEncoder:
    """`quick_length`: texts shorter than this are encoded here; `seconds`: for the texts of one call."""

    tokenizer: Tokenizer
    quick_length: int
    sandboxes: SandboxPool
    seconds: float

    def is_quick(self, text: str) -> bool:
        return len(text) < self.quick_length

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """The tokens of each text. Raises APIError or ValueError if the tokenizer fails or takes too long.

        Slow: call it in a thread.
        """
        if all(map(self.is_quick, texts)):
            return [
                encode_text(
                    self.tokenizer,
                    text,
                    add_special_tokens=add_special_tokens,
                    release_gil=len(text) > MAX_GIL_CHARACTERS,
                )
                for text in texts
            ]
        with self.sandboxes.borrow() as sandbox:
            return sandbox.encode(
                texts,
                self.seconds,
                add_special_tokens=add_special_tokens,
                encode_special_tokens=self.tokenizer.encode_special_tokens,
            )
