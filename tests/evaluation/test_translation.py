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

    found = corpus_metrics(GOOD, REFERENCES, lowercase=True)
    for kind, metric in (("bleu", BLEU(lowercase=True)), ("chrf", CHRF(lowercase=True)), ("ter", TER())):
        assert found[kind].score == pytest.approx(metric.corpus_score(GOOD, [REFERENCES]).score)
        assert found[kind].signature == str(metric.get_signature())
    assert "tok:13a" in found["bleu"].signature
    assert f"version:{sacrebleu.__version__}" in found["ter"].signature
    assert [one.name for one in found.values()] == ["BLEU", "chrF2", "TER"]


def test_training_reads_the_same_numbers():
    found, again = translation(GOOD, REFERENCES), corpus_metrics(GOOD, REFERENCES)
    assert found.keys() == {"bleu", "chrf", "exact"}
    assert found["bleu"] == again["bleu"].score
    assert found["chrf"] == again["chrf"].score


def test_the_better_of_two_is_found_whichever_comes_first_and_lower_ter_is_better():
    for one, other, names in ((GOOD, POOR, ("good", "poor")), (POOR, GOOD, ("poor", "good"))):
        for kind, found in paired_bootstrap(one, other, REFERENCES, names=names, samples=200).items():
            assert found.sentence.startswith("good is better than poor by"), found.sentence
            assert found.p < 0.05
            assert found.difference == pytest.approx(found.scores[0] - found.scores[1])
            assert (found.difference > 0) == ((one is GOOD) != (kind == "ter"))
            assert "bs:200" in found.signature


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
    for found in paired_bootstrap(GOOD, GOOD, REFERENCES, samples=50).values():
        assert found.p == 1.0
        assert "cannot be told apart" in found.sentence


def test_wrong_use_is_told():
    with pytest.raises(ValueError, match="1 texts beside 24 references"):
        paired_bootstrap(GOOD, ["a"], REFERENCES)
    with pytest.raises(ValueError, match="'meteor': there are bleu, chrf, ter"):
        corpus_metrics(GOOD, REFERENCES, metric_names=["meteor"])
