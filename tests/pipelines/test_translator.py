"""Texts of any length are translated sentence by sentence, and nothing but sentences is touched."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepleft.data.tokenizer import train_tokenizer
from keepleft.decoding.generation_config import GenerationConfig
from keepleft.pipelines.placeholders import PLACEHOLDERS
from keepleft.pipelines.text_generation import GenerationResult
from keepleft.pipelines.translator import Translator, split_text, target_languages

TEXTS = [f"the sea {mark} is calm" for mark in PLACEHOLDERS] * 9
TOKENIZER = train_tokenizer("bpe", TEXTS, 320, extra_special_tokens=["<2en>", "<2fr>"])


@dataclass(frozen=True)
class ShoutingGenerator:
    """Stands in for a TextGenerator: the translation is the text in capitals."""

    input_tokenizer: Any = TOKENIZER
    tag: str | None = None
    calls: list[list[str]] = field(default_factory=list)
    forgets: bool = False  # placeholders
    wants: str = (
        ""  # a placeholder is forgotten where this is not in the text, but not by the second candidate
    )

    def resolve(self, options):
        return options

    def generate(self, texts, options, **details):
        self.calls.append(list(texts))
        out = []
        for text in texts:
            words = [
                word for word in text.upper().split(" ") if not (self.forgets and word[0] in PLACEHOLDERS)
            ]
            result = GenerationResult(" ".join(words), list(range(len(words))), -1.0, True)
            forgetful = replace(result, text=re.sub(f"[{PLACEHOLDERS}]", "IT", result.text))
            best = result if self.wants in text else forgetful
            out.append([best, *[result] * ((options.num_return_sequences or 1) - 1)])
        return out


def translate(texts, generator=None, **options):
    translator = Translator(generator or ShoutingGenerator(), "fr")
    return [results[0].text for results in translator.generate(texts, GenerationConfig(**options))]


def test_each_sentence_is_translated_by_itself_and_only_once():
    generator = ShoutingGenerator()
    assert translate(["It rains. We stay.", "We stay."], generator) == ["IT RAINS. WE STAY.", "WE STAY."]
    assert generator.calls[0] == ["It rains.", "We stay."]


@pytest.mark.parametrize("text", ["", "   ", "\n\n", "…", "--- ---"])
def test_what_has_no_words_stays_as_it_is(text):
    generator = ShoutingGenerator()
    assert translate([text], generator) == [text]
    assert generator.calls == []


def test_white_space_and_blank_lines_stay():
    assert translate(["  One.\n\n Two.   Three. \n"]) == ["  ONE.\n\n TWO.   THREE. \n"]


@given(st.text(st.sampled_from("aB .!?\n\t1é—")))
def test_put_together_the_parts_are_the_text(text):
    assert "".join(part.text for part in split_text(text)) == text
    assert all(part.text == part.text.strip() for part in split_text(text) if part.is_sentence)


def test_a_long_sentence_is_cut_into_clauses():
    generator = ShoutingGenerator()
    text = "when it rains in spring, we stay at home and read, " * 8 + "and that is all."
    assert translate([text], generator) == [text.upper()]
    assert all(len(sentence.split()) <= 30 for sentence in generator.calls[0])
    assert all(sentence.endswith((",", ".")) for sentence in generator.calls[0])


def test_what_is_to_be_copied_goes_through_as_a_placeholder():
    generator = ShoutingGenerator()
    assert translate(["see example.org, page 42."], generator) == ["SEE example.org, PAGE 42."]
    assert generator.calls == [[f"See {PLACEHOLDERS[0]}, page {PLACEHOLDERS[1]}."]]


def test_a_sentence_that_loses_a_placeholder_is_translated_around_it():
    generator = ShoutingGenerator(forgets=True)
    assert translate(["go to page 42 now"], generator) == ["GO TO PAGE 42 NOW"]
    assert generator.calls == [*[[f"Go to page {PLACEHOLDERS[0]} now."]] * 2, ["Go to page.", "Now."]]


@given(
    words=st.lists(
        st.sampled_from(["1234.5", "2021", "a.b@c.org", "A380", "10:30", "the", "sea", "at"]), max_size=9
    )
)
def test_nothing_that_is_copied_is_lost_however_forgetful_the_model_is(words):
    for generator in (ShoutingGenerator(forgets=True), ShoutingGenerator(wants="no such word")):
        (text,) = translate([" see ".join(words)], generator)
        found = text.lower().split()
        for word in words:
            written = {"1234.5": "1234,5", "10:30": "10"}.get(word, word.lower())
            assert found.count(written) >= words.count(word), text


def test_a_sentence_with_more_to_copy_than_placeholders_is_cut_at_once():
    generator = ShoutingGenerator()
    text = "From 10 to 20, or 30, and 40 with 50."
    assert translate([text], generator) == [text.upper()]
    assert len(generator.calls) == 1
    assert len(generator.calls[0]) == 2


def test_of_several_candidates_one_that_keeps_the_placeholders_is_taken():
    generator = ShoutingGenerator(wants="no such word")
    assert translate(["Go to page 42 now."], generator) == ["GO TO PAGE 42 NOW."]
    assert len(generator.calls) == 2


def test_a_sentence_whose_candidates_all_lose_a_placeholder_is_translated_clause_by_clause():
    class ShortSightedGenerator(ShoutingGenerator):
        def generate(self, texts, options, **details):
            loses = [len(re.findall(f"[{PLACEHOLDERS}]", text)) > 1 for text in texts]
            results = super().generate(texts, options, **details)
            return [
                [replace(result, text=result.text.replace(PLACEHOLDERS[0], "IT")) for result in row]
                if lost
                else row
                for row, lost in zip(results, loses, strict=True)
            ]

    generator = ShortSightedGenerator()
    text = "Go to page 42 now, and read on to page 50."
    assert translate([text], generator) == [text.upper()]
    assert generator.calls[-1] == [
        f"Go to page {PLACEHOLDERS[0]} now,",
        f"And read on to page {PLACEHOLDERS[0]}.",
    ]


def test_several_translations_that_lose_a_placeholder_stay_as_many():
    translator = Translator(ShoutingGenerator(wants="no such word"), "fr")
    (results,) = translator.generate(["page 42"], GenerationConfig(num_beams=2, num_return_sequences=2))
    assert [result.text for result in results] == ["PAGE 42", "PAGE 42"]


def test_emoji_stay_where_they_are():
    generator = ShoutingGenerator()
    assert translate(["I like it 😀👍🏽 very much ❤️ !", "😀"], generator) == [
        "I LIKE IT 😀👍🏽 VERY MUCH ❤️ !",
        "😀",
    ]
    assert translate(["I like it 😀"], generator) == ["I LIKE IT 😀"]
    assert generator.calls[-1] == ["I like it."]


def test_a_model_that_never_saw_placeholders_gets_none():
    tokenizer = train_tokenizer("bpe", ["the sea is calm"] * 9, 300, extra_special_tokens=["<2fr>"])
    generator = ShoutingGenerator(tokenizer)
    translate(["page 42"], generator)
    assert generator.calls == [["page 42"]]


def test_typographic_characters_become_those_of_the_training_texts():
    generator = ShoutingGenerator()
    translate(["It’s\u00a0here.\u200b"], generator)
    assert generator.calls == [["It's here."]]


def test_several_translations_are_of_the_whole_text():
    translator = Translator(ShoutingGenerator(), "fr")
    (results,) = translator.generate(["One. Two."], GenerationConfig(num_beams=2, num_return_sequences=2))
    assert [result.text for result in results] == ["ONE. TWO."] * 2


def test_a_stream_is_the_same_text():
    translator = Translator(ShoutingGenerator(), "fr")
    assert list(translator.stream("One.  Two.", GenerationConfig())) == ["ONE.", "  ", "TWO."]


def test_languages_are_the_tags_of_the_tokenizer():
    assert target_languages(TOKENIZER) == {"en": "<2en>", "fr": "<2fr>"}
    assert Translator(ShoutingGenerator(), "FR").generator.tag == "<2fr>"
    with pytest.raises(
        ValueError, match=r"does not write 'klingon': there are en \(English\), fr \(French\)"
    ):
        Translator(ShoutingGenerator(), "klingon")
    plain = ShoutingGenerator(train_tokenizer("bpe", ["a b"] * 9, 300))
    with pytest.raises(ValueError, match="it has no language tags, so leave --to out"):
        Translator(plain, "fr")


def test_a_text_in_a_language_that_the_model_cannot_read_gets_a_note():
    translator = Translator(ShoutingGenerator(), "fr", pivot="en")
    with pytest.warns(UserWarning, match=r"looks like German, and this model .*English only.*--to en first"):
        translator.generate(["Wo ist der Bahnhof?"], GenerationConfig())
    with pytest.warns(UserWarning, match=r"looks like German, and this model .*English only"):
        translator.generate(["Ich habe Hunger"], GenerationConfig())


@pytest.mark.parametrize(
    ("text", "to", "message"),
    [
        ("J'ai faim", "fr", "French, and that is the language to write: the output may be in English"),
        ("I am hungry", "en", "English, .* language to write: the output may say the same in other words"),
    ],
)
def test_the_note_about_a_text_in_the_language_to_write_says_what_happens(text, to, message):
    translator = Translator(ShoutingGenerator(), to, pivot="en")
    with pytest.warns(UserWarning, match=f"looks like {message}"):
        translator.generate([text], GenerationConfig())


@pytest.mark.parametrize("text", ["Where is the station?", "Tom", ""])
def test_other_texts_get_none(text, recwarn):
    Translator(ShoutingGenerator(), "fr", pivot="en").generate([text], GenerationConfig())
    Translator(ShoutingGenerator(), "fr").generate(["Wo ist der Bahnhof?"], GenerationConfig())
    assert not recwarn.list


def test_fragments_and_capitals_are_given_to_the_model_as_sentences():
    generator = ShoutingGenerator()
    assert translate(["the sea\nWHERE IS IT?"], generator) == ["THE SEA\nWHERE IS IT?"]
    assert generator.calls == [["The sea.", "Where is it?"]]
