"""From texts to a token store, on one core: megabytes a second of CPU time, and whether memory stays flat.

python bench/prepare.py                  200 MB of made-up text
python bench/prepare.py --size 1000      a gigabyte
python bench/prepare.py corpus.txt       a file of yours
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from keepleft.data import sources
from keepleft.data.fast_encode import encoder
from keepleft.data.prepare import EncodedField, prepare
from keepleft.data.statistics import profile
from keepleft.data.token_store import token_dtype
from keepleft.data.tokenizer import train_tokenizer


def made_up(path: Path, megabytes: int) -> Path:
    """Sentences of words whose frequencies fall as in a language: the n-th word comes 1/n as often as the
    first.
    """
    chance = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    words = sorted(
        {"".join(chance.choices(letters, range(26, 0, -1), k=chance.randint(2, 9))) for _ in range(60_000)},
        key=lambda word: (len(word), word),
    )
    weights = [1.0 / (n + 3) for n in range(len(words))]
    with path.open("w", encoding="utf-8") as file:
        written = 0
        while written < megabytes * 1_000_000:
            drawn = iter(chance.choices(words, weights, k=200_000))
            block = "".join(
                " ".join([first.capitalize(), *(word for _, word in zip(range(14), drawn, strict=False))])
                + ".\n"
                for first in drawn
            )
            written += file.write(block)
    return path


def resident() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", nargs="?", type=Path)
    parser.add_argument("--size", type=int, default=200, help="megabytes of made-up text")
    parser.add_argument("--vocabulary", type=int, default=16_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus = given.corpus or made_up(Path(folder) / "corpus.txt", given.size)
        size = corpus.stat().st_size / 1e6
        print(f"{corpus.name}: {size:.0f} MB")
        source = sources.running_text(str(corpus))

        def some() -> Iterator[str]:
            for n, (text,) in enumerate(source):
                if n >= 400:
                    return
                yield text

        rows: list[tuple[str, float, float]] = []

        def timed(what: str, megabytes: float, work: object) -> object:
            begin = time.process_time()
            out = work()  # type: ignore[operator]
            rows.append((what, megabytes / (time.process_time() - begin), resident()))
            return out

        timed("report", size, lambda: profile(source))
        tokenizer = timed(
            "tokenizer (of the first 26 MB)",
            min(size, 26.2),
            lambda: train_tokenizer("bpe", some(), given.vocabulary, running_text=True),
        )
        encode = encoder(tokenizer, token_dtype(given.vocabulary))  # type: ignore[arg-type]
        store, _ = timed(
            "store",
            size,
            lambda: prepare(
                [(source, [EncodedField("text", encode)])],
                Path(folder) / "store",  # type: ignore[misc]
                vocab=given.vocabulary,
            ),
        )
        for what, rate, memory in rows:
            print(f"{what:32} {rate:7.1f} MB/s   {memory:6.0f} MB resident at most")
        print(f"{len(store['text'].tokens):,} tokens")


if __name__ == "__main__":
    main()
