"""The plan before the first step, --dry-run, --minutes, and the commands to try afterwards."""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keepleft as kl
from keepleft.cli import main
from keepleft.demo.phrases.corpus import split
from keepleft.runs import defaults, set_up
from keepleft.runs.job import DataConfig, RecipeOverrides, TrainJob
from keepleft.runs.next_commands import next_commands
from keepleft.runs.plan import MAX_USED_FRACTION, TimeEstimate, TrainingPlan, fit_recipe, format_duration
from keepleft.runs.train import TrainingFinished, plan_job, run_job
from keepleft.training.trial import StepTime

pytestmark = pytest.mark.usefixtures("one_thread")
PAIRS = split("fr", test=100)[0][:300]
TINY = "--size tiny --design.dim 32 --design.layers 1 --batch.tokens 256 --device cpu".split()
JOB = TrainJob(
    task="translate",
    train="pairs.tsv",
    valid="dev.tsv",
    out="runs/mine",
    size="tiny",
    device="cpu",
    design={"dim": 32, "layers": 1},
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory, with data of every kind."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{english}\t{french}\n" for english, french in PAIRS]
    Path("pairs.tsv").write_text("".join(rows), "utf-8")
    Path("dev.tsv").write_text("".join(rows[:20]), "utf-8")
    labelled = "".join(f"{french}\t{'yes' if 'pas' in french else 'no'}\n" for _, french in PAIRS)
    Path("labels.tsv").write_text("text\tlabel\n" + labelled, "utf-8")
    Path("text.txt").write_text("".join(f"{french}.\n\n" for _, french in PAIRS), "utf-8")
    return tmp_path


def files_below(folder: Path) -> set[tuple[str, float]]:
    return {(str(path), path.stat().st_mtime) for path in folder.rglob("*")}


