"""The translator that comes with keepleft: quality by direction, int8 against float32, speed, size.

    python bench/translator.py --data DATA/tatoeba
    python bench/translator.py --data DATA/tatoeba --float32 runs/translator/model

DATA/tatoeba has eng-{fra,deu,hin}.dev.tsv.gz: English, a tab, the other language. BLEU and chrF are
sacrebleu's, against one reference. --float32 names the directory that the model was made from; without it the
int8 weights computed in float32 stand in its place, which shows the rounding of activations alone. "first
answer" is the whole command, cold: Python, PyTorch, loading, translating. Tokens per second are those of one
sentence at a time, in this process.
"""

from __future__ import annotations

import gzip
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

import keepleft as kl
from command_line import make_parser, parse_arguments
from keepleft.cli.translate import shipped_translator
from keepleft.data.tokenizer import train_tokenizer
from keepleft.decoding.generation_config import GenerationConfig
from keepleft.evaluation.translation import translation
from keepleft.pipelines.text_generation import load_generator
from keepleft.pipelines.translator import Translator
from report import environment, print_table, write_json

LANGUAGES = {"fr": "fra", "de": "deu", "hi": "hin"}
TARGETS = {"en-fr": 50.0, "fr-en": 52.0, "en-de": 40.0, "de-en": 45.0}  # BLEU
SENTENCE = "Where is the station?"
BATCH_SIZE = 64


def read_pairs(path: Path, limit: int | None) -> list[list[str]]:
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    return [line.split("\t")[:2] for line in lines[:limit]]


def translate_all(translator: Translator, texts: list[str], options: GenerationConfig) -> list[str]:
    """Translations in batches of similar length."""
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
    out = [""] * len(texts)
    for begin in range(0, len(order), BATCH_SIZE):
        rows = order[begin : begin + BATCH_SIZE]
        for n, results in zip(rows, translator.generate([texts[n] for n in rows], options), strict=True):
            out[n] = results[0].text
    return out


def quality(
    folder: str, data: Path, dtype: str | None, options: GenerationConfig, limit: int | None
) -> dict[str, dict[str, float]]:
    """BLEU and chrF by direction."""
    generator = load_generator(folder, dtype=dtype)
    out = {}
    for language, code in LANGUAGES.items():
        pairs = read_pairs(data / f"eng-{code}.dev.tsv.gz", limit)
        for source, target, ours, theirs in (("en", language, 0, 1), (language, "en", 1, 0)):
            translator = Translator(generator, target)
            translations = translate_all(
                translator, [pair[ours] for pair in pairs], translator.resolve(options)
            )
            metrics = translation(translations, [pair[theirs] for pair in pairs])
            out[f"{source}-{target}"] = {"sentences": len(pairs), **metrics}
    return out


def tokens_per_second(folder: str, data: Path, options: GenerationConfig, count: int) -> float:
    """The median over sentences, one at a time, after a warm-up."""
    translator = Translator(load_generator(folder, device="cpu"), "fr")
    options = translator.resolve(options)
    rates = []
    for n, (english, _) in enumerate(read_pairs(data / "eng-fra.dev.tsv.gz", count + 5)):
        start = time.perf_counter()
        (results,) = translator.generate([english], options)
        seconds = time.perf_counter() - start
        if n >= 5:
            rates.append(len(results[0].tokens) / seconds)
    return statistics.median(rates)


def first_answer(folder: str, repetitions: int) -> float:
    """Seconds of the whole command, the fastest of several."""
    command = [
        sys.executable,
        "-m",
        "keepleft",
        "translate",
        folder,
        SENTENCE,
        "--to",
        "fr",
        "--device",
        "cpu",
    ]
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def toy_translator(folder: Path) -> str:
    """A model with language tags and random weights, for --smoke."""
    tags = ["<2en>", "<2fr>", "<2de>", "<2hi>"]
    tokenizer = train_tokenizer("bpe", ["the sea is calm"] * 9, 300, extra_special_tokens=tags)
    model = kl.build(kl.presets.small(kl.presets.pegasus).but(vocab=300))
    model.notes = {"generation": {"decoder_start_token_id": 1, "eos_token_id": 2, "max_new_tokens": 4}}
    kl.save(model, tokenizer, folder, int8=True)
    return str(folder)


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--data", type=Path, required=True, help="the folder with eng-fra.dev.tsv.gz and others"
    )
    parser.add_argument("--model", help="a model directory; default: the translator that is installed")
    parser.add_argument("--float32", help="the directory of the model before it was rounded")
    parser.add_argument("--beams", type=int, help="default: what the model's generation_config.json says")
    parser.add_argument("--limit", type=int, help="sentences of each language; default: all")
    parser.add_argument("--toy", type=Path, help="make a toy model there, and measure that (for --smoke)")
    options = parse_arguments(parser, argv, limit=3)
    folder = toy_translator(options.toy) if options.toy else options.model or shipped_translator()
    generation = GenerationConfig(num_beams=options.beams)
    int8 = quality(folder, options.data, None, generation, options.limit)
    float32 = quality(options.float32 or folder, options.data, "float32", generation, options.limit)
    rows: list[dict[str, Any]] = [
        {
            "direction": direction,
            "sentences": metrics["sentences"],
            "BLEU": metrics["bleu"],
            "chrF": metrics["chrf"],
            "BLEU float32": float32[direction]["bleu"],
            "lost": float32[direction]["bleu"] - metrics["bleu"],
            "target": TARGETS.get(direction, ""),
        }
        for direction, metrics in int8.items()
    ]
    model, _ = kl.load(folder)
    bytes_on_disk = sum(path.stat().st_size for path in Path(folder).iterdir() if path.is_file())
    facts = {
        "weights": sum(p.numel() for p in model.parameters()),
        "bytes": bytes_on_disk,
        "tokens/s": tokens_per_second(folder, options.data, generation, 3 if options.smoke else 100),
        "first answer, s": first_answer(folder, 1 if options.smoke else 5),
        **environment(),
    }
    print_table("Quality, by direction", rows)
    print_table("Size and speed", [facts])
    write_json(options.json, {"quality": rows, "facts": facts})


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
