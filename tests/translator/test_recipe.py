"""The recipe of the shipped translator runs from Tatoeba's files to int8 weights, at toy size."""

from __future__ import annotations

import gzip
import random
import re
import sys
from pathlib import Path

import pytest
import yaml

import keepleft as kl
from keepleft.cli import main
from keepleft.decoding.generation_config import GenerationConfig
from keepleft.pipelines.placeholders import PLACEHOLDERS
from keepleft.pipelines.text_generation import load_generator
from keepleft.pipelines.translator import Translator, knows_placeholders

RECIPE = Path(__file__).parents[2] / "recipes" / "translator"
TOY_SIZE = {
    "design": {"dim": 16, "heads": 2, "layers": 1, "width": 32},
    "batch": {"tokens": 256, "max_length": 64},
    "recipe": {"steps": 2, "warmup": 1, "eval_every": 2, "save_every": 2},
}
TEACHERS = ("from-english", "to-french", "into-english")
WORDS = {"fra": ("chat", "chien"), "deu": ("Katze", "Hund"), "hin": ("बिल्ली", "कुत्ता")}


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(RECIPE)
    import distill
    import prepare

    yield prepare, distill
    for name in ("distill", "hindi_names", "prepare"):
        sys.modules.pop(name, None)


def write_tatoeba(folder: Path) -> None:
    folder.mkdir()
    for code, (cat, dog) in WORDS.items():
        rows = [
            f"Tom has {n} {animal}s.\tTom {other} {n}."
            for n in range(10, 40)
            for animal, other in (("cat", cat), ("dog", dog))
        ]
        for part in ("train", "dev"):
            text = "\n".join(rows if part == "train" else rows[:4]) + "\n"
            (folder / f"eng-{code}.{part}.tsv.gz").write_bytes(gzip.compress(text.encode()))


def toy_job(name: str) -> str:
    """The recipe, at toy size, as a file here."""
    job = yaml.safe_load((RECIPE / f"{name}.yaml").read_text("utf-8"))
    for section, changes in TOY_SIZE.items():
        job[section] = {**job[section], **changes}
        for option in ("encoder_layers", "decoder_layers"):
            job[section].pop(option, None)
    path = Path(f"{name}.yaml")
    path.write_text(yaml.safe_dump(job))
    return str(path)


@pytest.mark.usefixtures("one_thread")
def test_the_recipe_runs(scripts, tmp_path, monkeypatch):
    prepare, distill = scripts
    monkeypatch.chdir(tmp_path)
    write_tatoeba(Path("tatoeba"))
    prepare.main(["tatoeba", "data/translator", "--vocabulary-size", "400"])
    pairs = Path("data/translator/fr.tsv").read_text("utf-8").splitlines()
    assert all(line.count("\t") == 1 for line in pairs)
    assert any(mark in line for line in pairs for mark in PLACEHOLDERS)  # in place of numbers
    for name in TEACHERS:
        assert main(["train", "--config", toy_job(f"teacher-{name}"), "--no-audit"]) == 0
    monkeypatch.setattr(distill, "is_complete", lambda source, text: True)  # a toy model writes nonsense
    monkeypatch.setattr(distill, "is_plausible", lambda source, text: bool(text.strip()))
    one, french, english = (f"runs/translator-{name}/model" for name in TEACHERS)
    teachers = [f"fr={one},{french}", f"de={one}", f"hi={one}", f"en={english}"]
    distill.main(["tatoeba", "data/translator", "--teachers", *teachers, "--batch-size", "32"])
    distilled = [
        f"distilled.{direction}" for direction in ("en-fr", "fr-en", "en-de", "de-en", "en-hi", "hi-en")
    ]
    for name in (*distilled, "backwards.fr-en", "backwards.de-en", "backwards.hi-en"):
        path = Path(f"data/translator/{name}.tsv")
        assert path.exists()
        if not path.read_text("utf-8"):
            path.write_text("Tom\tTom\n")
    assert main(["train", "--config", toy_job("student"), "--no-audit"]) == 0
    assert main(["export", "runs/translator/model", "--to", "int8", "--out", "int8", "--no-verify"]) == 0
    generator = load_generator("int8", device="cpu")
    assert knows_placeholders(generator.tokenizer)
    translator = Translator(generator, "hi")
    assert translator.generate(["Tom."], translator.resolve(GenerationConfig(max_new_tokens=3)))
    assert kl.load("int8")[0].design.kind == "encoder-decoder"


def test_what_is_chosen_is_most_like_a_reference(scripts):
    _, distill = scripts
    assert distill.similarity("a b c", "a b c") == 1.0
    assert distill.similarity("a b c", "x y") == 0.0
    assert distill.similarity("a b c", "a b d") > distill.similarity("a c b", "a b d")
    assert distill.is_plausible("Hello there.", "Bonjour.")
    assert not distill.is_plausible("Hi.", "very long " * 9)
    assert not distill.is_plausible("Hi.", " ")


def test_linked_sentences_keep_their_placeholders_apart(scripts):
    prepare, _ = scripts
    mark = PLACEHOLDERS[0]
    cats = (f"He has {mark} cats.", f"Il a {mark} chats.")
    page = (f"She reads page {mark}.", f"Elle lit la page {mark}.")
    linked = prepare.linked_pairs([cats, page], "fr", 4, random.Random(0))
    assert linked
    for english, french in linked:
        assert " he " in english or " she " in english  # without its capital
        marks, french_marks = (re.findall(f"[{PLACEHOLDERS}]", text) for text in (english, french))
        assert len(set(marks)) == 2
        assert marks == french_marks
    assert not prepare.linked_pairs([("You are here.", "Sie sind hier.")], "de", 9, random.Random(0))


def test_names_change_in_both_alphabets(scripts):
    prepare, _ = scripts
    renamed = prepare.hindi_renamed_pairs([("Tom lives in Rome.", "टॉम रोम में रहता है।")], random.Random(0))
    assert len(renamed) == 6
    from hindi_names import MEN, PLACES

    for english, hindi in renamed:
        assert english != "Tom lives in Rome."
        (name,) = (name for name in MEN if english.startswith(f"{name} "))
        (place,) = (place for place in PLACES if english.endswith(f"in {place}."))
        assert hindi == f"{MEN[name]} {PLACES[place]} में रहता है।"