def test_the_plan_names_data_model_steps_time_and_files(capsys):
    assert main(["train", "--task", "translate", "--train", "pairs.tsv", *TINY, "--recipe.steps", "3"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().err.splitlines() if "  " in line[1:])
    assert lines["data"] == "294 records"
    assert lines["validation"].startswith("6 records held out")
    parameters = sum(p.numel() for p in kl.load("runs/translate/model")[0].parameters())
    assert lines["model"].startswith(f"{parameters:,} parameters: encoder-decoder, 1 + 1 layers of width 32")
    assert lines["training"].startswith("3 steps of about 256 tokens, ")
    assert lines["time"].startswith("about ")
    assert "seconds a step" in lines["time"]
    assert lines["checkpoints"] == (
        "runs/translate/checkpoints: every 1 step, at least every 5 minutes, and at the end"
    )
    assert lines["result"] == "runs/translate/model"


def test_a_dry_run_writes_nothing_and_ends_with_0(folder, capsys, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(folder.parent))
    before = files_below(folder)
    assert main(["train", "--task", "translate", "--train", "pairs.tsv", *TINY, "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "runs/translate/model" in captured.err
    assert files_below(folder) == before
    assert not list(folder.parent.glob("keepleft-*"))


def test_a_dry_run_of_a_run_that_goes_on_shows_what_is_left(folder):
    job = replace(JOB, recipe=RecipeOverrides(steps=5))
    list(run_job(job, stop=lambda: True))
    before = files_below(folder)
    (plan,) = [event for event in plan_job(job, resume=True) if isinstance(event, TrainingPlan)]
    assert plan.steps_done == 1
    assert any("5 steps (1 are done)" in line for line in plan.lines())
    assert files_below(folder) == before
    with pytest.raises(ValueError, match="runs/mine holds a run already"):
        list(plan_job(job))


def test_trial_steps_change_neither_the_model_nor_random_numbers(monkeypatch):
    weights = []
    states = []

    def spy(model, *args, **options):
        weights.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        states.append(torch.get_rng_state())
        out = measure_steps(model, *args, **options)
        weights.append(model.state_dict())
        states.append(torch.get_rng_state())
        return out

    measure_steps = set_up.measure_steps
    monkeypatch.setattr(set_up, "measure_steps", spy)
    list(plan_job(replace(JOB, recipe=RecipeOverrides(steps=3))))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert torch.equal(*states)


def steps_that_take(seconds):
    return lambda *args, **options: StepTime(seconds, 3)


def test_minutes_choose_the_steps_once_and_a_resumed_run_keeps_them(monkeypatch, capsys):
    monkeypatch.setattr(set_up, "measure_steps", steps_that_take(5.0))
    fitted_job = replace(JOB, minutes=1.0)
    events = list(run_job(fitted_job, stop=lambda: True))
    (plan,) = [event for event in events if isinstance(event, TrainingPlan)]
    assert 5 <= plan.recipe.steps <= 11
    assert plan.seconds < 60
    expected = f"--minutes 1 chose --recipe.steps {plan.recipe.steps}, as many as fit at this speed"
    assert any(expected in line for line in plan.lines())
    assert plan.recipe.warmup == 1  # a tenth of the steps: the whole schedule fits
    monkeypatch.setattr(set_up, "measure_steps", steps_that_take(0.001))
    assert main(["train", "--out", "runs/mine", "--resume"]) == 0
    assert expected in capsys.readouterr().err
    by_number = replace(JOB, out="runs/number", recipe=RecipeOverrides(steps=plan.recipe.steps))
    list(run_job(by_number))
    fitted, numbered = (kl.load(f"runs/{name}/model")[0].state_dict() for name in ("mine", "number"))
    assert all(torch.equal(fitted[name], numbered[name]) for name in fitted)
    assert main(["train", "--out", "runs/mine", "--resume", "--minutes", "2"]) == 2
    assert "minutes was 1.0 and is 2.0" in capsys.readouterr().err


def test_where_the_data_and_not_the_minutes_limit_the_steps_the_plan_says_so(monkeypatch):
    monkeypatch.setattr(set_up, "measure_steps", steps_that_take(1e-6))
    events = plan_job(replace(JOB, minutes=30.0))
    (plan,) = [event for event in events if isinstance(event, TrainingPlan)]
    chosen = f"--minutes 30 chose --recipe.steps {plan.recipe.steps}, the most for so little data (60 epochs)"
    assert any(line.endswith(chosen) for line in plan.lines())
    (plan,) = [
        event
        for event in plan_job(replace(JOB, recipe=RecipeOverrides(steps=plan.recipe.steps)))
        if isinstance(event, TrainingPlan)
    ]
    assert not any("the most" in line for line in plan.lines())


def test_too_few_minutes_are_refused_with_what_is_needed(monkeypatch, folder):
    monkeypatch.setattr(set_up, "measure_steps", steps_that_take(90.0))
    with pytest.raises(ValueError, match=r"--minutes is 1, too little: .* takes about \d+ minutes"):
        list(run_job(replace(JOB, minutes=1.0)))
    assert not (folder / "runs").exists()


def test_a_run_stopped_between_preparing_and_choosing_chooses_when_it_is_resumed(monkeypatch):
    def broken(*args, **options):
        raise KeyboardInterrupt

    Path("runs/mine").mkdir(parents=True)  # so that a failed start leaves it
    monkeypatch.setattr(set_up, "measure_steps", broken)
    with pytest.raises(KeyboardInterrupt):
        list(run_job(replace(JOB, minutes=1.0)))
    assert Path("runs/mine/resolved.json").exists()
    monkeypatch.setattr(set_up, "measure_steps", steps_that_take(9.0))
    events = run_job(replace(JOB, minutes=1.0), resume=True)
    (plan,) = [event for event in events if isinstance(event, TrainingPlan)]
    assert plan.recipe.steps < 7


@given(
    step=st.floats(1e-4, 100.0),
    evaluation=st.floats(0.0, 100.0),
    checkpoint=st.floats(0.0, 10.0),
    seconds=st.floats(1.0, 1e5),
    steps_per_epoch=st.integers(1, 100_000),
)
def test_a_fitted_recipe_fits_and_is_as_long_as_can_be(
    step, evaluation, checkpoint, seconds, steps_per_epoch
):
    estimate = TimeEstimate(step, evaluation, checkpoint)
    job = replace(JOB, minutes=seconds / 60)
    limit = max(defaults.MIN_STEPS, round(defaults.max_epochs(job) * steps_per_epoch))
    try:
        recipe = fit_recipe(job, estimate, steps_per_epoch, seconds)
    except ValueError:
        assert step + evaluation + 3 * checkpoint > MAX_USED_FRACTION * seconds
        return
    assert estimate.run_seconds(recipe) <= MAX_USED_FRACTION * seconds
    assert recipe.steps <= limit
    if recipe.steps < limit:
        one_more = defaults.recipe(replace(job, recipe=RecipeOverrides(steps=recipe.steps + 1)), 1, 1)
        assert estimate.run_seconds(one_more) > MAX_USED_FRACTION * seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.004, "0.004 seconds"),
        (0.28, "0.28 seconds"),
        (40.2, "40 seconds"),
        (89, "89 seconds"),
        (150, "2 minutes"),
        (3600, "60 minutes"),
        (3600 * 2 + 600, "2 hours 10 minutes"),
        (3600 * 30, "30 hours"),
        (86_400 * 3 + 3600, "3 days 1 hour"),
    ],
)
def test_durations_are_read_at_a_glance(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "data", "valid"),
    [
        ("translate", "pairs.tsv", "dev.tsv"),
        ("summarize", "pairs.tsv", "dev.tsv"),
        ("lm", "text.txt", "text.txt"),
        ("classify", "labels.tsv", "labels.tsv"),
        ("mlm", "text.txt", None),
        ("span", "text.txt", None),
        ("denoise", "text.txt", None),
    ],
)
def test_the_next_commands_run_as_they_are_printed(task, data, valid, capsys):
    arguments = ["train", "--task", task, "--train", data, *TINY, "--recipe.steps", "2", "--out", "runs/é x"]
    assert main([*arguments, *(["--valid", valid] if valid else [])]) == 0
    captured = capsys.readouterr()
    assert captured.out == "runs/é x/model\n"
    _, _, listed = captured.err.partition("next:\n")
    commands = [shlex.split(line) for line in listed.splitlines()]
    assert len(commands) == 3
    for program, *command in commands:
        assert program == "keepleft"
        quick = {"audit": ["--budget", "quick"], "translate": ["--max-new-tokens", "4"]}
        assert main([*command, *quick.get(command[0], [])]) == 0, (command, capsys.readouterr().err)
        assert capsys.readouterr().out


