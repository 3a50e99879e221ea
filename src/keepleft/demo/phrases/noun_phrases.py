"""Noun phrases, and clauses, in all three languages at once."""

from __future__ import annotations

from functools import cache

from keepleft.demo.phrases import english, french, hindi
from keepleft.demo.phrases.grammar_types import Adjective, Clause, Noun, Phrase, Triple
from keepleft.demo.phrases.lexicon import NAMES, NUMBERS, WOMEN


def pronouns() -> tuple[Phrase, ...]:
    """I, you, he, she, we, they: you is tu and आप, and all but she are masculine."""
    table = (
        ("I", "me", "je", 0),
        ("you", "you", "tu", 1),
        ("he", "him", "il", 2),
        ("she", "her", "elle", 2),
        ("we", "us", "nous", 3),
        ("they", "them", "ils", 4),
    )
    return tuple(
        Phrase(
            name,
            french=je,
            hindi=hindi.PRONOUNS[person],
            oblique="",
            person=person,
            object_form=him,
            french_feminine=name == "she",
            hindi_feminine=name == "she",
            hindi_plural=person in (1, 3, 4),
        )
        for name, him, je, person in table
    )


def name_phrases() -> tuple[Phrase, ...]:
    return tuple(
        Phrase(
            name,
            french=nom,
            hindi=naam,
            oblique=naam,
            french_feminine=name in WOMEN,
            hindi_feminine=name in WOMEN,
        )
        for name, nom, naam in NAMES
    )


@cache
def noun_phrase(
    word: Noun,
    determiner: str = "the",
    *,
    plural: bool = False,
    quality: Adjective | None = None,
    number: int = 0,
    owner: Phrase | None = None,
    own: bool = False,
) -> Phrase:
    """A noun with its determiner (the, a, this, some, all, a possessive), number or owner, and adjective.

    `own`: the possessive refers to the subject of the clause, which Hindi tells apart.
    """
    plural = plural or number > 1
    feminine, hindi_plural = word.hindi_feminine, plural or word.honorific
    bare = english.noun(word, plural)
    name = f"{quality.english} {bare}" if quality else bare
    nom = french.noun_with_adjective(word, plural, quality)
    naam, oblique = hindi.noun(word, plural), hindi.noun(word, plural, oblique=True)
    if quality:
        naam = f"{hindi.agree(quality.hindi, feminine, hindi_plural)} {naam}"
        oblique = f"{hindi.agree(quality.hindi, feminine, True)} {oblique}"
    named = name
    nommé = ""
    before = ""
    after = ""
    whose = determiner if determiner in french.POSSESSIVES else ""
    negation = ""
    if owner:
        named = f"{owner.english}'s {name}"
        nommé = f"{french.with_determiner('the', nom, word.french_feminine, plural)} de {owner.french}"
        before, after = (
            f"{owner.oblique} {hindi.agree('का', feminine, many)}" for many in (hindi_plural, True)
        )
    elif number > 1:
        one, un, ek = NUMBERS[number - 1]
        named = f"{one} {name}"
        nommé = f"{un} {nom}"
        before = ek
        after = ek
    elif whose:
        stem = hindi.POSSESSIVES["own" if own else whose]
        named = f"{whose} {name}"
        before, after = hindi.agree(stem, feminine, hindi_plural), hindi.agree(stem, feminine, True)
    elif determiner == "this":
        named = f"{'these' if plural else 'this'} {name}"
        before, after = ("ये", "इन") if plural else ("यह", "इस")
    elif determiner == "a":
        named = name if plural else english.with_article(name)
        before, after, negation = ("", "", "de ") if plural else ("एक", "एक", "de ")
    elif determiner == "some":  # a stuff: du pain, and no article in English
        nommé, negation = f"de {french.with_determiner('the', nom, word.french_feminine, False)}", "de "
    elif determiner == "all":  # a kind: j'aime le pain, j'aime les pommes
        nommé = french.with_determiner("the", nom, word.french_feminine, plural)
    elif determiner == "the":
        named = f"the {name}"
    return Phrase(
        named,
        french=nommé or french.with_determiner(determiner, nom, word.french_feminine, plural),
        hindi=f"{before} {naam}".strip(),
        oblique=f"{after} {oblique}".strip(),
        person=4 if plural else 2,
        french_feminine=word.french_feminine,
        hindi_feminine=feminine,
        hindi_plural=hindi_plural,
        possessive=whose,
        french_negated=f"{negation}{nom}" if negation else "",
        hindi_negated=naam if negation else "",
    )


def render_clause(clause: Clause) -> Triple:
    return english.render_clause(clause), french.render_clause(clause), hindi.render_clause(clause)
