"""Tokens into text as they come: whole characters only, and nothing that may turn out to be the beginning of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Writing:
    """One text. `begin`, `add` and `end` give what may be shown now; together that is the text up to its first stop string."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        from tokenizers.decoders import DecodeStream

        self.tokenizer, self.stops = tokenizer, stops
        self.fresh = lambda: DecodeStream(skip_special_tokens=True)
        self.pieces = self.fresh()
        self.tokens: list[int] = []
        self.text = ""        # of all tokens so far, as far as its characters are whole
        self.shown = 0        # characters of it that were given away
        self.stopped = False  # a stop string was found: nothing more comes

    def begin(self, tokens: Sequence[int]) -> str:
        """What the text was told to begin with; nothing stops it there."""
        self.tokens.extend(tokens)
        self.text += "".join(map(self._piece, tokens))
        return self._give(len(self.text))

    def add(self, token: int) -> str:
        if self.stopped:
            return ""
        self.tokens.append(token)
        self.text += self._piece(token)
        self._look()
        return self._give(len(self.text) if self.stopped else len(self.text) - held(self.text[self.shown:], self.stops))

    def end(self) -> str:
        """What was held back: no more tokens come."""
        if not self.stopped:
            whole = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
            if whole.startswith(self.text):
                self.text = whole  # with what waited for more bytes
            self._look()
        return self._give(len(self.text))

    def _piece(self, token: int) -> str:
        try:
            return self.pieces.step(self.tokenizer, token) or ""
        except Exception:  # the library's own, where a token changes how those before it read
            self.pieces = self.fresh()
            return self.pieces.step(self.tokenizer, token) or ""

    def _look(self) -> None:
        """Cut the text at a stop string. None can begin in what was shown: that would have been held back."""
        places = [at for stop in self.stops if (at := self.text.find(stop, self.shown)) >= 0]
        if places:
            self.text, self.stopped = self.text[:min(places)], True

    def _give(self, end: int) -> str:
        piece, self.shown = self.text[self.shown:end], max(self.shown, end)
        return piece


def held(text: str, stops: Sequence[str]) -> int:
    """How many of the last characters may be the beginning of a stop string."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
