"""What is measured is what it is called: cross-entropy, accuracy, BLEU."""

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
from keepleft.evaluation.translation import translation
from keepleft.nn.loss import IGNORE_INDEX


def test_likelihood_is_the_mean_over_all_targets_however_they_are_batched():
    chance = torch.Generator().manual_seed(0)
    model = kl.build(kl.presets.small(kl.presets.gpt2), generator=chance).eval()
    texts = [torch.randint(5, 512, (n,), generator=chance).tolist() for n in (3, 11, 5, 8, 2)]
    store = kl.TokenStore.from_lists(text=texts)
    found = [
        kl.likelihood(
            model,
            kl.Batches(store, kl.NextToken(1), shape, 24, shuffle=False).one_epoch(),
            label_smoothing=0.1,
        )
        for shape in (kl.BucketedLayout(), kl.BucketedLayout(4, True), kl.PackedLayout(12))
    ]
    losses, right = [], []
    for text in texts:
        scores = model(torch.tensor([[1, *text[:-1]]]))[0].detach()
        losses.append(F.cross_entropy(scores, torch.tensor(text), reduction="none"))
        right.append(scores.argmax(-1) == torch.tensor(text))
    mean = float(torch.cat(losses).mean())
    for one in found:
        assert one["loss"] == pytest.approx(mean, rel=1e-5)
        assert one["perplexity"] == pytest.approx(math.exp(mean), rel=1e-4)
        assert one["accuracy"] == pytest.approx(float(torch.cat(right).float().mean()), abs=1e-6)
        assert one["smoothed"] == pytest.approx(found[0]["smoothed"], rel=1e-5)


def test_labels_are_measured_too():
    model = kl.build(kl.presets.small(kl.presets.bert).but(head=kl.ClassificationHead(3))).eval()
    store = kl.TokenStore.from_lists(text=[[1, 7, 2], [1, 8, 9, 2]], label=[[0], [2]])
    found = kl.likelihood(model, kl.Batches(store, kl.Classification(), kl.BucketedLayout(), 64).one_epoch())
    assert 0.0 <= found["accuracy"] <= 1.0


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


def test_translations_are_scored_as_sacrebleu_scores_them():
    sacrebleu = pytest.importorskip("sacrebleu")
    references = ["the cat sat on the mat .", "two dogs run in the park ."]
    written = ["the cat sat on a mat .", "two dogs run in the park ."]
    found = translation(written, references, tokenize="none")
    assert found["bleu"] == pytest.approx(
        sacrebleu.corpus_bleu(written, [references], tokenize="none", force=True).score
    )
    assert found["exact"] == 0.5
    with pytest.raises(ValueError, match="1 texts beside 2 references"):
        translation(["a"], references)


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
    code = "\n".join(
        re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)[:-1]
    )  # the last fetches a model
    exec(code, {})
    printed = capsys.readouterr().out
    told = re.findall(r"^ *print\(.*\) +# (.*?)…?$", code, re.M)
    assert len(told) == 4
    assert all(said in printed for said in told)
