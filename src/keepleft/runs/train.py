"""One job from plain files to a model directory; a generator of what happens.

    runs/NAME/config.yaml     the job as it was given
    runs/NAME/settled.json    what was chosen from the data: design, recipe, labels
    runs/NAME/data/           the texts as integers
    runs/NAME/metrics.jsonl   a line for each report
    runs/NAME/checkpoints/    where the run stands
    runs/NAME/model/          the result
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from keepleft.data.ahead import Ahead
from keepleft.data.batches import Batches, Bucketed, Packed, Windows
from keepleft.data.store import Store
from keepleft.data.tokenizer import read as read_tokenizer
from keepleft.disk import atomic
from keepleft.evaluate.likelihood import likelihood
from keepleft.models.build import build
from keepleft.models.design import Classes, Design
from keepleft.models.written import read as read_design
from keepleft.models.written import write as write_design
from keepleft.runs import finish, sizes, sources
from keepleft.runs import job as jobs
from keepleft.runs.job import Job
from keepleft.runs.sources import Tokenizers, Watch, unwatched
from keepleft.runs.tasks import TASKS, objective
from keepleft.training import checkpoint
from keepleft.training.loop import Report, train
from keepleft.training.parallel import Team, join
from keepleft.training.recipe import FREE, Recipe
from keepleft.training.recipe import read as read_recipe
from keepleft.weights.files import load

CONFIG, SETTLED, METRICS, CHECKPOINTS = "config.yaml", "settled.json", "metrics.jsonl", "checkpoints"
HELD = 50  # without a validation text every 50th record is held out; of running text the last twentieth


@dataclass(frozen=True)
class Settled:
    """A job with nothing left open."""

    design: Design
    recipe: Recipe
    labels: list[str]
    longest: int
    budget: int
    accumulate: int
    multiple: int
    pack: bool

    def write(self) -> str:
        out = {f.name: getattr(self, f.name) for f in fields(self)} | {"design": write_design(self.design),
                                                                     "recipe": asdict(self.recipe)}
        return json.dumps(out, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, text: str) -> Settled:
        data = json.loads(text)
        return cls(**{**data, "design": read_design(data["design"]), "recipe": read_recipe(data["recipe"])})


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
    team = join(job.parallel, job.device)
    try:
        with atomic.locked(Path(job.out)) if team.rank == 0 else nullcontext():
            yield from _run(job, team, resume, stop, watch)
    finally:
        team.leave()


def _run(job: Job, team: Team, resume: bool, stop: Callable[[], bool], watch: Watch) -> Iterator[Event]:
    out = Path(job.out)
    began = bool(checkpoint.steps(out / CHECKPOINTS))
    if began and not resume:
        raise ValueError(f"{out} holds a run already: add --resume to go on with it, or give another --out")
    if team.rank == 0 and not (resume and (out / SETTLED).exists()):
        yield from _prepared(job, out, team, watch)
    team.wait()
    settled = Settled.read((out / SETTLED).read_text("utf-8"))
    if resume:
        settled = _freed(settled, job)
    words = _tokenizers(out)
    batches, valid = _batches(job, settled, words, out, team)
    model = _model(job, settled, team)
    if team.rank == 0:
        weights = sum(p.numel() for p in model.parameters())
        yield (f"{job.task}: {weights:,} weights, {settled.recipe.steps:,} steps of about {batches.tokens:,} tokens, "
               f"{settled.recipe.optimizer}, on {team.world} × {team.device.type}")
        if settled.accumulate % team.world:
            yield (f"note: a step has {settled.accumulate} micro-batches for {team.world} processes, so some wait for others: "
                   "give batch.tokens and batch.micro so that they divide")
        yield Begun(settled.recipe.steps)
    yield from _trained(job, settled, model, words, batches, valid, out, team, stop)


def _prepared(job: Job, out: Path, team: Team, watch: Watch) -> Iterator[Event]:
    """Everything before the first step, written down, so that a run that goes on finds it as it was."""
    out.mkdir(parents=True, exist_ok=True)
    _sensible(job)
    found = sources.opened(job, job.train)
    for left in (CONFIG, SETTLED, METRICS, "source_tokenizer.json"):  # by a run that never took a step
        (out / left).unlink(missing_ok=True)
    atomic.removed(out / "data")
    held = [] if job.valid is None else sources.opened(job, job.valid)
    reports = sources.looked(found, watch)
    for report in reports:
        yield from report.lines()
    fields = [field for report in reports for field in report.fields if field.name != "label"]
    characters = sum(field.characters.total for field in fields)
    labels = sources.labels_of(job, found)
    words = sources.tokenizers(job, found, sizes.vocabulary(job, characters), watch)
    objective(job.task, words.target)  # raises where special tokens are lacking
    longest = sizes.longest(job, sources.usual_length(job, found, words))
    atomic.text(out / "tokenizer.json", words.target.to_str(pretty=True))
    if not words.joint:
        atomic.text(out / "source_tokenizer.json", words.source.to_str(pretty=True))
    store, counts = sources.store(job, found, words, labels, longest, out / "data" / "train", watch)
    if held:
        sources.store(job, held, words, labels, longest, out / "data" / "valid", watch)
    yield (f"tokens: {', '.join(f'{len(store[name].tokens):,} {name}' for name in store.columns if name != 'label')}; "
           f"vocabulary {words.target.get_vocab_size():,}; {counts.kept:,} of {counts.records:,} records kept"
           + (f", {counts.empty:,} empty" if counts.empty else "")
           + (f", {counts.overlong:,} longer than {longest} tokens left out (--batch.longest)" if counts.overlong else "")
           + (f", {counts.cut:,} cut to {longest} tokens (--batch.longest)" if counts.cut else ""))
    targets = len(store[TASKS[job.task].fields[-1] if "label" not in TASKS[job.task].fields else "text"].tokens)
    budget, accumulate = _budget(job, longest, team.world)
    source_vocab = None if words.joint else words.source.get_vocab_size()
    design = sizes.design(job, words.target.get_vocab_size(), source_vocab, longest, len(labels), targets)
    if job.start:
        design = _started(job, labels).design
    sizes.suits(job, design)
    if design.longest is not None and longest > design.longest:
        raise ValueError(f"texts of up to {longest} tokens do not fit a model of {design.longest} positions: give "
                         f"--batch.longest {design.longest}, or a model with more")
    per_step = budget * accumulate * (0.8 if job.task != "lm" else 1.0)
    recipe = sizes.recipe(job, targets, max(1, round(targets / per_step)))
    multiple = job.batch.multiple or (8 if team.device.type == "cuda" else 1)
    settled = Settled(design, recipe, labels, longest, budget, accumulate, multiple, _packs(job, team))
    atomic.text(out / CONFIG, jobs.write(job))
    atomic.text(out / SETTLED, settled.write())


def _sensible(job: Job) -> None:
    """What can be known to be wrong before any text is read."""
    metric = job.recipe.metric or "loss"
    written = ["bleu", "chrf", "exact"] if TASKS[job.task].fields == ("src", "tgt") else []
    known = ["loss", "perplexity", "accuracy", "smoothed", *written]
    if metric not in known:
        raise ValueError(f"the metric {metric!r} is not measured for the task {job.task}: there are {', '.join(known)}")
    if metric in ("bleu", "chrf"):
        import_module("keepleft.evaluate.translation").metrics()
    if job.lora and not job.start:
        raise ValueError("lora trains small matrices beside weights that stay as they are, and these would be random: give a "
                         "model to --start from, or leave --lora out")


def _budget(job: Job, longest: int, world: int) -> tuple[int, int]:
    """The tokens of a micro-batch, and how many make a step: one for each process, unless it was said."""
    tokens = max(job.batch.tokens or sizes.scale(job).tokens, longest)
    micro = max(min(job.batch.micro or -(-tokens // world), tokens), longest)
    return micro, max(1, round(tokens / micro))


def _packs(job: Job, team: Team) -> bool:
    """Several texts in a row? Where it was not said: on a GPU, which would rather have batches of one shape."""
    if job.task == "classify":
        if job.batch.pack:
            raise ValueError("batch.pack was asked for, but a classifier has one label for each row: leave it out")
        return False
    if job.batch.pack is None:
        pairs = TASKS[job.task].fields == ("src", "tgt")
        return (job.task == "lm" and job.words.documents) or (pairs and team.device.type == "cuda")
    return job.batch.pack


def _freed(settled: Settled, job: Job) -> Settled:
    """What may change when a run goes on: how often it reports, evaluates and saves, and when it gives up."""
    said = {name: getattr(job.recipe, name) for name in FREE if getattr(job.recipe, name) is not None}
    return replace(settled, recipe=replace(settled.recipe, **said))


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
            parts = store.cut(0.05)
            if len(parts[1][goal.fields[0]].tokens) > settled.longest:
                store, held = parts
        elif len(store) >= 2 * HELD:
            store, held = store.held(len(store) // HELD, settled.recipe.seed)
    shape: Bucketed | Packed | Windows = Bucketed(settled.multiple, fixed=settled.multiple > 1)
    if running:
        shape = Windows(settled.longest)
    elif settled.pack:
        shape = Packed(max(settled.longest, min(128, settled.budget)))
    training = Batches(store, goal, shape, settled.budget, settled.accumulate, settled.recipe.seed, rank=team.rank,
                       world=team.world)
    return training, None if held is None else replace(training, store=held, accumulate=1, shuffled=False, rank=0, world=1)


def _started(job: Job, labels: list[str]) -> Any:
    """A model to go on with, with a new head where the labels are new."""
    model, _ = load(str(job.start))
    if job.task != "classify":
        return model
    head, known = model.design.head, list(model.notes.get("id2label", {}).values())
    if isinstance(head, Classes) and known == labels:
        return model
    fresh = build(model.design.but(head=Classes(len(labels), "tanh" if model.design.decoder is None else "last")))
    state = fresh.state_dict()
    fresh.load_state_dict({**state, **{name: tensor for name, tensor in model.state_dict().items()
                                      if name in state and state[name].shape == tensor.shape and not name.startswith("head.")}})
    fresh.notes = {"model_type": model.notes.get("model_type")}
    return fresh


def _model(job: Job, settled: Settled, team: Team) -> Any:
    torch.manual_seed(settled.recipe.seed)
    if job.start:
        model = _started(job, settled.labels)
    else:
        model = build(settled.design, generator=torch.Generator().manual_seed(settled.recipe.seed))
    if job.lora:
        from keepleft.training.lora import adapt
        adapt(model, rank=job.lora, also=("head",) if job.task == "classify" else ())
    return model.to(team.device)


def _trained(job: Job, settled: Settled, model: Any, words: Tokenizers, batches: Batches, valid: Batches | None, out: Path,
             team: Team, stop: Callable[[], bool]) -> Iterator[Event]:
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
    board = _board(out) if job.board and team.rank == 0 else None
    with _Metrics(out / METRICS, folder, team.rank == 0) as metrics:
        for report in train(model, order, settled.recipe, folder=folder, measure=measure if kept else None, stop=stop,
                            team=team, about=about):
            metrics.add(report)
            measures, last = report.measures if report.best or not measures else measures, report
            if board is not None:
                for name, value in {"loss": report.loss, "rate": report.rate, "norm": report.norm, "speed": report.speed,
                                    **{f"valid/{key}": value for key, value in report.measures.items()}}.items():
                    board.add_scalar(name, value, report.step)
            if team.rank == 0:
                yield report
    if board is not None:
        board.close()
    stopped = last is not None and last.step < settled.recipe.steps and not last.tired
    if team.rank:
        return
    said = "stopped, and saved: add --resume to go on"
    if not stopped:
        said = _finished(job, settled, words, out)
    curve(out)
    yield Finished(out, said, stopped, measures)


def _finished(job: Job, settled: Settled, words: Tokenizers, out: Path) -> str:
    found = checkpoint.latest(out / CHECKPOINTS)
    assert found is not None
    fresh = _model(job, settled, Team())
    said = finish.keep(fresh, out / CHECKPOINTS, found[1]["best_step"], job.last)
    if job.lora:
        from keepleft.training.lora import merge
        merge(fresh)
    finish.directory(fresh.eval(), words, settled.labels, job.task, out / finish.MODEL)
    return f"{out / finish.MODEL} holds {said}"


def written(model: nn.Module, words: Tokenizers, valid: Batches | None, most: int) -> dict[str, float]:
    """BLEU and its like on the first texts of a validation store, written greedily."""
    from keepleft.evaluate.translation import translation
    from keepleft.runs.writing import write_from

    assert valid is not None
    rows = np.arange(min(most, len(valid.store)))
    references = [words.target.decode(text) for text in valid.store["tgt"].take(rows).texts()]
    return translation(write_from(model, words.target, valid.store["src"].take(rows)), references)


def curve(out: Path) -> None:
    """The loss curve as a picture beside the numbers."""
    from keepleft.runs.chart import lines

    records = [json.loads(line) for line in (out / METRICS).read_text("utf-8").splitlines()]
    series = {"training": [(r["step"], r["plain"]) for r in records if "plain" in r],
              "validation": [(r["step"], r["measures"]["loss"]) for r in records if "loss" in r.get("measures", {})]}
    series = {name: points for name, points in series.items() if len(points) > 1}
    if series:
        lines(out / "loss.svg", series, title=out.name, x="step", y="cross-entropy per token")


class _Metrics:
    """A line of JSON for each report. When a run goes on, lines of steps that are lost are dropped."""

    def __init__(self, path: Path, folder: Path, active: bool) -> None:
        self.path, self.active = path, active
        if active and path.exists():
            found = checkpoint.latest(folder)
            reached = int(found[1]["step"]) if found else 0
            old = [line for line in path.read_text("utf-8").splitlines() if _step(line) <= reached]
            atomic.text(path, "".join(line + "\n" for line in old))

    def __enter__(self) -> _Metrics:
        self.file = self.path.open("a", encoding="utf-8") if self.active else None
        return self

    def __exit__(self, *_: Any) -> None:
        if self.file is not None:
            self.file.close()

    def add(self, report: Report) -> None:
        if self.file is not None:
            self.file.write(json.dumps(report.record()) + "\n")
            self.file.flush()


def _step(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 1 << 62  # half a line, written in the last moment


def _board(out: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("the board needs tensorboard: pip install 'keepleft[board]'") from error
    return SummaryWriter(str(out / "board"))
