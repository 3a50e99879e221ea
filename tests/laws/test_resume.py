"""A run that was stopped, killed or damaged goes on exactly as if nothing had happened."""

from __future__ import annotations

import random
import shutil
import time

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tiny_training as tiny
import training_processes
from keepleft.data.batches import BucketedLayout, PackedLayout
from keepleft.training import checkpoint
from keepleft.training.loop import train

KILLS = 20


@pytest.fixture(autouse=True)
def few_threads():
    with tiny.one_thread():
        yield


@given(
    stops=st.sets(st.integers(1, 11), min_size=1, max_size=3),
    optimizer=st.sampled_from(["adamw", "muon"]),
    average=st.sampled_from([0.0, 0.9]),
    kind=st.sampled_from(["decoder", "both"]),
    accumulate=st.sampled_from([1, 3, 30]),
    shape=st.sampled_from([BucketedLayout(), PackedLayout(24)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(
    max_examples=8, phases=[Phase.explicit, Phase.generate]
)  # smaller failures would take minutes to find
def test_a_run_that_stopped_anywhere_ends_as_an_unbroken_one_bit_for_bit(
    tmp_path_factory, stops, optimizer, average, kind, accumulate, shape, dtype
):
    design = tiny.design(kind)
    order = tiny.batches(design, shape, accumulate=accumulate)
    recipe = tiny.recipe(optimizer=optimizer, ema_decay=average, log_every=3)
    whole, broken = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("broken")
    run = lambda folder, stop: list(
        train(tiny.model(design, dtype=dtype), order, recipe, folder=folder, stop=stop)
    )
    unbroken = run(whole, lambda: False)
    done, reports = 0, []
    for stop in [*sorted(stops), 99]:
        asked = iter(range(done + 1, 99))
        reports += run(broken, lambda: next(asked) == stop)  # noqa: B023
        done = reports[-1].step
        assert done == min(stop, 12)
    ends = tiny.checkpoint_tensors(whole, 12), tiny.checkpoint_tensors(broken, 12)
    assert tiny.equal_tensors(*ends)
    kinds = {"weights", "step", "exp_avg", "exp_avg_sq"} | ({"average"} if average else set())
    assert {name.split("/")[0] for name in ends[0]} == kinds | (
        {"momentum"} if optimizer == "muon" else set()
    )
    assert (
        checkpoint.read_state(whole / "step-00000012")["place"]
        == checkpoint.read_state(broken / "step-00000012")["place"]
    )
    assert unbroken[-1].grad_norm == reports[-1].grad_norm
    assert sum(report.tokens for report in unbroken) == sum(report.tokens for report in reports)


def test_a_run_that_is_killed_at_any_moment_ends_as_an_unbroken_one_bit_for_bit(tmp_path):
    """SIGKILL, twenty times, while it learns and while it saves; with everything on that must be remembered."""
    recipe = tiny.recipe(steps=50, save_every=2, optimizer="muon", ema_decay=0.9, keep_checkpoints=2)
    tiny.run(tmp_path / "whole", recipe=recipe)
    expected = tiny.checkpoint_tensors(tmp_path / "whole", 50)
    chance, kills, during, runs = random.Random(5), 0, 0, 0
    finished = False
    while kills < KILLS or not finished:
        folder = tmp_path / f"broken{runs}"
        started = training_processes.FORK_SERVER.Event()
        child = training_processes.start_child(
            training_processes.run_with_slow_saves, str(folder), "both", recipe, started
        )
        while (
            not started.wait(0.05) and child.is_alive()
        ):  # one that was killed after its last save ends without a step
            pass
        if kills < KILLS:
            time.sleep(chance.uniform(0.0, 0.4))
            child.kill()
        child.join(training_processes.CHILD_TIMEOUT)
        finished = child.exitcode == 0
        if finished:
            assert tiny.equal_tensors(tiny.checkpoint_tensors(folder, 50), expected)
            assert not list(folder.glob("*.part"))
            assert [place.name for place in checkpoint.list_checkpoints(folder)] == [
                "step-00000050",
                "step-00000048",
            ]
            runs += 1
        else:
            assert child.exitcode == -9
            kills += 1
            during += any(folder.glob("*.part"))
    assert during > 0  # some of them while a checkpoint was being written


def test_a_damaged_checkpoint_is_told_of_and_the_one_before_is_used(tmp_path):
    recipe = tiny.recipe(steps=8, save_every=2, keep_checkpoints=1, ema_decay=0.9)
    tiny.run(tmp_path / "whole", recipe=recipe)
    folder = tmp_path / "broken"
    asked = iter(range(1, 9))
    tiny.run(
        folder,
        recipe=tiny.recipe(steps=8, save_every=2, keep_checkpoints=9, ema_decay=0.9),
        stop=lambda: next(asked) == 6,
    )
    tensors = folder / "step-00000006" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    asked = iter(range(5, 9))
    often = tiny.recipe(steps=8, save_every=1, keep_checkpoints=1, ema_decay=0.9, log_every=1)
    reports = tiny.run(folder, recipe=often, stop=lambda: next(asked) == 5)
    assert "step-00000006 is damaged: tensors.safetensors has" in reports[0].notes[0]
    assert "going on from step-00000004" in reports[0].notes[0]
    assert [place.name for place in checkpoint.list_checkpoints(folder)] == [
        "step-00000005"
    ]  # the damaged one does not count as newer
    tiny.run(folder, recipe=recipe)
    assert tiny.equal_tensors(
        tiny.checkpoint_tensors(folder, 8), tiny.checkpoint_tensors(tmp_path / "whole", 8)
    )


def test_a_full_disk_names_the_checkpoint_leaves_the_one_before_and_the_run_can_go_on(tmp_path):
    resource = pytest.importorskip("resource")
    recipe = tiny.recipe(steps=8, save_every=4)
    tiny.run(tmp_path / "whole", recipe=recipe)
    folder, (soft, hard) = tmp_path / "broken", resource.getrlimit(resource.RLIMIT_FSIZE)

    def full() -> bool:
        if (folder / "step-00000004").exists():
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))  # no file may grow beyond
        return False

    try:
        with pytest.raises(
            OSError, match=r"the checkpoint .*step-00000008 could not be written .*File too large"
        ):
            tiny.run(folder, recipe=recipe, stop=full)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in folder.iterdir()] == ["step-00000004"]
    assert tiny.run(folder, recipe=recipe)[0].notes == ["going on from step-00000004"]
    assert tiny.equal_tensors(
        tiny.checkpoint_tensors(folder, 8), tiny.checkpoint_tensors(tmp_path / "whole", 8)
    )


