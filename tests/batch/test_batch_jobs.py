"""Batch jobs in one process: every row once, as it would be alone, whatever stops the job in between."""

from __future__ import annotations

import errno
import json
import math

import pytest

import keepleft as kl
from batch.jobs import assert_same, make_texts, read_results, save_models, write_rows
from keepleft.batch import job as job_module
from keepleft.batch import local, storage
from keepleft.batch.job import make_job
from keepleft.batch.tasks import LoadedTask, TaskSpec
from keepleft.batch.worker import BatchWorker
from keepleft.cli import main
from keepleft.cli.batch_jobs import BatchFlags, is_batch_job
from keepleft.decoding.generation_config import GenerationConfig
from keepleft.disk import atomic
from keepleft.pipelines.predictor import load_predictor
from keepleft.serving.engine.request import ShuttingDownError

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = make_texts(150)
SAMPLED = GenerationConfig(do_sample=True, temperature=0.8, max_new_tokens=4, seed=7)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def small_parts(monkeypatch):
    """Several parts for few rows."""
    monkeypatch.setattr(job_module, "MIN_PART_ROWS", 16)


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def expected(model: str, texts: list[str], options: GenerationConfig) -> list[str]:
    """What each text becomes alone; text n has the seed `seed + n`."""
    loaded = kl.load(model)
    return [
        kl.generate(
            *loaded, text, options=options.but(seed=None if options.seed is None else options.seed + n)
        )[0]
        for n, text in enumerate(texts)
    ]


# results ------------------------------------------------------------------------------------------


def test_every_text_becomes_what_it_would_be_alone(models, tmp_path, small_parts):
    write_rows(tmp_path / "a.txt", TEXTS[:50])
    write_rows(tmp_path / "b.jsonl.gz", TEXTS[50:90], first_id=50)
    write_rows(tmp_path / "c.parquet", TEXTS[90:])
    arguments = ("--input", tmp_path / "*.*", "--output", tmp_path / "out", "--in-order")
    flags = ("--do-sample", "--temperature", 0.8, "--max-new-tokens", 4, "--seed", 7)
    assert run("generate", models["decoder"], *arguments, *flags) == 0
    records = read_results(tmp_path / "out")
    assert [record["input"] for record in records] == TEXTS
    assert [record["text"] for record in records] == expected(models["decoder"], TEXTS, SAMPLED)
    names = [*range(50), *(f"row-{n}" for n in range(50, 90)), *range(90, 150)]
    assert [record["id"] for record in records] == names
    ordered = (tmp_path / "out" / "results.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in ordered] == records
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["rows"], report["failed"], report["rows_done_before"]) == (150, 0, 0)
    assert report["tokens"] == sum(record["num_tokens"] for record in records)


@pytest.mark.parametrize(
    "flags",
    [("--num-beams", "3", "--n-best", "2"), ("--regex", "[a-z ]{1,8}"), ("--stop-strings", "[' ']"), ()],
)
def test_options_mean_what_they_mean_for_single_texts(models, tmp_path, flags, capsys):
    if "--regex" in flags:
        pytest.importorskip("llguidance")
    write_rows(tmp_path / "a.jsonl", TEXTS[:12])
    flags = (*flags, "--max-new-tokens", "5")
    assert (
        run(
            "generate",
            models["decoder"],
            "--input",
            tmp_path / "a.jsonl",
            "--output",
            tmp_path / "out",
            *flags,
        )
        == 0
    )
    capsys.readouterr()
    write_rows(tmp_path / "a.txt", TEXTS[:12])
    assert run("generate", models["decoder"], "--input", tmp_path / "a.txt", "--json", *flags) == 0
    single = [json.loads(line) for line in capsys.readouterr()[0].splitlines()]
    for record, alone in zip(read_results(tmp_path / "out"), single, strict=True):
        assert record["text"] == alone["text"]
        assert record["ended"] == alone["ended"]
        assert math.isclose(record["score"], alone["score"], abs_tol=1e-3)
        if "--n-best" in flags:
            assert [entry["text"] for entry in record["n_best"]] == [
                entry["text"] for entry in alone["n_best"]
            ]


def test_an_instruct_model_answers_each_row(models, tmp_path):
    write_rows(tmp_path / "a.jsonl", ["the sea", ""])
    arguments = ("--input", tmp_path / "a.jsonl", "--max-new-tokens", 4)
    assert run("generate", models["talker"], *arguments, "--output", tmp_path / "chat") == 0
    assert run("generate", models["talker"], *arguments, "--output", tmp_path / "raw", "--raw") == 0
    loaded = kl.load(models["talker"])
    assert read_results(tmp_path / "chat")[0]["text"] == kl.chat(*loaded, "the sea", max_new_tokens=4)
    assert read_results(tmp_path / "raw")[0]["text"] == kl.generate(*loaded, "the sea", max_new_tokens=4)[0]
    assert read_results(tmp_path / "chat")[1]["text"] == ""


