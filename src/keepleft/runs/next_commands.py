"""The commands to try next on a trained model, ready to be pasted into a shell."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np

from keepleft.data.batches import Batches
from keepleft.data.tokenizer import special_tokens
from keepleft.runs.data_files import is_local_file
from keepleft.runs.dataset import Tokenizers, is_plain_text
from keepleft.runs.job import DataConfig, TrainJob
from keepleft.runs.job_batches import JobBatches

MAX_EXAMPLE_WORDS = 12
EXAMPLE_TOKENS = 256  # of running text
MAX_PROMPT_WORDS = 5  # of a line, for a language model to continue
CANDIDATE_RECORDS = 100  # among which an example is looked for
USE_COMMANDS = {
    "translate": "translate",
    "summarize": "summarize",
    "lm": "generate",
    "classify": "classify",
    "mlm": "fill",
}


def next_commands(job: TrainJob, model_folder: Path, example: str) -> list[str]:
    """Three commands: use the model, evaluate or audit it, look inside it. `example` is a text for it."""
    model = shlex.quote(str(model_folder))
    text = shlex.quote(example)
    html = shlex.quote(str(model_folder.parent / "attention.html"))
    commands = [f"keepleft audit {model}"]
    if evaluation := _evaluation_command(job, model):
        commands = [evaluation]
    if command := use_command(job, str(model_folder), example):
        commands.insert(0, command)
    else:  # a model to be trained further
        commands.append(f"keepleft push {model} OWNER/NAME --dry-run")
    source = "--source " if job.task in ("translate", "summarize", "span", "denoise") else ""
    language = source and _language_option(job.train)
    return [*commands, f"keepleft show {model} {source}{text}{language} --html {html}"]


def use_command(job: TrainJob, model: str, example: str) -> str | None:
    """The command that uses a model for its task; None for one that is made to be trained further."""
    if job.task not in USE_COMMANDS:
        return None
    name = USE_COMMANDS[job.task]
    option = _language_option(job.train) if job.task == "translate" else ""
    return f"keepleft {name} {shlex.quote(model)} {shlex.quote(example)}{option or _tag_option(job.train)}"


def example_text(job: TrainJob, batches: JobBatches, tokenizers: Tokenizers) -> str:
    """A short text of the validation data, or of the training data if there are none."""
    data = batches.validation or batches.training
    if batches.is_running_text:
        tokens = data.store[data.objective.fields[0]].tokens[:EXAMPLE_TOKENS].tolist()
        return line_beginning(tokenizers.target.decode(tokens)) or "The"
    words = _short_record(data, tokenizers).split()[:MAX_EXAMPLE_WORDS]
    mask = special_tokens(tokenizers.target).mask
    if job.task == "mlm" and mask is not None:
        words[len(words) // 2 : len(words) // 2 + 1] = [tokenizers.target.id_to_token(mask) or ""]
    return " ".join(words) or "Hello"


def line_beginning(text: str) -> str:
    """The first words of a line, of a text that begins and ends anywhere; it may be all one line."""
    words = text.split()
    best = words[1:-1][:MAX_PROMPT_WORDS]  # the first and the last may be parts of words
    lines = text.split("\n")[1:]
    if lines and not text.endswith("\n"):
        lines[-1] = " ".join(lines[-1].split()[:-1])
    for line in lines:
        if len(line_words := line.split()) >= 2:
            best = line_words[:MAX_PROMPT_WORDS]
            break
    return " ".join(best)


def _short_record(data: Batches, tokenizers: Tokenizers) -> str:
    """The first text of a few words; any text if there is none."""
    field = data.objective.fields[0]
    tokenizer = tokenizers.source if field == "src" else tokenizers.target
    rows = np.arange(min(CANDIDATE_RECORDS, len(data.store)))
    texts = [tokenizer.decode(tokens) for tokens in data.store[field].take(rows).to_lists()]
    short_texts = [text for text in texts if 3 <= len(text.split()) <= MAX_EXAMPLE_WORDS]
    return next(iter([*short_texts, *texts]), "")


def _tag_option(data: DataConfig | str | list[DataConfig]) -> str:
    config = data[0] if isinstance(data, list) else data
    tag = config.tag if isinstance(config, DataConfig) else None
    return "" if tag is None else f" --tag {shlex.quote(tag)}"


def _language_option(data: DataConfig | str | list[DataConfig]) -> str:
    """The option --to, where the tag of the data is one of a language: <2fr>."""
    tag = re.fullmatch(r" --tag '<2(\w+)>'", _tag_option(data))
    return "" if tag is None else f" --to {tag[1]}"


def _evaluation_command(job: TrainJob, model: str) -> str | None:
    """`keepleft eval` on the validation data; None where it does not read them, or there are none."""
    config = job.valid[0] if isinstance(job.valid, list) else job.valid
    if isinstance(config, str):
        config = DataConfig(path=config)
    if (
        config is None
        or config.columns is not None
        or job.task not in ("translate", "summarize", "lm", "classify")
    ):
        return None
    files = [config.path] if config.src is None or config.tgt is None else [config.src, config.tgt]
    if not all(file is not None and is_local_file(file) for file in files):
        return None
    if job.task == "lm" and not is_plain_text(str(files[0])):
        return None
    paths = " ".join(shlex.quote(str(file)) for file in files)
    task = " --task summarize" if job.task == "summarize" else ""
    option = _language_option(config) if job.task == "translate" else ""
    return f"keepleft eval {model} {paths}{task}{option or _tag_option(config)}"
