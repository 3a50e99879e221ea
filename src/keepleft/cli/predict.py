"""keepleft classify, fill, score"""

from __future__ import annotations

from math import exp
from typing import Literal

from keepleft.cli import text_io
from keepleft.cli.progress import Bar

Dtype = Literal["float32", "bfloat16", "float16"]


def classify(
    inputs: list[str],
    input: str | None = None,
    output: str | None = None,
    batch_size: int = 32,
    dtype: Dtype = "float32",
    device: str | None = None,
    json: bool = False,
) -> int:
    """Say which label a text has.

    Args:
        inputs: a model, then texts; without texts the lines of --input or of stdin
        input: a file of texts, a line each
        output: a file for the results, written whole or not at all
        batch_size: texts that are judged together
        dtype: how weights are kept
        device: cpu or cuda; a GPU is used where there is one
        json: an object a line, with the probability of every label
    """
    from keepleft.pipelines.predictor import load_predictor

    model, input_texts = text_io.split_model_and_texts(inputs, require_model=True)
    predictor = load_predictor(str(model), dtype=dtype, device=device)
    with text_io.open_output(output) as out, Bar("texts", len(input_texts) or None) as bar:
        done = 0
        for batch in text_io.in_batches(text_io.read_lines(input_texts, input), batch_size):
            for text, row in zip(batch, predictor.classify(batch).tolist(), strict=True):
                best = max(range(len(row)), key=row.__getitem__)
                if json:
                    probabilities = {
                        label: round(value, 6) for label, value in zip(predictor.labels, row, strict=True)
                    }
                    print(
                        text_io.as_json(
                            {"input": text, "label": predictor.labels[best], "probabilities": probabilities}
                        ),
                        file=out,
                    )
                else:
                    print(f"{predictor.labels[best]}\t{row[best]:.4f}", file=out)
            out.flush()
            done += len(batch)
            bar.update(done, "")
    return 0


def fill(
    inputs: list[str],
    input: str | None = None,
    count: int = 5,
    dtype: Dtype = "float32",
    device: str | None = None,
    json: bool = False,
) -> int:
    """Say what fits in the gap of a text, with a model that was trained to (BERT).

    Args:
        inputs: a model, then texts with the tokenizer's mask ([MASK], <mask>) where something is missing; without texts the
            lines of --input or of stdin
        input: a file of texts, a line each
        count: so many of the likeliest
        dtype: how weights are kept
        device: cpu or cuda; a GPU is used where there is one
        json: an object a line

    """
    from keepleft.pipelines.predictor import load_predictor

    model, input_texts = text_io.split_model_and_texts(inputs, require_model=True)
    predictor = load_predictor(str(model), dtype=dtype, device=device)
    for text in text_io.read_lines(input_texts, input):
        gaps = predictor.fill(text, count)
        if json:
            print(
                text_io.as_json(
                    {
                        "input": text,
                        "gaps": [
                            [
                                {"text": token_text, "probability": round(value, 6)}
                                for token_text, value in gap
                            ]
                            for gap in gaps
                        ],
                    }
                ),
                flush=True,
            )
        else:
            for gap in gaps:
                print("  ".join(f"{token_text} {value:.3f}" for token_text, value in gap), flush=True)
    return 0


def score(
    inputs: list[str],
    input: str | None = None,
    output: str | None = None,
    dtype: Dtype = "float32",
    device: str | None = None,
    tokens: bool = False,
    json: bool = False,
) -> int:
    """Say how likely texts are: their log-probability, and the perplexity of a token.

    Args:
        inputs: a model, then texts; an encoder-decoder takes source and target with a tab between them; without texts the lines
            of --input or of stdin
        input: a file of texts, a line each
        output: a file for the results, written whole or not at all
        dtype: how weights are kept
        device: cpu or cuda; a GPU is used where there is one
        tokens: show the log-probability of every token
        json: an object a line

    """
    from keepleft.pipelines.predictor import load_predictor

    model, input_texts = text_io.split_model_and_texts(inputs, require_model=True)
    predictor = load_predictor(str(model), dtype=dtype, device=device)
    is_encoder_decoder = predictor.model.design.is_encoder_decoder
    with text_io.open_output(output) as out:
        for n, line in enumerate(text_io.read_lines(input_texts, input)):
            source, tab, text = line.partition("\t") if is_encoder_decoder else (None, "\t", line)
            if not tab:
                raise ValueError(f"line {n + 1} has no tab: write source and target with a tab between them")
            token_logprobs = predictor.score(text, source)
            total = sum(entry.logprob for entry in token_logprobs)
            perplexity = exp(min(700.0, -total / max(1, len(token_logprobs))))
            token_scores = [
                (predictor.tokenizer.id_to_token(entry.token), round(entry.logprob, 4))
                for entry in token_logprobs
            ]
            if json:
                token_records = [
                    {"token": token_text, "logprob": value} for token_text, value in token_scores
                ]
                print(
                    text_io.as_json(
                        {
                            "input": line,
                            "logprob": round(total, 6),
                            "perplexity": round(perplexity, 4),
                            "tokens": token_records,
                        }
                    ),
                    file=out,
                    flush=True,
                )
            else:
                suffix = (
                    "\t" + " ".join(f"{token_text} {value}" for token_text, value in token_scores)
                    if tokens
                    else ""
                )
                print(f"{total:.4f}\t{perplexity:.4f}{suffix}", file=out, flush=True)
    return 0