def test_what_changed_is_named_and_what_is_free_may_change(tmp_path):
    recipe = tiny.recipe(steps=6, save_every=3)
    tiny.run(tmp_path / "whole", recipe=recipe, metadata={"data": "a", "sizes": (1, 2)})
    folder = tmp_path / "broken"
    asked = iter([False, False, True])
    tiny.run(folder, recipe=recipe, metadata={"data": "a", "sizes": (1, 2)}, stop=lambda: next(asked))
    shutil.copytree(folder, tmp_path / "before")
    with pytest.raises(
        ValueError,
        match=r"cannot go on, because it has changed: lr was 0.01 and is 0.02; data was 'a' and "
        r"is 'b'; more was None and is 1; sizes was \[1, 2\] and is None",
    ):
        tiny.run(folder, recipe=tiny.recipe(steps=6, lr=0.02), metadata={"data": "b", "more": 1})
    assert tiny.equal_tensors(
        tiny.checkpoint_tensors(folder, 3), tiny.checkpoint_tensors(tmp_path / "before", 3)
    )
    free = tiny.recipe(
        steps=6,
        save_every=1,
        log_every=2,
        keep_checkpoints=9,
        eval_every=2,
        patience=5,
        metric="bleu",
        activation_checkpointing=True,
    )
    tiny.run(
        folder, recipe=free, metadata={"data": "a", "sizes": [1, 2]}, measure=lambda model: {"bleu": 0.0}
    )
    assert tiny.equal_tensors(
        tiny.checkpoint_tensors(folder, 6), tiny.checkpoint_tensors(tmp_path / "whole", 6)
    )


def test_a_finished_run_stays_finished(tmp_path):
    recipe = tiny.recipe(steps=3)
    tiny.run(tmp_path, recipe=recipe)
    assert tiny.run(tmp_path, recipe=recipe) == []


@pytest.mark.parametrize(
    ("changes", "words"), [({"dim": 24}, "has shape"), ({"bias": False}, "unknown"), ({}, "and type")]
)
def test_another_model_is_refused_before_anything_is_filled(changes, words, tmp_path):
    recipe = tiny.recipe(steps=3)
    asked = iter([True])
    tiny.run(tmp_path, recipe=recipe, stop=lambda: next(asked))
    design = tiny.design("both", **changes)
    model = tiny.model(design, dtype=torch.float64 if changes else torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"step-00000001 is of another model.*{words}"):
        list(train(model, tiny.batches(design), recipe, folder=tmp_path))
    assert tiny.equal_tensors(model.state_dict(), before)
