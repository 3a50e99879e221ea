"""Everything before the first step: texts read, tokenizers learned, what the job leaves open chosen and
written down.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from keepleft.data.tokenizer import vocab_size
from keepleft.disk import atomic
from keepleft.models.design import Design
from keepleft.models.design_json import from_json as read_design
from keepleft.models.design_json import to_json as write_design
from keepleft.runs import dataset, defaults, initial_model
from keepleft.runs import job as jobs
from keepleft.runs.dataset import ProgressCallback
from keepleft.runs.job import TrainJob
from keepleft.runs.metrics import METRICS_FILE
from keepleft.runs.tasks import TASKS, objective
from keepleft.training.distributed import DistributedContext
from keepleft.training.recipe import CHANGEABLE, Recipe
from keepleft.training.recipe import from_dict as read_recipe

CONFIG_FILE, RESOLVED_FILE = "config.yaml", "resolved.json"


@dataclass(frozen=True)
class ResolvedJob:
    """A job with nothing left open."""

    design: Design
    recipe: Recipe
    labels: list[str]
    max_length: int
    micro_tokens: int
    accumulate: int
    pad_to_multiple_of: int
    pack: bool

    def to_json(self) -> str:
        out = {f.name: getattr(self, f.name) for f in fields(self)} | {
            "design": write_design(self.design),
            "recipe": asdict(self.recipe),
        }
        return json.dumps(out, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ResolvedJob:
        data = json.loads(text)
        return cls(**{**data, "design": read_design(data["design"]), "recipe": read_recipe(data["recipe"])})


def prepare_run(
    job: TrainJob, out: Path, distributed: DistributedContext, on_progress: ProgressCallback
) -> Iterator[str]:
    """Everything before the first step, written down, so that a run that goes on finds it as it was."""
    out.mkdir(parents=True, exist_ok=True)
    train_sources = dataset.open_sources(job, job.train)
    for stale_file in (
        CONFIG_FILE,
        RESOLVED_FILE,
        METRICS_FILE,
        "source_tokenizer.json",
    ):  # by a run that never took a step
        (out / stale_file).unlink(missing_ok=True)
    atomic.remove_folder(out / "data")
    valid_sources = [] if job.valid is None else dataset.open_sources(job, job.valid)
    reports = dataset.profile_sources(train_sources, on_progress)
    for report in reports:
        yield from report.lines()
    text_fields = [field for report in reports for field in report.fields if field.name != "label"]
    characters = sum(field.characters.total for field in text_fields)
    labels = dataset.label_names(job, train_sources)
    tokenizers = dataset.build_tokenizers(
        job, train_sources, defaults.vocabulary(job, characters), on_progress
    )
    vocab = vocab_size(tokenizers.target)
    source_vocab = None if tokenizers.joint else vocab_size(tokenizers.source)
    objective(job.task, tokenizers.target)  # raises where special tokens are lacking
    max_length = defaults.max_length(job, dataset.typical_length(job, train_sources, tokenizers))
    atomic.write_text(out / "tokenizer.json", tokenizers.target.to_str(pretty=True))
    if not tokenizers.joint:
        atomic.write_text(out / "source_tokenizer.json", tokenizers.source.to_str(pretty=True))
    store, counts = dataset.build_store(
        job, train_sources, tokenizers, labels, max_length, out / "data" / "train", on_progress
    )
    if valid_sources:
        dataset.build_store(
            job, valid_sources, tokenizers, labels, max_length, out / "data" / "valid", on_progress
        )
    yield (
        f"tokens: {', '.join(f'{len(store[name].tokens):,} {name}' for name in store.columns if name != 'label')}; "
        f"vocabulary {vocab:,}"
        + (
            ""
            if all(source.is_running_text for source, _ in train_sources)
            else f"; {counts.written:,} of {counts.records:,} records kept"
        )
        + (f", {counts.empty:,} empty" if counts.empty else "")
        + (
            f", {counts.overlong:,} longer than {max_length} tokens left out (--batch.max_length)"
            if counts.overlong
            else ""
        )
        + (
            f", {counts.truncated:,} cut to {max_length} tokens (--batch.max_length)"
            if counts.truncated
            else ""
        )
    )
    targets = len(
        store[TASKS[job.task].fields[-1] if "label" not in TASKS[job.task].fields else "text"].tokens
    )
    budget, accumulate = _batch_budget(job, max_length, distributed.world_size)
    design = defaults.design(job, vocab, source_vocab, max_length, len(labels), targets)
    if job.init_from:
        design = initial_model.initial_design(job, labels)
    defaults.check_design(job, design)
    if design.max_positions is not None and max_length > design.max_positions:
        raise ValueError(
            f"texts of up to {max_length} tokens do not fit a model of {design.max_positions} positions: give "
            f"--batch.max_length {design.max_positions}, or a model with more"
        )
    targets_per_step = budget * accumulate * (0.8 if job.task != "lm" else 1.0)
    recipe = defaults.recipe(job, targets, max(1, round(targets / targets_per_step)))
    pad_to_multiple_of = job.batch.pad_to_multiple_of or (8 if distributed.device.type == "cuda" else 1)
    resolved_job = ResolvedJob(
        design,
        recipe,
        labels,
        max_length,
        budget,
        accumulate,
        pad_to_multiple_of,
        _should_pack(job, distributed),
    )
    atomic.write_text(out / CONFIG_FILE, jobs.to_yaml(job))
    atomic.write_text(out / RESOLVED_FILE, resolved_job.to_json())


def _batch_budget(job: TrainJob, max_length: int, world_size: int) -> tuple[int, int]:
    """The tokens of a micro-batch, and how many make a step: one for each process, unless it was said."""
    tokens = max(job.batch.tokens or defaults.size_preset(job).tokens, max_length)
    micro_tokens = max(min(job.batch.micro_tokens or -(-tokens // world_size), tokens), max_length)
    return micro_tokens, max(1, round(tokens / micro_tokens))


def _should_pack(job: TrainJob, distributed: DistributedContext) -> bool:
    """Several texts in a row? Where it was not said: on a GPU, which would rather have batches of one shape."""
    if job.task == "classify":
        return False  # a label for each row
    if job.batch.pack is None:
        is_paired = TASKS[job.task].fields == ("src", "tgt")
        return (job.task == "lm" and job.tokenizer.documents) or (
            is_paired and distributed.device.type == "cuda"
        )
    return job.batch.pack


def apply_changeable(resolved_job: ResolvedJob, job: TrainJob) -> ResolvedJob:
    """What may change when a run goes on: how often it reports, evaluates and saves, and when it gives up."""
    changes = {
        name: getattr(job.recipe, name) for name in CHANGEABLE if getattr(job.recipe, name) is not None
    }
    return replace(resolved_job, recipe=replace(resolved_job.recipe, **changes))
