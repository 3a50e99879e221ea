"""The explorer translates with a model that has language tags, as `keepleft translate --to` does."""

from __future__ import annotations

import pytest

from keepleft.data.tokenizer import train_tokenizer
from keepleft.decoding.generation_config import GenerationConfig
from keepleft.pipelines.translator import Translator
from keepleft.serving.explorer.explorer import Explorer
from serving.tiny_explorers import ask, make_explorer, make_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def explorer() -> Explorer:
    model = make_model("encoder-decoder")
    model.notes["generation"] = {"max_new_tokens": 5}
    tags = ["<2en>", "<2fr>"]
    tokenizer = train_tokenizer("bpe", ["the sea is calm"] * 9, 290, extra_special_tokens=tags)
    return Explorer(model, tokenizer)


def test_it_says_which_languages_it_writes(explorer):
    info = ask(explorer, "model_info")
    assert info["languages"] == {"en": "English", "fr": "French"}
    assert info["views"][0] == "translate"
    assert info["example"]["source"].startswith("<2fr> ")
    assert ask(make_explorer("encoder-decoder"), "model_info")["languages"] == {}
    assert ask(make_explorer("encoder"), "model_info")["languages"] == {}


def test_a_text_is_what_the_translator_makes_of_it(explorer):
    text = "The sea.  It is calm.\n\nThe sea."
    answer = ask(explorer, "translate", text=text, to="fr")
    translator = Translator(explorer.generator, "fr")
    options = translator.resolve(GenerationConfig())
    assert answer["text"] == translator.generate([text], options)[0][0].text
    assert [sentence["source"] for sentence in answer["sentences"]] == ["The sea.", "It is calm."]
    assert answer["sentences"][0]["input"] == "<2fr> The sea."
    assert ask(explorer, "attention", text="", source=answer["sentences"][0]["input"])["tokens"]["source"]


def test_an_answer_warns_of_a_text_that_the_model_does_not_translate_into_that_language(explorer):
    assert ask(explorer, "translate", text="Ich habe Hunger", to="fr")["warnings"] == []
    explorer.pivot = "en"
    assert ask(explorer, "translate", text="the sea is calm", to="fr")["warnings"] == []
    (warning,) = ask(explorer, "translate", text="J'ai faim. J'ai soif.", to="fr")["warnings"]
    assert warning.startswith(
        "\"J'ai faim. J'ai soif.\" looks like French, and that is the language to write"
    )


def test_wrong_questions_name_the_remedy(explorer):
    with pytest.raises(ValueError, match="no to is called 'xx': there are en, fr"):
        ask(explorer, "translate", text="a", to="xx")
    with pytest.raises(ValueError, match="give at most 5,000"):
        ask(explorer, "translate", text="a" * 6000, to="fr")
