"""keepleft classify, fill, score"""

from __future__ import annotations

from math import exp
from typing import Literal

from keepleft.cli import texts
from keepleft.cli.show import Bar

Dtype = Literal["float32", "bfloat16", "float16"]


def classify(inputs: list[str], input: str | None = None, output: str | None = None, batch_size: int = 32,
             dtype: Dtype = "float32", device: str | None = None, json: bool = False) -> int:
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
    from keepleft.runs.judging import judge

    place, given = texts.divided(inputs, need=True)
    found = judge(str(place), dtype=dtype, device=device)
    with texts.delivered(output) as out, Bar("texts", len(given) or None) as bar:
        done = 0
        for batch in texts.in_batches(texts.lines(given, input), batch_size):
            for text, row in zip(batch, found.classify(batch).tolist(), strict=True):
                best = max(range(len(row)), key=row.__getitem__)
                if json:
                    chances = {label: round(value, 6) for label, value in zip(found.labels, row, strict=True)}
                    print(texts.as_json({"input": text, "label": found.labels[best], "probabilities": chances}), file=out)
                else:
                    print(f"{found.labels[best]}\t{row[best]:.4f}", file=out)
            out.flush()
            done += len(batch)
            bar.at(done, "")
    return 0


def fill(inputs: list[str], input: str | None = None, count: int = 5, dtype: Dtype = "float32", device: str | None = None,
         json: bool = False) -> int:
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
    from keepleft.runs.judging import judge

    place, given = texts.divided(inputs, need=True)
    found = judge(str(place), dtype=dtype, device=device)
    for text in texts.lines(given, input):
        gaps = found.fill(text, count)
        if json:
            print(texts.as_json({"input": text, "gaps": [[{"text": word, "probability": round(value, 6)} for word, value in gap]
                                                         for gap in gaps]}), flush=True)
        else:
            for gap in gaps:
                print("  ".join(f"{word} {value:.3f}" for word, value in gap), flush=True)
    return 0


def score(inputs: list[str], input: str | None = None, output: str | None = None, dtype: Dtype = "float32",
          device: str | None = None, tokens: bool = False, json: bool = False) -> int:
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
    from keepleft.runs.judging import judge

    place, given = texts.divided(inputs, need=True)
    found = judge(str(place), dtype=dtype, device=device)
    pair = found.model.design.encoder is not None
    with texts.delivered(output) as out:
        for n, line in enumerate(texts.lines(given, input)):
            source, tab, text = line.partition("\t") if pair else (None, "\t", line)
            if not tab:
                raise ValueError(f"line {n + 1} has no tab: write source and target with a tab between them")
            thoughts = found.score(text, source)
            total = sum(thought.logprob for thought in thoughts)
            mean = exp(min(700.0, -total / max(1, len(thoughts))))
            each = [(found.tokenizer.id_to_token(thought.token), round(thought.logprob, 4)) for thought in thoughts]
            if json:
                parts = [{"token": word, "logprob": value} for word, value in each]
                print(texts.as_json({"input": line, "logprob": round(total, 6), "perplexity": round(mean, 4), "tokens": parts}),
                      file=out, flush=True)
            else:
                shown = "\t" + " ".join(f"{word} {value}" for word, value in each) if tokens else ""
                print(f"{total:.4f}\t{mean:.4f}{shown}", file=out, flush=True)
    return 0
