"""From text to a token store on one core: MB per second of CPU time, and whether memory stays flat.

python bench/prepare_data.py                  200 MB of generated text
python bench/prepare_data.py --size 1000      a gigabyte
python bench/prepare_data.py corpus.txt       a file of yours
"""

from __future__ import annotations

import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from command_line import make_parser, parse_arguments
from keepleft.data import sources
from keepleft.data.fast_encode import encoder
from keepleft.data.prepare import EncodedField, prepare
from keepleft.data.statistics import profile
from keepleft.data.token_store import token_dtype
from keepleft.data.tokenizer import train_tokenizer
from report import print_table, write_json

LETTERS = "etaoinshrdlucmfwypvbgkqjxz"  # by frequency in English
WORDS_PER_SENTENCE = 15
TOKENIZER_BLOCKS = 400  # of running text, 26 MB, to train the tokenizer on


def generate_corpus(path: Path, megabytes: float, num_words: int = 60_000) -> Path:
    """Sentences of random words whose frequencies follow Zipf's law, as those of a language do."""
    rng = random.Random(0)
    words = sorted(
        {"".join(rng.choices(LETTERS, range(26, 0, -1), k=rng.randint(2, 9))) for _ in range(num_words)},
        key=lambda word: (len(word), word),
    )
    weights = [1.0 / (rank + 3) for rank in range(len(words))]
    with path.open("w", encoding="utf-8") as file:
        written = 0
        while written < megabytes * 1_000_000:
            drawn = iter(rng.choices(words, weights, k=min(200_000, int(megabytes * 200_000) + 1)))
            written += file.write(
                "".join(
                    " ".join([first.capitalize(), *islice(drawn, WORDS_PER_SENTENCE - 1)]) + ".\n"
                    for first in drawn
                )
            )
    return path


def peak_rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("corpus", nargs="?", type=Path)
    parser.add_argument("--size", type=float, default=200, help="megabytes of text to generate")
    parser.add_argument("--vocab", type=int, default=16_000)
    options = parse_arguments(parser, argv, size=0.1, vocab=300)
    rows: list[dict[str, Any]] = []

    def measure(stage: str, megabytes: float, work: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = work()
        seconds = max(1e-9, time.process_time() - started)
        rows.append({"stage": stage, "MB/s": megabytes / seconds, "peak RSS MB": round(peak_rss_mb())})
        return result

    with tempfile.TemporaryDirectory() as folder:
        corpus = options.corpus or generate_corpus(Path(folder) / "corpus.txt", options.size)
        size = corpus.stat().st_size / 1e6
        source = sources.running_text(str(corpus))

        def first_blocks() -> Iterator[str]:
            for (text,) in islice(iter(source), TOKENIZER_BLOCKS):
                yield text

        measure("statistics", size, lambda: profile(source))
        tokenizer = measure(
            "train tokenizer (first 26 MB)",
            min(size, 26.2),
            lambda: train_tokenizer("bpe", first_blocks(), options.vocab, running_text=True),
        )
        encode = encoder(tokenizer, token_dtype(options.vocab))
        store, _ = measure(
            "tokenize into a store",
            size,
            lambda: prepare(
                [(source, [EncodedField("text", encode)])], Path(folder) / "store", vocab=options.vocab
            ),
        )
        num_tokens = len(store["text"].tokens)
    print_table(f"{corpus.name}: {size:.1f} MB, {num_tokens:,} tokens", rows)
    write_json(options.json, {"megabytes": size, "tokens": num_tokens, "rows": rows})


if __name__ == "__main__":
    main()
