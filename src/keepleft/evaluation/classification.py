"""Classification metrics: accuracy, macro-F1, precision and recall of each label, confusion matrix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

Label = str | int


@dataclass(frozen=True)
class LabelMetrics:
    """Metrics of one label."""

    precision: float  # the share of examples predicted to have it that do; 0 where none was predicted to
    recall: float  # the share of examples that have it that were predicted to; 0 where none has it
    f1: float  # harmonic mean of the two
    support: int  # examples that have it


@dataclass(frozen=True)
class ClassificationMetrics:
    """Metrics over all labels."""

    accuracy: float
    macro_f1: float  # the unweighted mean over labels: a rare one counts as much as a common one
    per_label: dict[Label, LabelMetrics]
    # confusion[true][predicted], both in the order of `per_label`
    confusion: tuple[tuple[int, ...], ...]


def classification_metrics(
    predicted: Sequence[Label], true: Sequence[Label], *, names: Sequence[Label] | None = None
) -> ClassificationMetrics:
    """Compare predicted labels with true ones.

    The labels are `names`, or every label that occurs on either side. Raises ValueError if the lengths
    differ, there are no examples, or a label is not among `names`.
    """
    if len(predicted) != len(true) or not len(predicted):
        raise ValueError(
            f"{len(predicted)} labels beside {len(true)} true ones: there must be as many, and at least one"
        )
    label_set = set(predicted) | set(true)
    if names is None:
        labels = sorted(label_set, key=lambda label: (isinstance(label, str), label))
    else:
        labels = list(names)
    if unknown := sorted(map(str, label_set - set(labels))):
        raise ValueError(
            f"{', '.join(unknown)} is not among the labels {', '.join(map(str, labels))}: name all of them"
        )
    confusion_counts = Counter(zip(true, predicted, strict=True))
    true_counts = Counter(true)
    predicted_counts = Counter(predicted)
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
    return LabelMetrics(
        precision=correct / predicted if predicted else 0.0,
        recall=correct / support if support else 0.0,
        f1=2 * correct / (predicted + support) if predicted + support else 0.0,
        support=support,
    )
