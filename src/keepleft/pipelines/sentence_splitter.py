"""A sentence splitter by rule, for English, French, German and Hindi.

A sentence ends with . ! ? … or । , with the quotation marks and brackets that close behind it, where white
space and the beginning of a sentence follow. A full stop behind an abbreviation, an initial or an ordinal
number ends nothing.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_CLOSING = r"""["'”’»)\]“]*"""
_OPENING = r"""["'“‘«(\[„¿¡–—-]*"""
_BOUNDARY = re.compile(rf"(?:[.!?…।॥]+[!?।]*{_CLOSING})(\s+)(?={_OPENING}\s*[^\W_a-zà-öø-ÿœß])")
_LAST_WORD = re.compile(r"([\w.]+)\.$")
# fmt: off
ABBREVIATIONS = frozenset(
    # English
    "mr mrs ms dr prof st jr sr vs etc e.g i.e u.s u.k a.m p.m no inc ltd co corp gen col capt lt sgt rev "
    "hon mt jan feb mar apr jun jul aug sep sept oct nov dec "
    # French
    "m mm mme mmes mlle mlles me mgr dr pr st ste av bd cf ex p.ex c.-à-d env vol chap fig art "
    # German
    "hr fr dr prof dipl ing z.b d.h u.a usw bzw ca evtl ggf inkl max min mio mrd nr s str tel u.s.w v.a vgl "
    "z.t jh jan feb mär apr jun jul aug sep okt nov dez "
    # Hindi, in Latin or Devanagari
    "shri smt डॉ श्री प्रो".split()
)
# fmt: on
# fmt: off
CONJUNCTIONS = frozenset(  # a clause may begin with one
    "and but because although while when where which who so that if unless until "
    "et mais parce car quand lorsque tandis si qui où donc puisque "
    "und aber weil denn wenn als dass obwohl während sondern damit "
    "और लेकिन क्योंकि कि जब मगर परंतु इसलिए".split()
)
# fmt: on
# fmt: off
PHRASE_OPENERS = CONJUNCTIONS | frozenset(  # a phrase of a sentence may begin with one
    "at on in to for from by with of until till since before after between during about or not "
    "à au aux de du des en dans pour par avec sur sous depuis avant après pendant vers ou pas "
    "um am im an in zu zum zur für von vom bei bis mit nach vor seit auf aus über oder nicht "
    "में से को पर तक के की का या".split()
)
# fmt: on
ANYWHERE = 1.0  # the cost of a cut where nothing separates
_ENDING_ABBREVIATIONS = frozenset({"etc", "usw", "u.s.w", "a.m", "p.m", "co", "inc", "ltd"})


class Sentence(NamedTuple):
    text: str
    space: str  # the white space behind it, so that texts can be put together again


def split_sentences(text: str) -> list[Sentence]:
    """The sentences of a text; white space at its beginning belongs to the first.

    "".join(sentence.text + sentence.space for sentence in split_sentences(text)) is the text again.
    """
    out: list[Sentence] = []
    begin = 0
    for match in _BOUNDARY.finditer(text):
        end, next_begin = match.span(1)
        if not _ends_sentence(text[begin:end], text[next_begin:]):
            continue
        out.append(Sentence(text[begin:end], text[end:next_begin]))
        begin = next_begin
    rest = text[begin:]
    if rest or not out:
        stripped = rest.rstrip()
        out.append(Sentence(stripped, rest[len(stripped) :]))
    return out


def split_clauses(text: str, max_words: int) -> list[Sentence]:
    """Parts of a sentence longer than `max_words`: cut at semicolons, dashes and commas, before conjunctions,
    else anywhere."""
    words = re.findall(r"\S+\s*", text)
    if len(words) <= max_words:
        return [Sentence(text, "")]
    cut = min(range(1, len(words)), key=lambda n: _cut_cost(words, n))
    first, second = "".join(words[:cut]), "".join(words[cut:])
    stripped = first.rstrip()
    return [
        *_with_space(split_clauses(stripped, max_words), first[len(stripped) :]),
        *split_clauses(second, max_words),
    ]


def split_in_two(text: str, min_words: int) -> list[Sentence]:
    """The two clauses of a sentence, or the sentence where nothing separates two of so many words each."""
    words = re.findall(r"\S+\s*", text)
    cuts = [n for n in range(min_words, len(words) - min_words + 1) if _separation(words, n) < ANYWHERE]
    if not cuts:
        return [Sentence(text, "")]
    cut = min(cuts, key=lambda n: _cut_cost(words, n))
    first = "".join(words[:cut])
    return [Sentence(first.rstrip(), first[len(first.rstrip()) :]), Sentence("".join(words[cut:]), "")]


def _cut_cost(words: list[str], n: int) -> float:
    """How bad it is to cut before word n: far from the middle, or where nothing separates."""
    return abs(n - len(words) / 2) / len(words) + _separation(words, n)


def _separation(words: list[str], n: int) -> float:
    """How little separates word n from the words before it."""
    end = words[n - 1].rstrip()[-1:]
    if end in ";:—–":
        return 0.0
    if end == ",":
        return 0.15
    return 0.25 if words[n].strip().lower() in CONJUNCTIONS else ANYWHERE


def _with_space(parts: list[Sentence], space: str) -> list[Sentence]:
    return [*parts[:-1], Sentence(parts[-1].text, space)]


def _ends_sentence(text: str, following: str) -> bool:
    if not (match := _LAST_WORD.search(text)):
        return True
    word = match[1].lower()
    if word in _ENDING_ABBREVIATIONS:  # they may also end a sentence; a name or a noun rarely follows them
        return True
    if word in ABBREVIATIONS:
        return False
    if len(word) == 1 and word.isalpha():  # an initial, but not "I."; or the first half of "z. B."
        return word == "i" if match[1].isupper() else re.match(r"\w\.", following) is None
    return not re.fullmatch(r"\d{1,2}", word)  # "am 3. Mai"; a year may end a sentence
