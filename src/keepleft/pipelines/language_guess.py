"""Guess which of a few languages a text is in, by its function words and typical spellings.

A short text tells as well: "Ich habe Hunger" has a word that is German only. Names, numbers and texts whose
words say different things get no guess, and neither does a text in letters that none of the languages has.
"""

from __future__ import annotations

import re
from collections import Counter

# Weights of evidence; a guess needs MIN_EVIDENCE, and MIN_RATIO times that for all other languages.
CERTAIN = 4  # a word of one language, and of none beside it
TYPICAL = 2  # a spelling or a contraction that the others hardly have
SHARED = 1  # a word that is found elsewhere too: in Spanish, in Italian, or in names
MIN_EVIDENCE = 4
MIN_RATIO = 4

_CERTAIN_WORDS = {
    "en": """the of and to i you he she it we they my your his their our this that these those with from at
        is are been being have has had having do does did done can can't could would should shall must
        don't isn't aren't won't i'm it's that's he's she's what's where's who's how's there's let's here's
        what where when who whom whose why how which if because than then there here about into out up
        down over again always never very much many some any every each other another something nothing
        anything someone everyone anyone nobody please thank thanks yes hello sorry good like want know think
        go going went come came get got let make made take took see look need wait give tell said says
        speak told work time day today tomorrow yesterday people home house friend friends again too
        only just now really better more most less not but by off them him us open close shut
        eat drink sleep read write buy help love hate live him himself herself morning evening night""",
    "fr": """je il elle nous vous ils elles c'est c'était ce cette ces cet les une au aux et ou où mais
        donc avec sans dans pour sur sous chez pas jamais rien très trop aussi bien peu beaucoup
        être est suis êtes sommes sont était étais étaient sera serai avoir avez avons ont avait avais
        fait faire fais faites dit dis dire vais va vas allez allons aller veux veut voulez peux peut pouvez
        faut dois doit devez sais sait savez crois prends mange parle parlez aime aimez viens vient venez
        j'ai j'aime j'étais j'aimerais n'ai n'est n'y s'il s'est qu'il qu'elle qu'est-ce est-ce d'accord
        l'ai m'a t'ai l'air l'école l'argent mes tes ses leur leurs notre votre nos vos moi toi lui eux quoi
        quand pourquoi combien quel quelle quels quelles comme déjà encore toujours maintenant
        aujourd'hui demain ici là ça cela ceci oui merci bonjour bonsoir plaît quelque
        quelqu'un tout tous toute toutes même autre avant après depuis pendant entre vers
        soyez veuillez regarde regardez attends attendez donne donnez faim soif froid chaud fatigué malade
        homme femme enfant enfants père mère maison voiture gare jour nuit soir heure temps eau""",
    "de": """ich er sie wir ihr mich mir dich dir ihn ihm ihnen euch uns sich mein meine meinen meinem meiner
        dein deine deinen deinem deiner sein seine seinen seinem seiner ihre ihren ihrem ihrer unser
        unsere euer eure der das dem den ein eine einen einem einer eines kein keine keinen keinem
        dies diese dieser dieses diesen diesem und oder aber denn weil dass wenn als ob nicht nichts nie
        niemals immer schon noch nur auch sehr viel viele mehr zu zum zur von vom mit nach aus bei beim
        für über unter vor zwischen durch gegen ohne um bis seit auf ist sind bist bin seid waren wäre
        haben habe hast habt hatte hatten hätte werde werden wurde wirst würde kann kannst können
        könnte muss musst müssen soll sollte darf mag möchte möchtest wollen willst wollte weiß
        weißt wissen geht gehe gehen kommt komme kommen komm macht mache machen gibt gib sagt sagte
        wer wie wo wann warum wohin woher welche welcher welches wem wen da dort jetzt heute gestern
        morgen wieder ja nein bitte danke hallo guten gute gut schön tut leid etwas doch davon darüber jemand
        niemand alle alles sei lass lasst geh mach sieh nimm wetter frau kinder zeit haus uhr""",
    # Spanish, Italian and Dutch: they share words and letters with the others, and are not guessed
    "": """el las por está muy qué sé soy estoy tengo una con yo che di della è sono questo non per
        het een ik voor niet zijn waar dit dat""",
}  # fmt: skip
_SHARED_WORDS = {
    "en": "be was no old new well comment chose plus bald",
    "fr": "le la un de que qui ne se te si en à ma mon ton sa ta tu y plus comment chose ai",
    "de": "es die was war so im hat wird bald",
}
# looked at where a word is in no table
_SPELLINGS = [
    (language, weight, re.compile(pattern))
    for language, weight, pattern in (
        ("en", CERTAIN, r"\w+n't|\w+'(?:re|ll|ve)"),
        ("en", TYPICAL, r"\w+'[sdm]|wh\w+|\w{2,}ing|\w*(?:ght|ough|tch)\w*|sh\w+|\w{3,}ly|kn\w+"),
        ("fr", CERTAIN, r"(?:j|qu)'\w.*|\w+-(?:tu|vous|nous|moi|t-il|t-elle|t-on)"),
        ("fr", TYPICAL, r"(?:[lmtscdn]|jusqu|lorsqu)'\w.*|\w+-(?:il|elle|ce|je|le|la|les)"),
        ("fr", TYPICAL, r"\w*[âçêîôûœæ]\w*|\w{2,}(?:eaux?|eux|euse|oirs?|aient|ez|ais|ienne|ette)"),
        ("fr", SHARED, r"\w*[àéèùëï]\w*"),
        ("de", TYPICAL, r"\w*[äöü]\w*|\w+sch\w*|sch[lmnrtwiu]\w+|\w*(?:cht|tz|pf)\w*|ge\w{3,}(?:t|en)"),
        ("de", TYPICAL, r"\w{3,}(?:ung|ungen|lich|liche|lichen|keit|heit|chen)|(?:ver|zer|auf|aus)\w{3,}en"),
    )
]
_ONE_LANGUAGE_LETTERS = {"de": "ß", "fr": "œ"}
_FOREIGN_LETTERS = re.compile(r"[^\W\d_a-zàâæäçèéêëîïôöùûüÿœß]")
_DEVANAGARI = re.compile(r"[\u0900-\u097f]")
_WORD = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*")


