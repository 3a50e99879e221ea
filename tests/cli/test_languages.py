"""A multilingual model is used, measured and shown in the language that was asked for, or not at all."""

from __future__ import annotations

import json
import re

import pytest

import keepleft as kl
from keepleft.cli import main
from keepleft.data.tokenizer import BOS_TOKEN, EOS_TOKEN, train_tokenizer
from keepleft.decoding.generation_config import GenerationConfig
from keepleft.pipelines.evaluation import evaluate
from keepleft.pipelines.text_generation import load_generator
from keepleft.pipelines.translator import Translator
from keepleft.serving.explorer.explorer import Explorer
from keepleft.serving.explorer.translate import tag_source
from serving.tiny_explorers import make_explorer, make_model

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = ["the sea is calm. the sea.", "the ship sails on"]
SAY_WHICH = r"this model writes en \(English\), fr \(French\): say which language to write, as in --to fr"


@pytest.fixture(scope="module")
def multilingual(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("multilingual")
    tokenizer = train_tokenizer("bpe", TEXTS * 9, 290, extra_special_tokens=["<2en>", "<2fr>"])
    model = make_model("encoder-decoder")
    model.notes = {
        "decoder_start_token_id": tokenizer.token_to_id(BOS_TOKEN),
        "eos_token_id": tokenizer.token_to_id(EOS_TOKEN),
    }
    kl.save(model, tokenizer, folder)
    return str(folder)


@pytest.fixture
def pairs(tmp_path) -> str:
    (tmp_path / "pairs.tsv").write_text("".join(f"{text}\tla mer\n" for text in TEXTS))
    return str(tmp_path / "pairs.tsv")


def outputs(model: str, data: str, monkeypatch, **language) -> list[str]:
    """What a model wrote when it was evaluated."""
    written: list[str] = []

    def corpus_metrics(texts, references):
        written.extend(texts)
        return {}

    monkeypatch.setattr("keepleft.evaluation.translation.corpus_metrics", corpus_metrics)
    evaluate(model, [data], options=GenerationConfig(max_new_tokens=5), device="cpu", **language)
    return written


@pytest.mark.parametrize("command", ["eval", "translate"])
def test_a_multilingual_model_is_not_used_in_an_arbitrary_language(command, multilingual, pairs, capsys):
    assert main([command, multilingual, *([pairs] if command == "eval" else TEXTS)]) == 2
    captured = capsys.readouterr()
    assert re.search(SAY_WHICH, captured.err)
    assert captured.out == ""


def test_eval_measures_what_translate_writes(multilingual, pairs, monkeypatch):
    translator = Translator(load_generator(multilingual, device="cpu"), "fr")
    options = translator.resolve(GenerationConfig(max_new_tokens=5))
    expected = [row[0].text for row in translator.generate(TEXTS, options)]
    assert outputs(multilingual, pairs, monkeypatch, to="fr") == expected


def test_eval_with_a_tag_measures_the_model_on_whole_texts(multilingual, pairs, monkeypatch):
    generator = load_generator(multilingual, device="cpu")
    options = generator.resolve(GenerationConfig(max_new_tokens=5))
    expected = [row[0].text for row in generator.generate(TEXTS, options, tag="<2fr>")]
    assert outputs(multilingual, pairs, monkeypatch, tag="<2fr>") == expected


def test_eval_takes_the_language_from_the_tags_of_the_sources(multilingual, tmp_path, capsys):
    (tmp_path / "tagged.tsv").write_text("<2fr> the sea\tla mer\n<2en> la mer\tthe sea\n")
    options = ["--max-new-tokens", "3", "--json"]
    assert main(["eval", multilingual, str(tmp_path / "tagged.tsv"), *options]) == 0
    assert json.loads(capsys.readouterr().out)["count"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "xx"], r"does not write 'xx': there are en \(English\), fr \(French\)"),
        (["--to", "fr", "--tag", "<2fr>"], "--to fr and --tag <2fr> were given"),
        (["--to", "fr", "--task", "summarize"], "the task is summarize: leave --to out"),
    ],
)
def test_eval_says_what_is_wrong_with_a_language(options, message, multilingual, pairs, capsys):
    assert main(["eval", multilingual, pairs, *options]) == 2
    assert re.search(message, capsys.readouterr().err)


# -- show


@pytest.fixture(scope="module")
def explorer(multilingual) -> Explorer:
    generator = load_generator(multilingual, device="cpu")
    return Explorer(generator.model, generator.tokenizer)


def test_show_puts_the_tag_of_the_language_before_the_source(explorer):
    assert tag_source(explorer, "the sea", "en") == "<2en> the sea"
    assert tag_source(explorer, None, "en") == "<2en> The sea is calm today."


def test_show_takes_a_source_with_a_tag_as_it_is_and_refuses_one_without(explorer):
    assert tag_source(explorer, "<2fr> the sea", None) == "<2fr> the sea"
    assert tag_source(explorer, None, None) is None  # the example, which has a tag
    with pytest.raises(ValueError, match=SAY_WHICH):
        tag_source(explorer, "the sea", None)
    with pytest.raises(ValueError, match="--to is en, and the source starts with <2fr>"):
        tag_source(explorer, "<2fr> the sea", "en")


def test_show_needs_no_language_for_a_model_of_one(capsys):
    one_language = make_explorer("encoder-decoder")
    assert tag_source(one_language, "the sea", None) == "the sea"
    with pytest.raises(ValueError, match="it has no language tags, so leave --to out"):
        tag_source(one_language, "the sea", "fr")
