"""French: agreement, the place of the adjective, ne … pas, est-ce que, elision and contraction."""

from __future__ import annotations

import re

from keepleft.data.phrases.forms import Adjective, Clause, Mood, Noun, Phrase

IS = ("suis", "es", "est", "sommes", "sont")
WAS = ("étais", "étais", "était", "étions", "étaient")
HAS = ("ai", "as", "a", "avons", "ont")
HAD = ("avais", "avais", "avait", "avions", "avaient")
WANTS = ("veux", "veux", "veut", "voulons", "veulent")
MUST = ("dois", "dois", "doit", "devons", "doivent")
CAN = ("peux", "peux", "peut", "pouvons", "peuvent")
WILL = ("ai", "as", "a", "ons", "ont")
SELF = ("me", "te", "se", "nous", "se")
OWN = {"my": ("mon", "ma", "mes"), "your": ("ton", "ta", "tes"), "his": ("son", "sa", "ses"), "her": ("son", "sa", "ses"),
       "our": ("notre", "notre", "nos"), "their": ("leur", "leur", "leurs")}

VOWEL = "aàâeéèêiîoôuûyhœ"
SHORTENED = re.compile(rf"\b(j|l|n|d|qu|m|t|s)[ea] (?!hindi|huit|onze)(?=[{VOWEL}{VOWEL.upper()}])")
CONTRACTED = {" à le ": " au ", " à les ": " aux ", " de le ": " du ", " de les ": " des "}


def vowel(word: str) -> bool:
    """Whether a word before this one is shortened."""
    return word[0].lower() in VOWEL and not word.startswith(("hindi", "huit", "onze"))


def join(*parts: str) -> str:
    """A sentence: elided, contracted, a capital first, nothing at the end."""
    text = SHORTENED.sub(r"\1'", " ".join(filter(None, parts)))
    for apart, together in CONTRACTED.items():
        text = text.replace(apart, together)
    return text[0].upper() + text[1:]


def noun(word: Noun, plural: bool) -> str:
    return word.french_plural if plural else word.french


def agree(quality: Adjective, feminine: bool, plural: bool) -> str:
    return quality.french[2 * plural + feminine]


def described(word: Noun, plural: bool, quality: Adjective | None) -> str:
    """A noun and its adjective, on the side where it belongs: une voiture rouge, un nouvel ordinateur."""
    name = noun(word, plural)
    if quality is None:
        return name
    form = agree(quality, word.french_feminine, plural)
    if not quality.before:
        return f"{name} {form}"
    if quality.liaison and not plural and not word.french_feminine and vowel(name):
        form = quality.liaison
    return f"{form} {name}"


def determined(determiner: str, name: str, feminine: bool, plural: bool) -> str:
    """The determiner for what follows it: le, cette, mon école, des."""
    if determiner in OWN:
        forms = OWN[determiner]
        return f"{forms[2] if plural else forms[1] if feminine and not vowel(name) else forms[0]} {name}"
    if determiner == "this":
        return f"{'ces' if plural else 'cette' if feminine else 'cet' if vowel(name) else 'ce'} {name}"
    if determiner == "a":
        return f"{'des' if plural else 'une' if feminine else 'un'} {name}"
    return f"{'les' if plural else 'la' if feminine else 'le'} {name}"


def finite(subject: Phrase, before: str, verb: str, after: str, rest: str, mood: Mood) -> str:
    """A verb with its pronouns before it and its participle or infinitive after: il ne m'a pas donné de livre."""
    if mood == "not":
        return join(subject.french, "ne", before, verb, "pas", after, rest)
    return join("est-ce que" if mood == "ask" else "", subject.french, before, verb, after, rest)


def direct(thing: Phrase) -> str:
    """The pronoun of someone as a direct object: me, te, le, la, nous, les."""
    return ("me", "te", "la" if thing.french_feminine else "le", "nous", "les")[thing.person]


def indirect(person: Phrase) -> str:
    return ("me", "te", "lui", "nous", "leur")[person.person]


def clause(said: Clause) -> str:
    who, verb, mood = said.subject, said.verb, said.mood
    thing = said.object
    pronoun = indirect(said.receiver) if said.receiver else ""
    named = ""
    if thing and thing.him:
        pronoun = direct(thing)
    elif thing:
        named = (thing.french_not or thing.french) if mood == "not" else thing.french
    if verb.reflexive:
        pronoun = SELF[who.person]
    rest = " ".join(filter(None, [named, *(extra[1] for extra in said.extras)]))
    match said.tense:
        case "now" | "habit":
            return finite(who, pronoun, verb.present[who.person], "", rest, mood)
        case "future":
            return finite(who, pronoun, verb.future + WILL[who.person], "", rest, mood)
        case "past":
            helper = IS if verb.being else HAS
            participle = verb.participle + ("e" * who.french_feminine + "s" * who.plural) * verb.being
            return finite(who, pronoun, helper[who.person], participle, rest, mood)
        case _:
            modal = {"want": WANTS, "must": MUST, "can": CAN}[said.tense]
            return finite(who, "", modal[who.person], f"{pronoun} {verb.infinitive}".strip(), rest, mood)
