"""keepleft train"""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from keepleft.runs.job import (
    BatchConfig,
    DataConfig,
    RecipeOverrides,
    Size,
    TaskName,
    TokenizerConfig,
    TrainJob,
    from_yaml,
)


def train_model(
    task: TaskName | None = None,
    train: DataConfig | str | list[DataConfig] | None = None,
    valid: DataConfig | str | list[DataConfig] | None = None,
    out: str | None = None,
    size: Size = "small",
    init_from: str | None = None,
    revision: str | None = None,
    preset: str | None = None,
    design: dict[str, Any] | None = None,
    tokenizer: TokenizerConfig = TokenizerConfig(),  # noqa: B008 (it is frozen)
    batch: BatchConfig = BatchConfig(),  # noqa: B008
    recipe: RecipeOverrides = RecipeOverrides(),  # noqa: B008
    lora: int = 0,
    average_last: int = 0,
    minutes: float | None = None,
    parallel: Literal["ddp", "fsdp"] | None = None,
    device: str | None = None,
    track: str | list[str] | None = None,
    tensorboard: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    no_audit: bool = False,
    explicit_options: frozenset[str] = frozenset(),
) -> int:
    """Train a model on your own files, check it for leaks, and save it in runs/TASK/model.

    What --size and the options leave open is chosen from the data.

    Args:
        task: translate, summarize, lm, classify, mlm, span or denoise (required unless --resume). Pairs are
            read by translate and summarize, texts by lm, mlm (BERT), span (T5) and denoise (BART), texts with
            labels by classify
        train: training data: a file of texts, of pairs, or of texts and labels (required unless --resume). A
            .txt .tsv .csv .jsonl or .parquet file, or .gz of these, "-" for stdin, or hf:NAME for a Hugging
            Face dataset; or two line-aligned files, --train.src a.en --train.tgt a.fr. With a table,
            --train.columns '[text, summary]' names its columns, in the order of the task's fields;
            --train.tag '<2fr>' puts a language tag before each source, so that one model can generate
            several languages
        valid: validation data, given like --train. If not given, a part of the training data is held out
        out: the run directory (default: runs/TASK). --resume finds the run by it, or by --task
        size: the size of the model. --design changes single fields of it
        init_from: a model to start from instead of random weights: a folder, a GGUF file, an installed
            one, a name on the hub
        revision: the branch, tag or commit of --init-from on the hub; NAME@REVISION does the same. The run
            records the commit, and resumes from it
        preset: the published model whose design to use: gpt2, llama3, t5, marian, bert, …
        design: fields of the model's design. Usually one by one: --design.dim 256 --design.layers 4
        tokenizer: tokenizer
        batch: batches
        recipe: optimizer, schedule and checkpoints
        lora: train LoRA matrices of this rank and merge them at the end; 0: train all weights
        average_last: save the average of this many of the last checkpoints; 0: save the best checkpoint
        minutes: plan a run of about this time: a few steps are timed, and the number of steps and the
            schedule are chosen to fit. A machine that becomes slower takes longer. There are never more steps
            than the data is good for. The plan gives the number; --recipe.steps with it repeats the run
        parallel: with several processes (torchrun), ddp copies the model to each and fsdp shards it
        device: cpu or cuda; a GPU is used if there is one
        track: trackers to send the metrics to, besides metrics.jsonl: tensorboard, wandb, mlflow, trackio;
            several are separated by commas
        tensorboard: the same as --track tensorboard
        resume: continue the run in --out, exactly where it stopped
        dry_run: prepare the data in a temporary folder, print the plan (data, model, steps, expected time,
            files), and stop
        no_audit: skip the audit for leaks before the first step
    """
    start_time = time.monotonic()  # importing PyTorch takes its share of --minutes
    from keepleft.cli.paths import model_path
    from keepleft.cli.progress import Progress
    from keepleft.runs.prepare import CONFIG_FILE
    from keepleft.runs.resume import resume_job
    from keepleft.runs.train import plan_job, run_job

    run_folder = _run_folder(out, task, resume)
    if revision is not None and init_from is None:
        raise ValueError(f"--revision is {revision!r}, of which model? Name it with --init-from")
    init_from = init_from and model_path(init_from, revision)
    tokenizer = replace(
        tokenizer,
        path=tokenizer.path and model_path(tokenizer.path),
        source_path=tokenizer.source_path and model_path(tokenizer.source_path),
    )
    track_names = [name for text in _as_list(track) for name in text.replace(",", " ").split()]
    if tensorboard:
        track_names = list(dict.fromkeys([*track_names, "tensorboard"]))
        explicit_options |= {"track"}
    job_fields = dict(
        task=task,
        train=train,
        valid=valid,
        size=size,
        init_from=init_from,
        preset=preset,
        design=design or {},
        tokenizer=tokenizer,
        batch=batch,
        recipe=recipe,
        lora=lora,
        average_last=average_last,
        minutes=minutes,
        parallel=parallel,
        device=device,
        track=track_names,
        audit=not no_audit,
    )
    if resume and (run_folder / CONFIG_FILE).exists():
        job = resume_job(
            from_yaml((run_folder / CONFIG_FILE).read_text("utf-8"), str(run_folder / CONFIG_FILE)),
            job_fields,
            explicit_options,
            run_folder,
        )
    elif resume and (task is None or train is None):
        raise FileNotFoundError(
            f"there is no run to resume in {run_folder}: {CONFIG_FILE} is missing; give --task and --train "
            "to start one"
        )
    elif task is None or train is None:
        raise ValueError(
            "say what to do and from which data: keepleft train --task translate --train.src a.en "
            "--train.tgt a.fr, --task lm --train corpus.txt, or --task classify --train data.tsv"
        )
    else:
        job = TrainJob(**job_fields, out=str(run_folder))  # type: ignore[arg-type]
    stop_signal = _StopSignal()
    with Progress() as progress:

        def watch(label: str, done: int, total: int | None) -> None:
            if stop_signal():
                raise KeyboardInterrupt
            progress.watch(label, done, total)

        if dry_run:
            for planned in plan_job(job, resume=resume, on_progress=watch):
                progress.show(planned)
            return 0
        events = run_job(job, resume=resume, stop=stop_signal, on_progress=watch, start_time=start_time)
        for event in events:
            progress.show(event)
    return 130 if stop_signal() else 0


def _as_list(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


def _run_folder(out: str | None, task: str | None, resume: bool) -> Path:
    """The folder of the run, new or to be resumed."""
    if out is None and task is None and resume:
        run_folders = [str(path.parent) for path in sorted(Path("runs").glob("*/config.yaml"))]
        raise ValueError(
            "say which run to resume: --out DIR, or --task for the one in runs/TASK"
            + (f"; there are {', '.join(run_folders)}" if run_folders else "")
        )
    return Path(out or f"runs/{task}")


class _StopSignal:
    """True after SIGTERM or Ctrl-C. A second Ctrl-C does not wait for the end of the step."""

    def __init__(self) -> None:
        self.requested = False
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, self._on_signal)

    def _on_signal(self, signal_number: int, frame: Any) -> None:
        if self.requested and signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        print("stopping", file=sys.stderr)

    def __call__(self) -> bool:
        return self.requested
