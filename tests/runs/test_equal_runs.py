"""Equal runs write equal files, byte for byte, but for the times in metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from keepleft.data.tokenizer import train_tokenizer
from keepleft.demo.phrases.corpus import split
from keepleft.disk import safetensors
from keepleft.runs.job import RecipeOverrides, TokenizerConfig, TrainJob
from keepleft.runs.train import run_job

TIMES = ("speed", "share")  # of metrics.jsonl: tokens per second, MFU


def run_files(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes) -> dict[str, bytes]:
    """Train in a folder; the content of every file of the run, without times."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    lines = [f"{english}\t{french}\n" for english, french in split("fr", test=100)[0][:200]]
    Path("pairs.tsv").write_text("".join(lines), "utf-8")
    job = TrainJob(
        task="translate",
        train="pairs.tsv",
        out="runs/pairs",
        size="tiny",
        device="cpu",
        design={"dim": 32, "layers": 1},
        tokenizer=TokenizerConfig(joint=False),
        recipe=RecipeOverrides(steps=4, save_every=2, eval_every=2, log_every=1, **changes),
    )
    list(run_job(job))
    files = {str(path): path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
    reports = [json.loads(line) for line in files.pop("runs/pairs/metrics.jsonl").splitlines()]
    timeless = [{name: value for name, value in report.items() if name not in TIMES} for report in reports]
    return {**files, "metrics": json.dumps(timeless).encode()}


def test_equal_runs_write_the_same_bytes(tmp_path, monkeypatch):
    first, second = (run_files(tmp_path / name, monkeypatch) for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    assert {Path(name).suffix for name in first} >= {".safetensors", ".json", ".yaml", ".svg", ".tokens"}


def test_a_weight_file_is_the_same_each_time_and_the_library_reads_it(tmp_path):
    from safetensors.torch import load_file

    tensors = {
        "b": torch.arange(6).reshape(2, 3),
        "a é": torch.randn(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "bool": torch.tensor([True, False]),
    }
    contents = set()
    for _ in range(8):
        safetensors.save(tensors.items(), tmp_path, {})
        contents.add((tmp_path / "model.safetensors").read_bytes())
    assert len(contents) == 1
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    file = safetensors.SafetensorsFile(tmp_path, "model.safetensors")
    assert file.data_start % 8 == 0
    assert all(entry["data_offsets"][0] % 8 == 0 for entry in file.header.values() if entry["dtype"] == "I64")


def test_a_unigram_tokenizer_is_the_same_each_time():
    lines = [french for _, french in split("fr", test=100)[0][:300]]
    assert len({train_tokenizer("unigram", lines, 300).to_str() for _ in range(6)}) == 1
