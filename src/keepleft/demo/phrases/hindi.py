"""Hindi: direct and oblique forms, postpositions, agreement, ने in the past, and the dative subject."""

from __future__ import annotations

from keepleft.demo.phrases.grammar_types import Clause, Mood, Noun, Phrase

POSSESSIVES = {
    "my": "मेरा",
    "your": "आपका",
    "his": "उसका",
    "her": "उसका",
    "our": "हमारा",
    "their": "उनका",
    "own": "अपना",
}
PRONOUN_POSSESSIVES = ("मेरा", "आपका", "उसका", "हमारा", "उनका")
CASES = {
    "ने": ("मैंने", "आपने", "उसने", "हमने", "उन्होंने"),
    "को": ("मुझे", "आपको", "उसे", "हमें", "उन्हें"),
    "से": ("मुझसे", "आपसे", "उससे", "हमसे", "उनसे"),
}
PRONOUNS = ("मैं", "आप", "वह", "हम", "वे")
IRREGULAR_PERFECTIVES = {
    "कर": ("किया", "किए", "की", "कीं"),
    "जा": ("गया", "गए", "गई", "गईं"),
    "पी": ("पिया", "पिए", "पी", "पीं"),
    "दे": ("दिया", "दिए", "दी", "दीं"),
    "हो": ("हुआ", "हुए", "हुई", "हुईं"),
}
IRREGULAR_FUTURES = {"पी": ("पिऊँ", "पिए", "पिएँ"), "दे": ("दूँ", "दे", "दें"), "हो": ("होऊँ", "हो", "हों")}
VOWELS = "ाोीआ"


def join(*parts: str) -> str:
    """A sentence, without a full stop."""
    return " ".join(filter(None, parts))


def noun(word: Noun, plural: bool, oblique: bool = False) -> str:
    """लड़का लड़के, लड़के लड़कों; किताब किताबें, किताब किताबों; पिता is never inflected."""
    name = word.hindi
    if word.honorific:
        return name
    if not plural:
        return name[:-1] + "े" if oblique and name.endswith("ा") and not word.hindi_feminine else name
    if oblique:
        if name.endswith("ी"):
            return name[:-1] + "ियों"
        if name.endswith("ई"):
            return name[:-1] + "इयों"
        return (name[:-1] if name.endswith("ा") else name) + "ों"
    if not word.hindi_feminine:
        return name[:-1] + "े" if name.endswith("ा") else name
    if name.endswith("या"):
        return name + "ँ"
    return name[:-1] + "ियाँ" if name.endswith("ी") else name + "ें"


def agree(word: str, feminine: bool, plural: bool) -> str:
    """An adjective, possessive or participle in -ा, inflected; others never change. Oblique is as plural."""
    if " " in word:
        return " ".join(agree(part, feminine, plural) for part in word.split())
    if not word.endswith(("ा", "हुआ")) or not (feminine or plural):
        return word
    if word in ("नया", "हुआ"):
        return word[: -2 if word == "नया" else -1] + ("ई" if feminine else "ए")
    return word[:-1] + ("ी" if feminine else "े")


def with_postposition(phrase: Phrase, postposition: str) -> str:
    """A phrase with its postposition: मुझे, उसने, लड़के को, आपकी, रवि का."""
    if phrase.hindi in PRONOUNS and postposition in CASES:
        return CASES[postposition][phrase.person]
    if phrase.hindi in PRONOUNS:
        return PRONOUN_POSSESSIVES[phrase.person][:-1] + postposition[-1]  # का के की end as the pronoun does
    return f"{phrase.oblique} {postposition}"


def copula(phrase: Phrase, past: bool = False) -> str:
    """है हैं हूँ, or था थे थी थीं."""
    if past:
        return past_copula(phrase.hindi_feminine, phrase.hindi_plural)
    return "हूँ" if phrase.person == 0 else "हैं" if phrase.hindi_plural else "है"


def past_copula(feminine: bool, plural: bool) -> str:
    return ("थीं" if plural else "थी") if feminine else "थे" if plural else "था"


