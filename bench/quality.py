"""How good the recipes are: train one from its YAML file and measure it on a test set that it has not seen.

    python bench/quality.py recipes/multi30k-en-de.yaml --data DATA \
        --test multi30k/tok/test_2016_flickr.{en,de}.gz
    python bench/quality.py recipes/shakespeare-char.yaml --data DATA

DATA is a folder laid out as the recipes expect below data/. --set recipe.steps=500 changes a field. BLEU is
sacrebleu's on text that is split into words already (tokenize=none): what papers report on Multi30k.
"training" is the seconds from the first step to the last, compiling and recording included, without
evaluation and saving; "seconds" has these too. Neither has the preparation of the data.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import sys
import time
from pathlib import Path

import torch
import yaml

from keepleft.evaluation.translation import translation
from keepleft.pipelines.text_generation import generate_targets
from keepleft.runs import job as jobs
from keepleft.runs.train import TrainingFinished, run_job
from keepleft.training.loop import TrainReport
from keepleft.weights.model_directory import load


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--test", nargs=2, help="source and target of a test set, below DATA")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--beams", type=int, nargs="*", default=[1, 5])
    parser.add_argument("--penalty", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("out/quality"))
    given = parser.parse_args()
    said = yaml.safe_load(given.recipe.read_text("utf-8").replace("data/", f"{given.data}/"))
    for change in given.set:
        name, _, value = change.partition("=")
        *path, last = name.split(".")
        here = said
        for part in path:
            here = here.setdefault(part, {})
        here[last] = yaml.safe_load(value)
    said["out"] = str(given.out / given.recipe.stem)
    shutil.rmtree(said["out"], ignore_errors=True)
    job = jobs.from_yaml(yaml.safe_dump(said), str(given.recipe))
    began = training = 0.0
    best: dict[str, float] = {}
    for event in run_job(job):
        if isinstance(event, TrainReport):
            training += event.tokens / event.tokens_per_second
            if event.measures:
                best = event.measures if event.best else best
                print(
                    f"step {event.step} {training:.1f} s loss {event.loss:.4f} "
                    f"{ {k: round(v, 4) for k, v in event.measures.items()} } {event.tokens_per_second:,.0f} "
                    "tokens/s share "
                    f"{event.mfu or 0:.2f}{' best' if event.best else ''}",
                    flush=True,
                )
        elif isinstance(event, TrainingFinished):
            print(event.summary)
        else:
            print(event, file=sys.stderr, flush=True)
            began = time.perf_counter()
    seconds = time.perf_counter() - began
    result: dict[str, object] = {
        "recipe": given.recipe.name,
        "changes": given.set,
        "seconds": round(seconds, 1),
        "training": round(training, 1),
        "validation": best,
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    if given.test:
        model, tokenizer = load(
            Path(said["out"]) / "model", device="cuda" if torch.cuda.is_available() else "cpu"
        )
        path = Path(said["out"]) / "model" / "source_tokenizer.json"
        from keepleft.data.tokenizer import load_tokenizer

        source = load_tokenizer(path) if path.exists() else None
        texts, references = (
            gzip.decompress((given.data / name).read_bytes()).decode().splitlines() for name in given.test
        )
        for beams in given.beams:
            found = translation(
                generate_targets(
                    model,
                    tokenizer,
                    texts,
                    source_tokenizer=source,
                    num_beams=beams,
                    length_penalty=given.penalty,
                ),
                references,
                tokenize="none",
                lowercase=True,
            )
            result[f"beam {beams}"] = {name: round(value, 2) for name, value in found.items()}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
