"""The page's own arithmetic: its tests run in Node, and its filters are held against keepleft's."""

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
    found = shutil.which("node")
    if found is None:
        pytest.skip("Node.js is not installed: the page's own tests cannot run")
    if not (WEB / "node_modules" / "esbuild").is_dir():
        pytest.skip("what the page is made of is not installed: make page")
    return found


def ran(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
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
    done = ran(node, "test/run.mjs", KEEPLEFT_FILTER_CASES=str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# skipped 0" in done.stdout or "ℹ skipped 0" in done.stdout


def test_its_types_are_right(node):
    if not (WEB / "node_modules" / "typescript").is_dir():
        pytest.skip("TypeScript is not installed: make page")
    done = ran(node, "node_modules/typescript/bin/tsc", "--noEmit")
    assert done.returncode == 0, done.stdout + done.stderr


def cases():
    """Scores with ties and hopeless tokens among them, every combination of sliders, and what keepleft makes of both."""
    torch.manual_seed(7)
    rows = [
        torch.randn(61) * 3,
        torch.tensor([1.0, 3.0, 3.0, -2.0, 3.0, 0.0, -0.0]),
        torch.tensor([2.0, -80.0, 1.0, 2.0]),
    ]
    dials = list(itertools.product((1.0, 0.3, 1.7), (0, 1, 2, 40), (1.0, 0.9, 0.35), (0.0, 0.05, 0.6)))
    for row, (temperature, k, p, least) in itertools.product(rows, dials):
        scores = row[None].double()  # exact sums on both sides: where float32 rounds, either may be right
        for apply in (
            filters.temperature(temperature),
            *([filters.top_k(k)] if k else []),
            *([filters.top_p(p)] if p < 1 else []),
            filters.min_p(least),
        ):
            scores = apply(scores, None)
        yield {
            "scores": row.tolist(),
            "dials": {"temperature": temperature, "topK": k, "topP": p, "minP": least},
            "wanted": scores.softmax(-1)[0].tolist(),
        }
