"""keepleft eval"""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

from keepleft.cli import text_io
from keepleft.cli.paths import model_path
from keepleft.cli.progress import Bar
from keepleft.decoding.generation_config import GenerationConfig


def evaluate_model(
    inputs: list[str],
    options: GenerationConfig,
    task: Literal["translate", "summarize", "classify", "lm"] | None = None,
    baseline: str | None = None,
    to: str | None = None,
    tag: str | None = None,
    limit: int | None = None,
    fail_under: float | None = None,
    ensemble_average: Literal["probabilities", "logprobs"] = "probabilities",
    revision: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16", "int8"] = "float32",
    device: str | None = None,
    json: bool = False,
) -> int:
    """Evaluate a model on reference data, alone or against a baseline.

    BLEU and chrF for translations, ROUGE for summaries, accuracy for labels, perplexity for text.

    Args:
        inputs: a model, then a table (source and target, or text and label), two files, or a text. A table
            is TSV, CSV or JSONL; two files are aligned line by line; a text is for a language model
        task: translate, summarize, classify or lm, if the model does not determine it. Summaries are scored
            by ROUGE
        baseline: another model, or a file with the output of another system. Tests whether the difference is
            significant
        to: the language to write, for a multilingual model, such as fr. Texts are prepared as in
            `keepleft translate --to`: cut into sentences, with placeholders for what is copied
        tag: instead of --to, the language tag as a token of the model, such as '<2fr>'. Each text goes to the
            model as it is
        limit: use at most this many texts
        ensemble_average: several models, MODEL1,MODEL2, are decoded together: by the mean of their
            probabilities, or of their logarithms
        fail_under: exit with code 1 if the first metric is worse than this
        revision: the branch, tag or commit of a model on the hub; MODEL@REVISION does the same
        dtype: data type of the weights: float32, bfloat16, float16, or int8 on CPUs. With int8, the
            scores are compared with those of float32
        device: cpu or cuda; a GPU is used if there is one
        json: print one JSON object
    """
    from keepleft.pipelines.evaluation import evaluate

    model, data = text_io.split_model_and_texts(inputs, require_model=True)
    if not data:
        raise ValueError("say what to evaluate on: a table, two files, or a text, after the model")
    with Bar("texts", None) as bar:
        result = evaluate(
            model_path(str(model), revision),
            data,
            task=task,
            baseline=baseline and model_path(baseline),
            options=options,
            dtype=dtype,
            device=device,
            to=to,
            tag=tag,
            limit=limit,
            ensemble_average=ensemble_average,
            on_progress=lambda done, total: bar.update(done, f"of {total}"),
        )
    if json:
        print(text_io.as_json(asdict(result)))
    else:
        unit = "token" if result.task == "lm" else "text"
        print(f"{result.count:,} {unit}{'' if result.count == 1 else 's'}")
        for name, value in result.measures.items():
            signature = result.signatures.get(name)
            print(f"{name:18} {value:10.4f}" + (f"  {signature}" if signature else ""))
        for verdict in result.verdicts:
            print(verdict)
    name, value = next(iter(result.measures.items()))
    if fail_under is None:
        return 0
    worse = value > fail_under if name == "perplexity" else value < fail_under
    return 1 if worse else 0
