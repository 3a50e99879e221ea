"""How good a recipe is: train it from its YAML file, then measure it on a test set that it has not seen.

    python bench/quality.py recipes/multi30k-en-de.yaml --data DATA \\
        --test multi30k/tok/test_2016_flickr.{en,de}.gz
    python bench/quality.py recipes/shakespeare-char.yaml --data DATA

DATA is a folder laid out as the recipes expect below data/. --set recipe.steps=500 changes a field. BLEU is
sacrebleu's on text that is tokenized already (tokenize=none): what papers report on Multi30k. "training" is
the seconds from the first step to the last, with compilation and CUDA graph capture, without evaluation and
saving; "seconds" has these too. Neither has the preparation of the data.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import yaml

from command_line import make_parser, parse_arguments
from keepleft.data.tokenizer import load_tokenizer
from keepleft.evaluation.translation import translation
from keepleft.pipelines.text_generation import generate_targets
from keepleft.runs import job as jobs
from keepleft.runs.train import TrainingFinished, run_job
from keepleft.training.loop import TrainReport
from keepleft.weights.model_directory import load
from report import write_json

SMOKE_CHANGES = (
    "design.dim=16",
    "design.heads=2",
    "design.layers=1",
    "design.width=32",
    "batch.tokens=128",
    "batch.max_length=32",
    "recipe.steps=2",
    "recipe.warmup=1",
    "recipe.eval_every=1",
)


def read_recipe(path: Path, data: Path, changes: Sequence[str]) -> dict[str, Any]:
    """A recipe with its data below `data` and some fields, given as FIELD.FIELD=VALUE, changed."""
    recipe = yaml.safe_load(path.read_text("utf-8").replace("data/", f"{data}/"))
    for change in changes:
        name, _, value = change.partition("=")
        *parents, field = name.split(".")
        section = recipe
        for parent in parents:
            section = section.setdefault(parent, {})
        section[field] = yaml.safe_load(value)
    return recipe


def train(job: jobs.TrainJob) -> dict[str, Any]:
    """Train; returns the seconds and the best validation metrics."""
    started = training_seconds = 0.0
    best: dict[str, float] = {}
    for event in run_job(job):
        if isinstance(event, TrainReport):
            training_seconds += event.tokens / event.tokens_per_second
            if event.measures:
                best = event.measures if event.best else best
                metrics = {name: round(value, 4) for name, value in event.measures.items()}
                print(
                    f"step {event.step} {training_seconds:.1f} s loss {event.loss:.4f} {metrics} "
                    f"{event.tokens_per_second:,.0f} tokens/s MFU {event.mfu or 0:.2f}"
                    f"{' best' if event.best else ''}",
                    flush=True,
                )
        elif isinstance(event, TrainingFinished):
            print(event.summary)
        else:
            print(event, file=sys.stderr, flush=True)
            started = time.perf_counter()
    seconds = time.perf_counter() - started
    return {"seconds": round(seconds, 1), "training": round(training_seconds, 1), "validation": best}


def translate_test_set(
    folder: Path,
    device: str,
    sources: list[str],
    references: list[str],
    num_beams: int,
    length_penalty: float,
) -> dict[str, float]:
    """BLEU and chrF of the model in a directory."""
    model, tokenizer = load(folder, device=device)
    source_path = folder / "source_tokenizer.json"
    translations = generate_targets(
        model,
        tokenizer,
        sources,
        source_tokenizer=load_tokenizer(source_path) if source_path.exists() else None,
        num_beams=num_beams,
        length_penalty=length_penalty,
    )
    metrics = translation(translations, references, tokenize="none", lowercase=True)
    return {name: round(value, 2) for name, value in metrics.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--test", nargs=2, help="source and target of a test set, below DATA")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--beams", type=int, nargs="*", default=[1, 5])
    parser.add_argument("--length-penalty", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("out/quality"))
    options = parse_arguments(parser, argv, beams=[1, 2])
    changes = [*(SMOKE_CHANGES if options.smoke else ()), *options.set]
    recipe = read_recipe(options.recipe, options.data, changes)
    out = options.out / options.recipe.stem
    shutil.rmtree(out, ignore_errors=True)
    recipe["out"] = str(out)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, Any] = {
        "recipe": options.recipe.name,
        "changes": changes,
        **train(jobs.from_yaml(yaml.safe_dump(recipe), str(options.recipe))),
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    if options.test:
        sources, references = (
            gzip.decompress((options.data / name).read_bytes()).decode().splitlines() for name in options.test
        )
        for num_beams in options.beams:
            result[f"beam {num_beams}"] = translate_test_set(
                out / "model", device, sources, references, num_beams, options.length_penalty
            )
    print(json.dumps(result), flush=True)
    write_json(options.json, result)


if __name__ == "__main__":
    main()
