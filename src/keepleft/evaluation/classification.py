"""How good labels are: accuracy, macro-F1, precision and recall of each label, and which is taken for which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

Label = str | int


@dataclass(frozen=True)
class LabelMetrics:
    """One label."""

    precision: float  # of the examples said to have it, how many do; 0 where none was said to
    recall: float  # of the examples that have it, how many were said to; 0 where none has
    f1: float  # their harmonic mean
    support: int  # the examples that have it


@dataclass(frozen=True)
class ClassificationMetrics:
    """All of them together."""

    accuracy: float
    macro_f1: float  # the plain mean over labels, so a rare one counts as much as a common one
    per_label: dict[Label, LabelMetrics]
    # a row for each true label, a column for each said one, in the order of `each`
    confusion: tuple[tuple[int, ...], ...]


def classification_metrics(
    predicted: Sequence[Label], true: Sequence[Label], *, names: Sequence[Label] | None = None
) -> ClassificationMetrics:
    """What was said beside what is true. The labels are `names`, or all that occur on either side."""
    if len(predicted) != len(true) or not len(predicted):
        raise ValueError(
            f"{len(predicted)} labels beside {len(true)} true ones: there must be as many, and at least one"
        )
    label_set = set(predicted) | set(true)
    labels = (
        list(names)
        if names is not None
        else sorted(label_set, key=lambda label: (isinstance(label, str), label))
    )
    if unknown := sorted(map(str, label_set - set(labels))):
        raise ValueError(
            f"{', '.join(unknown)} is not among the labels {', '.join(map(str, labels))}: name all of them"
        )
    confusion_counts = Counter(zip(true, predicted, strict=True))
    true_counts, predicted_counts = Counter(true), Counter(predicted)
    per_label = {
        label: _label_metrics(confusion_counts[label, label], predicted_counts[label], true_counts[label])
        for label in labels
    }
    return ClassificationMetrics(
        accuracy=sum(confusion_counts[label, label] for label in labels) / len(true),
        macro_f1=sum(metrics.f1 for metrics in per_label.values()) / len(per_label),
        per_label=per_label,
        confusion=tuple(tuple(confusion_counts[a, b] for b in labels) for a in labels),
    )


def _label_metrics(correct: int, predicted: int, support: int) -> LabelMetrics:
    ratio = lambda total: correct / total if total else 0.0
    return LabelMetrics(
        ratio(predicted),
        ratio(support),
        2 * correct / (predicted + support) if predicted + support else 0.0,
        support,
    )
