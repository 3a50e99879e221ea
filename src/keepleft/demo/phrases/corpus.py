"""The corpus: every pair of sentences, and a split that holds out new combinations of known words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from itertools import product
from math import prod

from keepleft.demo.phrases.grammar_types import Pattern, Triple
from keepleft.demo.phrases.patterns import PATTERNS, SEEDS

LANGUAGES = {"fr": 1, "hi": 2}
SentencePair = tuple[str, str]

MAX_SENTENCE_WORDS = 12  # words in a sentence
MIN_WORD_COUNT = 8  # times that a word must be used, seeds aside
MIN_TRAIN_SENTENCES = 3  # sentences of the training part that each held-out word is in


def stable_hash(text: str) -> int:
    """A number for a text, the same on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def sample_sentences(pattern: Pattern) -> Iterator[Triple]:
    """Sentences of one kind: all of them where they are few, else a sample that is the same on every machine."""
    sizes = [len(choice) for choice in pattern.choices]
    total = prod(sizes)
    if total <= 2 * pattern.max_sentences:
        for combination in product(*pattern.choices):
            sentence = pattern.build(*combination)
            if sentence is not None:
                yield sentence
        return
    seen_indices: set[int] = set()
    count = 0
    for attempt in range(20 * pattern.max_sentences):
        index = stable_hash(f"{pattern.name} {attempt}") % total
        if index in seen_indices:
            continue
        seen_indices.add(index)
        options: list[object] = []
        for choice, size in zip(pattern.choices, sizes, strict=True):
            index, option_index = divmod(index, size)
            options.append(choice[option_index])
        sentence = pattern.build(*options)
        if sentence is not None:
            yield sentence
            count += 1
            if count == pattern.max_sentences:
                return


def drop_rare_words(all_sentences: list[Triple]) -> list[Triple]:
    """The seeds, and the sentences without rare words; as one goes, a word of another may turn rare, and it
    goes as well.
    """
    word_counts = [Counter(" ".join(texts).split()) for texts in zip(*all_sentences, strict=True)]
    uncommon_words = set().union(
        *({word for word, times in counts.items() if times < 4 * MIN_WORD_COUNT} for counts in word_counts)
    )
    candidates = {
        sentence: [text.split() for text in sentence]
        for sentence in all_sentences
        if not uncommon_words.isdisjoint(" ".join(sentence).split()) and sentence not in SEEDS
    }
    removed: set[Triple] = set()
    while True:
        rare_words = [
            {word for word, times in counts.items() if times < MIN_WORD_COUNT} for counts in word_counts
        ]
        removing = [
            sentence
            for sentence, texts in candidates.items()
            if not all(map(set.isdisjoint, rare_words, texts))
        ]
        if not removing:
            return [sentence for sentence in all_sentences if sentence not in removed]
        removed.update(removing)
        for sentence in removing:
            for counts, text in zip(word_counts, candidates.pop(sentence), strict=True):
                counts.subtract(text)


@lru_cache(maxsize=1)
def sentences() -> tuple[Triple, ...]:
    """English, French and Hindi together: distinct, none too long, no word too rare; the seeds come first."""
    by_english = {sentence[0]: sentence for sentence in SEEDS}
    for pattern in PATTERNS:
        for sentence in sample_sentences(pattern):
            if by_english.setdefault(sentence[0], sentence) != sentence:
                raise ValueError(
                    f"{sentence[0]!r} is said in two ways: {by_english[sentence[0]][1:]} and {sentence[1:]}; keep one of them"
                )
    return tuple(
        drop_rare_words(
            [
                sentence
                for sentence in by_english.values()
                if max(map(str.count, sentence, "   ")) < MAX_SENTENCE_WORDS
            ]
        )
    )


def pairs(language: str) -> list[SentencePair]:
    """English and its one translation into French (fr) or Hindi (hi), always in the same order."""
    if language not in LANGUAGES:
        raise ValueError(f"no phrases in {language!r}: there are {', '.join(LANGUAGES)}")
    return [(sentence[0], sentence[LANGUAGES[language]]) for sentence in sentences()]


def split(language: str, *, test: int = 500) -> tuple[list[SentencePair], list[SentencePair]]:
    """Train and held out: no held-out sentence is in train, but each of its words is, several times; seeds
    are in train.
    """
    all_pairs = pairs(language)
    if test < 0:
        raise ValueError(f"test must be at least 0, not {test}: it is how many sentences to hold out")
    seeds = {sentence[0] for sentence in SEEDS}
    word_counts = Counter(
        (side, word) for pair in all_pairs for side, text in enumerate(pair) for word in set(text.split())
    )
    held_out: set[str] = set()
    for pair in sorted(all_pairs, key=lambda pair: stable_hash(pair[0])):
        if len(held_out) == test:
            break
        used = {(side, word) for side, text in enumerate(pair) for word in text.split()}
        if pair[0] in seeds or any(word_counts[word] <= MIN_TRAIN_SENTENCES for word in used):
            continue
        held_out.add(pair[0])
        word_counts.subtract(used)
    if len(held_out) < test:
        raise ValueError(
            f"cannot hold out {test} sentences: only {len(held_out)} are made of words that others use; ask for fewer"
        )
    return [pair for pair in all_pairs if pair[0] not in held_out], [
        pair for pair in all_pairs if pair[0] in held_out
    ]