def perfective(stem: str, feminine: bool, plural: bool) -> str:
    """The perfective: सोया सोए सोई सोईं, पढ़ा पढ़े पढ़ी पढ़ीं."""
    if stem in IRREGULAR_PERFECTIVES:
        forms = IRREGULAR_PERFECTIVES[stem]
    elif stem[-1] in VOWELS:
        forms = (stem + "या", stem + "ए", stem + "ई", stem + "ईं")
    else:
        forms = (stem + "ा", stem + "े", stem + "ी", stem + "ीं")
    return forms[2 * feminine + plural]


def future(stem: str, phrase: Phrase) -> str:
    """The future: सोऊँगा सोएगा सोएगी सोएँगे, करूँगा करेगा करेगी करेंगे."""
    if stem in IRREGULAR_FUTURES:
        forms = IRREGULAR_FUTURES[stem]
    elif stem[-1] in VOWELS:
        forms = (stem + "ऊँ", stem + "ए", stem + "एँ")
    else:
        forms = (stem + "ूँ", stem + "े", stem + "ें")
    form_index = 0 if phrase.person == 0 else 2 if phrase.hindi_plural else 1
    return forms[form_index] + agree("गा", phrase.hindi_feminine, phrase.hindi_plural)


def habitual(stem: str, phrase: Phrase, mood: Mood) -> str:
    """सोता है; negated, है is left out and a feminine plural takes its nasal: नहीं सोता, नहीं सोतीं."""
    form = agree(stem + "ता", phrase.hindi_feminine, phrase.hindi_plural)
    if mood != "not":
        return f"{form} {copula(phrase)}"
    return form + "ं" if phrase.hindi_feminine and phrase.hindi_plural else form


def finite(subject: str, rest: str, prefix: str, verb: str, mood: Mood) -> str:
    """A clause, the verb last: क्या opens a question, नहीं stands before the verb."""
    return join("क्या" if mood == "ask" else "", subject, rest, prefix, "नहीं" if mood == "not" else "", verb)


def render_clause(clause: Clause) -> str:
    subject = clause.subject
    verb = clause.verb
    mood = clause.mood
    direct_object = clause.object
    prefix = clause.verb.prefix
    stem = clause.verb.hindi
    has_postposition = direct_object is not None and bool(verb.case)
    object_text = ""
    if direct_object is not None and has_postposition:
        object_text = with_postposition(direct_object, verb.case)
    elif direct_object is not None:
        object_text = (
            (direct_object.hindi_negated or direct_object.hindi) if mood == "not" else direct_object.hindi
        )
    recipient = with_postposition(clause.indirect_object, "को") if clause.indirect_object else ""
    time_and_place = [extra[2] for extra in reversed(clause.extras)]
    rest = join(*time_and_place, recipient, object_text)
    # what the verb agrees with when it does not agree with its subject
    feminine, plural = verb.prefix_feminine, False
    if direct_object is not None and not has_postposition:
        feminine, plural = direct_object.hindi_feminine, direct_object.hindi_plural
    match clause.tense:
        case "now":
            form = f"{stem} {agree('रहा', subject.hindi_feminine, subject.hindi_plural)} {copula(subject)}"
        case "habit":
            form = habitual(stem, subject, mood)
        case "past" if verb.ergative:
            return finite(
                with_postposition(subject, "ने"), rest, prefix, perfective(stem, feminine, plural), mood
            )
        case "past":
            form = perfective(stem, subject.hindi_feminine, subject.hindi_plural)
        case "future":
            form = future(stem, subject)
        case "want":
            return finite(
                subject.hindi, rest, f"{prefix} {stem}ना".strip(), habitual("चाह", subject, mood), mood
            )
        case "must":
            form = f"{agree(stem + 'ना', feminine, plural)} {'हैं' if plural else 'है'}"
            return finite(with_postposition(subject, "को"), rest, prefix, form, mood)
        case "can":
            form = f"{stem} {habitual('सक', subject, mood)}"
    return finite(subject.hindi, rest, prefix, form, mood)