def test_sources_are_translated_and_summarized(models, tmp_path):
    write_rows(tmp_path / "a.jsonl", TEXTS[:20])
    for command in ("translate", "summarize"):
        arguments = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / command, "--max-new-tokens", 4)
        assert run(command, models["translator"], *arguments) == 0
        found = [record["text"] for record in read_results(tmp_path / command)]
        options = GenerationConfig(max_new_tokens=4)
        if command == "summarize":
            options = options.but(no_repeat_ngram_size=3)
        assert found == expected(models["translator"], TEXTS[:20], options)


def test_labels_scores_and_embeddings(models, tmp_path):
    write_rows(tmp_path / "a.jsonl", TEXTS[:20])
    for command, model in (("classify", "classifier"), ("embed", "classifier"), ("score", "decoder")):
        arguments = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / command)
        assert run(command, models[model], *arguments) == 0
    predictor = load_predictor(models["classifier"])
    probabilities = predictor.classify(TEXTS[:20])
    for record, row in zip(read_results(tmp_path / "classify"), probabilities.tolist(), strict=True):
        assert record["label"] == predictor.labels[row.index(max(row))]
        assert list(record["probabilities"].values()) == pytest.approx(row, abs=1e-3)
    vectors = predictor.embed(predictor.encode(TEXTS[:20])).tolist()
    for record, vector in zip(read_results(tmp_path / "embed"), vectors, strict=True):
        assert record["embedding"] == pytest.approx(vector, abs=1e-4)
    scorer = load_predictor(models["decoder"])
    for record in read_results(tmp_path / "score"):
        total = sum(entry.logprob for entry in scorer.score(record["input"]))
        assert record["logprob"] == pytest.approx(total, abs=1e-2)


def test_the_rows_beside_a_text_do_not_change_its_draw(models):
    task = LoadedTask(TaskSpec(task="generate", model=models["decoder"], options=SAMPLED))
    try:
        together = task.run(TEXTS[:40], range(40))
        apart = [record for n in reversed(range(40)) for record in task.run([TEXTS[n]], [n])][::-1]
    finally:
        task.close()
    assert [record["text"] for record in together] == [record["text"] for record in apart]


def test_embed_prints_vectors_of_single_texts(models, capsys):
    assert run("embed", models["classifier"], "the sea", "a ship") == 0
    lines = capsys.readouterr()[0].splitlines()
    assert run("embed", models["classifier"], "the sea", "--json") == 0
    record = json.loads(capsys.readouterr()[0])
    assert record["input"] == "the sea"
    assert lines[0].split("\t") == [str(value) for value in record["embedding"]]
    assert len(lines) == 2


# bad rows -----------------------------------------------------------------------------------------


def test_a_bad_row_neither_stops_the_job_nor_is_lost(models, tmp_path, capsys):
    rows = [json.dumps({"text": text}) for text in TEXTS[:30]]
    rows[3] = "{"
    rows[8] = json.dumps({"id": "long", "text": "the sea " * 9000})
    rows[20] = json.dumps({"id": 99, "words": "no text"})
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    arguments = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out")
    assert run("classify", models["classifier"], *arguments) == 0
    assert run("generate", models["decoder"], *arguments[:3], tmp_path / "text", "--max-new-tokens", 2) == 0
    error = capsys.readouterr()[1]
    assert "2 rows failed" in error
    for folder in ("out", "text"):
        records = read_results(tmp_path / folder)
        failed = {record["id"]: record["error"] for record in records if "error" in record}
        assert {3, 99} <= failed.keys() <= {3, "long", 99}
        assert "is not JSON" in failed[3]
        assert {3: "{", 99: rows[20]}.items() <= {row["id"]: row["input"] for row in records}.items()
        report = json.loads((tmp_path / folder / "report.json").read_text())
        assert (report["rows"], report["failed"]) == (30, len(failed))
        assert {failure["id"]: failure["error"] for failure in report["failures"]} == failed
        lines = {failure["id"]: failure["line"] for failure in report["failures"]}
        assert {3: 4, 99: 21}.items() <= lines.items()
        assert {failure["file"] for failure in report["failures"]} == {str(tmp_path / "a.jsonl")}
    assert f"{tmp_path / 'a.jsonl'}:4: the line is not JSON" in error


