"""keepleft classify, fill, score, embed"""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING, Literal

from keepleft.cli import text_io
from keepleft.cli.batch_jobs import BatchFlags, is_batch_job, refuse_batch_size, run_batch_job
from keepleft.cli.paths import model_path
from keepleft.cli.progress import Bar

if TYPE_CHECKING:
    from keepleft.batch.tasks import TaskName

Dtype = Literal["float32", "bfloat16", "float16"]
DEFAULT_BATCH_SIZE = 32


def classify(
    inputs: list[str],
    input: str | None = None,
    output: str | None = None,
    batch_size: int | None = None,
    revision: str | None = None,
    dtype: Dtype = "float32",
    device: str | None = None,
    json: bool = False,
    job: BatchFlags = BatchFlags(),  # noqa: B008 (it is frozen)
) -> int:
    """Label texts with a classifier, such as one that `keepleft train --task classify` made.

    Prints the likeliest label of each text, and its probability.

    Args:
        inputs: a model (a folder, a GGUF file, an installed one, a name on the hub), then texts
        input: a file of texts, one per line. A batch job takes several, as in 'texts/*.jsonl'
        output: a file for the results. It is written completely or not at all. A batch job writes a folder
        batch_size: texts in a batch (default: 32)
        revision: the branch, tag or commit of a model on the hub; MODEL@REVISION does the same
        dtype: data type of the weights: float32, bfloat16 or float16
        device: cpu or cuda; a GPU is used if there is one
        json: print one JSON object per line, with the probability of every label
    """
    from keepleft.pipelines.predictor import load_predictor

    model, input_texts = text_io.split_model_and_texts(inputs, require_model=True)
    if is_batch_job(input, output, job):
        refuse_batch_size(batch_size)
        return _run_job("classify", str(model), input_texts, input, output, revision, dtype, device, job)
    predictor = load_predictor(model_path(str(model), revision), dtype=dtype, device=device)
    interactive = text_io.reads_terminal(input_texts, input)
    with (
        text_io.open_output(output) as out,
        Bar("texts", len(input_texts) or None, reads_terminal=interactive) as bar,
    ):
        done = 0
        lines = text_io.read_lines(input_texts, input)
        for batch in text_io.in_batches(lines, 1 if interactive else _resolve_batch_size(batch_size)):
            rows = predictor.classify(batch).tolist()
            labels = predictor.labels
            for text, row in zip(batch, rows, strict=True):
                best = max(range(len(row)), key=row.__getitem__)
                if json:
                    probabilities = {
                        label: round(probability, 6) for label, probability in zip(labels, row, strict=True)
                    }
                    record = {"input": text, "label": labels[best], "probabilities": probabilities}
                    print(text_io.as_json(record), file=out)
                else:
                    print(f"{labels[best]}\t{row[best]:.4f}", file=out)
            out.flush()
            done += len(batch)
            bar.update(done, "")
    return 0


def fill(
    inputs: list[str],
    input: str | None = None,
    count: int = 5,
    revision: str | None = None,
    dtype: Dtype = "float32",
    device: str | None = None,
    json: bool = False,
) -> int:
    """Predict the masked tokens of a text, with a masked language model (BERT).

    Write the mask token of the model, [MASK] or <mask>, where a word is missing.

    Args:
        inputs: a model (a folder, a GGUF file, an installed one, a name on the hub), then texts with mask
            tokens in them. Without texts, the lines of --input or of a pipe
        input: a file of texts, one per line
        count: how many of the likeliest tokens to print
        revision: the branch, tag or commit of a model on the hub; MODEL@REVISION does the same
        dtype: data type of the weights: float32, bfloat16 or float16
        device: cpu or cuda; a GPU is used if there is one
        json: print one JSON object per line
    """
    from keepleft.pipelines.predictor import load_predictor

    model, input_texts = text_io.split_model_and_texts(inputs, require_model=True)
    predictor = load_predictor(model_path(str(model), revision), dtype=dtype, device=device)
    for text in text_io.read_lines(input_texts, input):
        gaps = predictor.fill(text, count)
        if json:
            gap_records = [
                [{"text": token_text, "probability": round(value, 6)} for token_text, value in gap]
                for gap in gaps
            ]
            print(text_io.as_json({"input": text, "gaps": gap_records}), flush=True)
        else:
            for gap in gaps:
                print("  ".join(f"{token_text} {value:.3f}" for token_text, value in gap), flush=True)
    return 0