def test_the_command_to_go_on_is_printed_when_a_run_stops():
    (*_, finished) = run_job(replace(JOB, recipe=RecipeOverrides(steps=5)), stop=lambda: True)
    assert isinstance(finished, TrainingFinished)
    assert finished.next_commands == ["keepleft train --out runs/mine --resume"]


@pytest.mark.parametrize(
    ("valid", "command"),
    [
        (None, "keepleft audit runs/mine/model"),
        ("hf:some/name", "keepleft audit runs/mine/model"),
        (DataConfig(path="dev.csv", columns=[0, 1]), "keepleft audit runs/mine/model"),
        (DataConfig(src="a b.en", tgt="a.fr"), "keepleft eval runs/mine/model 'a b.en' a.fr"),
        (
            [DataConfig(path="dev.tsv", tag="<2fr>"), DataConfig(path="x.tsv", tag="<2hi>")],
            "keepleft eval runs/mine/model dev.tsv --to fr",
        ),
    ],
)
def test_a_model_is_evaluated_where_eval_reads_its_data_and_audited_elsewhere(valid, command):
    job = replace(JOB, valid=valid, train=DataConfig(path="pairs.tsv", tag="<2fr>"))
    commands = next_commands(job, Path("runs/mine/model"), "I'm here")
    assert commands[0] == """keepleft translate runs/mine/model 'I'"'"'m here' --to fr"""
    assert commands[1] == command
