"""Tokens into text as they come: whole characters only, and nothing that may turn out to be the beginning of
a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class IncrementalDetokenizer:
    """One text.

    `begin`, `add` and `end` give what may be shown now; together that is the text up to its first stop
    string.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str] = ()) -> None:
        from tokenizers.decoders import DecodeStream

        self.tokenizer = tokenizer
        self.stop_strings = stop_strings
        self.new_decode_stream = lambda: DecodeStream(skip_special_tokens=True)
        self.decode_stream = self.new_decode_stream()
        self.tokens: list[int] = []
        self.text = ""  # of all tokens so far, as far as its characters are whole
        self.shown_length = 0  # characters of it that were given away
        self.stopped = False  # a stop string was found: nothing more comes

    def begin(self, tokens: Sequence[int]) -> str:
        """What the text was told to begin with; nothing stops it there."""
        self.tokens.extend(tokens)
        self.text += "".join(map(self._decode_token, tokens))
        return self._release(len(self.text))

    def add(self, token: int) -> str:
        if self.stopped:
            return ""
        self.tokens.append(token)
        self.text += self._decode_token(token)
        self._cut_at_stop_string()
        return self._release(
            len(self.text)
            if self.stopped
            else len(self.text) - held_back_length(self.text[self.shown_length :], self.stop_strings)
        )

    def end(self) -> str:
        """What was held back: no more tokens come."""
        if not self.stopped:
            full_text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
            if full_text.startswith(self.text):
                self.text = full_text  # with what waited for more bytes
            self._cut_at_stop_string()
        return self._release(len(self.text))

    def _decode_token(self, token: int) -> str:
        try:
            return self.decode_stream.step(self.tokenizer, token) or ""
        except Exception:  # the library's own, where a token changes how those before it read
            self.decode_stream = self.new_decode_stream()
            return self.decode_stream.step(self.tokenizer, token) or ""

    def _cut_at_stop_string(self) -> None:
        """Cut the text at a stop string. None can begin in what was shown: that would have been held back."""
        positions = [
            position
            for stop in self.stop_strings
            if (position := self.text.find(stop, self.shown_length)) >= 0
        ]
        if positions:
            self.text = self.text[: min(positions)]
            self.stopped = True

    def _release(self, end: int) -> str:
        piece = self.text[self.shown_length : end]
        self.shown_length = max(self.shown_length, end)
        return piece


def held_back_length(text: str, stop_strings: Sequence[str]) -> int:
    """How many of the last characters may be the beginning of a stop string."""
    max_length = max((len(stop) for stop in stop_strings), default=1) - 1
    for size in range(min(max_length, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stop_strings):
            return size
    return 0
