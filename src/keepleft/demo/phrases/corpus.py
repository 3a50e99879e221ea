"""The toy corpus: all sentence pairs, and a split that holds out new combinations of known words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from itertools import product
from math import prod

from keepleft.demo.phrases.grammar_types import Pattern, Triple
from keepleft.demo.phrases.patterns import PATTERNS, SEEDS

LANGUAGES = {"fr": 1, "hi": 2}  # index into a Triple
SentencePair = tuple[str, str]  # English and its translation

MAX_SENTENCE_WORDS = 12
MIN_WORD_COUNT = 8  # occurrences of each word, those of the seeds aside
MIN_TRAIN_SENTENCES = 3  # training sentences with each held-out word


def stable_hash(text: str) -> int:
    """A hash of a text that is the same on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def sample_sentences(pattern: Pattern) -> Iterator[Triple]:
    """Sentences of one pattern: all of them if they are few, else a sample, the same on every machine."""
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
    """Drop sentences with rare words, but no seeds, until no word is rare: each drop may make others so."""
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
    """All sentences in the three languages, seeds first: distinct, none too long, no word too rare."""
    by_english = {sentence[0]: sentence for sentence in SEEDS}
    for pattern in PATTERNS:
        for sentence in sample_sentences(pattern):
            if by_english.setdefault(sentence[0], sentence) != sentence:
                raise ValueError(
                    f"{sentence[0]!r} has two translations: {by_english[sentence[0]][1:]} and "
                    f"{sentence[1:]}; keep one"
                )
    num_spaces = lambda sentence: max(text.count(" ") for text in sentence)
    short_sentences = [
        sentence for sentence in by_english.values() if num_spaces(sentence) < MAX_SENTENCE_WORDS
    ]
    return tuple(drop_rare_words(short_sentences))


def pairs(language: str) -> list[SentencePair]:
    """English sentences and their French (fr) or Hindi (hi) translations, always in the same order."""
    if language not in LANGUAGES:
        raise ValueError(f"no phrases in {language!r}: there are {', '.join(LANGUAGES)}")
    return [(sentence[0], sentence[LANGUAGES[language]]) for sentence in sentences()]


def split(language: str, *, test: int = 500) -> tuple[list[SentencePair], list[SentencePair]]:
    """Training pairs and `test` held-out ones.

    No held-out sentence is in training, but each of its words is, several times; seeds are never held out.
    Raises ValueError if there are not as many.
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
            f"cannot hold out {test} sentences: only {len(held_out)} are made of words that others use; ask "
            "for fewer"
        )
    train_pairs = [pair for pair in all_pairs if pair[0] not in held_out]
    return train_pairs, [pair for pair in all_pairs if pair[0] in held_out]
