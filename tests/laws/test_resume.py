"""A run that was stopped, killed or damaged resumes exactly as if nothing had happened."""

from __future__ import annotations

import os
import random
import shutil
import time

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tiny_training as tiny
from keepleft.data.batches import BucketedLayout
from keepleft.data.packing import PackedLayout
from keepleft.training import checkpoint
from keepleft.training.loop import train
from training_processes import CHILD_TIMEOUT, FORK_SERVER, run_with_slow_saves, start_child

KILLS = 20


@pytest.fixture(autouse=True)
def few_threads():
    with tiny.one_thread():
        yield


@given(
    stop_steps=st.sets(st.integers(1, 11), min_size=1, max_size=3),
    optimizer=st.sampled_from(["adamw", "muon"]),
    ema_decay=st.sampled_from([0.0, 0.9]),
    kind=st.sampled_from(["decoder", "both"]),
    accumulate=st.sampled_from([1, 3, 30]),
    layout=st.sampled_from([BucketedLayout(), PackedLayout(24)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])  # shrinking would take minutes
def test_a_run_that_stopped_anywhere_ends_as_an_unbroken_one_bit_for_bit(
    tmp_path_factory, stop_steps, optimizer, ema_decay, kind, accumulate, layout, dtype
):
    design = tiny.design(kind)
    batches = tiny.batches(design, layout, accumulate=accumulate)
    recipe = tiny.recipe(optimizer=optimizer, ema_decay=ema_decay, log_every=3)
    unbroken_folder = tmp_path_factory.mktemp("unbroken")
    broken_folder = tmp_path_factory.mktemp("broken")
    run = lambda folder, stop: list(
        train(tiny.model(design, dtype=dtype), batches, recipe, folder=folder, stop=stop)
    )
    unbroken_reports = run(unbroken_folder, lambda: False)
    reports = []
    done = 0
    for stop_step in [*sorted(stop_steps), 99]:
        steps = iter(range(done + 1, 99))
        reports += run(broken_folder, lambda: next(steps) == stop_step)  # noqa: B023
        done = reports[-1].step
        assert done == min(stop_step, 12)
    unbroken = tiny.checkpoint_tensors(unbroken_folder, 12)
    assert tiny.equal_tensors(unbroken, tiny.checkpoint_tensors(broken_folder, 12))
    kinds = {"weights", "step", "exp_avg", "exp_avg_sq"} | ({"average"} if ema_decay else set())
    kinds |= {"momentum"} if optimizer == "muon" else set()
    assert {name.split("/")[0] for name in unbroken} == kinds
    cursors = [
        checkpoint.read_state(folder / "step-00000012")["place"]
        for folder in (unbroken_folder, broken_folder)
    ]
    assert cursors[0] == cursors[1]
    assert unbroken_reports[-1].grad_norm == reports[-1].grad_norm
    assert sum(report.tokens for report in unbroken_reports) == sum(report.tokens for report in reports)


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_ends_as_an_unbroken_one_bit_for_bit(tmp_path):
    """SIGKILL, twenty times, while it learns and while it saves; with everything that has a state."""
    recipe = tiny.recipe(steps=50, save_every=2, optimizer="muon", ema_decay=0.9, keep_checkpoints=2)
    tiny.run(tmp_path / "unbroken", recipe=recipe)
    expected = tiny.checkpoint_tensors(tmp_path / "unbroken", 50)
    rng = random.Random(5)
    kills = 0
    kills_while_saving = 0
    runs = 0
    finished = False
    while kills < KILLS or not finished:
        folder = tmp_path / f"broken{runs}"
        started = FORK_SERVER.Event()
        child = start_child(run_with_slow_saves, str(folder), "both", recipe, started)
        # one that was killed after its last save ends without a step
        while not started.wait(0.05) and child.is_alive():
            pass
        if kills < KILLS:
            time.sleep(rng.uniform(0.0, 0.4))
            child.kill()
        child.join(CHILD_TIMEOUT)
        finished = child.exitcode == 0
        if finished:
            assert tiny.equal_tensors(tiny.checkpoint_tensors(folder, 50), expected)
            assert not list(folder.glob("*.part"))
            names = [path.name for path in checkpoint.list_checkpoints(folder)]
            assert names == ["step-00000050", "step-00000048"]
            runs += 1
        else:
            assert child.exitcode == -9
            kills += 1
            kills_while_saving += any(folder.glob("*.part"))
    assert kills_while_saving > 0


@pytest.mark.parametrize("stop_step", [1, 4, 5, 7])
def test_a_checkpoint_by_the_clock_loses_nothing_and_changes_nothing(stop_step, tmp_path):
    """A run that dies right after any step, with a checkpoint at each, reports and ends as one without."""

    class Crash(Exception):  # noqa: N818
        pass

    def crash() -> bool:
        if next(steps) > stop_step:
            raise Crash
        return False

    def timeless(reports):
        return [report.to_timeless_line().replace("crashed", "whole") for report in reports]

    recipes = [
        tiny.recipe(steps=8, save_every=4, log_every=3, ema_decay=0.9, save_minutes=minutes)
        for minutes in (0.0, 1e-9)
    ]
    expected = tiny.run(tmp_path / "whole", recipe=recipes[0])
    folder = tmp_path / "crashed"
    steps = iter(range(1, 10))
    reports = []
    design = tiny.design("both")
    generator = train(tiny.model(design), tiny.batches(design), recipes[1], folder=folder, stop=crash)
    with pytest.raises(Crash):
        reports.extend(generator)
    newest = checkpoint.list_resumable(folder)[0]
    assert newest.name == f"step-{stop_step:08d}"
    assert (newest.parent == folder) == (stop_step == 4)
    assert not (folder / "timed").exists() or newest.parent != folder
    resumed = tiny.run(folder, recipe=recipes[1])
    assert timeless([*reports, *resumed]) == timeless(expected)
    for step in (4, 8):
        whole = tiny.checkpoint_tensors(tmp_path / "whole", step)
        assert tiny.equal_tensors(tiny.checkpoint_tensors(folder, step), whole)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000008"]


def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(tmp_path):
    recipe = tiny.recipe(steps=8, save_every=2, keep_checkpoints=1, ema_decay=0.9)
    tiny.run(tmp_path / "unbroken", recipe=recipe)
    folder = tmp_path / "broken"
    steps = iter(range(1, 9))
    keep_all = tiny.recipe(steps=8, save_every=2, keep_checkpoints=9, ema_decay=0.9)
    tiny.run(folder, recipe=keep_all, stop=lambda: next(steps) == 6)
    tensors = folder / "step-00000006" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    steps = iter(range(5, 9))
    save_often = tiny.recipe(steps=8, save_every=1, keep_checkpoints=1, ema_decay=0.9, log_every=1)
    reports = tiny.run(folder, recipe=save_often, stop=lambda: next(steps) == 5)
    assert "step-00000006 is damaged: tensors.safetensors has" in reports[0].notes[0]
    assert "going on from step-00000004" in reports[0].notes[0]
    # the damaged one does not count as newer
    assert [path.name for path in checkpoint.list_checkpoints(folder)] == ["step-00000005"]
    tiny.run(folder, recipe=recipe)
    expected = tiny.checkpoint_tensors(tmp_path / "unbroken", 8)
    assert tiny.equal_tensors(tiny.checkpoint_tensors(folder, 8), expected)


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors"])
def test_a_pipe_in_a_checkpoint_is_damage_and_not_waited_for(name, tmp_path):
    tiny.run(tmp_path, recipe=tiny.recipe(steps=4, save_every=2))
    path = tmp_path / "step-00000004" / name
    path.unlink()
    os.mkfifo(path)
    directory, _, errors = checkpoint.latest(tmp_path)
    assert directory.name == "step-00000002"
    assert "step-00000004 is damaged: " in errors[0]


def test_a_full_disk_names_the_checkpoint_keeps_the_one_before_and_the_run_can_resume(tmp_path):
    resource = pytest.importorskip("resource")
    recipe = tiny.recipe(steps=8, save_every=4)
    tiny.run(tmp_path / "unbroken", recipe=recipe)
    folder = tmp_path / "broken"
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_disk() -> bool:
        if (folder / "step-00000004").exists():
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard_limit))  # no file may grow beyond
        return False

    try:
        message = r"the checkpoint .*step-00000008 could not be written .*File too large"
        with pytest.raises(OSError, match=message):
            tiny.run(folder, recipe=recipe, stop=fill_disk)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft_limit, hard_limit))
    assert [path.name for path in folder.iterdir()] == ["step-00000004"]
    assert tiny.run(folder, recipe=recipe)[0].notes == ["going on from step-00000004"]
    expected = tiny.checkpoint_tensors(tmp_path / "unbroken", 8)
    assert tiny.equal_tensors(tiny.checkpoint_tensors(folder, 8), expected)


