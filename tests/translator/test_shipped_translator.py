"""The translator that comes with keepleft: fifty everyday sentences, its size, its audit, what it copies."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

import keepleft as kl
from keepleft.cli import main
from keepleft.cli.paths import installed_weights
from keepleft.decoding.generation_config import GenerationConfig
from keepleft.pipelines.text_generation import load_generator
from keepleft.pipelines.translator import Translator

ROOT = Path(__file__).parents[2]
MODEL_CARD = ROOT / "translator" / "README.md"
SENTENCES = Path(__file__).parent / "everyday.tsv"
ACCEPTABLE_CHRF = 60.0  # README.md in this folder
MIN_ACCEPTABLE = 45  # of the fifty
MAX_PACKAGE_BYTES = 12_000_000

pytestmark = [
    pytest.mark.skipif("translator" not in installed_weights(), reason="the translator is not installed"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(scope="module")
def generator():
    return load_generator(str(installed_weights()["translator"]), device="cpu")


def translate(generator, to: str, texts: list[str]) -> list[str]:
    translator = Translator(generator, to)
    results = translator.generate(texts, translator.resolve(GenerationConfig()))
    return [result.text for (result, *_) in results]


def test_it_translates_everyday_sentences_acceptably(generator):
    from sacrebleu.metrics import CHRF

    with SENTENCES.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    assert len(rows) == 50
    metric = CHRF()
    refused = []
    for to in sorted({row[0] for row in rows}):
        sources = [(source, wanted.split(" | ")) for language, source, wanted in rows if language == to]
        for (source, wanted), text in zip(
            sources, translate(generator, to, [source for source, _ in sources]), strict=True
        ):
            if max(metric.sentence_score(text, [reference]).score for reference in wanted) < ACCEPTABLE_CHRF:
                refused.append(f"{source} → {text}")
    assert len(rows) - len(refused) >= MIN_ACCEPTABLE, "\n".join(refused)


def test_numbers_names_and_addresses_survive(generator):
    texts = [
        "Write to anna.maier@example.org or call 0123456.",
        "See https://example.org/a?b=1 for more.",
        "Zaphod lives in Berlin.",
        "The meeting is in room B12.",
        "The train leaves at 18:45 on platform 12.",
    ]
    copied = [
        "anna.maier@example.org 0123456",
        "https://example.org/a?b=1",
        "Zaphod Berlin",
        "B12",
        "18 45 12",
    ]
    for to in ("fr", "de"):
        for text, names in zip(translate(generator, to, texts), copied, strict=True):
            assert all(name in text for name in names.split()), text


def test_numbers_are_written_as_the_language_does(generator):
    (french,) = translate(generator, "fr", ["It costs 1,250.50 dollars."])
    assert "1 250,50" in french
    (english,) = translate(generator, "en", ["Das kostet 1.250,50 Euro."])
    assert "1,250.50" in english


def test_a_letter_keeps_its_lines_and_blank_lines(generator):
    letter = "Dear Tom,\n\nI am happy. The weather is nice today.\n\n  Where are you?\n"
    (translation,) = translate(generator, "de", [letter])
    assert re.fullmatch(r"\S.*\n\n\S.*\n\n  \S.*\n", translation), translation


def test_a_sentence_longer_than_what_it_learned_is_translated_to_its_end(generator):
    text = (
        "We went to the market, " + "and then we bought some bread and milk, " * 8 + "and then we went home."
    )
    (translation,) = translate(generator, "fr", [text])
    assert re.search("maison|chez nous", translation[-60:]), translation
    assert len(translation) > 0.6 * len(text)


def test_the_command_needs_no_model(capsys):
    assert main(["translate", "Where is the station?", "--to", "fr"]) == 0
    assert capsys.readouterr().out == "Où est la gare ?\n"


def test_it_does_not_peek():
    model, _ = kl.load(installed_weights()["translator"])
    report = kl.audit(model, checks=["future"])
    assert report.ok, report.text()


def test_the_package_is_small_and_its_card_has_the_figures():
    folder = installed_weights()["translator"]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_PACKAGE_BYTES
    model, _ = kl.load(folder)
    card = MODEL_CARD.read_text("utf-8")
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in card
    for direction in ("en → fr", "fr → en", "en → de", "de → en", "en → hi", "hi → en"):
        assert re.search(rf"\| {direction} \| [\d,]+ \| \d+\.\d \| \d+\.\d \|", card), direction
