"""Prepare a run: profile and tokenize the data, resolve what the job leaves open, make the initial model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from math import ceil
from pathlib import Path

import torch

from keepleft.data.prepare import Counts
from keepleft.data.token_store import TokenStore
from keepleft.data.tokenizer import SOURCE_TOKENIZER_FILE, vocab_size
from keepleft.disk import atomic
from keepleft.models.build import build
from keepleft.models.design import ClassificationHead, Design
from keepleft.models.design import from_json as read_design
from keepleft.models.design import to_json as write_design
from keepleft.runs import dataset, defaults
from keepleft.runs import job as jobs
from keepleft.runs.data_files import STORE_FOLDER, check_stable, data_fingerprints, store_fingerprints
from keepleft.runs.dataset import ProgressCallback
from keepleft.runs.job import TrainJob
from keepleft.runs.metrics import METRICS_FILE
from keepleft.runs.tasks import TASKS, objective
from keepleft.training.distributed import DistributedContext
from keepleft.training.recipe import CHANGEABLE, Recipe
from keepleft.training.recipe import from_dict as read_recipe
from keepleft.weights.model_directory import AnyModel, load, pin_revision

CONFIG_FILE = "config.yaml"
RESOLVED_FILE = "resolved.json"
TRACKING_FILE = "tracking.json"  # by what name trackers know the run


@dataclass(frozen=True)
class ResolvedJob:
    """A job with nothing left open: what the run folder has in resolved.json."""

    design: Design
    recipe: Recipe
    labels: list[str]
    max_length: int
    micro_tokens: int
    accumulate: int  # micro-batches in a step, on all devices together
    pad_to_multiple_of: int
    pack: bool
    steps_per_epoch: int = 0  # about; 0 if it is not known
    minutes: float | None = None  # that the number of steps was chosen for, once it is
    init_from: str | None = None  # a name on the hub with the commit that it had, as NAME@COMMIT
    data_files: dict[str, str] = field(default_factory=dict)  # fingerprints by name
    store_files: dict[str, str] = field(default_factory=dict)

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
    """Write tokenizers, token stores, config.yaml and resolved.json to `out`, and yield lines for the log.

    A resumed run finds them there. Raises ValueError if the data do not suit the job.
    """
    out.mkdir(parents=True, exist_ok=True)
    pinned_job = replace(job, init_from=job.init_from and pin_revision(job.init_from))
    train_sources = dataset.open_sources(job, job.train)
    data_files = data_fingerprints(job)
    # a run that never took a step may have left these
    for stale_file in (CONFIG_FILE, RESOLVED_FILE, TRACKING_FILE, METRICS_FILE, SOURCE_TOKENIZER_FILE):
        (out / stale_file).unlink(missing_ok=True)
    atomic.remove_folder(out / STORE_FOLDER)
    valid_sources = [] if job.valid is None else dataset.open_sources(job, job.valid)
    reports = dataset.profile_sources(train_sources, on_progress)
    for report in reports:
        yield from report.lines()
    text_fields = [field for report in reports for field in report.fields if field.name != "label"]
    characters = sum(field.characters.total for field in text_fields)
    labels = dataset.label_names(job, train_sources)
    max_vocab = defaults.vocabulary(job, characters)
    tokenizers = dataset.build_tokenizers(pinned_job, train_sources, max_vocab, on_progress)
    vocab = vocab_size(tokenizers.target)
    source_vocab = None if tokenizers.joint else vocab_size(tokenizers.source)
    objective(job.task, tokenizers.target)  # raises if special tokens are missing
    max_length = defaults.max_length(job, dataset.typical_length(train_sources, tokenizers))
    atomic.write_text(out / "tokenizer.json", tokenizers.target.to_str(pretty=True))
    if not tokenizers.joint:
        atomic.write_text(out / SOURCE_TOKENIZER_FILE, tokenizers.source.to_str(pretty=True))
    store, counts = dataset.build_store(
        job, train_sources, tokenizers, labels, max_length, out / STORE_FOLDER / "train", on_progress
    )
    if valid_sources:
        dataset.build_store(
            job, valid_sources, tokenizers, labels, max_length, out / STORE_FOLDER / "valid", on_progress
        )
    is_running_text = all(source.is_running_text for source, _ in train_sources)
    yield _describe_tokens(store, counts, vocab, max_length, is_running_text)
    task_fields = TASKS[job.task].fields
    targets = len(store["text" if "label" in task_fields else task_fields[-1]].tokens)
    micro_tokens, accumulate = _batch_sizes(job, max_length, distributed.world_size)
    design = defaults.design(job, vocab, source_vocab, max_length, len(labels), targets)
    if job.init_from:
        design = initial_design(pinned_job, labels)
    defaults.check_design(job, design)
    if design.max_positions is not None and max_length > design.max_positions:
        raise ValueError(
            f"texts of up to {max_length} tokens do not fit a model of {design.max_positions} positions: "
            f"give --batch.max-length {design.max_positions}, or a model with more"
        )
    padding_factor = 0.8 if job.task != "lm" else 1.0  # about a fifth of the tokens of a batch are padding
    steps_per_epoch = max(1, ceil(targets / (micro_tokens * accumulate * padding_factor)))
    resolved_job = ResolvedJob(
        design=design,
        recipe=defaults.recipe(job, targets, steps_per_epoch),
        labels=labels,
        max_length=max_length,
        micro_tokens=micro_tokens,
        accumulate=accumulate,
        pad_to_multiple_of=job.batch.pad_to_multiple_of or (8 if distributed.device.type == "cuda" else 1),
        pack=_should_pack(job, distributed),
        steps_per_epoch=steps_per_epoch,
        init_from=pinned_job.init_from,
        data_files=data_files,
        store_files=store_fingerprints(out),
    )
    check_stable(job, data_files)
    atomic.write_text(out / CONFIG_FILE, jobs.to_yaml(job))
    atomic.write_text(out / RESOLVED_FILE, resolved_job.to_json())


def _describe_tokens(
    store: TokenStore, counts: Counts, vocab: int, max_length: int, is_running_text: bool
) -> str:
    """A line for the log: tokens of each field, size of the vocabulary, and what became of the records."""
    columns = [f"{len(store[name].tokens):,} {name}" for name in store.columns if name != "label"]
    parts = [f"tokens: {', '.join(columns)}; vocabulary {vocab:,}"]
    if not is_running_text:
        parts.append(f"; {counts.written:,} of {counts.records:,} records kept")
    if counts.empty:
        parts.append(f", {counts.empty:,} empty")
    if counts.overlong:
        parts.append(f", {counts.overlong:,} longer than {max_length} tokens left out (--batch.max-length)")
    if counts.truncated:
        parts.append(f", {counts.truncated:,} cut to {max_length} tokens (--batch.max-length)")
    return "".join(parts)


def _batch_sizes(job: TrainJob, max_length: int, world_size: int) -> tuple[int, int]:
    """The tokens of a micro-batch, and the micro-batches of a step; by default one for each process."""
    tokens = max(job.batch.tokens or defaults.size_preset(job).tokens, max_length)
    micro_tokens = max(min(job.batch.micro_tokens or -(-tokens // world_size), tokens), max_length)
    return micro_tokens, max(1, round(tokens / micro_tokens))


def _should_pack(job: TrainJob, distributed: DistributedContext) -> bool:
    """Whether to pack sequences. By default pairs are, on a GPU, where batches of one shape are faster."""
    if job.task == "classify":
        return False  # there is one label for each row
    if job.batch.pack is not None:
        return job.batch.pack
    if TASKS[job.task].is_paired:
        return distributed.device.type == "cuda"
    return job.task == "lm" and job.tokenizer.documents


def apply_changeable(resolved_job: ResolvedJob, job: TrainJob) -> ResolvedJob:
    """The resolved job with the recipe fields that may change when a run is resumed taken from `job`."""
    changes = {
        name: getattr(job.recipe, name) for name in CHANGEABLE if getattr(job.recipe, name) is not None
    }
    return replace(resolved_job, recipe=replace(resolved_job.recipe, **changes))


def initial_model(job: TrainJob, design: Design, labels: list[str], seed: int) -> AnyModel:
    torch.manual_seed(seed)
    if job.init_from:
        model = _load_initial_model(job, labels)
    else:
        model = build(design, generator=torch.Generator().manual_seed(seed))
    if job.lora:
        from keepleft.training.lora import add_lora

        add_lora(model, rank=job.lora, modules_to_save=("head",) if job.task == "classify" else ())
    return model


def initial_design(job: TrainJob, labels: list[str]) -> Design:
    """The design of the model in `job.init_from`, without loading its weights."""
    return _design_with_head(load(str(job.init_from), device="meta")[0], job, labels)


def _design_with_head(pretrained: AnyModel, job: TrainJob, labels: list[str]) -> Design:
    """The design of a pretrained model; to classify other labels than it knows, with a new head."""
    design = pretrained.design
    model_labels = list(pretrained.notes.get("id2label", {}).values())
    if job.task != "classify" or (isinstance(design.head, ClassificationHead) and model_labels == labels):
        return design
    return design.but(head=ClassificationHead(len(labels), "tanh" if design.decoder is None else "last"))


def _load_initial_model(job: TrainJob, labels: list[str]) -> AnyModel:
    pretrained, _ = load(str(job.init_from))
    design = _design_with_head(pretrained, job, labels)
    if design is pretrained.design:
        return pretrained
    model = build(design)
    state = model.state_dict()
    for name, tensor in pretrained.state_dict().items():
        if name in state and state[name].shape == tensor.shape and not name.startswith("head."):
            state[name] = tensor
    model.load_state_dict(state)
    model.notes = {"model_type": pretrained.notes.get("model_type")}
    return model
