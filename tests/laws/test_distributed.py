"""Two processes, with DDP or FSDP, learn what one process learns, and resume from each other's checkpoints.

A step has three uneven micro-batches for two processes, and dropout is on. All runs are in float64, and equal
up to rounding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny_training as tiny
from keepleft.training import checkpoint
from keepleft.training.distributed import DistributedContext, init_distributed
from keepleft.training.loop import TrainReport, train
from keepleft.training.lora import add_lora
from training_processes import measure, run_distributed, train_jobs

pytestmark = pytest.mark.slow
OPTIONS = {"ema_decay": 0.9, "save_every": 4, "eval_every": 6}  # of the recipe


@pytest.fixture(autouse=True)
def few_threads():
    with tiny.one_thread():
        yield


def train_alone(
    folder: Path | None, stop_step: int | None = None, kind: str = "both", lora: bool = False, **changes: Any
) -> tuple[dict[str, torch.Tensor], TrainReport]:
    """The same run in one process: its weights and its last report."""
    design = tiny.design(kind)
    model = tiny.model(design)
    steps = iter(range(1, 99))
    if lora:
        add_lora(model, 2, seed=0)
    *_, last = train(
        model,
        tiny.batches(design),
        tiny.recipe(**{**OPTIONS, **changes}),
        folder=folder,
        measure=lambda model: measure(0, model),
        stop=lambda: next(steps) == stop_step,
    )
    return model.state_dict(), last


def train_fsdp(folder: Path, stop_step: int) -> None:
    """A run in two processes, each of which holds half of every tensor."""
    job = {
        "strategy": "fsdp",
        "folder": str(folder),
        "recipe": OPTIONS,
        "stop_step": stop_step,
        "out": str(folder.parent / "end"),
    }
    run_distributed(2, train_jobs, [job])


def read_result(out: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The weights and the summary of the first process."""
    return load_file(f"{out}.safetensors"), json.loads(Path(f"{out}.0.json").read_text())


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        with_name = lambda message, name=name: f"{name}: {message}"
        torch.testing.assert_close(a[name], b[name], atol=1e-9, rtol=1e-9, msg=with_name)


def assert_no_pickles(folder: Path) -> None:
    for path in folder.glob("step-*/*"):
        assert path.suffix in (".json", ".safetensors")
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        else:
            load_file(path)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_learn_what_one_does(strategy, tmp_path):
    variants = [{"kind": "decoder", "lora": True}, {"recipe": {**OPTIONS, "activation_checkpointing": True}}]
    variants += [{"recipe": {**OPTIONS, "optimizer": "muon"}}] if strategy == "ddp" else []
    full_disk = {"folder": str(tmp_path / "full"), "recipe": {"save_every": 2, "steps": 6}}
    jobs = [
        {"folder": str(tmp_path / "run"), "recipe": OPTIONS},
        *({"recipe": OPTIONS, **variant} for variant in variants),
        {"recipe": {"steps": 6}, "stop_step": 4, "stop_rank": 1},
        {"recipe": {"steps": 6}, "nan_rank": 1},
        {**full_disk, "full_disk_rank": 1 if strategy == "fsdp" else 0},
        full_disk,
    ]
    jobs = [{"strategy": strategy, "out": str(tmp_path / f"end{n}"), **job} for n, job in enumerate(jobs)]
    run_distributed(2, train_jobs, jobs)

    weights, summary = read_result(tmp_path / "end0")
    expected, last = train_alone(None)
    assert_close(weights, expected)
    assert summary["loss"] == pytest.approx(last.loss, abs=1e-9)
    assert summary["grad_norm"] == pytest.approx(last.grad_norm, abs=1e-9)
    assert summary["measures"]["loss"] == pytest.approx(last.measures["loss"], abs=1e-9)
    assert summary["tokens"] == last.tokens
    assert_no_pickles(tmp_path / "run")
    for n, variant in enumerate(variants, 1):
        variant_weights, _ = train_alone(
            None,
            kind=variant.get("kind", "both"),
            lora=variant.get("lora", False),
            **variant.get("recipe", {}),
        )
        assert_close(read_result(tmp_path / f"end{n}")[0], variant_weights)
    stopped, spoilt, full, resumed = (tmp_path / f"end{n}" for n in range(len(jobs) - 4, len(jobs)))
    assert read_result(stopped)[1]["steps"] == [4]  # one was told to stop: both did
    for rank in range(2):  # NaN in one ends both
        error = json.loads(Path(f"{spoilt}.{rank}.json").read_text())["error"]
        assert "FloatingPointError: the " in error
        assert "of step 3 is nan (epoch 0, step 3 of it" in error
    for rank in range(2):  # and so does a full disk
        error = json.loads(Path(f"{full}.{rank}.json").read_text())["error"]
        assert "OSError: " in error
        assert "step-00000004 could not be written" in error
        assert ("File too large" in error) == (strategy == "fsdp" or rank == 0)
    assert read_result(resumed)[1]["notes"] == ["going on from step-00000002"]
    assert sorted(path.name for path in (tmp_path / "full").iterdir()) == [
        "step-00000002",
        "step-00000004",
        "step-00000006",
    ]
    unbroken, _ = train_alone(None, ema_decay=0.0, save_every=2, eval_every=None, steps=6)
    assert_close(read_result(resumed)[0], unbroken)


