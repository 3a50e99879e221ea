"""Everything before the first step: texts read, tokenizers learned, what the job leaves open chosen and written down."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from keepleft.data.tokenizer import span
from keepleft.disk import atomic
from keepleft.models.design import Design
from keepleft.models.written import read as read_design
from keepleft.models.written import write as write_design
from keepleft.runs import job as jobs
from keepleft.runs import sizes, sources, start
from keepleft.runs.job import Job
from keepleft.runs.metrics import METRICS
from keepleft.runs.sources import Watch
from keepleft.runs.tasks import TASKS, objective
from keepleft.training.parallel import Team
from keepleft.training.recipe import FREE, Recipe
from keepleft.training.recipe import read as read_recipe

CONFIG, SETTLED = "config.yaml", "settled.json"


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


def prepared(job: Job, out: Path, team: Team, watch: Watch) -> Iterator[str]:
    """Everything before the first step, written down, so that a run that goes on finds it as it was."""
    out.mkdir(parents=True, exist_ok=True)
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
    vocab, source_vocab = span(words.target), None if words.joint else span(words.source)
    objective(job.task, words.target)  # raises where special tokens are lacking
    longest = sizes.longest(job, sources.usual_length(job, found, words))
    atomic.text(out / "tokenizer.json", words.target.to_str(pretty=True))
    if not words.joint:
        atomic.text(out / "source_tokenizer.json", words.source.to_str(pretty=True))
    store, counts = sources.store(job, found, words, labels, longest, out / "data" / "train", watch)
    if held:
        sources.store(job, held, words, labels, longest, out / "data" / "valid", watch)
    yield (f"tokens: {', '.join(f'{len(store[name].tokens):,} {name}' for name in store.columns if name != 'label')}; "
           f"vocabulary {vocab:,}"
           + ("" if all(source.running for source, _ in found) else f"; {counts.kept:,} of {counts.records:,} records kept")
           + (f", {counts.empty:,} empty" if counts.empty else "")
           + (f", {counts.overlong:,} longer than {longest} tokens left out (--batch.longest)" if counts.overlong else "")
           + (f", {counts.cut:,} cut to {longest} tokens (--batch.longest)" if counts.cut else ""))
    targets = len(store[TASKS[job.task].fields[-1] if "label" not in TASKS[job.task].fields else "text"].tokens)
    budget, accumulate = _budget(job, longest, team.world)
    design = sizes.design(job, vocab, source_vocab, longest, len(labels), targets)
    if job.start:
        design = start.design(job, labels)
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


def _budget(job: Job, longest: int, world: int) -> tuple[int, int]:
    """The tokens of a micro-batch, and how many make a step: one for each process, unless it was said."""
    tokens = max(job.batch.tokens or sizes.scale(job).tokens, longest)
    micro = max(min(job.batch.micro or -(-tokens // world), tokens), longest)
    return micro, max(1, round(tokens / micro))


def _packs(job: Job, team: Team) -> bool:
    """Several texts in a row? Where it was not said: on a GPU, which would rather have batches of one shape."""
    if job.task == "classify":
        return False  # a label for each row
    if job.batch.pack is None:
        pairs = TASKS[job.task].fields == ("src", "tgt")
        return (job.task == "lm" and job.words.documents) or (pairs and team.device.type == "cuda")
    return job.batch.pack


def freed(settled: Settled, job: Job) -> Settled:
    """What may change when a run goes on: how often it reports, evaluates and saves, and when it gives up."""
    said = {name: getattr(job.recipe, name) for name in FREE if getattr(job.recipe, name) is not None}
    return replace(settled, recipe=replace(settled.recipe, **said))
