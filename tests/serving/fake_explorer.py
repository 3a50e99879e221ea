"""An explorer without a model: answers of the right shapes, to draw and test the page."""

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
    describe,
    f32,
    hash_of,
    quantize,
    split_tokens,
    token,
    token_text,
    u8,
    weights,
)

LAYERS, HEADS = 3, 4
QUESTIONS = """model_info attention overview tile token_attention head_stats next_token vocabulary token_texts
               continue_text beam translate alignment mask audit unmasked runs run compare""".split()


class RefusedError(Exception):
    """What the server answers to a question that is wrong."""

    def __init__(self, message: str, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class FakeExplorer:
    """Answers in the shapes of `Explorer.ask`, and records the questions."""

    def __init__(
        self,
        family: str = "encoder-decoder",
        example: dict[str, str] | None = None,
        languages: dict[str, str] | None = None,
    ) -> None:
        self.languages = languages or {}
        self.warnings: list[str] = []  # about the language of a text
        self.is_encoder_decoder = family == "encoder-decoder"
        self.family = family
        self.example = example or (
            {"text": TARGET, "source": SOURCE} if self.is_encoder_decoder else {"text": f"{SOURCE} {HINDI}"}
        )
        self.texts: dict[str, dict[str, Any]] = {}
        self.questions: list[tuple[str, dict[str, Any]]] = []
        self.num_audit_polls = 0
        self.num_polls_until_done = 3
        self.lock = threading.Lock()

    def ask(self, question: str, params: dict[str, Any], tenant: str = "") -> dict[str, Any]:
        if question not in QUESTIONS:
            raise RefusedError(f"there is no question {question!r}")
        with self.lock:
            self.questions.append((question, params))
            return getattr(self, question)(**params)

    def model_info(self) -> dict[str, Any]:
        kinds = {"encoder.self": "self", "decoder.self": "masked", "decoder.cross": "cross"}
        names = {"encoder-decoder": list(kinds), "decoder": ["decoder.self"], "encoder": ["encoder.self"]}[
            self.family
        ]
        views = ["attention", "masks", "leaks", "training"] + ["decoding"] * (self.family != "encoder")
        views += ["translate"] * bool(self.languages)
        return {
            "name": "fake",
            "family": self.family,
            "parameters": 1_234_567,
            "dim": 64,
            "vocab_size": VOCAB,
            "max_positions": 4096,
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
            "views": sorted(views, key="translate attention decoding masks leaks training".split().index),
            "languages": self.languages,
            "example": self.example,
            "version": "0",
        }

    def translate(self, text: str, to: str) -> dict[str, Any]:
        return {
            "text": text.upper(),
            "sentences": [{"source": text, "target": text.upper(), "input": f"<2{to}> {text}"}],
            "warnings": self.warnings,
        }

    # attention

    def attention(self, text: str, source: str = "") -> dict[str, Any]:
        if not text.strip() and not self.is_encoder_decoder:
            raise RefusedError("the text is empty: give some text to read")
        tokens = {"text": [token(1, "<s>", True), *split_tokens(text or TARGET)]}
        if self.is_encoder_decoder:
            tokens["source"] = [*split_tokens(source), token(2, "</s>", True)]
        key = f"key-{len(self.texts)}"
        self.texts[key] = tokens
        sides = {"encoder.self": "source source", "decoder.self": "text text", "decoder.cross": "text source"}
        attentions = []
        for attention in self.model_info()["attentions"]:
            row, column = (sides[attention["name"]] if self.is_encoder_decoder else "text text").split()
            attentions.append(
                {
                    **attention,
                    "rows": len(tokens[row]),
                    "columns": len(tokens[column]),
                    "row_side": row,
                    "column_side": column,
                    "mask": [attention["mask"]] * LAYERS,
                }
            )
        return {"key": key, "tokens": tokens, "attentions": attentions, "truncated": None}

    def _map(self, key: str, name: str, layer: int, head: Any) -> tuple[Any, Any]:
        if key not in self.texts:
            raise RefusedError(f"the text {key!r} is no longer kept: ask again", "expired", 404)
        tokens = self.texts[key]
        row, column = (
            {
                "encoder.self": ("source", "source"),
                "decoder.self": ("text", "text"),
                "decoder.cross": ("text", "source"),
            }[name]
            if self.is_encoder_decoder
            else ("text", "text")
        )
        rows = len(tokens[row])
        columns = len(tokens[column])
        causal = name == "decoder.self"
        heads = [head] if isinstance(head, int) else range(HEADS)
        maps = [weights(rows, columns, causal, layer, head, head == 3) for head in heads]
        attention_map = sum(maps) / len(heads)
        claim = np.tri(rows, columns, dtype=bool) if causal else np.ones((rows, columns), bool)
        return attention_map, claim

    def overview(self, key: str, name: str, layer: int, head: Any, size: int) -> dict[str, Any]:
        attention_map, claim = self._map(key, name, layer, head)
        rows, columns = attention_map.shape
        cell_size = -(-max(rows, columns) // size)
        cells, claim_cells = (
            np.pad(table, ((0, -rows % cell_size), (0, -columns % cell_size)))
            .reshape(-(-rows // cell_size), cell_size, -1, cell_size)
            .max((1, 3))
            for table in (attention_map, claim)
        )
        max_weight = float(cells.max())
        return {
            "rows": rows,
            "columns": columns,
            "cell_size": cell_size,
            "map_u8": u8(quantize(cells, max_weight)),
            "max_weight": max_weight,
            "claim_bits": bits(claim_cells),
        }

    def tile(
        self, key: str, name: str, layer: int, head: Any, row: int, column: int, size: int
    ) -> dict[str, Any]:
        attention_map, claim = (
            table[row : row + size, column : column + size] for table in self._map(key, name, layer, head)
        )
        return {
            "row": row,
            "column": column,
            "rows": attention_map.shape[0],
            "columns": attention_map.shape[1],
            "map_u8": u8(quantize(attention_map)),
            "claim_bits": bits(claim),
        }

    def token_attention(
        self, key: str, name: str, layer: int, head: Any, token: int, incoming: bool
    ) -> dict[str, Any]:
        attention_map, _ = self._map(key, name, layer, head)
        return {"weights_f32": f32(attention_map[:, token] if incoming else attention_map[token])}

    def head_stats(self, key: str, name: str, layer: int) -> dict[str, Any]:
        out = []
        for head in range(HEADS):
            attention_map, claim = self._map(key, name, layer, head)
            i, j = np.indices(attention_map.shape)
            logs = np.log2(np.where(attention_map > 0, attention_map, 1))
            out.append(
                {
                    "entropy": float(-(attention_map * logs).sum(1).mean()),
                    "distance": float((attention_map * abs(i - j)).sum(1).mean()),
                    "first": float(attention_map[:, 0].mean()),
                    "previous": float(attention_map.diagonal(-1).mean()),
                    "itself": float(attention_map.diagonal().mean()),
                    "outside": float((attention_map * ~claim).max()),
                }
            )
        return {"heads": out}

    # decoding

    def next_token(
        self, text: str, tokens: list[int], source: str = "", unmasked: bool = False
    ) -> dict[str, Any]:
        logits = (
            np.random.default_rng(hash_of(text + source) + sum(tokens) * 31 + len(tokens)).normal(size=VOCAB)
            * 2.2
        )
        best = hash_of(f"{tokens}") % (VOCAB - 10) + 5
        logits[best] = 12.5
        logits[best + 1] = 11.5
        logits[0] = 9.0 + len(tokens) / 4
        return {
            "prompt": split_tokens(text),
            "new_tokens": describe(tokens),
            "logits_f32": f32(logits),
            "eos_ids": [0],
            "decoder_start_token_id": 1,
        }

    def vocabulary(self) -> dict[str, Any]:
        return {"tokens": [token_text(n) for n in range(VOCAB)]}

    def token_texts(self, ids: list[int], context: list[int]) -> dict[str, Any]:
        return {"tokens": describe(ids)}

    def continue_text(
        self, text: str, tokens: list[int], options: dict[str, Any], max_new_tokens: int, source: str = ""
    ) -> dict[str, Any]:
        if unknown := {*options} - {"do_sample", "temperature", "top_k", "top_p", "min_p"}:
            raise RefusedError(f"continue_text takes no {unknown}")
        new = [10 + (sum(tokens) + n * 37) % 4_000 for n in range(max_new_tokens)]
        return {"tokens": describe(new), "logprobs": [-1.0] * max_new_tokens, "finished": False}

    def beam(
        self,
        text: str,
        num_beams: int,
        max_new_tokens: int,
        length_penalty: float,
        early_stopping: bool,
        source: str = "",
    ) -> dict[str, Any]:
        rng = np.random.default_rng(num_beams)
        steps: list[list[dict[str, Any]]] = []
        for step in range(min(max_new_tokens, 9)):
            nodes = []
            for parent in range(1 if step == 0 else num_beams):
                parent_score = steps[-1][parent]["score"] if steps else 0.0
                for _ in range(num_beams if step == 0 else 2):
                    logprob = -float(rng.exponential(0.8))
                    number = int(rng.integers(10, 4_000))
                    nodes.append(
                        {
                            "id": 0,
                            "parent": parent if steps else -1,
                            "token": token(number, token_text(number)),
                            "logprob": logprob,
                            "score": parent_score + logprob,
                        }
                    )
            steps.append(sorted(nodes, key=lambda node: -node["score"])[:num_beams])
        path, rank = [], 0
        for nodes in reversed(steps):
            path.insert(0, nodes[rank]["token"])
            rank = max(0, nodes[rank]["parent"])
        best = [*path, token(0, "</s>", True)]
        result = {"tokens": best, "score": -0.7}
        return {"steps": steps, "finished": [{**result, "step": len(steps) - 1}], "best": result}

    def alignment(self, source: str, tokens: list[int], layer: Any, head: Any) -> dict[str, Any]:
        source_tokens = split_tokens(source)
        attention_map = weights(max(1, len(tokens)), len(source_tokens), False, 1, 2, False)
        return {
            "source": source_tokens,
            "target": describe(tokens),
            "weights_u8": u8(quantize(attention_map)),
            "rows": len(tokens),
            "columns": len(source_tokens),
        }

    # masks, leaks, training

    def mask(
        self, expression: str, length: int, padding: dict[str, int], packing: list[int]
    ) -> dict[str, Any]:
        if re.sub(r"causal|full|(window|prefix|block)\(\d+\)|[&|~() ]", "", expression):
            raise RefusedError(
                f"{expression!r} is not a mask: write one such as 'causal & window(3) | prefix(1)'"
            )
        i, j = np.indices((length, length))
        window = re.search(r"window\((\d+)\)", expression)
        visible = (j <= i) if "causal" in expression else np.ones((length, length), bool)
        visible = visible & (abs(i - j) < int(window[1])) if window else visible
        prefix = re.search(r"prefix\((\d+)\)", expression)
        visible = visible | (j < int(prefix[1])) if prefix else visible
        if expression.startswith("~"):
            visible = ~visible
        real = (np.arange(length) >= padding["left"]) & (np.arange(length) < length - padding["right"])
        visible = visible & real[:, None] & real[None]
        count = int(visible.sum())
        faults = [
            f"position {q} sees position {k}, its future"
            for q, k in zip(*np.nonzero(np.triu(visible, 1)), strict=True)
        ]
        return {
            "mask": expression,
            "visible_bits": bits(visible),
            "rows": length,
            "columns": length,
            "faults": faults[:12],
            "cost": {
                "visible": count,
                "total": length * length,
                "fraction": count / length**2,
                "note": "A kernel skips the rest.",
            },
        }

    def audit(
        self, budget: str = "quick", action: str = "poll", wait: bool = False, client: str = ""
    ) -> dict[str, Any]:
        self.num_audit_polls += action != "stop"
        is_done = self.num_audit_polls >= self.num_polls_until_done
        status = {
            "future": "leak",
            "batch": "clean",
            "nan": "clean" if is_done else "running",
            "padding": "clean" if is_done else "waiting",
            "packing": "not applicable" if is_done else "waiting",
            "cache": "unchecked" if is_done else "waiting",
            "labels": "not applicable" if is_done else "waiting",
        }
        reasons = {
            "packing": "the model takes no segment, document or position ids",
            "cache": "the time of the quick budget was up; budget='full' has no limit",
            "labels": "the model takes no labels",
        }
        checks = [
            {
                "name": name,
                "status": status[name],
                "num_paths": 12 if status[name] in ("clean", "leak") else 0,
                "reason": reasons.get(name, "") if is_done else "",
            }
            for name in ("future", "padding", "packing", "cache", "batch", "nan", "labels")
        ]
        progress = {
            "fraction": 1.0 if is_done else 0.47,
            "check": "nan",
            "path": "train, no mask, batch 2, length 13",
            "pass_number": 1,
            "num_passes": 1 if budget == "quick" else 2,
            "calls": 1412,
            "checks": checks,
        }
        claim = np.tri(12, dtype=bool)
        influence = np.where(claim, 10.0 ** -np.abs(np.subtract.outer(np.arange(12), np.arange(12)) / 2.0), 0)
        influence[4, 9] = 0.01
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
            "also": ["train"],
        }
        answer = {
            "budget": budget,
            "seconds": 1.5 * self.num_audit_polls,
            "progress": {**progress, "findings": [] if is_done else [finding]},
        }
        if not is_done:
            return {"state": "running", **answer}
        return {
            "state": "done",
            **answer,
            "claim_bits": bits(claim),
            "influence_f32": f32(influence),
            "rows": 12,
            "columns": 12,
            "report": {
                "ok": False,
                "claim": "causal",
                "skipped": ["gradients: the head has none"],
                "notes": [],
                "paths": ["eval, no mask, batch 2, length 13", "train, no mask, batch 2, length 13"],
                "not_tried": ["train, a mask of ones, batch 2", "length 65"],
                "not_tried_summary": "train, a mask of ones, batch 2; lengths 65 (budget full tries them)",
                "findings": [finding],
            },
        }

    def unmasked(self, text: str, source: str = "") -> dict[str, Any]:
        tokens = split_tokens(text or TARGET)
        n = len(tokens)
        rng = np.random.default_rng(n)
        masked, unmasked = weights(n, n, True, 0, 2, False), np.roll(np.eye(n), 1, 1) * 0.8 + 0.2 / n
        losses = rng.exponential(2.5, n)
        return {
            "tokens": tokens,
            "masked_loss_f32": f32(losses),
            "unmasked_loss_f32": f32(losses * 0.06),
            "note": (
                "A token costs 2.51 nats with the mask and 0.15 without it: "
                "seeing the future gives the answer away."
            ),
            "maps": {
                "rows": n,
                "columns": n,
                "masked_u8": u8(quantize(masked)),
                "unmasked_u8": u8(quantize(unmasked)),
            },
        }

    def runs(self) -> dict[str, Any]:
        return {
            "runs": [
                {"name": "en-fr", "steps": 2_000, "modified": 0.0, "task": "translation"},
                {"name": "stories", "steps": 100, "modified": 0.0, "task": "language"},
            ]
        }

    def run(self, name: str, from_line: int) -> dict[str, Any]:
        end = 200 if name == "en-fr" else min(100, from_line + 10)
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
            for n in range(from_line + 1, end + 1)
        ]
        return {
            "lines": lines,
            "first_line": from_line,
            "next_line": end,
            "finished": end in (100, 200),
            "config": "task: translation\nrecipe:\n  steps: 2000\n" if from_line == 0 else "",
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
