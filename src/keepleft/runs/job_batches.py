"""The batches of a job, for training and for validation, and how much data they hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from keepleft.data.batches import Batches, BucketedLayout, WindowLayout
from keepleft.data.packing import PackedLayout
from keepleft.data.token_store import TokenStore
from keepleft.runs.data_files import STORE_FOLDER
from keepleft.runs.dataset import Tokenizers
from keepleft.runs.job import TrainJob
from keepleft.runs.prepare import ResolvedJob
from keepleft.runs.tasks import objective
from keepleft.training.distributed import DistributedContext

# without validation data, one of 50 records is held out, or the last 5 % of running text; within limits
HOLDOUT_INTERVAL = 50
HOLDOUT_FRACTION = 0.05
MAX_HELDOUT_RECORDS = 4096
MAX_HELDOUT_TOKENS = 1 << 18
# with less validation data than this, metrics are too noisy to rely on
MIN_RELIABLE_RECORDS = 100
MIN_RELIABLE_TOKENS = 10_000


@dataclass(frozen=True)
class JobBatches:
    """The batches of a job; none for validation where there is too little data to hold some out."""

    training: Batches
    validation: Batches | None
    is_running_text: bool
    is_held_out: bool  # validation data are a part of the training data that were given

    @property
    def training_size(self) -> int:
        """Records, or tokens of running text."""
        return self._size(self.training)

    @property
    def validation_size(self) -> int:
        return 0 if self.validation is None else self._size(self.validation)

    def _size(self, batches: Batches) -> int:
        field = batches.objective.fields[0]
        return len(batches.store[field].tokens) if self.is_running_text else len(batches.store)

    def describe_training(self) -> str:
        return self.describe_size(self.training_size)

    def describe_validation(self) -> str:
        """How much validation data there is, and whether it is enough to rely on."""
        if self.validation is None:
            return "nothing is held out of so few texts, so no one sees how it does on new ones (--valid)"
        size = self.validation_size
        line = self.describe_size(size) + (" held out" if self.is_held_out else "")
        if size < (MIN_RELIABLE_TOKENS if self.is_running_text else MIN_RELIABLE_RECORDS):
            line += "; metrics on so few are rough" + (" (--valid takes more)" if self.is_held_out else "")
        return line

    def describe_size(self, size: int) -> str:
        """A number of records, or of tokens of running text."""
        unit = "tokens of running text" if self.is_running_text else "record" if size == 1 else "records"
        return f"{size:,} {unit}"


def make_batches(
    job: TrainJob,
    resolved_job: ResolvedJob,
    tokenizers: Tokenizers,
    out: Path,
    distributed: DistributedContext,
) -> JobBatches:
    """The batches of the token stores in a run folder.

    Without validation data a part of the training data is held out.
    """
    batch_objective = objective(job.task, tokenizers.target)
    field = batch_objective.fields[0]
    store = TokenStore.open(out / STORE_FOLDER / "train")
    heldout: TokenStore | None = None
    has_valid_store = (out / STORE_FOLDER / "valid").exists()
    if has_valid_store:
        heldout = TokenStore.open(out / STORE_FOLDER / "valid")
    elif job.is_running_text:
        head, tail = store.split_tail(min(HOLDOUT_FRACTION, MAX_HELDOUT_TOKENS / len(store[field].tokens)))
        if len(tail[field].tokens) > resolved_job.max_length:
            store, heldout = head, tail
    elif len(store) >= 2 * HOLDOUT_INTERVAL:
        num_heldout = min(len(store) // HOLDOUT_INTERVAL, MAX_HELDOUT_RECORDS)
        store, heldout = store.split_random(num_heldout, resolved_job.recipe.seed)
    layout: BucketedLayout | PackedLayout | WindowLayout
    if job.is_running_text:
        layout = WindowLayout(resolved_job.max_length)
    elif resolved_job.pack:
        layout = PackedLayout(max(resolved_job.max_length, min(128, resolved_job.micro_tokens)))
    else:
        multiple = resolved_job.pad_to_multiple_of
        layout = BucketedLayout(multiple, fixed_height=multiple > 1)
    training = Batches(
        store,
        batch_objective,
        layout,
        resolved_job.micro_tokens,
        resolved_job.accumulate,
        resolved_job.recipe.seed,
        rank=distributed.rank,
        world_size=distributed.world_size,
    )
    validation = None
    if heldout is not None:
        validation = replace(training, store=heldout, accumulate=1, shuffle=False, rank=0, world_size=1)
    return JobBatches(training, validation, job.is_running_text, is_held_out=not has_valid_store)
