"""One job from plain files to a model directory; a generator of what happens.

    runs/NAME/config.yaml     the job as it was given
    runs/NAME/settled.json    what was chosen from the data: design, recipe, labels
    runs/NAME/data/           the texts as integers
    runs/NAME/metrics.jsonl   a line for each report
    runs/NAME/checkpoints/    where the run stands
    runs/NAME/model/          the result
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from keepleft.data.ahead import Ahead
from keepleft.data.batches import Batches, Bucketed, Packed, Windows
from keepleft.data.store import Store
from keepleft.data.tokenizer import read as read_tokenizer
from keepleft.disk import atomic
from keepleft.evaluate.likelihood import likelihood
from keepleft.runs import finish, start
from keepleft.runs.audited import audited
from keepleft.runs.check import check
from keepleft.runs.job import Job
from keepleft.runs.metrics import Metrics, curve
from keepleft.runs.settle import SETTLED, Settled, freed, prepared
from keepleft.runs.sources import Tokenizers, Watch, unwatched
from keepleft.runs.tasks import objective
from keepleft.training import checkpoint
from keepleft.training.loop import Report, train
from keepleft.training.parallel import Team, join

CHECKPOINTS = "checkpoints"
# without a validation text: every 50th record is held out, or the last twentieth of running text, but not more than
HELD, MOST_RECORDS, MOST_TOKENS = 50, 4096, 1 << 18
FEW_RECORDS, FEW_TOKENS = 100, 10_000  # with fewer to measure on, chance says as much as the model


@dataclass(frozen=True)
class Begun:
    """Everything is ready, and training begins."""

    steps: int


@dataclass(frozen=True)
class Finished:
    """The result of a run."""

    folder: Path
    said: str
    stopped: bool
    measures: dict[str, float]


Event = str | Begun | Report | Finished


def run(job: Job, *, resume: bool = False, stop: Callable[[], bool] = lambda: False,
        watch: Watch = unwatched) -> Iterator[Event]:
    """Do a job. Lines are for people, reports for the record; the last event says where the model lies. `watch` hears how
    far the work before training has come."""
    out, team = Path(job.out), join(job.parallel, job.device)
    new = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        check(job)
        with atomic.locked(out) if team.rank == 0 else nullcontext():
            try:
                ready = yield from _ready(job, team, resume, watch)
            except BaseException:
                if new and team.rank == 0:  # what a failed start has made
                    atomic.removed(out)
                    with suppress(OSError):  # others may have put something there
                        for folder in new[1:]:
                            folder.rmdir()
                raise
            yield from _trained(job, ready, out, team, stop)
    finally:
        team.leave()


@dataclass(frozen=True)
class _Ready:
    """All that training needs."""

    settled: Settled
    model: Any
    words: Tokenizers
    batches: Batches
    valid: Batches | None


def _ready(job: Job, team: Team, resume: bool, watch: Watch) -> Generator[Event, None, _Ready]:
    out = Path(job.out)
    began = bool(checkpoint.steps(out / CHECKPOINTS))
    if began and not resume:
        raise ValueError(f"{out} holds a run already: add --resume to go on with it, or give another --out")
    if team.rank == 0 and not (resume and (out / SETTLED).exists()):
        yield from prepared(job, out, team, watch)
    team.wait()
    settled = Settled.read((out / SETTLED).read_text("utf-8"))
    if resume:
        settled = freed(settled, job)
    words = _tokenizers(out)
    batches, valid = _batches(job, settled, words, out, team)
    model = start.model(job, settled.design, settled.labels, settled.recipe.seed).to(team.device)
    if team.rank == 0:
        yield from _held(job, batches, valid)
        weights, steps = sum(p.numel() for p in model.parameters()), settled.recipe.steps
        yield (f"{job.task}: {weights:,} weights, {steps:,} {'step' if steps == 1 else 'steps'} of about {batches.tokens:,} "
               f"tokens, {settled.recipe.optimizer}, on {team.world} × {team.device.type}")
        if settled.accumulate % team.world:
            yield (f"note: a step has {settled.accumulate} micro-batches for {team.world} processes, so some wait for others: "
                   "give batch.tokens and batch.micro so that they divide")
        if job.audit and not began:
            yield audited(model)
    return _Ready(settled, model, words, batches, valid)


def _held(job: Job, batches: Batches, valid: Batches | None) -> Iterator[str]:
    """What is measured on."""
    if valid is None:
        yield "validation: nothing is held out of so few texts, so no one sees how it does on new ones: give some with --valid"
        return
    running = job.task == "lm" and not job.words.documents
    field = batches.objective.fields[0]
    here, left = (len(part.store[field].tokens) if running else len(part.store) for part in (valid, batches))
    what = "tokens of running text" if running else "record" if here == 1 else "records"
    few = here < (FEW_TOKENS if running else FEW_RECORDS)
    yield (f"validation: {here:,} {what}" + ("" if job.valid is not None else f" held out, {left:,} are left to learn from")
           + ("; measures on so few are rough" + ("" if job.valid is not None else " (--valid takes more)") if few else ""))


def _tokenizers(out: Path) -> Tokenizers:
    target = read_tokenizer(out / "tokenizer.json")
    own = out / "source_tokenizer.json"
    return Tokenizers(target, read_tokenizer(own) if own.exists() else target)


def _batches(job: Job, settled: Settled, words: Tokenizers, out: Path, team: Team) -> tuple[Batches, Batches | None]:
    goal = objective(job.task, words.target)
    running = job.task == "lm" and not job.words.documents
    store = Store.open(out / "data" / "train")
    held: Store | None = Store.open(out / "data" / "valid") if (out / "data" / "valid").exists() else None
    if held is None:
        if running:
            parts = store.cut(min(0.05, MOST_TOKENS / len(store[goal.fields[0]].tokens)))
            if len(parts[1][goal.fields[0]].tokens) > settled.longest:
                store, held = parts
        elif len(store) >= 2 * HELD:
            store, held = store.held(min(len(store) // HELD, MOST_RECORDS), settled.recipe.seed)
    shape: Bucketed | Packed | Windows = Bucketed(settled.multiple, fixed=settled.multiple > 1)
    if running:
        shape = Windows(settled.longest)
    elif settled.pack:
        shape = Packed(max(settled.longest, min(128, settled.budget)))
    training = Batches(store, goal, shape, settled.budget, settled.accumulate, settled.recipe.seed, rank=team.rank,
                       world=team.world)
    return training, None if held is None else replace(training, store=held, accumulate=1, shuffled=False, rank=0, world=1)


def _trained(job: Job, ready: _Ready, out: Path, team: Team, stop: Callable[[], bool]) -> Iterator[Event]:
    settled, words, batches, valid = ready.settled, ready.words, ready.batches, ready.valid
    if team.rank == 0:
        yield Begun(settled.recipe.steps)
    kept = list(valid.once()) if valid is not None else []

    def measure(now: nn.Module) -> dict[str, float]:
        found = likelihood(now, kept, smoothing=settled.recipe.smoothing)
        if settled.recipe.metric in ("bleu", "chrf", "exact"):
            found |= written(now, words, valid, 500)
        return found

    order = Ahead(batches, max(1, job.batch.ahead), pin=team.device.type == "cuda")
    about = {"task": job.task, "records": len(batches.store), "budget": settled.budget, "accumulate": settled.accumulate}
    folder, last = out / CHECKPOINTS, None
    measures: dict[str, float] = {}
    with Metrics(out, board=job.board and team.rank == 0) as metrics:
        for report in train(ready.model, order, settled.recipe, folder=folder, measure=measure if kept else None, stop=stop,
                            team=team, about=about):
            measures, last = report.measures if report.best or not measures else measures, report
            if team.rank == 0:
                metrics.add(report)
                yield report
    stopped = last is not None and last.step < settled.recipe.steps and not last.tired
    if team.rank:
        return
    said = "stopped, and saved: add --resume to go on"
    if not stopped:
        said = _finished(job, settled, words, out, already=last is None)
    curve(out)
    yield Finished(out, said, stopped, measures)


def _finished(job: Job, settled: Settled, words: Tokenizers, out: Path, *, already: bool) -> str:
    found = checkpoint.latest(out / CHECKPOINTS)
    assert found is not None
    fresh = start.model(job, settled.design, settled.labels, settled.recipe.seed)
    said = finish.keep(fresh, out / CHECKPOINTS, found[1]["best_step"], job.last)
    if job.lora:
        from keepleft.training.lora import merge
        merge(fresh)
    finish.directory(fresh.eval(), words, settled.labels, job.task, out / finish.MODEL)
    return f"{'this run was finished already: ' if already else ''}{out / finish.MODEL} holds {said}"


def written(model: nn.Module, words: Tokenizers, valid: Batches | None, most: int) -> dict[str, float]:
    """BLEU and its like on the first texts of a validation store, written greedily."""
    from keepleft.evaluate.translation import translation
    from keepleft.runs.writing import write_from

    assert valid is not None
    rows = np.arange(min(most, len(valid.store)))
    references = [words.target.decode(text) for text in valid.store["tgt"].take(rows).texts()]
    return translation(write_from(model, words.target, valid.store["src"].take(rows)), references)
