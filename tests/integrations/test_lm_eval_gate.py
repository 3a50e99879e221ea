"""lm-eval: a model that leaks gets no scores."""

from __future__ import annotations

from typing import Any

import pytest

import keepleft as kl
from integration_models import TEXTS, tiny_llama, tiny_tokenizer
from integration_scripts import import_library
from keepleft import integrations

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


def harness_model(honest: bool) -> Any:
    import_library("lm_eval")
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=tiny_llama(honest), tokenizer=tiny_tokenizer(), batch_size=2, max_length=32)


def evaluate(lm: Any) -> dict[str, Any]:
    import datasets
    import lm_eval
    from lm_eval.tasks import TaskManager

    words = [" ".join(f"w{n}" for n in text) for text in TEXTS[:3]]
    rows = datasets.Dataset.from_list([{"text": text} for text in words])
    task = {
        "task": "rolling",
        "custom_dataset": lambda **_: {"test": rows},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    }
    results = lm_eval.simple_evaluate(
        model=lm, tasks=[task], bootstrap_iters=0, task_manager=TaskManager(include_defaults=False)
    )
    return results["results"]["rolling"]


def test_an_honest_model_is_evaluated():
    lm = harness_model(True)
    assert integrations.audit_before_evaluation(lm) is lm
    assert evaluate(lm)["word_perplexity,none"] > 1


def test_a_leaking_model_is_not_evaluated():
    lm = harness_model(False)
    with pytest.raises(kl.LeakError, match="its future"):
        evaluate(integrations.audit_before_evaluation(lm))


def test_a_model_behind_an_interface_of_http_cannot_be_audited():
    with pytest.raises(ValueError, match="object holds no model on this machine"):
        integrations.audit_before_evaluation(object())
