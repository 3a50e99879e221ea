"""Every benchmark runs, at toy size: a renamed function or option cannot break one unseen."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from toy_corpora import sentences, write_lines, write_toy_data

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
FILES = sorted(path.stem for path in BENCH.glob("*.py"))

# what to add to --smoke; "{tmp}" is a temporary folder
SMOKE_RUNS: dict[str, list[str]] = {
    "attack": ["--only", "million"],
    "attention_backends_gpu": ["--device", "cpu"],
    "attention_memory": [],
    "audit_gpu": ["--device", "cpu"],
    "audit_speed": ["--device", "cpu"],
    "audit_zoo": ["--out", "{tmp}"],
    "chaos_train": [],
    "confirm": [],
    "cpu_train": [],
    "explorer_beside": [],
    "gpu_train": ["--device", "cpu", "--profile", "{tmp}/profile.txt"],
    "load_memory": [],
    "prepare_data": [],
    "quality": [
        *[str(ROOT / "recipes" / "multi30k-en-de.yaml"), "--data", "{tmp}/data", "--out", "{tmp}/out"],
        *["--test", "test.en.gz", "test.de.gz"],
    ],
    "race_attend": [],
    "race_decode_cpu": [],
    "race_decode_gpu": ["--device", "cpu"],
    "race_forward": [],
    "race_scale": [],
    "race_serve_cpu": [],
    "race_serve_gpu": ["--device", "cpu", "--static"],
    "race_versions": ["--device", "cpu"],
    "fairness": ["--only", "8 clients with 16 scores", "scores"],
    "scoreboard": ["--out", "{tmp}"],
    "soak": [],
    "threads": [],
    "time_to_first_token": ["--device", "cpu"],
    "translator": ["--data", "{tmp}/tatoeba", "--toy", "{tmp}/toy"],
}
# one forks, which is safe only where no other threads run; the other starts Ray
IN_A_PROCESS = {"audit_zoo", "race_scale"}

# modules without a main: each is run by a benchmark that imports it
RUN_BY = {
    "attention_workloads": "attention_backends_gpu",
    "backend_parity": "attention_backends_gpu",
    "child_process": "fairness",
    "command_line": "race_attend",
    "ctranslate2_weights": "race_decode_cpu",
    "direct_kernels": "attention_backends_gpu",
    "greedy_clients": "fairness",
    "peak_memory": "load_memory",
    "report": "race_attend",
    "timing": "race_attend",
    "transformers_models": "race_forward",
    "zoo_releases": "scoreboard",
}


def imports(file: str) -> set[str]:
    tree = ast.parse((BENCH / f"{file}.py").read_text("utf-8"))
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return set(modules)


@pytest.fixture(autouse=True)
def process_settings(monkeypatch) -> Iterator[None]:
    """What benchmarks set for the whole process is set back."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


def test_every_file_has_a_smoke_run():
    assert sorted([*SMOKE_RUNS, *RUN_BY]) == FILES
    for module, user in RUN_BY.items():
        assert user in SMOKE_RUNS
        assert module in imports(user), f"bench/{user}.py does not import {module}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of other libraries, which the benchmarks compare with
@pytest.mark.parametrize("file", SMOKE_RUNS)
def test_a_benchmark_runs_at_toy_size(file, tmp_path):
    if file == "quality":
        write_toy_data(ROOT / "recipes" / "multi30k-en-de.yaml", tmp_path)
        for language in ("en", "de"):
            write_lines(tmp_path / "data" / f"test.{language}.gz", sentences(2)[:3])
    if file == "translator":
        for language in ("fra", "deu", "hin"):
            pairs = [f"{line}\t{line}" for line in sentences(3)]
            write_lines(tmp_path / "tatoeba" / f"eng-{language}.dev.tsv.gz", pairs)
    result_path = tmp_path / "result.json"
    arguments = ["--smoke", "--json", str(result_path)]
    arguments += [argument.replace("{tmp}", str(tmp_path)) for argument in SMOKE_RUNS[file]]
    if file in IN_A_PROCESS:
        subprocess.run([sys.executable, str(BENCH / f"{file}.py"), *arguments], check=True, timeout=300)
    else:
        assert importlib.import_module(file).main(arguments) in (None, 0)
    check_result(file, json.loads(result_path.read_text("utf-8")), tmp_path)


def check_result(file: str, result: dict[str, Any], folder: Path) -> None:
    """Something was measured, and where two implementations compute the same, they agree."""
    for name, rows in result.items():
        if isinstance(rows, list) and name != "long padded batches":
            assert rows, name
    if file == "audit_zoo":
        assert [row["verdict"] for row in result["rows"]] == ["clean"], result["rows"]
        assert list(folder.glob("zoo-*.html"))
    if file == "confirm":
        assert {row["state"] for row in result["rows"]} == {"not reproduced"}, result["rows"]
    if file == "scoreboard":
        assert [row["leak"] for row in result["releases"]] == [1]
        assert (folder / "scoreboard.html").exists()
    if file == "attention_backends_gpu":
        assert all(row["agrees"] == "yes" for row in result["parity"])
        assert all(row["max difference"] < 1e-3 for row in result["races"])
    if file in ("race_decode_cpu", "race_decode_gpu", "race_serve_gpu"):
        agreements = [
            value for row in result["rows"] for name, value in row.items() if name.startswith("agreement")
        ]
        assert agreements
        assert max(agreements) == 1.0
    if file == "quality":
        assert {"beam 1", "beam 2"} <= result.keys()
        assert result["validation"]
    if file == "attack":
        assert all(row["/health failed"].startswith("0/") for row in result["attacks"]), result["attacks"]
    if file in ("chaos_train", "soak"):
        assert result["passed"], result
