"""keepleft eval"""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

from keepleft.cli import text_io
from keepleft.cli.progress import Bar
from keepleft.decoding.generation_config import GenerationConfig


def evaluate(
    inputs: list[str],
    options: GenerationConfig,
    task: Literal["translate", "summarize", "classify", "lm"] | None = None,
    baseline: str | None = None,
    tag: str | None = None,
    limit: int | None = None,
    fail_under: float | None = None,
    dtype: Literal["float32", "bfloat16", "float16", "int8"] = "float32",
    device: str | None = None,
    json: bool = False,
) -> int:
    """Measure a model on texts with known answers, alone or beside another one.

    Args:
        inputs: a model, then the data: a table of source and target or of text and label (TSV, CSV, JSONL), two files whose
            lines belong together, or for a language model a text
        task: what the model is for, where it cannot be told from the model: summarize is measured by ROUGE
        baseline: another model, or a file of what another system wrote: says which is better, and whether that may be chance
        tag: the token that names the language, for a model that has several
        limit: look at so many texts at most
        fail_under: end with exit code 1 if the first number is worse than this
        dtype: how weights are kept; int8 is told beside float32
        device: cpu or cuda; a GPU is used where there is one
        json: everything as one object

    """
    from keepleft.pipelines.evaluation import evaluate as evaluate_model

    model, data = text_io.split_model_and_texts(inputs, require_model=True)
    if not data:
        raise ValueError("say what to evaluate on: a table, two files, or a text, after the model")
    with Bar("texts", None) as bar:
        result = evaluate_model(
            str(model),
            data,
            task=task,
            baseline=baseline,
            options=options,
            dtype=dtype,
            device=device,
            tag=tag,
            limit=limit,
            on_progress=lambda done, total: bar.update(done, f"of {total}"),
        )
    if json:
        print(text_io.as_json(asdict(result)))
    else:
        print(f"{result.count:,} {'tokens' if result.task == 'lm' else 'texts'}")
        for name, value in result.measures.items():
            signature = result.signatures.get(name)
            print(f"{name:18} {value:10.4f}" + (f"  {signature}" if signature else ""))
        for verdict in result.verdicts:
            print(verdict)
    name, value = next(iter(result.measures.items()))
    worse = (
        value > fail_under
        if name == "perplexity" and fail_under is not None
        else fail_under is not None and value < fail_under
    )
    return 1 if worse else 0
