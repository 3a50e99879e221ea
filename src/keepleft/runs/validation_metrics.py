"""The metrics of an evaluation during training: likelihood, and quality of generated text where it counts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from keepleft.data.batches import Batches
from keepleft.data.objectives import Classification
from keepleft.evaluation.likelihood import likelihood
from keepleft.models.transformer import Model
from keepleft.runs.dataset import Tokenizers
from keepleft.training.recipe import Recipe

GENERATION_METRICS = ("bleu", "chrf", "exact")
MAX_GENERATED_RECORDS = 500  # of the validation data


def make_measure(
    validation: Batches, tokenizers: Tokenizers, recipe: Recipe
) -> Callable[[Model], dict[str, float]] | None:
    """The function that evaluates a model on validation data; None if they have no targets."""
    valid_batches = list(validation.one_epoch())
    if not valid_batches:
        return None

    def measure(model: Model) -> dict[str, float]:
        measures = likelihood(model, valid_batches, label_smoothing=recipe.label_smoothing)
        if isinstance(validation.objective, Classification):
            del measures["perplexity"]  # of labels it says nothing that the loss does not
        if recipe.metric in GENERATION_METRICS:
            measures |= translation_metrics(model, tokenizers, validation, MAX_GENERATED_RECORDS)
        return measures

    return measure


def translation_metrics(
    model: Model, tokenizers: Tokenizers, validation: Batches, max_records: int
) -> dict[str, float]:
    """BLEU, chrF and exact match of greedy translations of the first validation records."""
    from keepleft.evaluation.translation import translation
    from keepleft.pipelines.text_generation import generate_from_ids

    rows = np.arange(min(max_records, len(validation.store)))
    target_rows = validation.store["tgt"].take(rows).to_lists()
    references = [tokenizers.target.decode(tokens) for tokens in target_rows]
    sources = validation.store["src"].take(rows)
    return translation(generate_from_ids(model, tokenizers.target, sources), references)
