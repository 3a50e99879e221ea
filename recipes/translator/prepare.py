"""Make the training data of the shipped translator from Tatoeba's sentence pairs.

    python recipes/translator/prepare.py DATA/tatoeba data/translator

Reads eng-{fra,deu,hin}.{train,dev}.tsv.gz (English, a tab, the other language) and writes {fr,de,hi}.tsv for
both directions, and tokenizer.json, the vocabulary that all models of the recipe share. Added to the pairs as
they are, from the training files alone:

- numbers, times and codes that both sides share become placeholders, and so do some names
- some names become other names, also such as look like words, so that names are copied letter by letter
- in Hindi, which writes them in its own letters, known names become others of the same kind
- some sentences are joined, so that longer texts are known, and some linked by "and" or "but", so that longer
  sentences are, and sentences with several placeholders
- Hindi, of which there is little, is repeated
"""

from __future__ import annotations

import argparse
import gzip
import random
import re
from collections import Counter
from pathlib import Path

from hindi_names import KINDS

from keepleft.data.tokenizer import train_tokenizer
from keepleft.disk import atomic
from keepleft.pipelines.number_notation import convert_number
from keepleft.pipelines.placeholders import PLACEHOLDERS, copied_pattern

Pair = tuple[str, str]

LANGUAGES = {"fr": "fra", "de": "deu", "hi": "hin"}
REPEATS = {"fr": 1, "de": 1, "hi": 5}
TAGS = ("<2fr>", "<2en>", "<2de>", "<2hi>")
VOCABULARY_SIZE = 10_000
JOINED = 0.06  # joined texts, as a fraction of all pairs
MAX_JOINED_WORDS = 36
LINKED = 0.06  # linked sentences, as a fraction of all pairs; half of them of pairs with a placeholder
MAX_LINKS_OF_MARKED = 2  # for each pair with a placeholder, where there are few
MAX_LINKED_WORDS = 30
LINKS = {  # what links two sentences in English, and in the other language
    "fr": ((" and ", " et "), (", and ", " et "), (", but ", ", mais ")),
    "de": ((" and ", " und "), (", and ", " und "), (", but ", ", aber ")),
    "hi": ((" and ", " और "), (", and ", " और "), (", but ", ", लेकिन ")),
}
# words that only begin with a capital because a sentence does
ENGLISH_OPENERS = frozenset(
    "He She It We They You This That There The My His Her Our Their Your A An".split()
)
OPENERS = {
    "fr": frozenset(
        "Il Elle Nous Vous Ils Elles Je Tu Le La Les Un Une Mon Ma Mes Son Sa Ses On Ce Cette".split()
    ),
    "de": frozenset("Er Sie Es Wir Ihr Ich Du Der Die Das Ein Eine Mein Meine Sein Seine Dies Diese".split()),
    "hi": frozenset[str](),  # which has no capitals
}
HINDI_RENAMINGS = 3  # of each pair with a name in the table
RENAMED = 0.7  # of the pairs with a name that both sides share
MIN_NAME_COUNT = 3
MIN_WORD_COUNT = 20
NAME = re.compile(r"\b[A-Z][a-z]{2,}\b", re.ASCII)
_MARKS = re.compile(f"[{PLACEHOLDERS}]")
SYLLABLES = (
    "an ar bel bo bra cha da del el en es fa fi ga gor ha hel i in is ja jo ka ken la li lo ma mi mor na ne "
    "ni no o pa per qua ra ri ro sa se son ta ter ti to u va vi wil xa ya yu za zo"
).split()


def read_pairs(path: Path) -> list[Pair]:
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    return [(english.strip(), other.strip()) for english, other in (line.split("\t")[:2] for line in lines)]


def shared_names(pairs: list[Pair]) -> list[str]:
    """Capitalised words that stand on both sides of several pairs, and are no word of the languages."""
    both, single, lower = Counter(), Counter(), set()
    for english, other in pairs:
        names = set(NAME.findall(english))
        shared = names & set(NAME.findall(other))
        both.update(shared)
        single.update(names - shared)
        lower.update(word for word in re.findall(r"\b[a-z]{3,}\b", english))
    return sorted(
        name
        for name, count in both.items()
        if count >= MIN_NAME_COUNT and count > 2 * single[name] and name.lower() not in lower
    )


