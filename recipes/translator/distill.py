"""Sequence-level distillation: teachers translate the training sentences, for the student to learn.

    python recipes/translator/distill.py DATA/tatoeba data/translator --workers 4 --teachers \\
        fr=runs/translator-from-english/model,runs/translator-to-french/model \\
        de=runs/translator-from-english/model hi=runs/translator-from-english/model \\
        en=runs/translator-into-english/model

Every English sentence is translated into French and German, also those that Tatoeba has in one of them only,
and a part of them into Hindi; every sentence of the other languages into English (Kim and Rush 2016, arXiv
1606.07947). Several teachers of a language are an ensemble. Of the best translations of a beam the one that
is most like a reference is kept, where there is one. Writes distilled.{en-fr,fr-en,…}.tsv: the source, a tab,
the translation; and what teachers made up where Tatoeba has nothing, to be used backwards (back-translation,
Sennrich et al. 2016), into backwards.{fr-en,de-en,hi-en}.tsv.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from prepare import LANGUAGES, Pair, read_pairs, write_pairs

import keepleft as kl
from keepleft.data.fast_encode import encoder
from keepleft.data.tokenizer import special_tokens
from keepleft.decoding.generate import completions
from keepleft.models.transformer import Model
from keepleft.pipelines.number_notation import convert_number
from keepleft.pipelines.placeholders import PLACEHOLDERS, ProtectedText, is_complete, protect

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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


def load_teacher(folders: list[Path], device: str) -> tuple[Model, Tokenizer]:
    """One model, or an ensemble of several."""
    dtype = torch.bfloat16 if device == "cuda" else None
    loaded = [kl.load(folder, device=device, dtype=dtype) for folder in folders]
    models = [model for model, _ in loaded]
    tokenizer = loaded[0][1]
    assert tokenizer is not None
    return models[0] if len(models) == 1 else kl.ensemble(models), tokenizer


def translate_shard(
    model: Model,
    tokenizer: Tokenizer,
    references: References,
    direction: tuple[str, str],
    out: Path,
    batch_size: int,
) -> None:
    """Translate the sentences and write the pairs that are kept."""
    start, end = special_tokens(tokenizer).require("start", "end")
    language, to = direction
    protected = {protect(source, language): source for source in references}
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
        expected = [_with_placeholders(reference, source, to) for reference in references[protected[source]]]
        best = max(texts, key=lambda text: max((similarity(text, other) for other in expected), default=0.0))
        pairs.append((source.text, best))
    write_pairs(out, pairs)


def _with_placeholders(text: str, source: ProtectedText, language: str) -> str:
    """A reference in this language with the placeholders of its source."""
    for placeholder, copied in zip(PLACEHOLDERS, source.copied, strict=False):
        text = text.replace(convert_number(copied, source.language, language), placeholder)
    return text


def parse_teachers(texts: list[str]) -> dict[str, list[Path]]:
    """The model directories by the language that they write."""
    teachers = {}
    for text in texts:
        language, _, folders = text.partition("=")
        if language not in ("en", *LANGUAGES) or not folders:
            raise SystemExit(f"--teachers {text}: give a language and a folder, like fr=runs/teacher/model")
        teachers[language] = [Path(folder) for folder in folders.split(",")]
    return teachers


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tatoeba", type=Path, help="the folder with eng-fra.train.tsv.gz and the others")
    parser.add_argument("out", type=Path, help="the folder for distilled.en-fr.tsv and the others")
    parser.add_argument(
        "--teachers",
        nargs="+",
        required=True,
        metavar="LANGUAGE=MODEL,…",
        help="the model directories by the language that they write",
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that share the work")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--limit", type=int, help="sentences of each direction, to try it")
    parser.add_argument("--shard", type=int, help=argparse.SUPPRESS)  # of a worker: which part it does
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teachers = parse_teachers(options.teachers)
    directions = {
        direction: references
        for direction, references in references_of(options.tatoeba).items()
        if direction[1] in teachers
    }
    if options.shard is None and options.workers > 1:
        command = [sys.executable, __file__, *(argv if argv is not None else sys.argv[1:])]
        workers = [subprocess.Popen([*command, "--shard", str(n)]) for n in range(options.workers)]
        exit_codes = [worker.wait() for worker in workers]
        if any(exit_codes):
            raise SystemExit("a worker failed")
    else:
        loaded = {language: load_teacher(folders, device) for language, folders in teachers.items()}
        for (source, target), references in directions.items():
            items = list(references.items())[: options.limit]
            shard = dict(items[options.shard or 0 :: options.workers])
            path = options.out / f"distilled.{source}-{target}.{options.shard or 0}.part"
            translate_shard(*loaded[target], shard, (source, target), path, options.batch_size)
    if options.shard is not None:
        return
    for (source, target), references in directions.items():
        parts = sorted(options.out.glob(f"distilled.{source}-{target}.*.part"))
        pairs = [tuple(line.split("\t")) for part in parts for line in part.read_text("utf-8").splitlines()]
        for part in parts:
            part.unlink()
        random.Random(0).shuffle(pairs)
        write_pairs(options.out / f"distilled.{source}-{target}.tsv", pairs)  # type: ignore[arg-type]
        print(f"{source} to {target}: {len(pairs):,} translations")
        if source == "en":
            known = {protect(text).text for text, expected in references.items() if expected}
            backwards = [(other, english) for english, other in pairs if english not in known]
            write_pairs(options.out / f"backwards.{target}-{source}.tsv", backwards)
            print(f"{target} to {source}: {len(backwards):,} translations used backwards")


if __name__ == "__main__":
    main()
