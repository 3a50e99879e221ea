"""French: agreement, the place of the adjective, ne … pas, est-ce que, elision and contraction."""

from __future__ import annotations

import re

from keepleft.demo.phrases.grammar_types import Adjective, Clause, Mood, Noun, Phrase

IS = ("suis", "es", "est", "sommes", "sont")
WAS = ("étais", "étais", "était", "étions", "étaient")
HAS = ("ai", "as", "a", "avons", "ont")
HAD = ("avais", "avais", "avait", "avions", "avaient")
WANTS = ("veux", "veux", "veut", "voulons", "veulent")
MUST = ("dois", "dois", "doit", "devons", "doivent")
CAN = ("peux", "peux", "peut", "pouvons", "peuvent")
FUTURE_ENDINGS = ("ai", "as", "a", "ons", "ont")
REFLEXIVES = ("me", "te", "se", "nous", "se")
POSSESSIVES = {
    "my": ("mon", "ma", "mes"),
    "your": ("ton", "ta", "tes"),
    "his": ("son", "sa", "ses"),
    "her": ("son", "sa", "ses"),
    "our": ("notre", "notre", "nos"),
    "their": ("leur", "leur", "leurs"),
}

VOWEL = "aàâeéèêiîoôuûyhœ"
ELISION = re.compile(rf"\b(j|l|n|d|qu|m|t|s)[ea] (?!hindi|huit|onze)(?=[{VOWEL}{VOWEL.upper()}])")
CONTRACTIONS = {" à le ": " au ", " à les ": " aux ", " de le ": " du ", " de les ": " des "}


def starts_with_vowel(word: str) -> bool:
    """Whether a word before this one is elided."""
    return word[0].lower() in VOWEL and not word.startswith(("hindi", "huit", "onze"))


def join(*parts: str) -> str:
    """A sentence: elided, contracted, capitalised, without a full stop."""
    text = ELISION.sub(r"\1'", " ".join(filter(None, parts)))
    for full_form, contraction in CONTRACTIONS.items():
        text = text.replace(full_form, contraction)
    return text[0].upper() + text[1:]


def noun(word: Noun, plural: bool) -> str:
    return word.french_plural if plural else word.french


def agree(quality: Adjective, feminine: bool, plural: bool) -> str:
    return quality.french[2 * plural + feminine]


def noun_with_adjective(word: Noun, plural: bool, quality: Adjective | None) -> str:
    """A noun and its adjective, before or after it: une voiture rouge, un nouvel ordinateur."""
    name = noun(word, plural)
    if quality is None:
        return name
    form = agree(quality, word.french_feminine, plural)
    if not quality.before_noun:
        return f"{name} {form}"
    if quality.liaison and not plural and not word.french_feminine and starts_with_vowel(name):
        form = quality.liaison
    return f"{form} {name}"


def with_determiner(determiner: str, name: str, feminine: bool, plural: bool) -> str:
    """A noun with its determiner: le chat, cette voiture, mon école, des pommes."""
    elides = starts_with_vowel(name)
    if determiner in POSSESSIVES:
        masculine_form, feminine_form, plural_form = POSSESSIVES[determiner]
        form = plural_form if plural else feminine_form if feminine and not elides else masculine_form
    elif determiner == "this":
        form = "ces" if plural else "cette" if feminine else "cet" if elides else "ce"
    elif determiner == "a":
        form = "des" if plural else "une" if feminine else "un"
    else:
        form = "les" if plural else "la" if feminine else "le"
    return f"{form} {name}"


def finite(subject: Phrase, before: str, verb: str, after: str, rest: str, mood: Mood) -> str:
    """A clause: pronouns before the verb, participle or infinitive after: il ne m'a pas donné de livre."""
    if mood == "not":
        return join(subject.french, "ne", before, verb, "pas", after, rest)
    return join("est-ce que" if mood == "ask" else "", subject.french, before, verb, after, rest)


def direct_pronoun(phrase: Phrase) -> str:
    """The direct object pronoun: me, te, le, la, nous, les."""
    return ("me", "te", "la" if phrase.french_feminine else "le", "nous", "les")[phrase.person]


def indirect_pronoun(phrase: Phrase) -> str:
    """The indirect object pronoun: me, te, lui, nous, leur."""
    return ("me", "te", "lui", "nous", "leur")[phrase.person]


def render_clause(clause: Clause) -> str:
    subject = clause.subject
    verb = clause.verb
    mood = clause.mood
    direct_object = clause.object
    pronoun = indirect_pronoun(clause.indirect_object) if clause.indirect_object else ""
    object_text = ""
    if direct_object and direct_object.object_form:
        pronoun = direct_pronoun(direct_object)
    elif direct_object:
        object_text = (
            (direct_object.french_negated or direct_object.french) if mood == "not" else direct_object.french
        )
    if verb.reflexive:
        pronoun = REFLEXIVES[subject.person]
    rest = " ".join(filter(None, [object_text, *(extra[1] for extra in clause.extras)]))
    match clause.tense:
        case "now" | "habit":
            return finite(subject, pronoun, verb.present[subject.person], "", rest, mood)
        case "future":
            return finite(subject, pronoun, verb.future + FUTURE_ENDINGS[subject.person], "", rest, mood)
        case "past":
            helper = IS if verb.uses_etre else HAS
            participle = (
                verb.participle + ("e" * subject.french_feminine + "s" * subject.plural) * verb.uses_etre
            )
            return finite(subject, pronoun, helper[subject.person], participle, rest, mood)
        case _:
            modal = {"want": WANTS, "must": MUST, "can": CAN}[clause.tense]
            return finite(
                subject, "", modal[subject.person], f"{pronoun} {verb.infinitive}".strip(), rest, mood
            )
