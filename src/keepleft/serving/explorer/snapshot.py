"""Precomputed answers for the static page: what it asks first, then as much more as fits."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np

from keepleft.serving.explorer.attention_tiles import MAX_OVERVIEW_CELLS, MAX_TILE_CELLS
from keepleft.serving.explorer.explorer import Answer, Explorer
from keepleft.serving.explorer.model_info import available_views

MAX_BYTES = 20_000_000  # of all answers
DECODING_STEPS = 24  # tokens generated one by one
MAX_RUNS = 12
THUMBNAIL_CELLS = 64  # along one side
EXAMPLE_MASKS = (  # those that the page offers, as in web/src/views/masks/examples.ts
    "causal & window(3) | prefix(1)",
    "causal",
    "full",
    "causal & window(3)",
    "prefix(5) | causal",
    "window(5)",
    "causal & block(4)",
    "~causal",
)

SnapshotEntry = dict[str, Any]  # with the keys question, params and answer


class SnapshotBuilder:
    """Asks questions and keeps the answers while there is space; a question that is refused is skipped."""

    def __init__(self, explorer: Explorer, bytes_left: int, on_progress: Callable[[int], None]) -> None:
        self.explorer = explorer
        self.bytes_left = bytes_left
        self.on_progress = on_progress
        self.entries: list[SnapshotEntry] = []
        self.keys: set[str] = set()

    def ask(self, question: str, params: Mapping[str, Any], **overrides: Any) -> dict[str, Any] | None:
        """The answer, some fields replaced by `overrides`; None if refused, asked before, or too large."""
        key = question + json.dumps(params, sort_keys=True)
        if key in self.keys or self.bytes_left <= 0:
            return None
        try:
            answer = {**self.explorer.ask(question, params), **overrides}
        except ValueError:
            return None
        entry = {"question": question, "params": dict(params), "answer": answer}
        size = len(json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode())
        if size > self.bytes_left:
            return None
        self.bytes_left -= size
        self.keys.add(key)
        self.entries.append(entry)
        self.on_progress(len(self.entries))
        return answer


def build_snapshot(
    explorer: Explorer,
    text: str | None = None,
    source: str | None = None,
    views: Sequence[str] | None = None,
    *,
    max_bytes: int = MAX_BYTES,
    on_progress: Callable[[int], None] = lambda count: None,
) -> list[SnapshotEntry]:
    """All that the page asks when it is opened on one text; of a long text coarse maps, and fewer details.

    `max_bytes` bounds all answers as JSON; `on_progress` is called with their number so far.
    """
    available = available_views(explorer)
    selected = list(available if views is None else views)
    for view in selected:
        if view not in available:
            raise ValueError(f"there is no view {view!r} of this model: there are {', '.join(available)}")
    texts = _resolve_texts(explorer, text, source)
    explorer.ask("attention", texts)  # raises if something is wrong with the text
    builder = SnapshotBuilder(explorer, max_bytes, on_progress)
    builder.ask("model_info", {}, example=texts, views=selected)
    attention_answer = builder.ask("attention", texts) if "attention" in selected else None
    if attention_answer is not None:
        _add_overviews(builder, attention_answer)
    if "decoding" in selected:
        _add_decoding(builder, texts)
    if "masks" in selected:
        for expression in EXAMPLE_MASKS:
            builder.ask(
                "mask",
                {"expression": expression, "length": 16, "padding": {"left": 0, "right": 0}, "packing": []},
            )
    if "leaks" in selected:
        audit_run = explorer.audit.start("quick", patience=inf)
        if audit_run is not None:
            audit_run.thread.join()
        builder.ask("audit", {"wait": False})
        builder.ask("unmasked", texts)
    if "training" in selected:
        for run in (builder.ask("runs", {}) or {"runs": []})["runs"][:MAX_RUNS]:
            # a static page polls for no more
            builder.ask("run", {"name": run["name"], "from_line": 0}, finished=True)
        builder.ask("compare", {})
    if attention_answer is not None:
        _add_all_maps(builder, attention_answer)
    return builder.entries


def _resolve_texts(explorer: Explorer, text: str | None, source: str | None) -> dict[str, str]:
    if not explorer.generator.is_encoder_decoder:
        if source is not None:
            raise ValueError(f"source is {source!r}, and this model reads none: give the text alone")
        return {"text": explorer.example["text"] if text is None else text}
    if source is None and text is not None:
        raise ValueError(f"text is {text!r}, and this model writes it from a source: give source, too")
    return dict(explorer.example) if source is None else {"text": text or "", "source": source}


def _add_overviews(builder: SnapshotBuilder, answer: Answer) -> None:
    """Of each attention: head statistics and mean map of each layer, and a thumbnail of every head."""
    for attention in answer["attentions"]:
        for layer in range(attention["layers"]):
            builder.ask("head_stats", {"key": answer["key"], "name": attention["name"], "layer": layer})
            _add_map(builder, answer, attention, layer, "mean")
    for attention in answer["attentions"]:
        for layer in range(attention["layers"]):
            for head in ("mean", *range(attention["heads"])):
                builder.ask(
                    "overview", {**_map_params(answer, attention, layer, head), "size": THUMBNAIL_CELLS}
                )


def _add_all_maps(builder: SnapshotBuilder, answer: Answer) -> None:
    """All maps of all heads, while there is space; then the tiles of long texts."""
    for attention in answer["attentions"]:
        for layer in range(attention["layers"]):
            if attention["kind"] != "cross":
                _add_map(builder, answer, attention, layer, "rollout")
            for head in range(attention["heads"]):
                _add_map(builder, answer, attention, layer, head)
    for attention in answer["attentions"]:
        for layer in reversed(range(attention["layers"])):
            for row in range(0, attention["rows"], MAX_TILE_CELLS):
                for column in range(0, attention["columns"], MAX_TILE_CELLS):
                    builder.ask(
                        "tile",
                        {
                            **_map_params(answer, attention, layer, "mean"),
                            "row": row,
                            "column": column,
                            "size": MAX_TILE_CELLS,
                        },
                    )


def _add_map(
    builder: SnapshotBuilder, answer: Answer, attention: Answer, layer: int, head: int | str
) -> None:
    """A map as the page asks for it: one tile if it fits, else an overview."""
    if max(attention["rows"], attention["columns"]) <= MAX_TILE_CELLS:
        builder.ask(
            "tile",
            {**_map_params(answer, attention, layer, head), "row": 0, "column": 0, "size": MAX_TILE_CELLS},
        )
    else:
        builder.ask("overview", {**_map_params(answer, attention, layer, head), "size": MAX_OVERVIEW_CELLS})


def _map_params(answer: Answer, attention: Answer, layer: int, head: int | str) -> dict[str, Any]:
    return {"key": answer["key"], "name": attention["name"], "layer": layer, "head": head}


def _add_decoding(builder: SnapshotBuilder, texts: dict[str, str]) -> None:
    """A beam search, and a greedy continuation with the logits and the alignment of each step."""
    builder.ask("vocabulary", {})
    prompt_texts = {**texts, "text": ""} if "source" in texts else texts
    builder.ask(
        "beam",
        {
            **prompt_texts,
            "num_beams": 4,
            "max_new_tokens": DECODING_STEPS,
            "length_penalty": 1,
            "early_stopping": False,
        },
    )
    tokens: list[int] = []
    for _ in range(DECODING_STEPS):
        answer = builder.ask("next_token", {**prompt_texts, "tokens": tokens, "unmasked": False})
        if "source" in texts and tokens:
            builder.ask(
                "alignment", {"source": texts["source"], "tokens": tokens, "layer": "mean", "head": "mean"}
            )
        if answer is None or (tokens and tokens[-1] in answer["eos_ids"]):
            break
        logits = np.frombuffer(b64decode(answer["logits_f32"]), "<f4")
        tokens = [*tokens, int(logits.argmax())]