def common_words(pairs: list[Pair]) -> list[str]:
    """Common English words of four to seven letters, to make names of, like Springfield."""
    counts = Counter(word for english, _ in pairs for word in re.findall(r"\b[a-z]{4,7}\b", english))
    return sorted(word for word, count in counts.items() if count >= MIN_WORD_COUNT)


def placeholder_pair(pair: Pair, language: str, rng: random.Random) -> Pair:
    """The pair with placeholders for what stands once on each side, numbers as each language writes them."""
    english, other = pair
    characters = iter(rng.sample(PLACEHOLDERS, len(PLACEHOLDERS)))
    read, read_other = copied_pattern("en"), copied_pattern(language)
    copied = [match[0] for match in read.finditer(english)]
    other_copied = {
        match[0]: convert_number(match[0], language, "en") for match in read_other.finditer(other)
    }
    for part in dict.fromkeys(copied):
        twins = [text for text, value in other_copied.items() if value == part]
        if len(twins) != 1 or english.count(part) != 1 or other.count(twins[0]) != 1:
            continue
        character = next(characters, None)
        if character is None:
            break
        english, other = english.replace(part, character), other.replace(twins[0], character)
    return english, other


class NewNames:
    """Names to put in place of others: known ones, invented ones, compounds of words, and placeholders."""

    def __init__(self, names: list[str], words: list[str], rng: random.Random) -> None:
        self.names, self.words, self.rng = names, words, rng

    def draw(self) -> str:
        kind = self.rng.random()
        if kind < 0.25:
            return self.rng.choice(self.names)
        if kind < 0.5:
            return "".join(self.rng.choices(SYLLABLES, k=self.rng.randint(2, 4))).capitalize()
        if kind < 0.75 and self.words:
            return "".join(self.rng.sample(self.words, min(2, len(self.words)))).capitalize()
        return self.rng.choice(PLACEHOLDERS)


def renamed_pair(pair: Pair, names: set[str], new_names: NewNames, rng: random.Random) -> Pair | None:
    """The pair with another name for one that both sides share."""
    english, other = pair
    candidates = [
        name
        for name in NAME.findall(english)
        if name in names and len(re.findall(rf"\b{name}\b", other)) == english.count(name) == 1
    ]
    if not candidates:
        return None
    name, new_name = rng.choice(candidates), new_names.draw()
    return re.sub(rf"\b{name}\b", new_name, english), re.sub(rf"\b{name}\b", new_name, other)


def joined_pairs(pairs: list[Pair], count: int, rng: random.Random) -> list[Pair]:
    out = []
    for _ in range(count):
        parts = [rng.choice(pairs) for _ in range(rng.randint(2, 4))]
        while sum(len(english.split()) for english, _ in parts) > MAX_JOINED_WORDS:
            parts.pop()
        if len(parts) > 1:
            out.append((" ".join(part[0] for part in parts), " ".join(part[1] for part in parts)))
    return out