def test_a_forbidden_change_is_named_and_others_change_nothing(tmp_path):
    recipe = tiny.recipe(steps=6, save_every=3)
    tiny.run(tmp_path / "unbroken", recipe=recipe, metadata={"data": "a", "sizes": (1, 2)})
    folder = tmp_path / "broken"
    answers = iter([False, False, True])
    tiny.run(folder, recipe=recipe, metadata={"data": "a", "sizes": (1, 2)}, stop=lambda: next(answers))
    shutil.copytree(folder, tmp_path / "before")
    with pytest.raises(
        ValueError,
        match=r"cannot go on, because it has changed: lr was 0.01 and is 0.02; data was 'a' and "
        r"is 'b'; more was None and is 1; sizes was \[1, 2\] and is None",
    ):
        tiny.run(folder, recipe=tiny.recipe(steps=6, lr=0.02), metadata={"data": "b", "more": 1})
    before = tiny.checkpoint_tensors(tmp_path / "before", 3)
    assert tiny.equal_tensors(tiny.checkpoint_tensors(folder, 3), before)
    changed = tiny.recipe(
        steps=6,
        save_every=1,
        log_every=2,
        keep_checkpoints=9,
        eval_every=2,
        patience=5,
        metric="bleu",
        activation_checkpointing=True,
    )
    metadata = {"data": "a", "sizes": [1, 2]}
    tiny.run(folder, recipe=changed, metadata=metadata, measure=lambda model: {"bleu": 0.0})
    expected = tiny.checkpoint_tensors(tmp_path / "unbroken", 6)
    assert tiny.equal_tensors(tiny.checkpoint_tensors(folder, 6), expected)


def test_a_finished_run_stays_finished(tmp_path):
    recipe = tiny.recipe(steps=3)
    tiny.run(tmp_path, recipe=recipe)
    assert tiny.run(tmp_path, recipe=recipe) == []


@pytest.mark.parametrize(
    ("changes", "message"), [({"dim": 24}, "has shape"), ({"bias": False}, "unknown"), ({}, "and type")]
)
def test_another_model_is_refused_before_any_weight_changes(changes, message, tmp_path):
    recipe = tiny.recipe(steps=3)
    tiny.run(tmp_path, recipe=recipe, stop=lambda: True)
    design = tiny.design("both", **changes)
    model = tiny.model(design, dtype=torch.float64 if changes else torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"step-00000001 is of another model.*{message}"):
        list(train(model, tiny.batches(design), recipe, folder=tmp_path))
    assert tiny.equal_tensors(model.state_dict(), before)
