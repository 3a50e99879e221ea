"""Hindi: direct and oblique forms, postpositions, agreement of verb and adjective, ने in the past, and the dative subject."""

from __future__ import annotations

from keepleft.data.phrases.forms import Clause, Mood, Noun, Phrase

OWN = {"my": "मेरा", "your": "आपका", "his": "उसका", "her": "उसका", "our": "हमारा", "their": "उनका", "own": "अपना"}
WHOSE = ("मेरा", "आपका", "उसका", "हमारा", "उनका")
CASES = {"ने": ("मैंने", "आपने", "उसने", "हमने", "उन्होंने"), "को": ("मुझे", "आपको", "उसे", "हमें", "उन्हें"),
         "से": ("मुझसे", "आपसे", "उससे", "हमसे", "उनसे")}
PRONOUNS = ("मैं", "आप", "वह", "हम", "वे")
DONE = {"कर": ("किया", "किए", "की", "कीं"), "जा": ("गया", "गए", "गई", "गईं"), "पी": ("पिया", "पिए", "पी", "पीं"),
        "दे": ("दिया", "दिए", "दी", "दीं"), "हो": ("हुआ", "हुए", "हुई", "हुईं")}
WILL = {"पी": ("पिऊँ", "पिए", "पिएँ"), "दे": ("दूँ", "दे", "दें"), "हो": ("होऊँ", "हो", "हों")}
VOWELS = "ाोीआ"


def join(*parts: str) -> str:
    """A sentence, nothing at the end."""
    return " ".join(filter(None, parts))


def noun(word: Noun, plural: bool, oblique: bool = False) -> str:
    """लड़का लड़के, लड़के लड़कों; किताब किताबें, किताब किताबों; पिता never bends."""
    name = word.hindi
    if word.honoured:
        return name
    if not plural:
        return name[:-1] + "े" if oblique and name.endswith("ा") and not word.hindi_feminine else name
    if oblique:
        stem = name[:-1] if name.endswith("ा") else name
        return name[:-1] + "ियों" if name.endswith("ी") else name[:-1] + "इयों" if name.endswith("ई") else stem + "ों"
    if not word.hindi_feminine:
        return name[:-1] + "े" if name.endswith("ा") else name
    if name.endswith("या"):
        return name + "ँ"
    return name[:-1] + "ियाँ" if name.endswith("ी") else name + "ें"


def agree(word: str, feminine: bool, plural: bool) -> str:
    """An adjective, possessive or participle in -ा, for what it goes with; others never change. Oblique is as plural."""
    if " " in word:
        return " ".join(agree(part, feminine, plural) for part in word.split())
    if not word.endswith(("ा", "हुआ")) or not (feminine or plural):
        return word
    if word in ("नया", "हुआ"):
        return word[:-2 if word == "नया" else -1] + ("ई" if feminine else "ए")
    return word[:-1] + ("ी" if feminine else "े")


def case(phrase: Phrase, post: str) -> str:
    """Someone before a postposition: मुझे, उसने, लड़के को, आपकी, रवि का."""
    if phrase.hindi in PRONOUNS and post in CASES:
        return CASES[post][phrase.person]
    if phrase.hindi in PRONOUNS:
        return WHOSE[phrase.person][:-1] + post[-1]  # का के की end as the pronoun does
    return f"{phrase.oblique} {post}"


def be(phrase: Phrase, past: bool = False) -> str:
    """है हैं हूँ, or था थे थी थीं."""
    if past:
        return was(phrase.hindi_feminine, phrase.hindi_plural)
    return "हूँ" if phrase.person == 0 else "हैं" if phrase.hindi_plural else "है"


def was(feminine: bool, plural: bool) -> str:
    return ("थीं" if plural else "थी") if feminine else "थे" if plural else "था"


def done(stem: str, feminine: bool, plural: bool) -> str:
    """The perfective: सोया सोए सोई सोईं, पढ़ा पढ़े पढ़ी पढ़ीं."""
    if stem in DONE:
        forms = DONE[stem]
    elif stem[-1] in VOWELS:
        forms = (stem + "या", stem + "ए", stem + "ई", stem + "ईं")
    else:
        forms = (stem + "ा", stem + "े", stem + "ी", stem + "ीं")
    return forms[2 * feminine + plural]


def will(stem: str, phrase: Phrase) -> str:
    """The future: सोऊँगा सोएगा सोएगी सोएँगे, करूँगा करेगा करेगी करेंगे."""
    if stem in WILL:
        forms = WILL[stem]
    elif stem[-1] in VOWELS:
        forms = (stem + "ऊँ", stem + "ए", stem + "एँ")
    else:
        forms = (stem + "ूँ", stem + "े", stem + "ें")
    which = 0 if phrase.person == 0 else 2 if phrase.hindi_plural else 1
    return forms[which] + agree("गा", phrase.hindi_feminine, phrase.hindi_plural)


def habit(stem: str, phrase: Phrase, mood: Mood) -> str:
    """सोता है; when it is denied है is left out and a feminine plural takes over its nasal: नहीं सोता, नहीं सोतीं."""
    form = agree(stem + "ता", phrase.hindi_feminine, phrase.hindi_plural)
    if mood != "not":
        return f"{form} {be(phrase)}"
    return form + "ं" if phrase.hindi_feminine and phrase.hindi_plural else form


def finite(subject: str, rest: str, prefix: str, verb: str, mood: Mood) -> str:
    """Subject, the rest, then the verb: क्या opens a question, नहीं stands before the verb."""
    return join("क्या" if mood == "ask" else "", subject, rest, prefix, "नहीं" if mood == "not" else "", verb)


def clause(said: Clause) -> str:
    who, verb, mood = said.subject, said.verb, said.mood
    thing, prefix, stem = said.object, said.verb.prefix, said.verb.hindi
    cased = thing is not None and bool(verb.case)
    named = ""
    if thing is not None and cased:
        named = case(thing, verb.case)
    elif thing is not None:
        named = (thing.hindi_not or thing.hindi) if mood == "not" else thing.hindi
    given = case(said.receiver, "को") if said.receiver else ""
    rest = " ".join(filter(None, [*(extra[2] for extra in reversed(said.extras)), given, named]))  # time, place, what
    # what the verb agrees with when it does not agree with its subject
    feminine, plural = verb.prefix_feminine, False
    if thing is not None and not cased:
        feminine, plural = thing.hindi_feminine, thing.hindi_plural
    match said.tense:
        case "now":
            form = f"{stem} {agree('रहा', who.hindi_feminine, who.hindi_plural)} {be(who)}"
        case "habit":
            form = habit(stem, who, mood)
        case "past" if verb.ergative:
            return finite(case(who, "ने"), rest, prefix, done(stem, feminine, plural), mood)
        case "past":
            form = done(stem, who.hindi_feminine, who.hindi_plural)
        case "future":
            form = will(stem, who)
        case "want":
            return finite(who.hindi, rest, f"{prefix} {stem}ना".strip(), habit("चाह", who, mood), mood)
        case "must":
            form = f"{agree(stem + 'ना', feminine, plural)} {'हैं' if plural else 'है'}"
            return finite(case(who, "को"), rest, prefix, form, mood)
        case "can":
            form = f"{stem} {habit('सक', who, mood)}"
    return finite(who.hindi, rest, prefix, form, mood)