def linked_pairs(pairs: list[Pair], language: str, count: int, rng: random.Random) -> list[Pair]:
    """Pairs of two statements linked by a conjunction."""
    statements = [pair for pair in pairs if pair[0].endswith(".") and pair[1].endswith((".", "।"))]
    seconds = [pair for pair in statements if _lowered(pair, language) is not None]
    marked = [[pair for pair in part if _MARKS.search(pair[0])] for part in (statements, seconds)]
    out: list[Pair] = []
    if not seconds:
        return out
    num_marked = min(count // 2, MAX_LINKS_OF_MARKED * min(map(len, marked)))
    for n in range(count):
        choices = marked if n < num_marked else (statements, seconds)
        first, second = rng.choice(choices[0]), _lowered(rng.choice(choices[1]), language)
        assert second is not None
        second = _with_other_marks(second, first[0])
        if second is None or len(first[0].split()) + len(second[0].split()) > MAX_LINKED_WORDS:
            continue
        link, other_link = rng.choice(LINKS[language])
        out.append((first[0][:-1] + link + second[0], first[1].rstrip(" .।") + other_link + second[1]))
    return out


def _lowered(pair: Pair, language: str) -> Pair | None:
    """The pair as it stands behind a conjunction; None where a capital may belong to a name or a noun."""
    english, other = pair
    first, other_first = english.split()[0], other.split()[0]
    if first not in ENGLISH_OPENERS and first not in ("I", "I'm", "I'll", "I've"):
        return None
    if language != "hi" and other_first not in OPENERS[language]:
        return None
    if other_first == "Sie" and first not in ("She", "They"):  # the polite form keeps its capital
        return None
    if first in ENGLISH_OPENERS:
        english = english[0].lower() + english[1:]
    return english, other if language == "hi" else other[0].lower() + other[1:]


def _with_other_marks(pair: Pair, text: str) -> Pair | None:
    """The pair with placeholders that are not in the text; None where there are too few."""
    used = dict.fromkeys(_MARKS.findall(pair[0]))
    free = [mark for mark in PLACEHOLDERS if mark not in text]
    if len(free) < len(used):
        return None
    marks = str.maketrans(dict(zip(used, free, strict=False)))
    return pair[0].translate(marks), pair[1].translate(marks)


def hindi_renamed_pairs(pairs: list[Pair], rng: random.Random) -> list[Pair]:
    """Pairs with other men, women or places, as both languages write them."""
    out = []
    for english, hindi in pairs:
        for names in KINDS:
            for name in set(NAME.findall(english)) & names.keys():
                if english.count(name) != 1 or hindi.count(names[name]) != 1:
                    continue
                for new_name in rng.sample(sorted(names.keys() - {name}), HINDI_RENAMINGS):
                    out.append((english.replace(name, new_name), hindi.replace(names[name], names[new_name])))
    return out


def augment(pairs: list[Pair], language: str, rng: random.Random) -> list[Pair]:
    """The pairs and what is made from them, in random order."""
    names = shared_names(pairs)
    new_names = NewNames(names, common_words(pairs), rng)
    plain = [placeholder_pair(pair, language, rng) for pair in pairs]
    known_names = set(names)
    out = plain * REPEATS[language]
    for pair in plain:
        if (
            rng.random() < RENAMED
            and (renamed := renamed_pair(pair, known_names, new_names, rng)) is not None
        ):
            out.append(renamed)
    if language == "hi":
        out += hindi_renamed_pairs(plain, rng)
    count = len(out)
    out += joined_pairs(plain, round(JOINED * count), rng)
    out += linked_pairs(out[:count], language, round(LINKED * count), rng)
    rng.shuffle(out)
    return out


def write_pairs(path: Path, pairs: list[Pair]) -> None:
    atomic.write_text(path, "".join(f"{source}\t{target}\n" for source, target in pairs))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tatoeba", type=Path, help="the folder with eng-fra.train.tsv.gz and the others")
    parser.add_argument("out", type=Path, help="the folder for fr.tsv, de.tsv, hi.tsv, tokenizer.json")
    parser.add_argument("--vocabulary-size", type=int, default=VOCABULARY_SIZE)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    texts: list[str] = []
    for language, code in LANGUAGES.items():
        rng = random.Random(language)
        pairs = augment(read_pairs(options.tatoeba / f"eng-{code}.train.tsv.gz"), language, rng)
        write_pairs(options.out / f"{language}.tsv", pairs)
        texts += [text for pair in pairs for text in pair]
        dev = [
            placeholder_pair(pair, language, rng)
            for pair in read_pairs(options.tatoeba / f"eng-{code}.dev.tsv.gz")
        ]
        write_pairs(options.out / f"{language}.dev.tsv", dev)
        print(f"{language}: {len(pairs):,} pairs, {len(dev):,} for validation")
    tokenizer = train_tokenizer("bpe", texts, options.vocabulary_size, extra_special_tokens=TAGS)
    atomic.write_text(options.out / "tokenizer.json", tokenizer.to_str())


if __name__ == "__main__":
    main()
