"""keepleft train"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any, Literal

from keepleft.runs.job import Batching, Job, Size, Task, Texts, Wishes, Words, read


def teach(task: Task | None = None, train: Texts | str | list[Texts] | None = None,
          valid: Texts | str | list[Texts] | None = None, out: str | None = None, size: Size = "small",
          start: str | None = None, like: str | None = None, design: dict[str, Any] | None = None, words: Words = Words(),  # noqa: B008
          batch: Batching = Batching(), recipe: Wishes = Wishes(), lora: int = 0, last: int = 0,  # noqa: B008
          parallel: Literal["ddp", "fsdp"] | None = None, device: str | None = None, board: bool = False,
          resume: bool = False, no_audit: bool = False, said: frozenset[str] = frozenset()) -> int:
    """Train a model from plain files: translate, summarize, lm, classify, mlm, span, denoise.

    Args:
        task: what the model shall do: translate and summarize read pairs; lm, mlm (BERT), span (T5) and denoise (BART) read
            texts; classify reads texts and labels
        train: the training texts. A file (.txt .tsv .csv .jsonl .parquet, or .gz of these), "-" for stdin, or hf:NAME for a
            Hugging Face dataset; or two line-aligned files, --train.src a.en --train.tgt a.fr. With a table,
            --train.columns '[text, summary]' names its columns, in the order of the task's fields; --train.tag '<2fr>' puts a
            language tag before each source, so that one model can write several languages
        valid: texts to evaluate on, given like --train (--valid.src, --valid.tgt, --valid.columns, --valid.tag); without them
            a part of the training texts is held out
        out: the run directory; runs/TASK unless given. --resume finds the run by it, or by --task
        size: how large a model, if nothing else is said: tiny, small or base
        start: a model directory to go on from, instead of fresh weights
        like: the preset whose plan the model follows (gpt2, llama3, t5, bart, marian, bert, …)
        design: choices of the model's design: --design.dim 256 --design.layers 4 --design.dropout 0.2
        words: the tokenizer
        batch: how texts become batches
        recipe: how the weights change
        lora: train only small matrices of this rank beside the weights, and fold them in at the end; 0: train all weights
        last: keep the mean of the weights of so many last checkpoints; 0: keep the best checkpoint
        parallel: with several processes (torchrun), ddp copies the model to each and fsdp shards it
        device: cpu or cuda; None: a GPU if there is one
        board: write TensorBoard files too
        resume: go on with the run in --out, exactly where it was
        no_audit: do not look for leaks before the first step
    """
    from keepleft.cli.show import Progress
    from keepleft.runs.resume import resumed
    from keepleft.runs.settle import CONFIG
    from keepleft.runs.train import run

    place = _place(out, task, resume)
    given = dict(task=task, train=train, valid=valid, size=size, start=start, like=like, design=design or {}, words=words,
                 batch=batch, recipe=recipe, lora=lora, last=last, parallel=parallel, device=device, board=board,
                 audit=not no_audit)
    if resume and (place / CONFIG).exists():
        job = resumed(read((place / CONFIG).read_text("utf-8"), str(place / CONFIG)), given, said, place)
    elif resume and (task is None or train is None):
        raise FileNotFoundError(f"there is no run to go on with in {place}: {CONFIG} is missing; give --task and --train to "
                                "begin one")
    elif task is None or train is None:
        raise ValueError("say what to do and from which texts: keepleft train --task translate --train.src a.en --train.tgt "
                         "a.fr, --task lm --train corpus.txt, or --task classify --train data.tsv")
    else:
        job = Job(**given, out=str(place))  # type: ignore[arg-type]
    asked = _Asked()
    with Progress() as progress:

        def watch(what: str, done: int, total: int | None) -> None:
            if asked():
                raise KeyboardInterrupt
            progress.watch(what, done, total)

        for event in run(job, resume=resume, stop=asked, watch=watch):
            progress.show(event)
    return 130 if asked() else 0


def _place(out: str | None, task: str | None, resume: bool) -> Path:
    """Where the run is, or shall be."""
    if out is None and task is None and resume:
        there = [str(path.parent) for path in sorted(Path("runs").glob("*/config.yaml"))]
        raise ValueError("say which run shall go on: --out DIR, or --task for the one in runs/TASK"
                         + (f"; there are {', '.join(there)}" if there else ""))
    return Path(out or f"runs/{task}")


class _Asked:
    """Has someone asked to stop? SIGTERM and Ctrl-C do; a second Ctrl-C does not wait for the end of the step."""

    def __init__(self) -> None:
        self.asked = False
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._ask)

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
        print("stopping", file=sys.stderr)

    def __call__(self) -> bool:
        return self.asked
