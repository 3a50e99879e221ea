"""A made-up model behind the explorer's questions, to draw and test the page without one: the right shapes, and no more."""

from __future__ import annotations

import math
import re
import threading
from typing import Any

import numpy as np

from serving.fake_answers import (
    HINDI,
    SOURCE,
    TARGET,
    VOCAB,
    bits,
    cut,
    f32,
    hash_of,
    named,
    shades,
    token,
    u8,
    weights,
    word,
)

LAYERS, HEADS = 3, 4
QUESTIONS = """about attention overview tile reads summary next vocabulary spell write beam alignment mask leaks unmasked runs
               run compare""".split()


class Refusal(Exception):  # noqa: N818
    def __init__(self, message: str, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class FakeExplorer:
    """Answers like keepleft.serving.explorer.Explorer.ask."""

    def __init__(self, family: str = "encoder-decoder", example: dict[str, str] | None = None) -> None:
        self.pair = family == "encoder-decoder"
        self.family = family
        self.example = example or (
            {"text": TARGET, "source": SOURCE} if self.pair else {"text": f"{SOURCE} {HINDI}"}
        )
        self.kept: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.audited = 0
        self.lock = threading.Lock()

    def ask(self, question: str, given: dict[str, Any]) -> dict[str, Any]:
        if question not in QUESTIONS:
            raise Refusal(f"there is no question {question!r}")
        with self.lock:
            self.asked.append((question, given))
            return getattr(self, question)(**given)

    def about(self) -> dict[str, Any]:
        kinds = {"encoder.self": "self", "decoder.self": "masked", "decoder.cross": "cross"}
        names = {"encoder-decoder": list(kinds), "decoder": ["decoder.self"], "encoder": ["encoder.self"]}[
            self.family
        ]
        views = ["attention", "masks", "leaks", "training"] + ["decoding"] * (self.family != "encoder")
        return {
            "name": "stand-in",
            "family": self.family,
            "parameters": 1_234_567,
            "dim": 64,
            "vocab": VOCAB,
            "longest": 4096,
            "attentions": [
                {
                    "name": name,
                    "kind": kinds[name],
                    "layers": LAYERS,
                    "heads": HEADS,
                    "mask": "causal" if kinds[name] == "masked" else "full",
                }
                for name in names
            ],
            "views": sorted(views, key="attention decoding masks leaks training".split().index),
            "example": self.example,
            "version": "0",
        }

    # attention

    def attention(self, text: str, source: str = "") -> dict[str, Any]:
        if not text.strip() and not self.pair:
            raise Refusal("the text is empty: give some text to read")
        shown = {"text": [token(1, "<s>", True), *cut(text or TARGET)]}
        if self.pair:
            shown["source"] = [*cut(source), token(2, "</s>", True)]
        key = f"key-{len(self.kept)}"
        self.kept[key] = shown
        sides = {"encoder.self": "source source", "decoder.self": "text text", "decoder.cross": "text source"}
        out = []
        for one in self.about()["attentions"]:
            row, column = (sides[one["name"]] if self.pair else "text text").split()
            out.append(
                {
                    **one,
                    "rows": len(shown[row]),
                    "columns": len(shown[column]),
                    "row_side": row,
                    "column_side": column,
                    "mask": [one["mask"]] * LAYERS,
                }
            )
        return {"key": key, "tokens": shown, "attentions": out, "shortened": None}

    def _map(self, key: str, name: str, layer: int, head: Any) -> tuple[Any, Any]:
        if key not in self.kept:
            raise Refusal(f"the text {key!r} is no longer kept: ask again", "forgotten", 404)
        shown = self.kept[key]
        row, column = (
            {
                "encoder.self": ("source", "source"),
                "decoder.self": ("text", "text"),
                "decoder.cross": ("text", "source"),
            }[name]
            if self.pair
            else ("text", "text")
        )
        rows = len(shown[row])
        columns = len(shown[column])
        causal = name == "decoder.self"
        heads = [head] if isinstance(head, int) else range(HEADS)
        found = sum(weights(rows, columns, causal, layer, one, one == 3) for one in heads) / len(heads)
        claim = np.tri(rows, columns, dtype=bool) if causal else np.ones((rows, columns), bool)
        return found, claim

    def overview(self, key: str, name: str, layer: int, head: Any, size: int) -> dict[str, Any]:
        found, claim = self._map(key, name, layer, head)
        rows, columns = found.shape
        step = -(-max(rows, columns) // size)
        pooled, may = (
            np.pad(table, ((0, -rows % step), (0, -columns % step)))
            .reshape(-(-rows // step), step, -1, step)
            .max((1, 3))
            for table in (found, claim)
        )
        top = float(pooled.max())
        return {
            "rows": rows,
            "columns": columns,
            "step": step,
            "map_u8": u8(shades(pooled, top)),
            "top": top,
            "claim_bits": bits(may),
        }

    def tile(
        self, key: str, name: str, layer: int, head: Any, row: int, column: int, size: int
    ) -> dict[str, Any]:
        found, claim = (
            table[row : row + size, column : column + size] for table in self._map(key, name, layer, head)
        )
        return {
            "row": row,
            "column": column,
            "rows": found.shape[0],
            "columns": found.shape[1],
            "map_u8": u8(shades(found)),
            "claim_bits": bits(claim),
        }

    def reads(self, key: str, name: str, layer: int, head: Any, token: int, by: bool) -> dict[str, Any]:
        found, _ = self._map(key, name, layer, head)
        return {"weights_f32": f32(found[:, token] if by else found[token])}

    def summary(self, key: str, name: str, layer: int) -> dict[str, Any]:
        out = []
        for head in range(HEADS):
            found, claim = self._map(key, name, layer, head)
            i, j = np.indices(found.shape)
            logs = np.log2(np.where(found > 0, found, 1))
            out.append(
                {
                    "entropy": float(-(found * logs).sum(1).mean()),
                    "distance": float((found * abs(i - j)).sum(1).mean()),
                    "first": float(found[:, 0].mean()),
                    "previous": float(found.diagonal(-1).mean()),
                    "itself": float(found.diagonal().mean()),
                    "outside": float((found * ~claim).max()),
                }
            )
        return {"heads": out}

    # decoding

    def next(self, text: str, tokens: list[int], source: str = "", unmasked: bool = False) -> dict[str, Any]:
        scores = (
            np.random.default_rng(hash_of(text + source) + sum(tokens) * 31 + len(tokens)).normal(size=VOCAB)
            * 2.2
        )
        best = hash_of(f"{tokens}") % (VOCAB - 10) + 5
        scores[best] = 12.5
        scores[best + 1] = 11.5
        scores[0] = 9.0 + len(tokens) / 4
        return {
            "prompt": cut(text),
            "written": named(tokens),
            "scores_f32": f32(scores),
            "ends": [0],
            "start": 1,
        }

    def vocabulary(self) -> dict[str, Any]:
        return {"words": [word(n) for n in range(VOCAB)]}

    def spell(self, ids: list[int], before: list[int]) -> dict[str, Any]:
        return {"tokens": named(ids)}

    def write(
        self, text: str, tokens: list[int], options: dict[str, Any], limit: int, source: str = ""
    ) -> dict[str, Any]:
        if unknown := {*options} - {"do_sample", "temperature", "top_k", "top_p", "min_p"}:
            raise Refusal(f"write takes no {unknown}")
        new = [10 + (sum(tokens) + n * 37) % 4_000 for n in range(limit)]
        return {"tokens": named(new), "logprobs": [-1.0] * limit, "ended": False}

    def beam(
        self, text: str, width: int, limit: int, length_penalty: float, early_stopping: bool, source: str = ""
    ) -> dict[str, Any]:
        chance = np.random.default_rng(width)
        steps: list[list[dict[str, Any]]] = []
        for step in range(min(limit, 9)):
            grown = []
            for place in range(1 if step == 0 else width):
                total = steps[-1][place]["total"] if steps else 0.0
                for _ in range(width if step == 0 else 2):
                    score = -float(chance.exponential(0.8))
                    number = int(chance.integers(10, 4_000))
                    grown.append(
                        {
                            "id": 0,
                            "parent": place if steps else -1,
                            "token": token(number, word(number)),
                            "score": score,
                            "total": total + score,
                        }
                    )
            steps.append(sorted(grown, key=lambda node: -node["total"])[:width])
        path, place = [], 0
        for nodes in reversed(steps):
            path.insert(0, nodes[place]["token"])
            place = max(0, nodes[place]["parent"])
        best = [*path, token(0, "</s>", True)]
        ended = {"tokens": best, "score": -0.7}
        return {"steps": steps, "finished": [{**ended, "step": len(steps) - 1}], "best": ended}

    def alignment(self, source: str, tokens: list[int], layer: Any, head: Any) -> dict[str, Any]:
        there = cut(source)
        found = weights(max(1, len(tokens)), len(there), False, 1, 2, False)
        return {
            "source": there,
            "written": named(tokens),
            "weights_u8": u8(shades(found)),
            "rows": len(tokens),
            "columns": len(there),
        }

    # masks, leaks, training

    def mask(
        self, expression: str, length: int, padding: dict[str, int], packing: list[int]
    ) -> dict[str, Any]:
        if re.sub(r"causal|full|(window|prefix|block)\(\d+\)|[&|~() ]", "", expression):
            raise Refusal(f"{expression!r} is not a mask: write one such as 'causal & window(3) | prefix(1)'")
        i, j = np.indices((length, length))
        near = re.search(r"window\((\d+)\)", expression)
        seen = (j <= i) if "causal" in expression else np.ones((length, length), bool)
        seen = seen & (abs(i - j) < int(near[1])) if near else seen
        first = re.search(r"prefix\((\d+)\)", expression)
        seen = seen | (j < int(first[1])) if first else seen
        if expression.startswith("~"):
            seen = ~seen
        real = (np.arange(length) >= padding["left"]) & (np.arange(length) < length - padding["right"])
        seen = seen & real[:, None] & real[None]
        count = int(seen.sum())
        faults = [
            f"position {q} sees position {k}, its future"
            for q, k in zip(*np.nonzero(np.triu(seen, 1)), strict=True)
        ]
        return {
            "mask": expression,
            "seen_bits": bits(seen),
            "rows": length,
            "columns": length,
            "faults": faults[:12],
            "cost": {
                "seen": count,
                "all": length * length,
                "share": count / length**2,
                "words": "A kernel skips the rest.",
            },
        }

    def leaks(self, wait: bool) -> dict[str, Any]:
        self.audited += 1
        if self.audited < 3:
            return {"state": "running", "seconds": float(self.audited)}
        claim = np.tri(12, dtype=bool)
        found = np.where(claim, 10.0 ** -np.abs(np.subtract.outer(np.arange(12), np.arange(12)) / 2.0), 0)
        found[4, 9] = 0.01
        finding = {
            "kind": "future",
            "reader": 4,
            "source": 9,
            "size": 0.01,
            "path": "forward",
            "module": "decoder.layers.1.self",
            "message": "position 4 moves when position 9 is changed: put the mask back",
            "line": "model.py:12: weights = scores.softmax(-1)",
            "reproduce": "import keepleft as kl\nkl.audit(model)",
        }
        return {
            "state": "done",
            "seconds": 3.2,
            "claim_bits": bits(claim),
            "influence_f32": f32(found),
            "rows": 12,
            "columns": 12,
            "report": {
                "ok": False,
                "claim": "causal",
                "skipped": ["gradients: the head has none"],
                "notes": [],
                "findings": [finding],
            },
        }

    def unmasked(self, text: str, source: str = "") -> dict[str, Any]:
        shown = cut(text or TARGET)
        n = len(shown)
        chance = np.random.default_rng(n)
        before, after = weights(n, n, True, 0, 2, False), np.roll(np.eye(n), 1, 1) * 0.8 + 0.2 / n
        lost = chance.exponential(2.5, n)
        return {
            "tokens": shown,
            "with_f32": f32(lost),
            "without_f32": f32(lost * 0.06),
            "words": "A token costs 2.51 nats with the mask and 0.15 without it: what comes later gives the answer away.",
            "reads": {
                "rows": n,
                "columns": n,
                "before_u8": u8(shades(before)),
                "after_u8": u8(shades(after)),
            },
        }

    def runs(self) -> dict[str, Any]:
        return {
            "runs": [
                {"name": "en-fr", "steps": 2_000, "modified": 0.0, "task": "translation"},
                {"name": "stories", "steps": 100, "modified": 0.0, "task": "language"},
            ]
        }

    def run(self, name: str, after: int) -> dict[str, Any]:
        end = 200 if name == "en-fr" else min(100, after + 10)
        lines = [
            {
                "step": 10 * n,
                "plain": 5 * math.exp(-n / 60) + 0.6 + 0.1 * math.sin(n),
                "accuracy": 1 - math.exp(-n / 80),
                "rate": 4e-3 * min(1, n / 20),
                "norm": 1 + math.exp(-n / 30),
                "speed": 20_000 + 500 * math.sin(n / 3),
                **({"measures": {"loss": 5 * math.exp(-n / 60) + 0.8, "bleu": n / 6}} if n % 20 == 0 else {}),
            }
            for n in range(after + 1, end + 1)
        ]
        return {
            "lines": lines,
            "from": after,
            "next": end,
            "ended": end in (100, 200),
            "config": "task: translation\nrecipe:\n  steps: 2000\n" if after == 0 else "",
        }

    def compare(self) -> dict[str, Any]:
        same = [
            {
                "length": n,
                "ratio": {"with a cache": n / 3, "from scratch": n / 2},
                "seconds": {
                    "one pass": 0.004 + n * 2e-5,
                    "with a cache": 0.003 * n,
                    "from scratch": 4e-5 * n * n,
                },
                "difference": {"with a cache": 3e-15, "from scratch": 2e-15},
            }
            for n in (16, 64, 128, 300)
        ]
        return {
            "ok": True,
            "same": same,
            "control": {"length": 16, "difference": {"with a cache": 0.9, "from scratch": 0.9}},
            "masked": trial("causal", 0.1, 0.9),
            "unmasked": trial("full", 0.3, 0.05),
        }


def trial(mask: str, fall: float, right: float) -> dict[str, Any]:
    sample = {
        "english": "the cat sleeps",
        "french": "le chat dort",
        "written": "le chat dort" if right > 0.5 else "",
    }
    return {
        "mask": mask,
        "faults": [],
        "curve": [[n * 10, 4 * math.exp(-n * fall) + 0.02] for n in range(1, 41)],
        "loss": 0.5,
        "accuracy": 0.9,
        "honest": right,
        "words": right,
        "exact": right / 2,
        "seen": f"With {mask}, a sentence.",
        "samples": [sample],
    }
