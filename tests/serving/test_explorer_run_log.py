"""Runs are read as they grow, by names from our own list, and nothing outside the folder is read."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepleft.serving.explorer import run_log
from serving.tiny_explorers import ask, make_explorer

LINE = {"step": 1, "after": 0, "loss": 2.5, "plain": 2.5}


def write_run(folder, name: str, steps: int, *, task: str = "lm", last: bool = False):
    run_folder = folder / name
    run_folder.mkdir(parents=True)
    (run_folder / "config.yaml").write_text(f"task: {task}\nout: runs/{name}\n")
    lines = [
        {**LINE, "step": n + 1, "after": n, **({"last": True} if last and n == steps - 1 else {})}
        for n in range(steps)
    ]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_folder


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs"


def test_runs_are_listed_the_newest_first(folder):
    for n, name in enumerate(("old", "new", "वन run")):
        run_folder = write_run(folder, name, n + 2, task="translate")
        for file in run_folder.iterdir():
            os.utime(file, (1_000_000 + n, 1_000_000 + n))
    (folder / "no run").mkdir()
    (folder / ".hidden").mkdir()
    (folder / "a file").write_text("x")
    answer = ask(make_explorer("decoder", runs=folder), "runs")["runs"]
    assert [run["name"] for run in answer] == ["वन run", "new", "old"]
    assert answer[1] == {"name": "new", "steps": 3, "modified": 1_000_001.0, "task": "translate"}
    assert ask(make_explorer("decoder"), "runs") == {"runs": []}
    assert ask(make_explorer("decoder", runs=folder / "nowhere"), "runs") == {"runs": []}


def test_lines_come_as_they_are_written(folder):
    run_folder = write_run(folder, "mine", 3)
    explorer = make_explorer("decoder", runs=folder)
    first = ask(explorer, "run", name="mine", from_line=0)
    assert [line["step"] for line in first["lines"]] == [1, 2, 3]
    assert first["config"].startswith("task: lm")
    assert (first["first_line"], first["next_line"], first["finished"]) == (0, 3, False)
    assert ask(explorer, "run", name="mine", from_line=3) == {
        "lines": [],
        "first_line": 3,
        "next_line": 3,
        "config": "",
        "finished": False,
    }
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": NaN}\n{"step": 5, "lo')
        file.flush()
        half = ask(explorer, "run", name="mine", from_line=3)
        # JSON has no NaN; half a line is left for later
        assert half["lines"] == [{"step": 4, "loss": None}]
        assert half["next_line"] == 4
        file.write('ss": 1.5, "last": true}\nnot json\n[1]\n')
    rest = ask(explorer, "run", name="mine", from_line=4)
    assert rest["lines"] == [{"step": 5, "loss": 1.5, "last": True}]
    assert (rest["next_line"], rest["finished"]) == (7, True)
    assert ask(explorer, "run", name="mine", from_line=7)["finished"]
    assert (
        ask(explorer, "run", name="mine", from_line=2)["first_line"] == 2
    )  # another page may be at another line


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6))
@settings(max_examples=30)
def test_any_order_of_asking_reads_the_same_lines(tmp_path_factory, starts):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder, "mine", 9)
    runs = run_log.RunFolder(folder)
    for from_line in starts:
        answer = runs.read_lines("mine", from_line)
        begin = from_line if from_line <= 9 else 0
        assert (answer["first_line"], answer["next_line"]) == (begin, 9)
        assert [line["step"] for line in answer["lines"]] == list(range(begin + 1, 10))


def test_a_run_that_was_taken_up_again_is_read_from_its_beginning(folder):
    run_folder = write_run(folder, "mine", 9)
    explorer = make_explorer("decoder", runs=folder)
    assert ask(explorer, "run", name="mine", from_line=0)["next_line"] == 9
    (run_folder / "new").write_text(
        "".join(json.dumps({**LINE, "step": n, "loss": 1.0}) + "\n" for n in range(1, 5))
    )
    (run_folder / "new").replace(run_folder / "metrics.jsonl")
    again = ask(explorer, "run", name="mine", from_line=9)
    assert (again["first_line"], again["next_line"]) == (0, 4)
    assert [line["loss"] for line in again["lines"]] == [1.0] * 4


def test_an_answer_is_bounded(folder, monkeypatch):
    monkeypatch.setattr(run_log, "MAX_LINES", 4)
    write_run(folder, "mine", 9)
    explorer = make_explorer("decoder", runs=folder)
    steps, from_line = [], 0
    for _ in range(4):
        answer = ask(explorer, "run", name="mine", from_line=from_line)
        steps += [line["step"] for line in answer["lines"]]
        from_line = answer["next_line"]
    assert steps == list(range(1, 10))


@pytest.mark.parametrize(
    "name", ["../secret", "..", ".", "", "/etc", "mine/../../secret", "mine\0", "link", "linked", "MINE/"]
)
def test_no_name_leads_out_of_the_folder(folder, name):
    write_run(folder.parent, "secret", 2)
    write_run(folder, "mine", 2)
    (folder / "link").symlink_to(folder.parent / "secret")
    (folder / "linked").mkdir()
    (folder / "linked" / "metrics.jsonl").symlink_to(folder.parent / "secret" / "metrics.jsonl")
    explorer = make_explorer("decoder", runs=folder)
    assert [run["name"] for run in ask(explorer, "runs")["runs"]] == ["mine"]
    with pytest.raises(ValueError, match=r"there is no run called .*: there are mine"):
        ask(explorer, "run", name=name, from_line=0)


def test_a_configuration_behind_a_link_is_not_shown(folder):
    run_folder = write_run(folder, "mine", 2)
    (folder.parent / "key").write_text("task: secret")
    (run_folder / "config.yaml").unlink()
    (run_folder / "config.yaml").symlink_to(folder.parent / "key")
    explorer = make_explorer("decoder", runs=folder)
    assert ask(explorer, "run", name="mine", from_line=0)["config"] == ""
    assert ask(explorer, "runs")["runs"][0]["task"] == ""


def test_what_was_compared_is_shown_as_it_lies(tmp_path):
    results = {"ok": True, "same": [{"length": 16}], "masked": {"curve": [[1, float("nan")]]}}
    (tmp_path / "compare.json").write_text(json.dumps(results))
    answer = ask(make_explorer("decoder", compare=tmp_path), "compare")
    assert answer == {"ok": True, "same": [{"length": 16}], "masked": {"curve": [[1, None]]}}
    (tmp_path / "compare.json").write_text("half of {")
    assert ask(make_explorer("decoder", compare=tmp_path), "compare") == {}
    assert ask(make_explorer("decoder", compare=tmp_path / "nowhere"), "compare") == {}
    assert ask(make_explorer("decoder"), "compare") == {}


def test_training_is_offered_where_there_is_a_folder(folder):
    assert "training" in ask(make_explorer("encoder", runs=folder), "model_info")["views"]
    assert "training" in ask(make_explorer("encoder", compare=folder), "model_info")["views"]
    assert "training" not in ask(make_explorer("encoder"), "model_info")["views"]
