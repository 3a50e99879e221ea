"""Evaluate a model directory on texts with known answers, alone or against a baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from keepleft.data import sources
from keepleft.data.records import RecordSource
from keepleft.decoding.generation_config import SUMMARY_DEFAULTS, GenerationConfig, from_model_directory
from keepleft.evaluation.significance import bootstrap, mcnemar
from keepleft.models.design import ClassificationHead
from keepleft.models.ensemble import EnsembleAverage
from keepleft.pipelines.loading import split_ensemble
from keepleft.pipelines.predictor import load_predictor
from keepleft.pipelines.text_generation import TextGenerator, load_generator
from keepleft.pipelines.translator import Translator, require_language

if TYPE_CHECKING:
    from keepleft.evaluation.perplexity import Perplexity

EvalTask = Literal["translate", "summarize", "classify", "lm"]
ProgressCallback = Callable[[int, int], None]  # texts done, texts in all

BATCH_SIZE = 32  # texts at a time


@dataclass(frozen=True)
class EvalResult:
    """Metrics by name, the signatures to cite them by, and the verdict against each other system."""

    task: EvalTask
    count: int  # texts; tokens for a language model
    measures: dict[str, float]
    signatures: dict[str, str] = field(default_factory=dict)
    verdicts: list[str] = field(default_factory=list)


def evaluate(
    model_path: str,
    data: Sequence[str],
    *,
    task: EvalTask | None = None,
    baseline: str | None = None,
    options: GenerationConfig | None = None,
    dtype: str = "float32",
    device: str | None = None,
    to: str | None = None,
    tag: str | None = None,
    limit: int | None = None,
    ensemble_average: EnsembleAverage = "probabilities",
    on_progress: ProgressCallback = lambda done, total: None,
) -> EvalResult:
    """Evaluate a model directory on `data`, by default for the task that its design suggests.

    Several, MODEL1,MODEL2, are evaluated as an ensemble (not classifiers).

    `data` names a table of source and target or of text and label, two aligned files, or a running text.
    `baseline` is another model, or a file of another system's outputs, one on each line. An int8 model is
    also compared with its own float32 weights. `limit` evaluates only the first so many texts.

    A model with language tags needs a language, unless every source starts with a tag. `to` is its code:
    what is measured is then `Translator`, which cuts texts into sentences and protects what is to be copied.
    `tag` is the token itself: what is measured is then the model alone, given each source whole.
    """
    if to is not None and tag is not None:
        raise ValueError(f"--to {to} and --tag {tag} were given: they say the same, so give one of them")
    eval_task = task or _infer_task(model_path)
    if to is not None and eval_task != "translate":
        raise ValueError(f"to is {to!r}, and the task is {eval_task}: leave --to out, it is for translations")
    if eval_task == "lm":
        if limit is not None:
            raise ValueError(
                "limit counts texts, and a language model is measured on running text: cut the file instead"
            )
        return _evaluate_perplexity(model_path, data, baseline, dtype, device, ensemble_average)
    if eval_task == "classify":
        return _evaluate_labels(model_path, data, baseline, dtype, device, limit)
    rows = [(str(source), str(target)) for source, target in _open_pairs(data)][:limit]
    if not rows:
        raise ValueError(f"{', '.join(data)} holds no text: there is nothing to evaluate on")
    texts = [source for source, _ in rows]
    references = [target for _, target in rows]
    defaults = SUMMARY_DEFAULTS if eval_task == "summarize" else GenerationConfig()

    def generate_with(path: str, precision: str) -> list[str]:
        generator = load_generator(path, dtype=precision, device=device, ensemble_average=ensemble_average)
        resolved_options = generator.resolve(options or GenerationConfig()).with_defaults(defaults)
        if to is None and tag is None:
            require_language(generator.input_tokenizer, texts)
        writer = replace(generator, tag=tag) if to is None else Translator(generator, to)
        return _generate_texts(writer, texts, resolved_options, on_progress)

    outputs = generate_with(model_path, dtype)
    other_outputs = {"float32": generate_with(model_path, "float32")} if dtype == "int8" else {}
    if baseline is not None:
        if Path(baseline).is_file():
            baseline_outputs = Path(baseline).read_text("utf-8").removesuffix("\n").split("\n")
        else:
            baseline_outputs = generate_with(baseline, dtype)
        if len(baseline_outputs) != len(texts):
            raise ValueError(
                f"{baseline} has {len(baseline_outputs)} lines, and there are {len(texts)} texts: they must "
                "be as many"
            )
        other_outputs[baseline] = baseline_outputs
    evaluate_outputs = _evaluate_summaries if eval_task == "summarize" else _evaluate_translations
    return evaluate_outputs(eval_task, outputs, references, other_outputs, model_path)


def _evaluate_translations(
    task: EvalTask,
    outputs: list[str],
    references: list[str],
    other_outputs: dict[str, list[str]],
    model_path: str,
) -> EvalResult:
    from keepleft.evaluation.exact_match import exact_match
    from keepleft.evaluation.translation import corpus_metrics, paired_bootstrap

    metrics = corpus_metrics(outputs, references)
    measures = {name: result.score for name, result in metrics.items()}
    measures["exact"] = exact_match(outputs, references)
    signatures = {name: result.signature for name, result in metrics.items()}
    verdicts = [
        f"{name}: {result.sentence}".replace("the first", model_path).replace("the second", baseline)
        for baseline, baseline_outputs in other_outputs.items()
        for name, result in paired_bootstrap(outputs, baseline_outputs, references).items()
    ]
    return EvalResult(task, len(outputs), measures, signatures, verdicts)


def _evaluate_summaries(
    task: EvalTask,
    outputs: list[str],
    references: list[str],
    other_outputs: dict[str, list[str]],
    model_path: str,
) -> EvalResult:
    from keepleft.evaluation import rouge

    scores = rouge.rouge(outputs, references)["rougeL"]
    verdicts = []
    for baseline, baseline_outputs in other_outputs.items():
        baseline_scores = rouge.rouge(baseline_outputs, references)["rougeL"]
        verdict = bootstrap(scores, baseline_scores, names=(model_path, baseline))
        verdicts.append(f"rougeL: {verdict.sentence}")
    measures = rouge.mean_rouge(outputs, references)
    return EvalResult(task, len(outputs), measures, {"rouge": rouge.signature()}, verdicts)


def _evaluate_labels(
    model_path: str,
    data: Sequence[str],
    baseline: str | None,
    dtype: str,
    device: str | None,
    limit: int | None,
) -> EvalResult:
    from keepleft.evaluation.calibration import calibration
    from keepleft.evaluation.classification import classification_metrics

    if dtype == "int8":
        raise ValueError("int8 is for models that write: leave --dtype out for a classifier")
    rows = list(sources.open_source(data[0], ("text", "label"), None))[:limit]
    texts = [str(text) for text, _ in rows]
    true_labels = [str(label) for _, label in rows]

    def predict(path: str) -> tuple[list[str], torch.Tensor, list[str]]:
        """Predicted labels, (texts, labels) probabilities, and the names of the labels."""
        predictor = load_predictor(path, dtype=dtype, device=device)
        batches = (texts[n : n + BATCH_SIZE] for n in range(0, len(texts), BATCH_SIZE))
        probabilities = torch.cat([predictor.classify(batch) for batch in batches])
        labels = predictor.labels
        return [labels[n] for n in probabilities.argmax(-1).tolist()], probabilities, labels

    predictions, probabilities, label_names = predict(model_path)
    if unknown_labels := sorted(set(true_labels) - set(label_names)):
        raise ValueError(f"the label {unknown_labels[0]!r} is none of the model's: {', '.join(label_names)}")
    metrics = classification_metrics(predictions, true_labels, names=label_names)
    label_ids = [label_names.index(label) for label in true_labels]
    calibration_metrics = calibration(probabilities.numpy(), label_ids)
    verdicts = []
    if baseline is not None:
        baseline_predictions, _, _ = predict(baseline)
        verdict = mcnemar(
            [a == b for a, b in zip(predictions, true_labels, strict=True)],
            [a == b for a, b in zip(baseline_predictions, true_labels, strict=True)],
            names=(model_path, baseline),
        )
        verdicts = [f"accuracy: {verdict.sentence}"]
    measures = {
        "accuracy": metrics.accuracy,
        "macro_f1": metrics.macro_f1,
        "calibration_error": calibration_metrics.error,
        "brier": calibration_metrics.brier,
    }
    return EvalResult("classify", len(rows), measures, {}, verdicts)


def _evaluate_perplexity(
    model_path: str,
    data: Sequence[str],
    baseline: str | None,
    dtype: str,
    device: str | None,
    ensemble_average: EnsembleAverage,
) -> EvalResult:
    from keepleft.evaluation.perplexity import perplexity

    texts = ["".join(text for (text,) in sources.running_text(path)) for path in data]

    def measure(path: str, precision: str) -> Perplexity:
        generator = load_generator(path, dtype=precision, device=device, ensemble_average=ensemble_average)
        prefix_token_id = from_model_directory(generator.model.notes).bos_or_eos
        return perplexity(generator.model, generator.tokenizer, texts, prefix_token_id=prefix_token_id)

    result = measure(model_path, dtype)
    other_results = {} if baseline is None else {baseline: measure(baseline, dtype)}
    if dtype == "int8":
        other_results["float32"] = measure(model_path, "float32")
    verdicts = [
        f"perplexity {result.perplexity:.4f} beside {other.perplexity:.4f} of {name}"
        for name, other in other_results.items()
    ]
    measures = {"perplexity": result.perplexity, "bits_per_byte": result.bits_per_byte}
    return EvalResult("lm", result.tokens, measures, {}, verdicts)


def _generate_texts(
    generator: TextGenerator | Translator,
    texts: list[str],
    options: GenerationConfig,
    on_progress: ProgressCallback,
) -> list[str]:
    """The best completion of each text, generated in batches of texts of similar length."""
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
    out = [""] * len(texts)
    for start in range(0, len(order), BATCH_SIZE):
        indices = order[start : start + BATCH_SIZE]
        results = generator.generate([texts[n] for n in indices], options)
        for n, completions in zip(indices, results, strict=True):
            out[n] = completions[0].text
        on_progress(min(len(order), start + BATCH_SIZE), len(order))
    return out


def _open_pairs(data: Sequence[str]) -> RecordSource:
    if len(data) == 2:
        return sources.parallel_text(*data)
    return sources.open_source(data[0], ("src", "tgt"), None)


def _infer_task(model_path: str) -> EvalTask:
    """The task that a model is for, by its design. Raises ValueError for an encoder without labels."""
    from keepleft.weights.model_directory import load

    design = load(split_ensemble(model_path)[0], device="meta")[0].design
    if isinstance(design.head, ClassificationHead):
        return "classify"
    if design.decoder is None:
        raise ValueError(f"{model_path} is an encoder without labels: there is no answer of it to compare")
    return "translate" if design.is_encoder_decoder else "lm"
