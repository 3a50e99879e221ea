"""Likelihood is the mean over all targets; metrics import no library unasked; docs/evaluation.md is true."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import keepleft as kl
from keepleft.nn.loss import IGNORE_INDEX


def test_likelihood_is_the_mean_over_all_targets_however_they_are_batched():
    rng = torch.Generator().manual_seed(0)
    model = kl.build(kl.presets.small(kl.presets.gpt2), generator=rng).eval()
    texts = [torch.randint(5, 512, (n,), generator=rng).tolist() for n in (3, 11, 5, 8, 2)]
    store = kl.TokenStore.from_lists(text=texts)
    results = [
        kl.likelihood(
            model,
            kl.Batches(store, kl.NextToken(1), layout, 24, shuffle=False).one_epoch(),
            label_smoothing=0.1,
        )
        for layout in (kl.BucketedLayout(), kl.BucketedLayout(4, True), kl.PackedLayout(12))
    ]
    losses, correct = [], []
    for text in texts:
        logits = model(torch.tensor([[1, *text[:-1]]]))[0].detach()
        losses.append(F.cross_entropy(logits, torch.tensor(text), reduction="none"))
        correct.append(logits.argmax(-1) == torch.tensor(text))
    mean = float(torch.cat(losses).mean())
    for result in results:
        assert result["loss"] == pytest.approx(mean, rel=1e-5)
        assert result["perplexity"] == pytest.approx(math.exp(mean), rel=1e-4)
        assert result["accuracy"] == pytest.approx(float(torch.cat(correct).float().mean()), abs=1e-6)
        assert result["smoothed"] == pytest.approx(results[0]["smoothed"], rel=1e-5)


def test_labels_are_measured_too():
    model = kl.build(kl.presets.small(kl.presets.bert).but(head=kl.ClassificationHead(3))).eval()
    store = kl.TokenStore.from_lists(text=[[1, 7, 2], [1, 8, 9, 2]], label=[[0], [2]])
    result = kl.likelihood(model, kl.Batches(store, kl.Classification(), kl.BucketedLayout(), 64).one_epoch())
    assert 0.0 <= result["accuracy"] <= 1.0


def test_nothing_to_measure_is_an_error():
    model = kl.build(kl.presets.small(kl.presets.gpt2))
    batch = next(
        iter(
            kl.Batches(
                kl.TokenStore.from_lists(text=[[5, 6]]), kl.NextToken(1), kl.BucketedLayout(), 8
            ).one_epoch()
        )
    )
    assert (batch.without_targets().targets == IGNORE_INDEX).all()
    with pytest.raises(ValueError, match="have no targets"):
        kl.likelihood(model, [])


def test_nobody_imports_the_libraries_that_count_unasked():
    rooms = "perplexity rouge significance translation"
    code = f"""
import importlib, sys
for name in "{rooms}".split():
    importlib.import_module("keepleft.evaluation." + name)
assert not {{"lm_eval", "rouge_score", "sacrebleu", "scipy"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_page_on_evaluation_prints_what_it_says(capsys):
    pytest.importorskip("sacrebleu")
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text("utf-8")
    # the last fetches a model
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)[:-1])
    exec(code, {})
    printed = capsys.readouterr().out
    expected_lines = re.findall(r"^ *print\(.*\) +# (.*?)…?$", code, re.M)
    assert len(expected_lines) == 7
    assert all(line in printed for line in expected_lines)
