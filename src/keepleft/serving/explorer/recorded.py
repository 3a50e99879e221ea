"""Answers worked out beforehand, in the order of their worth: what the page asks at first, then as much more as fits."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from keepleft.serving.explorer.about import views as offered
from keepleft.serving.explorer.explorer import Explorer
from keepleft.serving.explorer.maps import OVERVIEW, TILE

BYTES = 20_000_000  # of all answers
STEPS = 24          # tokens that are written one by one
RUNS = 12
SMALL = 64          # cells along one side of the small pictures
MASKS = ("causal & window(3) | prefix(1)", "causal", "full", "causal & window(3)", "prefix(5) | causal", "window(5)",
         "causal & block(4)", "~causal")  # those that the page offers, as web/src/views/masks/examples.ts spells them

Recording = dict[str, Any]  # question, given, answer


class Recorder:
    """Asks, and keeps the answer as long as there is room; a question that is refused is not kept."""

    def __init__(self, explorer: Explorer, room: int, watch: Callable[[int], None]) -> None:
        self.explorer, self.room, self.watch = explorer, room, watch
        self.kept: list[Recording] = []
        self.known: set[str] = set()

    def ask(self, question: str, given: Mapping[str, Any], **instead: Any) -> dict[str, Any] | None:
        name = question + json.dumps(given, sort_keys=True)
        if name in self.known or self.room <= 0:
            return None
        try:
            answer = {**self.explorer.ask(question, given), **instead}
        except ValueError:
            return None
        one = {"question": question, "given": dict(given), "answer": answer}
        size = len(json.dumps(one, ensure_ascii=False, separators=(",", ":")).encode())
        if size > self.room:
            return None
        self.room -= size
        self.known.add(name)
        self.kept.append(one)
        self.watch(len(self.kept))
        return answer


def record(explorer: Explorer, text: str | None = None, source: str | None = None, views: Sequence[str] | None = None, *,
           most: int = BYTES, watch: Callable[[int], None] = lambda count: None) -> list[Recording]:
    """What the page asks of a model when it is opened on one text. Long texts get whole pictures, and fewer details.

    `most`: bytes of all answers as JSON; `watch` hears how many there are.
    """
    there = offered(explorer)
    chosen = list(there if views is None else views)
    for view in chosen:
        if view not in there:
            raise ValueError(f"there is no view {view!r} of this model: there are {', '.join(there)}")
    texts = _texts(explorer, text, source)
    explorer.ask("attention", texts)  # what is wrong with the text is said here
    out = Recorder(explorer, most, watch)
    out.ask("about", {}, example=texts, views=chosen)
    read = out.ask("attention", texts) if "attention" in chosen else None
    if read is not None:
        _first(out, read)
    if "decoding" in chosen:
        _decoding(out, texts)
    if "masks" in chosen:
        for expression in MASKS:
            out.ask("mask", {"expression": expression, "length": 16, "padding": {"left": 0, "right": 0}, "packing": []})
    if "leaks" in chosen:
        explorer.audit.begin()
        explorer.audit.wait(None)
        out.ask("leaks", {"wait": False})
        out.ask("unmasked", texts)
    if "training" in chosen:
        for run in (out.ask("runs", {}) or {"runs": []})["runs"][:RUNS]:
            out.ask("run", {"name": run["name"], "after": 0}, ended=True)  # no more will come here
        out.ask("compare", {})
    if read is not None:
        _rest(out, read)
    return out.kept


def _texts(explorer: Explorer, text: str | None, source: str | None) -> dict[str, str]:
    if not explorer.voice.pair:
        if source is not None:
            raise ValueError(f"source is {source!r}, and this model reads none: give the text alone")
        return {"text": explorer.example["text"] if text is None else text}
    if source is None and text is not None:
        raise ValueError(f"text is {text!r}, and this model writes it from a source: give source, too")
    return dict(explorer.example) if source is None else {"text": text or "", "source": source}


def _first(out: Recorder, read: dict[str, Any]) -> None:
    """Of each attention: its heads in numbers, the mean of each layer, and a small picture of every head."""
    for one in read["attentions"]:
        for layer in range(one["layers"]):
            out.ask("summary", {"key": read["key"], "name": one["name"], "layer": layer})
            _map(out, read, one, layer, "mean")
    for one in read["attentions"]:
        for layer in range(one["layers"]):
            for head in ("mean", *range(one["heads"])):
                out.ask("overview", {**_which(read, one, layer, head), "size": SMALL})


def _rest(out: Recorder, read: dict[str, Any]) -> None:
    """All maps of all heads, as far as there is room; then the tiles of long texts."""
    for one in read["attentions"]:
        for layer in range(one["layers"]):
            if one["kind"] != "cross":
                _map(out, read, one, layer, "rollout")
            for head in range(one["heads"]):
                _map(out, read, one, layer, head)
    for one in read["attentions"]:
        for layer in reversed(range(one["layers"])):
            for row in range(0, one["rows"], TILE):
                for column in range(0, one["columns"], TILE):
                    out.ask("tile", {**_which(read, one, layer, "mean"), "row": row, "column": column, "size": TILE})


def _map(out: Recorder, read: dict[str, Any], one: dict[str, Any], layer: int, head: int | str) -> None:
    """A map as the page asks for it: one tile where it fits into one, else coarsely."""
    if max(one["rows"], one["columns"]) <= TILE:
        out.ask("tile", {**_which(read, one, layer, head), "row": 0, "column": 0, "size": TILE})
    else:
        out.ask("overview", {**_which(read, one, layer, head), "size": OVERVIEW})


def _which(read: dict[str, Any], one: dict[str, Any], layer: int, head: int | str) -> dict[str, Any]:
    return {"key": read["key"], "name": one["name"], "layer": layer, "head": head}


def _decoding(out: Recorder, texts: dict[str, str]) -> None:
    """The likeliest token again and again, with all that could have come, and where it looked; the beams."""
    out.ask("vocabulary", {})
    asked = {**texts, "text": ""} if "source" in texts else texts
    out.ask("beam", {**asked, "width": 4, "limit": STEPS, "length_penalty": 1, "early_stopping": False})
    written: list[int] = []
    for _ in range(STEPS):
        found = out.ask("next", {**asked, "tokens": written, "unmasked": False})
        if "source" in texts and written:
            out.ask("alignment", {"source": texts["source"], "tokens": written, "layer": "mean", "head": "mean"})
        if found is None or (written and written[-1] in found["ends"]):
            break
        scores = np.frombuffer(b64decode(found["scores_f32"]), "<f4")
        written = [*written, int(scores.argmax())]
