"""Sequence-level distillation: the teacher translates the training sentences, for the student to learn.

    python recipes/translator/distill.py runs/translator-teacher/model DATA/tatoeba data/translator

Every English sentence is translated into French and German, also those that Tatoeba has in one of them only,
and a part of them into Hindi; every sentence of the other languages into English (Kim and Rush 2016, arXiv
1606.07947). Of the best translations of a beam the one that is most like a reference is kept, where there is
one. Writes distilled.{en-fr,fr-en,…}.tsv: the source, a tab, the translation. Where the teacher made up a
sentence of another language, the pair is also used backwards (back-translation, Sennrich et al. 2016).
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch
from prepare import LANGUAGES, Pair, read_pairs, write_pairs

import keepleft as kl
from keepleft.data.fast_encode import encoder
from keepleft.data.tokenizer import special_tokens
from keepleft.decoding.generate import completions
from keepleft.pipelines.placeholders import PLACEHOLDERS, ProtectedText, is_complete, protect

BEAMS = 4
MAX_HINDI_SENTENCES = 60_000  # English ones, translated into Hindi
MAX_LENGTH_RATIO = 3.0  # of a translation to its source, in characters
SLACK_CHARACTERS = 20
BATCH_SIZE = 256

References = dict[str, list[str]]  # by source; empty where there is none


def references_of(tatoeba: Path) -> dict[tuple[str, str], References]:
    """The sentences to translate in each direction, with their references."""
    pairs = {
        language: read_pairs(tatoeba / f"eng-{code}.train.tsv.gz") for language, code in LANGUAGES.items()
    }
    every_english = sorted({english for side in pairs.values() for english, _ in side})
    out: dict[tuple[str, str], References] = {}
    for language, side in pairs.items():
        to_other, to_english = defaultdict(list), defaultdict(list)
        for english, other in side:
            to_other[english].append(other)
            to_english[other].append(english)
        others = [english for english in every_english if english not in to_other]
        if language == "hi":
            others = random.Random(language).sample(others, min(len(others), MAX_HINDI_SENTENCES))
        out["en", language] = {**to_other, **{english: [] for english in others}}
        out[language, "en"] = dict(to_english)
    return out


def ngrams(text: str) -> Counter[tuple[str, ...]]:
    words = text.split()
    return Counter(tuple(words[n : n + size]) for size in (1, 2, 3) for n in range(len(words) - size + 1))


def similarity(text: str, reference: str) -> float:
    """F1 of the n-grams that both texts share."""
    ours, theirs = ngrams(text), ngrams(reference)
    return 2 * (ours & theirs).total() / max(1, ours.total() + theirs.total())


def is_plausible(source: str, translation: str) -> bool:
    longest, shortest = max(len(source), len(translation)), min(len(source), len(translation))
    return bool(translation.strip()) and longest <= MAX_LENGTH_RATIO * shortest + SLACK_CHARACTERS


def translate_shard(
    model_folder: Path, references: References, to: str, out: Path, device: str, batch_size: int
) -> None:
    """Translate the sentences and write the pairs that are kept."""
    model, tokenizer = kl.load(
        model_folder, device=device, dtype=torch.bfloat16 if device == "cuda" else None
    )
    assert tokenizer is not None
    start, end = special_tokens(tokenizer).require("start", "end")
    protected = {protect(source): source for source in references}
    sources = list(protected)
    encode = encoder(tokenizer, np.dtype(np.int64), prefix=[tokenizer.token_to_id(f"<2{to}>")], suffix=[end])
    rows = [np.frombuffer(row, np.int64).tolist() for row in encode([source.text for source in sources])]
    results = completions(
        model,
        tokenizer,
        rows,
        batch_size=batch_size,
        num_beams=BEAMS,
        num_return_sequences=BEAMS,
        max_new_tokens=100,
        decoder_start_token_id=start,
        eos_token_id=end,
    )
    pairs: list[Pair] = []
    for source, candidates in zip(sources, results, strict=True):
        texts = [candidate.text for candidate in candidates]
        texts = [text for text in texts if is_complete(source, text) and is_plausible(source.text, text)]
        if not texts:
            continue
        expected = [_with_placeholders(reference, source) for reference in references[protected[source]]]
        best = max(texts, key=lambda text: max((similarity(text, other) for other in expected), default=0.0))
        pairs.append((source.text, best))
    write_pairs(out, pairs)


def _with_placeholders(text: str, source: ProtectedText) -> str:
    """A reference with the placeholders of its source."""
    for placeholder, copied in zip(PLACEHOLDERS, source.copied, strict=False):
        text = text.replace(copied, placeholder)
    return text


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="the model directory of the teacher")
    parser.add_argument("tatoeba", type=Path, help="the folder with eng-fra.train.tsv.gz and the others")
    parser.add_argument("out", type=Path, help="the folder for distilled.en-fr.tsv and the others")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the work")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--limit", type=int, help="sentences of each direction, to try it")
    parser.add_argument("--shard", type=int, help=argparse.SUPPRESS)  # of a worker: which part it does
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    directions = references_of(options.tatoeba)
    if options.shard is None and options.workers > 1:
        command = [sys.executable, __file__, *(argv if argv is not None else sys.argv[1:])]
        workers = [subprocess.Popen([*command, "--shard", str(n)]) for n in range(options.workers)]
        exit_codes = [worker.wait() for worker in workers]
        if any(exit_codes):
            raise SystemExit("a worker failed")
    else:
        for (source, target), references in directions.items():
            items = list(references.items())[: options.limit]
            shard = dict(items[options.shard or 0 :: options.workers])
            path = options.out / f"distilled.{source}-{target}.{options.shard or 0}.part"
            translate_shard(options.model, shard, target, path, device, options.batch_size)
    if options.shard is not None:
        return
    merged: dict[tuple[str, str], list[Pair]] = {}
    for source, target in directions:
        parts = sorted(options.out.glob(f"distilled.{source}-{target}.*.part"))
        lines = [line for part in parts for line in part.read_text("utf-8").splitlines()]
        merged[source, target] = [tuple(line.split("\t")) for line in lines]  # type: ignore[misc]
        for part in parts:
            part.unlink()
    for (source, target), pairs in merged.items():
        backwards: list[Pair] = []
        if target == "en":
            known = {protect(text).text for text, expected in directions["en", source].items() if expected}
            backwards = [(other, english) for english, other in merged["en", source] if english not in known]
        out = pairs + backwards
        random.Random(0).shuffle(out)
        write_pairs(options.out / f"distilled.{source}-{target}.tsv", out)
        print(f"{source} to {target}: {len(pairs):,} translations, {len(backwards):,} used backwards")


if __name__ == "__main__":
    main()
