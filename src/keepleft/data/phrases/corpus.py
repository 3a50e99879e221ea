"""The corpus: every pair of sentences, and a split that holds out new combinations of known words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from itertools import product
from math import prod

from keepleft.data.phrases.forms import Pattern, Said
from keepleft.data.phrases.patterns import PATTERNS, SEEDS

LANGUAGES = {"fr": 1, "hi": 2}
Pair = tuple[str, str]

LONGEST = 12  # words in a sentence
RAREST = 8    # times that a word must be used, seeds aside
KNOWN = 3     # sentences of the training part that each held-out word is in


def mark(text: str) -> int:
    """A number for a text, the same on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def draw(pattern: Pattern) -> Iterator[Said]:
    """Sentences of one kind: all of them where they are few, else a sample that is the same on every machine."""
    sizes = [len(choice) for choice in pattern.choices]
    total = prod(sizes)
    if total <= 2 * pattern.most:
        for every in product(*pattern.choices):
            said = pattern.rule(*every)
            if said is not None:
                yield said
        return
    tried: set[int] = set()
    made = 0
    for turn in range(20 * pattern.most):
        place = mark(f"{pattern.name} {turn}") % total
        if place in tried:
            continue
        tried.add(place)
        chosen: list[object] = []
        for choice, size in zip(pattern.choices, sizes, strict=True):
            place, which = divmod(place, size)
            chosen.append(choice[which])
        said = pattern.rule(*chosen)
        if said is not None:
            yield said
            made += 1
            if made == pattern.most:
                return


def familiar(found: list[Said]) -> list[Said]:
    """The seeds, and the sentences without rare words; as one goes, a word of another may turn rare, and it goes as well."""
    often = [Counter(" ".join(texts).split()) for texts in zip(*found, strict=True)]
    uncommon = set().union(*({word for word, times in counts.items() if times < 4 * RAREST} for counts in often))
    doubtful = {said: [text.split() for text in said] for said in found
                if not uncommon.isdisjoint(" ".join(said).split()) and said not in SEEDS}
    gone: set[Said] = set()
    while True:
        rare = [{word for word, times in counts.items() if times < RAREST} for counts in often]
        going = [said for said, texts in doubtful.items() if not all(map(set.isdisjoint, rare, texts))]
        if not going:
            return [said for said in found if said not in gone]
        gone.update(going)
        for said in going:
            for counts, text in zip(often, doubtful.pop(said), strict=True):
                counts.subtract(text)


@lru_cache(maxsize=1)
def sentences() -> tuple[Said, ...]:
    """English, French and Hindi together: distinct, none too long, no word too rare; the seeds come first."""
    found = {said[0]: said for said in SEEDS}
    for pattern in PATTERNS:
        for said in draw(pattern):
            if found.setdefault(said[0], said) != said:
                raise ValueError(f"{said[0]!r} is said in two ways: {found[said[0]][1:]} and {said[1:]}; keep one of them")
    return tuple(familiar([said for said in found.values() if max(map(str.count, said, "   ")) < LONGEST]))


def pairs(language: str) -> list[Pair]:
    """English and its one translation into French (fr) or Hindi (hi), always in the same order."""
    if language not in LANGUAGES:
        raise ValueError(f"no phrases in {language!r}: there are {', '.join(LANGUAGES)}")
    return [(said[0], said[LANGUAGES[language]]) for said in sentences()]


def split(language: str, *, test: int = 500) -> tuple[list[Pair], list[Pair]]:
    """Train and held out: no held-out sentence is in train, but each of its words is, several times; seeds are in train."""
    everything = pairs(language)
    if test < 0:
        raise ValueError(f"test must be at least 0, not {test}: it is how many sentences to hold out")
    seeds = {said[0] for said in SEEDS}
    often = Counter((side, word) for pair in everything for side, text in enumerate(pair) for word in set(text.split()))
    held: set[str] = set()
    for pair in sorted(everything, key=lambda pair: mark(pair[0])):
        if len(held) == test:
            break
        used = {(side, word) for side, text in enumerate(pair) for word in text.split()}
        if pair[0] in seeds or any(often[word] <= KNOWN for word in used):
            continue
        held.add(pair[0])
        often.subtract(used)
    if len(held) < test:
        raise ValueError(f"cannot hold out {test} sentences: only {len(held)} are made of words that others use; ask for fewer")
    return [pair for pair in everything if pair[0] not in held], [pair for pair in everything if pair[0] in held]
