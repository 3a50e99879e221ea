"""Incremental detokenizer: tokens to text as they come, whole characters only, and stop strings held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class IncrementalDetokenizer:
    """The text of one sequence.

    `begin`, `add` and `end` return what may be shown now: together the text up to the first stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()) -> None:
        from tokenizers.decoders import DecodeStream

        self.tokenizer = tokenizer
        self.stop_strings = stop_strings
        self.new_decode_stream = lambda: DecodeStream(skip_special_tokens=True)
        self.decode_stream = self.new_decode_stream()
        self.tokens: list[int] = []
        self.text = ""  # of all tokens so far, up to the last whole character
        self.shown_length = 0  # characters returned so far
        self.stopped = False  # a stop string was found

    def begin(self, tokens: Sequence[int]) -> str:
        """Forced tokens at the start, in which stop strings do not count."""
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
        """The text that was held back: no more tokens come."""
        if not self.stopped:
            full_text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
            if full_text.startswith(self.text):
                self.text = full_text  # with bytes of an incomplete character
            self._cut_at_stop_string()
        return self._release(len(self.text))

    def _decode_token(self, token: int) -> str:
        try:
            return self.decode_stream.step(self.tokenizer, token) or ""
        except Exception:  # the library's own exception, where a token changes how earlier ones decode
            self.decode_stream = self.new_decode_stream()
            return self.decode_stream.step(self.tokenizer, token) or ""

    def _cut_at_stop_string(self) -> None:
        """Cut the text at a stop string.

        None can start in what was returned: that would have been held back.
        """
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
    """How many of the last characters may be the start of a stop string."""
    max_length = max((len(stop) for stop in stop_strings), default=1) - 1
    for size in range(min(max_length, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stop_strings):
            return size
    return 0
