"""Two processes, copied (ddp) or sharded (fsdp), learn what one process learns, and take each other's
checkpoints up.

Micro-batches are uneven, three to a step for two processes, and dropout is on. All runs in float64, to
rounding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lessons
from keepleft.training import checkpoint
from keepleft.training.distributed import DistributedContext, init_distributed
from keepleft.training.loop import train
from keepleft.training.lora import add_lora

pytestmark = pytest.mark.slow
ON = {"ema_decay": 0.9, "save_every": 4, "eval_every": 6}


@pytest.fixture(autouse=True)
def few_threads():
    with lessons.one_thread():
        yield


def alone(
    folder: Path | None, until: int | None = None, kind: str = "both", lora: bool = False, **choices: Any
):
    """The same run in one process: its weights and its last report."""
    design = lessons.design(kind)
    model, asked = lessons.model(design), iter(range(1, 99))
    if lora:
        add_lora(model, 2, seed=0)
    *_, last = train(
        model,
        lessons.batches(design),
        lessons.recipe(**{**ON, **choices}),
        folder=folder,
        measure=lambda model: lessons.likelihood(0, model),
        stop=lambda: next(asked) == until,
    )
    return model.state_dict(), last


def sharded(folder: Path, until: int) -> None:
    """A run in two processes that hold a half of everything each."""
    job = {
        "way": "fsdp",
        "folder": str(folder),
        "recipe": ON,
        "until": until,
        "out": str(folder.parent / "end"),
    }
    lessons.together(2, lessons.shared, [job])


def ended(out: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return load_file(f"{out}.safetensors"), json.loads(Path(f"{out}.0.json").read_text())


def alike(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-9, rtol=1e-9, msg=lambda said: f"{name}: {said}")  # noqa: B023


def no_pickles(folder: Path) -> None:
    for path in folder.glob("step-*/*"):
        assert path.suffix in (".json", ".safetensors")
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        else:
            load_file(path)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_are_one(way, tmp_path):
    others = [{"kind": "decoder", "lora": True}, {"recipe": {**ON, "activation_checkpointing": True}}]
    others += [{"recipe": {**ON, "optimizer": "muon"}}] if way == "ddp" else []
    full = {"folder": str(tmp_path / "full"), "recipe": {"save_every": 2, "steps": 6}}
    jobs = [
        {"folder": str(tmp_path / "run"), "recipe": ON},
        *({"recipe": ON, **other} for other in others),
        {"recipe": {"steps": 6}, "until": 4, "told": 1},
        {"recipe": {"steps": 6}, "trouble": "nan"},
        {**full, "starved": 1 if way == "fsdp" else 0},
        full,
    ]
    jobs = [{"way": way, "out": str(tmp_path / f"end{n}"), **job} for n, job in enumerate(jobs)]
    lessons.together(2, lessons.shared, jobs)

    weights, said = ended(tmp_path / "end0")
    expected, last = alone(None)
    alike(weights, expected)
    assert said["loss"] == pytest.approx(last.loss, abs=1e-9)
    assert said["norm"] == pytest.approx(last.grad_norm, abs=1e-9)
    assert said["measures"]["loss"] == pytest.approx(last.measures["loss"], abs=1e-9)
    assert said["tokens"] == last.tokens
    no_pickles(tmp_path / "run")
    for n, other in enumerate(others, 1):
        alike(
            ended(tmp_path / f"end{n}")[0],
            alone(
                None, kind=other.get("kind", "both"), lora=other.get("lora", False), **other.get("recipe", {})
            )[0],
        )
    told, spoilt, starved, well = (tmp_path / f"end{n}" for n in range(len(jobs) - 4, len(jobs)))
    assert ended(told)[1]["steps"] == [4]  # one was told to stop: both did
    for rank in range(2):  # a loss that is no number in one ends both
        error = json.loads(Path(f"{spoilt}.{rank}.json").read_text())["error"]
        assert "FloatingPointError: the " in error
        assert "of step 3 is nan (epoch 0, step 3 of it" in error
    for rank in range(2):  # and so does a full disk
        error = json.loads(Path(f"{starved}.{rank}.json").read_text())["error"]
        assert "OSError: " in error
        assert "step-00000004 could not be written" in error
        assert ("File too large" in error) == (way == "fsdp" or rank == 0)
    assert ended(well)[1]["notes"] == ["going on from step-00000002"]
    assert sorted(path.name for path in (tmp_path / "full").iterdir()) == [
        "step-00000002",
        "step-00000004",
        "step-00000006",
    ]
    alike(ended(well)[0], alone(None, ema_decay=0.0, save_every=2, eval_every=None, steps=6)[0])


def test_a_run_goes_on_with_any_number_of_processes_in_any_way(tmp_path):
    """1 → 2 copied → 2 sharded → 1 sharded → 2 copied → 1"""
    expected, _ = alone(None)
    folder = tmp_path / "run"
    alone(folder, until=2)
    job = {"folder": str(folder), "recipe": ON}
    begin = 2
    for world, ways in ((2, ["ddp", "fsdp"]), (1, ["fsdp"]), (2, ["ddp"])):  # each two steps
        outs = [tmp_path / f"end{begin + 2 * n}" for n in range(len(ways))]
        lessons.together(
            world,
            lessons.shared,
            [{**job, "way": way, "until": 2, "out": str(out)} for way, out in zip(ways, outs, strict=True)],
        )
        for out in outs:
            assert ended(out)[1]["notes"] == [f"going on from step-{begin:08d}"]
            assert ended(out)[1]["steps"][-1] == begin + 2
            begin += 2
    assert [checkpoint.read_state(place)["sharded"] for place in checkpoint.list_checkpoints(folder)] == [
        False,
        True,
        True,
    ]
    no_pickles(folder)
    weights, last = alone(folder)
    assert last.notes == ["going on from step-00000010"]
    alike(weights, expected)


def test_shards_are_taken_up_by_one_process_and_damage_is_named(tmp_path):
    folder = tmp_path / "run"
    sharded(folder, until=6)
    assert [place.name for place in checkpoint.list_checkpoints(folder)] == ["step-00000006", "step-00000004"]
    shard = sorted((folder / "step-00000006").glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-3] + b"xyz")
    with pytest.raises(ValueError, match=f"step-00000006 is damaged: {shard.name} has changed"):
        checkpoint.read_state(folder / "step-00000006")
    shard.unlink()
    with pytest.raises(ValueError, match=f"step-00000006 is damaged: {shard.name} is missing"):
        checkpoint.read_state(folder / "step-00000006")
    weights, last = alone(folder, log_every=1, until=8)
    assert last.step == 12
    alike(weights, alone(None)[0])


def test_another_model_is_refused_by_the_reader_of_shards_too(tmp_path):
    folder = tmp_path / "run"
    sharded(folder, until=2)
    with pytest.raises(ValueError, match=r"is of another model or optimizer: 'average/.*' is unknown"):
        list(
            train(
                lessons.model(lessons.design("decoder")),
                lessons.batches(lessons.design("decoder")),
                lessons.recipe(**ON),
                folder=folder,
            )
        )


def test_who_is_alone_is_told_so(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert init_distributed(device="cpu") == init_distributed("ddp", "cpu") == DistributedContext()
    with pytest.raises(
        ValueError, match="fsdp was asked for, but this process is alone: start it with torchrun"
    ):
        init_distributed("fsdp", "cpu")


def test_muon_and_shards_are_refused():
    design = lessons.design()
    with pytest.raises(ValueError, match="muon needs whole matrices, and fsdp shards them"):
        next(
            iter(
                train(
                    lessons.model(design),
                    lessons.batches(design),
                    lessons.recipe(optimizer="muon"),
                    distributed=DistributedContext(0, 1, torch.device("cpu"), "fsdp"),
                )
            )
        )
