"""Beam search as a tree: after each step the texts that went on and those that ended, and which text each grew out of."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from keepleft.decoding.beam import Beam
from keepleft.decoding.generate import Work, chosen, settled, steps
from keepleft.runs.tree import Name, nodes
from keepleft.serving.explorer.given import Given
from keepleft.serving.explorer.writing import LIMIT

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer

WIDEST = 16


def beam(explorer: Explorer, given: Given) -> dict[str, Any]:
    words, model = explorer.writer("beam"), explorer.voice.model
    row = words.prompt(explorer.asked(given))
    width, penalty = given.whole("width", 1, WIDEST), given.real("length_penalty", -10, 10, 1.0)
    options = settled(model, None, {
        "num_beams": max(2, width), "max_new_tokens": given.whole("limit", 1, LIMIT), "length_penalty": penalty,
        "early_stopping": given.flag("early_stopping", False), "do_sample": False, "num_beam_groups": 1,
        "num_return_sequences": 1, "penalty_alpha": 0.0})
    options = replace(options, stop_strings=None, max_time=None, prompt_lookup_num_tokens=None)
    work = Work.of(model, [row], options)
    before = words.begun if explorer.voice.pair else row
    explorer.reachable([*before, 0])
    strategy = chosen(explorer.voice.tokenizer, options, work)
    assert isinstance(strategy, Beam)
    strategy = replace(strategy, width=width, keep=width)
    seen: list[Any] = list(steps(model, work, strategy, options))
    results = strategy.results(seen[-1])[0]
    finished = [{"tokens": words.shown(one.tokens, before), "score": one.score, "step": max(0, len(one.tokens) - 1)}
                for one in results]
    best = {"tokens": finished[0]["tokens"], "score": finished[0]["score"]} if results[0].tokens else None
    return {"steps": _tree(explorer, seen, before, penalty), "finished": finished, "best": best}


def _tree(explorer: Explorer, seen: list[Any], before: list[int], penalty: float) -> list[list[dict[str, Any]]]:
    """A list for each step. `total` is the log-probability of the text, `score` that of its last token alone."""
    out: list[list[dict[str, Any]]] = []
    place: dict[Name, tuple[int, float]] = {}  # of each text: its place among those of its step, and its total
    found = nodes(seen)
    for step in range(1, max(len(node.tokens) for node in found) + 1):
        here = sorted((node for node in found if len(node.tokens) == step),
                      key=lambda node: (not node.best, not node.kept, node.ended, -node.score))
        parents = [place.get(node.parent, (-1, 0.0)) for node in here]
        for n, node in enumerate(here):  # what has ended was ranked by its total for its length
            place[node.name] = (n, node.score * step ** penalty if node.ended else node.score)
        first = sum(map(len, out))
        out.append([{"id": first + n, "parent": parent, "token": explorer.words.after([*before, *node.tokens[:-1]],
                                                                                     node.tokens[-1:])[0],
                     "score": place[node.name][1] - total, "total": place[node.name][1],
                     "ended": node.ended, "kept": node.kept, "best": node.best}
                    for n, (node, (parent, total)) in enumerate(zip(here, parents, strict=True))])
    return out
