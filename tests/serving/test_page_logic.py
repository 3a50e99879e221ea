"""The page's own arithmetic: its tests run in Node, and its logits filters are compared with keepleft's."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from keepleft.decoding import filters

WEB = Path(__file__).parents[2] / "web"


@pytest.fixture(scope="module")
def node() -> str:
    path = shutil.which("node")
    if path is None:
        pytest.skip("Node.js is not installed: the page's own tests cannot run")
    if not (WEB / "node_modules" / "esbuild").is_dir():
        pytest.skip("what the page is made of is not installed: make page")
    return path


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=WEB,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
        env={**os.environ, **env},
    )


def test_the_page_keeps_its_own_laws_and_filters_as_keepleft_does(node, tmp_path):
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(list(cases())), "utf-8")
    process = run(node, "test/run.mjs", KEEPLEFT_FILTER_CASES=str(path))
    assert process.returncode == 0, process.stdout + process.stderr
    assert "# skipped 0" in process.stdout or "ℹ skipped 0" in process.stdout


def test_its_types_are_right(node):
    if not (WEB / "node_modules" / "typescript").is_dir():
        pytest.skip("TypeScript is not installed: make page")
    process = run(node, "node_modules/typescript/bin/tsc", "--noEmit")
    assert process.returncode == 0, process.stdout + process.stderr


def cases():
    """Logits, some with ties and hopeless tokens; every combination of sliders; keepleft's probabilities."""
    torch.manual_seed(7)
    logit_rows = [
        torch.randn(61) * 3,
        torch.tensor([1.0, 3.0, 3.0, -2.0, 3.0, 0.0, -0.0]),
        torch.tensor([2.0, -80.0, 1.0, 2.0]),
    ]
    settings = list(itertools.product((1.0, 0.3, 1.7), (0, 1, 2, 40), (1.0, 0.9, 0.35), (0.0, 0.05, 0.6)))
    for row, (temperature, k, p, min_p) in itertools.product(logit_rows, settings):
        logits = row[None].double()  # exact sums on both sides: where float32 rounds, either may be right
        for apply in (
            filters.temperature(temperature),
            *([filters.top_k(k)] if k else []),
            *([filters.top_p(p)] if p < 1 else []),
            filters.min_p(min_p),
        ):
            logits = apply(logits, None)
        yield {
            "logits": row.tolist(),
            "params": {"temperature": temperature, "topK": k, "topP": p, "minP": min_p},
            "expected": logits.softmax(-1)[0].tolist(),
        }
