"""BLEU, chrF and TER are sacrebleu's, and say so; two translators are told apart only where they differ."""

from __future__ import annotations

import pytest

from keepleft.evaluation.translation import corpus_metrics, paired_bootstrap, translation

sacrebleu = pytest.importorskip("sacrebleu")

REFERENCES = [
    f"the {animal} sat on the {place} and looked at {number} birds ."
    for animal in ("cat", "dog", "Fox", "hen")
    for place in ("mat", "roof", "old wall")
    for number in ("two", "ten")
]
GOOD = [text.replace("looked", "gazed") if n % 3 == 0 else text for n, text in enumerate(REFERENCES)]
POOR = [text.replace("sat on", "is over").replace("birds", "bird") for text in REFERENCES]


def test_each_metric_is_sacrebleus_and_carries_its_signature():
    from sacrebleu.metrics import BLEU, CHRF, TER

    metrics = corpus_metrics(GOOD, REFERENCES, lowercase=True)
    for name, metric in (("bleu", BLEU(lowercase=True)), ("chrf", CHRF(lowercase=True)), ("ter", TER())):
        assert metrics[name].score == pytest.approx(metric.corpus_score(GOOD, [REFERENCES]).score)
        assert metrics[name].signature == str(metric.get_signature())
    assert "tok:13a" in metrics["bleu"].signature
    assert f"version:{sacrebleu.__version__}" in metrics["ter"].signature
    assert [metric_score.name for metric_score in metrics.values()] == ["BLEU", "chrF2", "TER"]


def test_training_reads_the_same_numbers():
    scores, metrics = translation(GOOD, REFERENCES), corpus_metrics(GOOD, REFERENCES)
    assert scores.keys() == {"bleu", "chrf", "exact"}
    assert scores["bleu"] == metrics["bleu"].score
    assert scores["chrf"] == metrics["chrf"].score


def test_translations_are_scored_as_sacrebleu_scores_them():
    references = ["the cat sat on the mat .", "two dogs run in the park ."]
    predictions = ["the cat sat on a mat .", "two dogs run in the park ."]
    result = translation(predictions, references, tokenize="none")
    assert result["bleu"] == pytest.approx(
        sacrebleu.corpus_bleu(predictions, [references], tokenize="none", force=True).score
    )
    assert result["exact"] == 0.5
    with pytest.raises(ValueError, match="1 texts beside 2 references"):
        translation(["a"], references)


def test_the_better_of_two_is_found_whichever_comes_first_and_lower_ter_is_better():
    for first, second, names in ((GOOD, POOR, ("good", "poor")), (POOR, GOOD, ("poor", "good"))):
        for metric_name, result in paired_bootstrap(
            first, second, REFERENCES, names=names, samples=200
        ).items():
            assert result.sentence.startswith("good is better than poor by"), result.sentence
            assert result.p < 0.05
            assert result.difference == pytest.approx(result.scores[0] - result.scores[1])
            assert (result.difference > 0) == ((first is GOOD) != (metric_name == "ter"))
            assert "bs:200" in result.signature


def test_p_is_sacrebleus():
    from sacrebleu.metrics import CHRF
    from sacrebleu.significance import PairedTest

    near = [text.replace("birds", "birds there") if n % 5 == 0 else text for n, text in enumerate(GOOD)]
    ours = paired_bootstrap(near, GOOD, REFERENCES, metric_names=["chrf"], samples=100)["chrf"]
    _, theirs = PairedTest(
        [("base", GOOD), ("near", near)], {"chrf": CHRF()}, [REFERENCES], test_type="bs", n_samples=100
    )()
    assert ours.p == theirs["chrF2"][1].p_value
    assert ours.half_widths == (theirs["chrF2"][1].ci, theirs["chrF2"][0].ci)


def test_a_system_cannot_be_told_from_itself():
    for result in paired_bootstrap(GOOD, GOOD, REFERENCES, samples=50).values():
        assert result.p == 1.0
        assert "cannot be told apart" in result.sentence


def test_wrong_use_raises():
    with pytest.raises(ValueError, match="1 texts beside 24 references"):
        paired_bootstrap(GOOD, ["a"], REFERENCES)
    with pytest.raises(ValueError, match="'meteor': there are bleu, chrf, ter"):
        corpus_metrics(GOOD, REFERENCES, metric_names=["meteor"])
