"""English: the verb and its auxiliaries, in full words and without contractions."""

from __future__ import annotations

from keepleft.data.phrases.forms import Clause, Mood, Noun, Phrase

IS = ("am", "are", "is", "are", "are")
WAS = ("was", "were", "was", "were", "were")
DO = ("do", "do", "does", "do", "do")


def join(*parts: str) -> str:
    """A sentence: a capital first, nothing at the end."""
    text = " ".join(filter(None, parts)).rstrip()
    return text[0].upper() + text[1:]


def an(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def noun(word: Noun, plural: bool) -> str:
    return word.english_plural if plural else word.english


def finite(subject: Phrase, helper: str, rest: str, mood: Mood) -> str:
    """A helper verb around its subject: he is …, he is not …, is he …"""
    if mood == "ask":
        return join(helper, subject.english, rest)
    if mood == "not":
        return join(subject.english, "cannot" if helper == "can" else f"{helper} not", rest)
    return join(subject.english, helper, rest)


def plain(subject: Phrase, base: str, third: str, rest: str, mood: Mood) -> str:
    """A verb without a helper, which takes do where it is denied or asked: he likes …, he does not like …"""
    if mood == "say":
        return join(subject.english, third if subject.person == 2 else base, rest)
    return finite(subject, DO[subject.person], f"{base} {rest}", mood)


def clause(said: Clause) -> str:
    who, mood = said.subject, said.mood
    base, third, going, past = said.verb.english
    rest = " ".join(filter(None, [said.receiver.him if said.receiver else "",
                                  (said.object.him or said.object.english) if said.object else "",
                                  *(extra[0] for extra in said.extras)]))
    match said.tense:
        case "now":
            return finite(who, IS[who.person], f"{going} {rest}", mood)
        case "habit":
            return plain(who, base, third, rest, mood)
        case "past":
            return join(who.english, past, rest) if mood == "say" else finite(who, "did", f"{base} {rest}", mood)
        case "future":
            return finite(who, "will", f"{base} {rest}", mood)
        case "want":
            return plain(who, "want to", "wants to", f"{base} {rest}", mood)
        case "must":
            return plain(who, "have to", "has to", f"{base} {rest}", mood)
        case "can":
            return finite(who, "can", f"{base} {rest}", mood)
