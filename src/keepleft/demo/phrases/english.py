"""English: the verb and its auxiliaries, in full words and without contractions."""

from __future__ import annotations

from keepleft.demo.phrases.grammar_types import Clause, Mood, Noun, Phrase

IS = ("am", "are", "is", "are", "are")
WAS = ("was", "were", "was", "were", "were")
DO = ("do", "do", "does", "do", "do")


def join(*parts: str) -> str:
    """A sentence: capitalised, without a full stop."""
    text = " ".join(filter(None, parts)).rstrip()
    return text[0].upper() + text[1:]


def with_article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def noun(word: Noun, plural: bool) -> str:
    return word.english_plural if plural else word.english


def finite(subject: Phrase, helper: str, rest: str, mood: Mood) -> str:
    """A clause with an auxiliary: he is …, he is not …, is he …"""
    if mood == "ask":
        return join(helper, subject.english, rest)
    if mood == "not":
        return join(subject.english, "cannot" if helper == "can" else f"{helper} not", rest)
    return join(subject.english, helper, rest)


def with_do_support(subject: Phrase, base: str, third: str, rest: str, mood: Mood) -> str:
    """A clause that takes do in negation and question: he likes …, he does not like …"""
    if mood == "say":
        return join(subject.english, third if subject.person == 2 else base, rest)
    return finite(subject, DO[subject.person], f"{base} {rest}", mood)


def render_clause(clause: Clause) -> str:
    subject, mood = clause.subject, clause.mood
    base, third, gerund, past = clause.verb.english
    rest = " ".join(
        filter(
            None,
            [
                clause.indirect_object.object_form if clause.indirect_object else "",
                (clause.object.object_form or clause.object.english) if clause.object else "",
                *(extra[0] for extra in clause.extras),
            ],
        )
    )
    match clause.tense:
        case "now":
            return finite(subject, IS[subject.person], f"{gerund} {rest}", mood)
        case "habit":
            return with_do_support(subject, base, third, rest, mood)
        case "past":
            return (
                join(subject.english, past, rest)
                if mood == "say"
                else finite(subject, "did", f"{base} {rest}", mood)
            )
        case "future":
            return finite(subject, "will", f"{base} {rest}", mood)
        case "want":
            return with_do_support(subject, "want to", "wants to", f"{base} {rest}", mood)
        case "must":
            return with_do_support(subject, "have to", "has to", f"{base} {rest}", mood)
        case "can":
            return finite(subject, "can", f"{base} {rest}", mood)