def score(
    inputs: list[str],
    input: str | None = None,
    output: str | None = None,
    revision: str | None = None,
    dtype: Dtype = "float32",
    device: str | None = None,
    tokens: bool = False,
    json: bool = False,
    job: BatchFlags = BatchFlags(),  # noqa: B008 (it is frozen)
) -> int:
    """Score texts: their log-probability, and the perplexity per token.

    Without texts, it reads the lines of --input or of a pipe.

    Args:
        inputs: a model (a folder, a GGUF file, an installed one, a name on the hub), then texts. For an
            encoder-decoder, source and target separated by a tab
        input: a file of texts, one per line. A batch job takes several, as in 'texts/*.jsonl'
        output: a file for the results. It is written completely or not at all. A batch job writes a folder
        revision: the branch, tag or commit of a model on the hub; MODEL@REVISION does the same
        dtype: data type of the weights: float32, bfloat16 or float16
        device: cpu or cuda; a GPU is used if there is one
        tokens: print every token, in quotes, and its log-probability
        json: print one JSON object per line
    """
    from keepleft.data.token_text import token_pieces
    from keepleft.pipelines.predictor import load_predictor

    model, input_texts = text_io.split_model_and_texts(inputs, require_model=True)
    if is_batch_job(input, output, job):
        if tokens:
            raise ValueError("--tokens is not for batch jobs: leave it out, or give one file of texts")
        return _run_job("score", str(model), input_texts, input, output, revision, dtype, device, job)
    predictor = load_predictor(model_path(str(model), revision), dtype=dtype, device=device)
    with text_io.open_output(output) as out:
        for n, line in enumerate(text_io.read_lines(input_texts, input)):
            source, text = predictor.split_source(line, f"line {n + 1}")
            scored_tokens = predictor.score(text, source)
            total = sum(entry.logprob for entry in scored_tokens)
            perplexity = exp(min(700.0, -total / max(1, len(scored_tokens))))
            pieces = token_pieces(predictor.tokenizer, [entry.token for entry in scored_tokens])
            token_logprobs = [
                (piece, round(entry.logprob, 4)) for piece, entry in zip(pieces, scored_tokens, strict=True)
            ]
            if json:
                record = {
                    "input": line,
                    "logprob": round(total, 6),
                    "perplexity": round(perplexity, 4),
                    "tokens": [{"token": token, "logprob": logprob} for token, logprob in token_logprobs],
                }
                print(text_io.as_json(record), file=out, flush=True)
            else:
                columns = [f"{total:.4f}", f"{perplexity:.4f}"]
                if tokens:
                    columns.append(
                        " ".join(f"{text_io.quote(token)} {logprob}" for token, logprob in token_logprobs)
                    )
                print("\t".join(columns), file=out, flush=True)
    return 0


def embed(
    inputs: list[str],
    input: str | None = None,
    output: str | None = None,
    batch_size: int | None = None,
    revision: str | None = None,
    dtype: Dtype = "float32",
    device: str | None = None,
    json: bool = False,
    job: BatchFlags = BatchFlags(),  # noqa: B008 (it is frozen)
) -> int:
    """Embed texts: print one vector for each, by the model's pooling or the mean of its hidden states.

    Texts beyond the model's positions are cut.

    Args:
        inputs: a model (a folder, a GGUF file, an installed one, a name on the hub), then texts
        input: a file of texts, one per line. A batch job takes several, as in 'texts/*.jsonl'
        output: a file for the results. It is written completely or not at all. A batch job writes a folder
        batch_size: texts in a batch (default: 32)
        revision: the branch, tag or commit of a model on the hub; MODEL@REVISION does the same
        dtype: data type of the weights: float32, bfloat16 or float16
        device: cpu or cuda; a GPU is used if there is one
        json: print one JSON object per line, with the text
    """
    from keepleft.pipelines.predictor import load_predictor

    model, input_texts = text_io.split_model_and_texts(inputs, require_model=True)
    if is_batch_job(input, output, job):
        refuse_batch_size(batch_size)
        return _run_job("embed", str(model), input_texts, input, output, revision, dtype, device, job)
    predictor = load_predictor(model_path(str(model), revision), dtype=dtype, device=device)
    with (
        text_io.open_output(output) as out,
        Bar(
            "texts", len(input_texts) or None, reads_terminal=text_io.reads_terminal(input_texts, input)
        ) as bar,
    ):
        done = 0
        for batch in text_io.in_batches(
            text_io.read_lines(input_texts, input), _resolve_batch_size(batch_size)
        ):
            for text, vector in zip(batch, predictor.embed(predictor.encode(batch)).tolist(), strict=True):
                numbers = [round(value, 6) for value in vector]
                record = {"input": text, "embedding": numbers}
                print(text_io.as_json(record) if json else "\t".join(map(str, numbers)), file=out)
            done += len(batch)
            bar.update(done, "")
    return 0


def _resolve_batch_size(batch_size: int | None) -> int:
    if batch_size is None:
        return DEFAULT_BATCH_SIZE
    if batch_size < 1:
        raise ValueError(f"--batch-size is {batch_size}: give at least 1")
    return batch_size


def _run_job(
    task: TaskName,
    model: str,
    texts: list[str],
    input: str | None,
    output: str | None,
    revision: str | None,
    dtype: Dtype,
    device: str | None,
    job: BatchFlags,
) -> int:
    from keepleft.batch.tasks import TaskSpec

    spec = TaskSpec(task=task, model=model_path(model, revision), dtype=dtype, device=device)
    return run_batch_job(spec, texts, input, output, job)
