"""BLEU, chrF and TER by sacrebleu, with the signatures to cite them by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keepleft.evaluation.significance import verdict_sentence

METRIC_NAMES = ("bleu", "chrf", "ter")
LOWER_IS_BETTER = frozenset({"ter"})


@dataclass(frozen=True)
class MetricScore:
    """A score, and how it was computed."""

    name: str  # as sacrebleu writes it: BLEU, chrF2, TER
    score: float  # from 0 to 100; TER may be higher, and lower is better
    signature: str  # sacrebleu's, to cite with the score


@dataclass(frozen=True)
class PairedBootstrapResult:
    """Two systems compared by one metric, with sacrebleu's paired bootstrap."""

    name: str
    scores: tuple[float, float]
    half_widths: tuple[float, float]  # half the width of each score's 95 % interval
    difference: float  # score of the first minus score of the second
    p: float
    signature: str
    sentence: str


def metrics() -> tuple[Any, Any]:
    """sacrebleu's classes BLEU and CHRF. Raises ImportError, naming the extra, if sacrebleu is missing."""
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError as error:
        raise ImportError("BLEU needs sacrebleu: pip install 'keepleft[metrics]'") from error
    return BLEU, CHRF


def translation(
    predictions: Sequence[str], references: Sequence[str], *, tokenize: str = "13a", lowercase: bool = False
) -> dict[str, float]:
    """bleu, chrf and exact (the share of texts that equal their reference). Options: see `corpus_metrics`."""
    _check_lengths(predictions, references)
    results = corpus_metrics(
        predictions, references, metric_names=("bleu", "chrf"), tokenize=tokenize, lowercase=lowercase
    )
    exact_matches = sum(a == b for a, b in zip(predictions, references, strict=True))
    return {
        **{metric_name: result.score for metric_name, result in results.items()},
        "exact": exact_matches / len(predictions),
    }


def corpus_metrics(
    predictions: Sequence[str],
    references: Sequence[str],
    *,
    metric_names: Sequence[str] = METRIC_NAMES,
    tokenize: str = "13a",
    lowercase: bool = False,
) -> dict[str, MetricScore]:
    """Each metric with its signature.

    `tokenize` is BLEU's: "13a", "zh", "ja-mecab", "ko-mecab" …, or "none" for text that is already split into
    words. Raises ValueError for an unknown metric, or if there are not as many texts as references.
    """
    _check_lengths(predictions, references)
    out = {}
    for metric_name in metric_names:
        metric = _metric(metric_name, tokenize, lowercase)
        result = metric.corpus_score(list(predictions), [list(references)])
        out[metric_name] = MetricScore(result.name, float(result.score), str(metric.get_signature()))
    return out


def paired_bootstrap(
    first: Sequence[str],
    second: Sequence[str],
    references: Sequence[str],
    *,
    metric_names: Sequence[str] = METRIC_NAMES,
    tokenize: str = "13a",
    lowercase: bool = False,
    samples: int = 1000,
    names: tuple[str, str] = ("the first", "the second"),
) -> dict[str, PairedBootstrapResult]:
    """Compare two systems on the same texts, by metric.

    sacrebleu resamples the sentences; its seed is in the signature (SACREBLEU_SEED sets it).
    """
    _check_lengths(first, references)
    _check_lengths(second, references)
    scorers = {metric_name: _metric(metric_name, tokenize, lowercase) for metric_name in metric_names}
    from sacrebleu.significance import PairedTest

    test: Any = PairedTest(
        [("other", list(second)), ("one", list(first))],
        scorers,
        [list(references)],
        test_type="bs",
        n_samples=samples,
    )
    signatures, results = test()
    out = {}
    for metric_name, name in zip(metric_names, signatures, strict=True):
        base, system = results[name]
        difference = float(system.score - base.score)
        # sacrebleu gives the smallest p there is to a system compared with itself
        p = float(system.p_value) if difference else 1.0
        scores = (float(system.score), float(base.score))
        half_widths = (float(system.ci), float(base.ci))
        verdict = verdict_sentence(
            names,
            difference,
            p,
            unit=name,
            lower_is_better=metric_name in LOWER_IS_BETTER,
            details=f"{scores[0]:.1f} beside {scores[1]:.1f}, p = {p:.2g}, {len(references)} texts, "
            "paired bootstrap",
        )
        out[metric_name] = PairedBootstrapResult(
            name, scores, half_widths, difference, p, str(signatures[name]), verdict
        )
    return out


def _metric(metric_name: str, tokenize: str, lowercase: bool) -> Any:
    bleu_class, chrf_class = metrics()
    match metric_name:
        case "bleu":
            return bleu_class(tokenize=tokenize, lowercase=lowercase, force=True)
        case "chrf":
            return chrf_class(lowercase=lowercase)
        case "ter":
            from sacrebleu.metrics import TER

            return TER()  # ignores case, as its authors had it
    raise ValueError(f"no metric is called {metric_name!r}: there are {', '.join(METRIC_NAMES)}")


def _check_lengths(predictions: Sequence[str], references: Sequence[str]) -> None:
    if len(predictions) != len(references) or not predictions:
        raise ValueError(
            f"{len(predictions)} texts beside {len(references)} references: there must be as many, and at "
            "least one"
        )