def _weights() -> dict[str, tuple[str, int]]:
    """Word → the language that it speaks for, and how strongly; no word that speaks for two."""
    words = [
        (word, (language, weight))
        for table, weight in ((_CERTAIN_WORDS, CERTAIN), (_SHARED_WORDS, SHARED))
        for language, text in table.items()
        for word in text.split()
    ]
    counts = Counter(word for word, _ in words)
    return {word: evidence for word, evidence in words if counts[word] == 1}


_WEIGHTS = _weights()


def guess_language(text: str) -> str | None:
    """Its code (en, fr, de, hi), or None where the text does not tell."""
    if _DEVANAGARI.search(text):
        return "hi"
    lower_text = text.lower().replace("’", "'")
    if _FOREIGN_LETTERS.search(lower_text):
        return None
    evidence: Counter[str] = Counter()
    for word in _WORD.findall(lower_text):
        if word in _WEIGHTS:
            language, weight = _WEIGHTS[word]
            evidence[language] += weight
            continue
        for language, weight, pattern in _SPELLINGS:
            if pattern.fullmatch(word):
                evidence[language] += weight
    for language, letter in _ONE_LANGUAGE_LETTERS.items():
        evidence[language] += CERTAIN * (letter in lower_text)
    best = max(evidence, key=evidence.__getitem__, default=None)
    others = evidence.total() - evidence[best] if best else 0
    return best if best and evidence[best] >= max(MIN_EVIDENCE, MIN_RATIO * others) else None
