"""Types of the toy grammar: nouns, adjectives, verbs, places, phrases, clauses and sentence patterns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Tense = Literal["now", "habit", "past", "future", "want", "must", "can"]
Mood = Literal["say", "not", "ask"]
MOODS: tuple[Mood, ...] = ("say", "not", "ask")
Triple = tuple[str, str, str]  # English, French, Hindi


@dataclass(frozen=True, eq=False)
class Noun:
    english: str
    english_plural: str
    french: str
    french_plural: str
    french_feminine: bool
    hindi: str
    hindi_feminine: bool
    honorific: bool = False  # in Hindi always plural and never inflected: पिता, माँ
    classes: str = ""  # which adjectives make sense with it, one letter for each class


@dataclass(frozen=True, eq=False)
class Adjective:
    english: str
    french: tuple[str, str, str, str]  # masculine, feminine, and their plurals
    hindi: str
    before_noun: bool = False  # in French
    liaison: str = ""  # masculine before a vowel: nouvel, vieil, bel
    classes: str = ""


@dataclass(frozen=True, eq=False)
class Verb:
    english: tuple[str, str, str, str]  # sleep sleeps sleeping slept
    infinitive: str
    present: tuple[str, str, str, str, str]  # je tu il nous ils
    participle: str
    future: str  # the stem: dormir-
    hindi: str  # the stem: सो
    uses_etre: bool = False  # as the auxiliary of the past
    reflexive: bool = False
    prefix: str = ""  # the word before the stem: काम in काम कर
    prefix_feminine: bool = False
    ergative: bool = False  # the past takes ने
    case: str = ""  # the postposition of the object: को, से, का, की


@dataclass(frozen=True, eq=False)
class Phrase:
    """Someone or something, in three languages; person 0 to 4 is I, you, he or she, we, they."""

    english: str
    french: str
    hindi: str
    oblique: str  # Hindi before a postposition
    person: int = 2
    french_feminine: bool = False
    hindi_feminine: bool = False
    hindi_plural: bool = False
    possessive: str = ""  # the possessive it begins with: my, your, his, …
    object_form: str = ""  # English, standing as an object
    french_negated: str = ""  # after a negation: de pain, where it is not as in a statement
    hindi_negated: str = ""

    @property
    def plural(self) -> bool:
        return self.person >= 3


@dataclass(frozen=True, eq=False)
class PlacePhrase:
    """A place as location, destination and origin."""

    at: Triple
    to: Triple
    out: Triple


@dataclass(frozen=True, eq=False)
class Clause:
    subject: Phrase
    verb: Verb
    tense: Tense = "now"
    mood: Mood = "say"
    object: Phrase | None = None
    indirect_object: Phrase | None = None  # a pronoun: gave *me* a book
    extras: tuple[Triple, ...] = ()  # place, then time


@dataclass(frozen=True, eq=False)
class Pattern:
    """A sentence pattern: a function that builds a sentence, or None, from one choice for each argument."""

    name: str
    max_sentences: int
    build: Callable[..., Triple | None]
    choices: tuple[tuple[object, ...], ...]
