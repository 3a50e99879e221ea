"""Batch jobs on Ray: killed workers and drivers cost time, and no row."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from batch.jobs import assert_same, make_texts, read_results, save_models, write_rows
from cluster.processes import WAIT_SECONDS, processes_called, start_keepleft, wait_until
from keepleft.cli import main

pytest.importorskip("ray", reason="needs ray: pip install 'keepleft[ray]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the processes of Ray are found in /proc"),
]
NUM_ROWS = 20_000
WORKER = "MapWorker"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


def finish(process) -> str:
    _, error = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, error
    assert "Traceback" not in error
    return error


def test_a_killed_worker_and_a_killed_driver_lose_no_row(models, tmp_path):
    texts = make_texts(NUM_ROWS)
    for n in range(4):
        write_rows(tmp_path / f"{n}.jsonl", texts[n * 5000 : (n + 1) * 5000])
    arguments = ("classify", models["classifier"], "--input", tmp_path / "*.jsonl", "--output")
    assert main([str(argument) for argument in (*arguments, tmp_path / "alone")]) == 0
    out = tmp_path / "out"
    parts = lambda: list(out.glob("part-*.jsonl"))
    driver = start_keepleft(*arguments, out, "--workers", "2", "--in-order")
    wait_until(lambda: len(parts()) > 3, "the first parts")
    wait_until(lambda: len(processes_called(WORKER, driver.pid)) == 2, "two workers")
    workers = processes_called(WORKER, driver.pid)
    num_done = len(parts())
    os.kill(workers[0], signal.SIGKILL)
    wait_until(lambda: len(parts()) > num_done + 5, "parts after a worker was killed")
    driver.kill()
    driver.communicate()
    num_done = len(parts())
    assert num_done < len(list((tmp_path / "alone").glob("part-*.jsonl")))
    error = finish(start_keepleft(*arguments, out, "--workers", "2", "--in-order"))
    assert "rows are done already; going on with the others" in error
    assert_same(read_results(out), read_results(tmp_path / "alone"))
    ordered = [json.loads(line) for line in (out / "results.jsonl").read_text("utf-8").splitlines()]
    assert [record["input"] for record in ordered] == texts
    report = json.loads((out / "report.json").read_text())
    assert (report["rows"], report["failed"]) == (NUM_ROWS, 0)


def test_workers_draw_what_one_process_draws(models, tmp_path):
    write_rows(tmp_path / "a.parquet", make_texts(300))
    (tmp_path / "b.jsonl").write_text("{\n")
    arguments = ("generate", models["decoder"], "--input", tmp_path / "*.*", "--do-sample", "--seed", "3")
    limit = ("--max-new-tokens", "4")
    assert main([str(argument) for argument in (*arguments, *limit, "--output", tmp_path / "alone")]) == 0
    error = finish(start_keepleft(*arguments, *limit, "--output", tmp_path / "out", "--workers", "2"))
    assert_same(read_results(tmp_path / "out"), read_results(tmp_path / "alone"))
    assert "1 row failed" in error


def test_what_a_cluster_cannot_do_is_one_line(models, tmp_path):
    write_rows(tmp_path / "a.jsonl", ["the sea"])
    arguments = ("generate", models["decoder"], "--input", tmp_path / "a.jsonl", "--max-new-tokens", "2")

    def refused(*more):
        process = start_keepleft(*arguments, *more)
        lines = process.communicate(timeout=WAIT_SECONDS)[1].strip().splitlines()
        assert process.returncode == 2
        assert len(lines) == 1, lines
        return lines[0]

    nowhere = refused("--output", tmp_path / "x", "--workers", "1", "--address", "127.0.0.1:1")
    assert "there is no Ray cluster at '127.0.0.1:1'" in nowhere
    assert "ray start --head" in nowhere
    many = refused("--output", tmp_path / "y", "--workers", "1000")
    assert "1000 workers need 1000 CPUs, and the cluster has" in many
    gpus = refused("--output", tmp_path / "z", "--workers", "1", "--gpus-per-worker", "64")
    assert "a worker needs 64 GPUs, and the cluster has" in gpus


def test_without_ray_the_remedy_is_named(models, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    write_rows(tmp_path / "a.jsonl", ["the sea"])
    arguments = ("generate", models["decoder"], "--input", tmp_path / "a.jsonl", "--output", tmp_path / "x")
    assert main([str(argument) for argument in (*arguments, "--workers", "1")]) == 2
    assert "pip install 'keepleft[ray]'" in capsys.readouterr()[1]