def test_a_run_resumes_with_any_number_of_processes_and_any_strategy(tmp_path):
    """1 → 2 with DDP → 2 with FSDP → 1 with FSDP → 2 with DDP → 1"""
    expected, _ = train_alone(None)
    folder = tmp_path / "run"
    train_alone(folder, stop_step=2)
    job = {"folder": str(folder), "recipe": OPTIONS, "stop_step": 2}
    first_step = 2
    for world_size, strategies in ((2, ["ddp", "fsdp"]), (1, ["fsdp"]), (2, ["ddp"])):  # each two steps
        outs = [tmp_path / f"end{first_step + 2 * n}" for n in range(len(strategies))]
        jobs = [
            {**job, "strategy": strategy, "out": str(out)}
            for strategy, out in zip(strategies, outs, strict=True)
        ]
        run_distributed(world_size, train_jobs, jobs)
        for out in outs:
            assert read_result(out)[1]["notes"] == [f"going on from step-{first_step:08d}"]
            assert read_result(out)[1]["steps"][-1] == first_step + 2
            first_step += 2
    sharded = [checkpoint.read_state(path)["sharded"] for path in checkpoint.list_checkpoints(folder)]
    assert sharded == [False, True, True]
    assert_no_pickles(folder)
    weights, last = train_alone(folder)
    assert last.notes == ["going on from step-00000010"]
    assert_close(weights, expected)


def test_one_process_resumes_from_shards_and_damage_is_named(tmp_path):
    folder = tmp_path / "run"
    train_fsdp(folder, stop_step=6)
    names = [path.name for path in checkpoint.list_checkpoints(folder)]
    assert names == ["step-00000006", "step-00000004"]
    shard = sorted((folder / "step-00000006").glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-3] + b"xyz")
    with pytest.raises(ValueError, match=f"step-00000006 is damaged: {shard.name} has changed"):
        checkpoint.read_state(folder / "step-00000006")
    shard.unlink()
    with pytest.raises(ValueError, match=f"step-00000006 is damaged: {shard.name} is missing"):
        checkpoint.read_state(folder / "step-00000006")
    weights, last = train_alone(folder, log_every=1, stop_step=8)
    assert last.step == 12
    assert_close(weights, train_alone(None)[0])


def test_shards_of_another_model_are_refused(tmp_path):
    folder = tmp_path / "run"
    train_fsdp(folder, stop_step=2)
    design = tiny.design("decoder")
    with pytest.raises(ValueError, match=r"is of another model or optimizer: 'average/.*' is unknown"):
        list(train(tiny.model(design), tiny.batches(design), tiny.recipe(**OPTIONS), folder=folder))


def test_fsdp_in_a_single_process_is_refused(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert init_distributed(device="cpu") == init_distributed("ddp", "cpu") == DistributedContext()
    with pytest.raises(
        ValueError, match="fsdp was asked for, but this process is alone: start it with torchrun"
    ):
        init_distributed("fsdp", "cpu")


def test_muon_with_fsdp_is_refused():
    design = tiny.design()
    fsdp = DistributedContext(0, 1, torch.device("cpu"), "fsdp")
    with pytest.raises(ValueError, match="muon needs whole matrices, and fsdp shards them"):
        next(
            iter(
                train(
                    tiny.model(design), tiny.batches(design), tiny.recipe(optimizer="muon"), distributed=fsdp
                )
            )
        )