def test_an_error_of_the_model_is_the_error_of_its_row(models, tmp_path, monkeypatch):
    task = LoadedTask(TaskSpec(task="classify", model=models["classifier"]))
    monkeypatch.setattr(task, "function", lambda texts, indices: [{"at": 1 // (n - 5)} for n in indices])
    try:
        records = task.run(TEXTS[:20], range(20))
    finally:
        task.close()
    assert [n for n, record in enumerate(records) if "error" in record] == [5]
    assert records[5]["error"].startswith("ZeroDivisionError")


# a job that was stopped ---------------------------------------------------------------------------


def test_a_job_that_was_stopped_goes_on_with_what_is_missing(
    models, tmp_path, small_parts, monkeypatch, capsys
):
    write_rows(tmp_path / "a.txt", TEXTS)
    arguments = (
        "generate",
        models["decoder"],
        "--input",
        tmp_path / "*.txt",
        "--do-sample",
        "--max-new-tokens",
        3,
    )
    whole = run(*arguments, "--output", tmp_path / "whole")
    assert whole == 0
    # an unseeded job remembers the seed that it drew
    seed = json.loads((tmp_path / "whole" / "job.json").read_text())["options"]["seed"]
    done = 0
    write_part = job_module.Job.write_part

    def stop_at_fourth(self, part, records):
        nonlocal done
        done += 1
        if done == 4:
            raise KeyboardInterrupt
        write_part(self, part, records)

    monkeypatch.setattr(job_module.Job, "write_part", stop_at_fourth)
    stopped = (*arguments, "--output", tmp_path / "out")
    assert run(*stopped, "--seed", seed) == 130
    monkeypatch.undo()
    monkeypatch.setattr(job_module, "MIN_PART_ROWS", 16)
    parts = sorted((tmp_path / "out").glob("part-*"))
    assert 1 <= len(parts) < 10
    times = [path.stat().st_mtime_ns for path in parts]
    capsys.readouterr()
    assert run(*stopped) == 0
    assert "rows are done already; going on with the others" in capsys.readouterr()[1]
    assert [path.stat().st_mtime_ns for path in parts] == times
    assert_same(read_results(tmp_path / "out"), read_results(tmp_path / "whole"))
    assert run(*stopped) == 0
    assert "all rows are done already" in capsys.readouterr()[1]


def test_parts_with_failed_rows_are_done_again_where_asked(
    models, tmp_path, small_parts, monkeypatch, capsys
):
    write_rows(tmp_path / "a.jsonl", TEXTS[:40])
    run_task = LoadedTask.run

    def fail_once(self, texts, indices):
        records = run_task(self, texts, indices)
        return [
            {"error": "out of memory"} if n == 20 else row for n, row in zip(indices, records, strict=True)
        ]

    arguments = (
        "classify",
        models["classifier"],
        "--input",
        tmp_path / "a.jsonl",
        "--output",
        tmp_path / "out",
    )
    monkeypatch.setattr(LoadedTask, "run", fail_once)
    assert run(*arguments) == 0
    monkeypatch.setattr(LoadedTask, "run", run_task)
    assert run(*arguments) == 0
    first_part = (tmp_path / "out" / "part-000000.jsonl").stat().st_mtime_ns
    assert "a.jsonl:21: out of memory" in capsys.readouterr()[1]
    assert run(*arguments, "--retry-failed") == 0
    assert "failed" not in capsys.readouterr()[1]
    assert not any("error" in record for record in read_results(tmp_path / "out"))
    assert (tmp_path / "out" / "part-000000.jsonl").stat().st_mtime_ns == first_part


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(models, tmp_path, monkeypatch, capsys):
    write_rows(tmp_path / "a.jsonl", TEXTS[:5])
    sync = atomic.sync

    def full(path):
        if "part-" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        sync(path)

    monkeypatch.setattr(atomic, "sync", full)
    arguments = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--max-new-tokens", 2)
    assert run("generate", models["decoder"], *arguments) == 2
    error = capsys.readouterr()[1].strip().splitlines()[-1]
    assert "part-000000.jsonl could not be written" in error
    assert "free some space" in error
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["job.json"]
    monkeypatch.undo()
    assert run("generate", models["decoder"], *arguments) == 0
    assert len(read_results(tmp_path / "out")) == 5


def test_an_engine_that_has_ended_ends_the_job(models, tmp_path):
    job = make_job(
        TaskSpec(task="generate", model=models["decoder"], options=GenerationConfig(max_new_tokens=2)),
        [str(write_rows(tmp_path / "a.txt", TEXTS[:5]))],
        str(tmp_path / "out"),
    )
    worker = BatchWorker(job)
    worker.close()
    with pytest.raises(ShuttingDownError):
        worker.run(job.parts[0])
    assert storage.names_in(job.output) == ["job.json"]


# what is refused ----------------------------------------------------------------------------------


def test_what_a_batch_job_refuses(models, tmp_path, capsys):
    def refused(*arguments):
        assert run(*arguments) == 2
        lines = capsys.readouterr()[1].strip().splitlines()
        return lines[-1]

    path = write_rows(tmp_path / "a.jsonl", TEXTS[:5])
    model = models["decoder"]
    batch = ("generate", model, "--input", path)
    assert "name it with --output" in refused(*batch)
    assert "reads files: give them with --input" in refused("generate", model, "a text", "--workers", 2)
    (tmp_path / "file").touch()
    assert "is a file, and --output of a batch job is a folder" in refused(
        *batch, "--output", tmp_path / "file"
    )
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    assert "has other files in it, such as mine.txt" in refused(*batch, "--output", tmp_path / "full")
    assert "there is no file" in refused(
        "generate", model, "--input", tmp_path / "*.parquet", "--output", tmp_path / "x"
    )
    assert "--plot is not for batch jobs" in refused(*batch, "--output", tmp_path / "x", "--plot", "a.svg")
    assert "--stream is not for batch jobs" in refused(*batch, "--output", tmp_path / "x", "--stream")
    assert "an ensemble is not for batch jobs" in refused(
        "generate", f"{model},{model}", "--input", path, "--output", tmp_path / "x"
    )
    assert "--workers is 0" in refused(*batch, "--output", tmp_path / "x", "--workers", 0)
    assert "say how many with --workers" in refused(*batch, "--output", tmp_path / "x", "--address", "auto")
    assert "writes no text" in refused(
        "generate", models["classifier"], "--input", path, "--output", tmp_path / "y"
    )
    # what was refused leaves nothing that is in the way
    assert run("classify", models["classifier"], "--input", path, "--output", tmp_path / "y") == 0
    assert run(*batch, "--output", tmp_path / "done", "--max-new-tokens", 2) == 0
    other = refused(*batch, "--output", tmp_path / "done", "--max-new-tokens", 3)
    assert "has the results of another job: its options is" in other
    write_rows(path, TEXTS[:6])
    changed = refused(*batch, "--output", tmp_path / "done", "--max-new-tokens", 2)
    assert "a.jsonl has changed since; give another --output" in changed


@pytest.mark.parametrize(
    ("input", "output", "flags", "is_batch"),
    [
        (None, None, {}, False),
        ("-", "out.txt", {}, False),
        ("a.txt", "out.txt", {}, False),
        ("a.txt", "out/", {}, True),
        ("a.txt", "folder", {}, True),
        ("a.jsonl", None, {}, True),
        ("a.txt.gz", None, {}, True),
        ("*.txt", None, {}, True),
        ("[x].txt", None, {}, False),
        ("s3://bucket/a.txt", None, {}, True),
        (None, None, {"workers": 1}, True),
        ("a.txt", "out.txt", {"in_order": True}, True),
    ],
)
def test_what_makes_a_batch_job(tmp_path, monkeypatch, input, output, flags, is_batch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "[x].txt"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    assert is_batch_job(input, output, BatchFlags(**flags)) == is_batch
    if not is_batch:
        with pytest.raises(ValueError, match="--field, --id-field and --gpus-per-worker are for batch jobs"):
            is_batch_job(input, output, BatchFlags(**flags, field="prompt"))


def test_no_rows_are_a_job_too(models, tmp_path):
    write_rows(tmp_path / "a.jsonl", [])
    assert (
        run("generate", models["decoder"], "--input", tmp_path / "a.jsonl", "--output", tmp_path / "out") == 0
    )
    assert json.loads((tmp_path / "out" / "report.json").read_text())["rows"] == 0
    assert list(local.run_parts(None, [])) == []  # type: ignore[arg-type]


def test_a_path_may_be_a_uri_of_this_machine(models, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", TEXTS[:3])
    arguments = ("--input", f"file://{path}", "--output", f"file://{tmp_path}/out", "--max-new-tokens", 2)
    assert run("generate", models["decoder"], *arguments) == 0
    assert len(read_results(tmp_path / "out")) == 3
    assert storage.names_in(f"file://{tmp_path}/out") == ["job.json", "part-000000.jsonl", "report.json"]
