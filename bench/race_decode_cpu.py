"""Writing on a CPU, greedily and with a beam of 4: ours, plain, packed and compiled, against CTranslate2 and
transformers.

All sides have the same weights (made up), read the same 24 tokens and write 24; no text ends before. Each
side is a process of its own; they take turns, the medians count. A ratio is tokens a second, ours over
CTranslate2's with numbers of the same kind: more is better. `same` is the share of our tokens that
CTranslate2 wrote too. On a busy machine `--threads 1 --clock process` counts processor time.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor

import ctranslated
import keepleft as kl
from report import about, arguments, show, weather, write

LENGTH, BEAM = 24, 4
REST = 0.3  # seconds until the threads of a side that is done have gone to sleep
SPAWN = multiprocessing.get_context("spawn")
TARGETS = {"float32": 1.2, "int8": 2.0}
SIZES = {
    "gpt2": kl.presets.gpt2,
    "base": kl.presets.marian.but(vocab=32_000, feedforward=kl.FeedForward(2048, "relu")),
    "small": kl.presets.marian.but(
        vocab=8_000,
        dim=256,
        heads=4,
        feedforward=kl.FeedForward(1024, "relu"),
        encoder=kl.StackDesign(3, (kl.full,), final_norm=False),
        decoder=kl.StackDesign(3, (kl.causal,), final_norm=False),
    ),
}


def written(model: Any, texts: Tensor, width: int) -> list[list[int]]:
    """By the door that everybody uses."""
    found = kl.completions(
        model,
        None,
        texts.tolist(),
        num_beams=width,
        max_new_tokens=LENGTH,
        length_penalty=0.0 if width > 1 else None,
    )
    return [several[0].tokens for several in found]


def translated(engine: Any, texts: Tensor, width: int) -> list[list[int]]:
    rows = [ctranslated.said(row) for row in texts]
    if hasattr(engine, "translate_batch"):
        done = engine.translate_batch(
            rows, beam_size=width, min_decoding_length=LENGTH, max_decoding_length=LENGTH, length_penalty=0
        )
        said = [result.hypotheses[0] for result in done]
        return [
            [ctranslated.NAMES.index(word) if word in ctranslated.NAMES else int(word) for word in text]
            for text in said
        ]
    done = engine.generate_batch(
        rows,
        beam_size=width,
        min_length=LENGTH,
        max_length=LENGTH,
        length_penalty=0,
        include_prompt_in_result=False,
    )
    return [result.sequences_ids[0] for result in done]


def peer(model: Any) -> Any:
    """The same weights in transformers."""
    from transformers import GPT2LMHeadModel, MarianMTModel

    with tempfile.TemporaryDirectory() as folder:
        kl.save(model, None, folder)
        return (
            (MarianMTModel if isinstance(model, kl.EncoderDecoder) else GPT2LMHeadModel)
            .from_pretrained(folder)
            .eval()
        )


@torch.no_grad()
def generated(theirs: Any, texts: Tensor, width: int) -> list[list[int]]:
    out = theirs.generate(
        texts,
        attention_mask=torch.ones_like(texts),
        num_beams=width,
        do_sample=False,
        min_new_tokens=LENGTH,
        max_new_tokens=LENGTH,
        length_penalty=0.0,
        forced_eos_token_id=None,
    )
    return [row[-LENGTH:].tolist() for row in out]


def made(side: str, size: str, folder: str, threads: int) -> Callable[[Tensor, int], list[list[int]]]:
    """One side, ready to write."""
    torch.set_num_threads(threads)
    name, _, kind = side.partition(" ")
    if name == "ct2":
        return partial(translated, ctranslated.opened(Path(folder), SIZES[size], kind, threads))
    model = model_of(size)
    if name == "transformers":
        return partial(generated, peer(model))
    return partial(
        written, model if name == "plain" else kl.prepack(model, kind, compiled=name == "compiled")
    )


def model_of(size: str) -> Any:
    torch.manual_seed(0)
    model = kl.build(SIZES[size]).eval()
    model.notes = {"bos_token_id": 0, "decoder_start_token_id": 0, "pad_token_id": 1}
    return model


def texts_of(size: str, batch: int) -> Tensor:
    return torch.randint(3, SIZES[size].vocab, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def worker(line: Any, side: str, size: str, folder: str, threads: int, clock: str) -> None:
    """A side in a process of its own: threads of one library that wait for work would keep those of another
    from it.
    """
    way = made(side, size, folder, threads)
    now = time.perf_counter if clock == "wall" else time.process_time
    line.send("ready")
    while (asked := line.recv()) is not None:
        texts, width = texts_of(size, asked[0]), asked[1]
        before = now()
        said = way(texts, width)
        line.send((now() - before, said))


def race(
    lines: dict[str, Any], batch: int, width: int, seconds: float
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Seconds of each side, in rounds; each round begins with another side."""
    found: dict[str, list[float]] = {name: [] for name in lines}
    said = {}
    names = list(lines)
    until = None
    while until is None or time.perf_counter() < until or len(found[names[0]]) < 3:
        for name in names:
            lines[name].send((batch, width))
            took, said[name] = lines[name].recv()
            if until is not None:  # the first round is for warming up
                found[name].append(took)
            time.sleep(REST)
        until = until or time.perf_counter() + seconds
        names.append(names.pop(0))
    return found, said


def same(ours: list[list[int]], theirs: list[list[int]]) -> float:
    pairs = [
        a == b for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine, other, strict=True)
    ]
    return sum(pairs) / len(pairs)


def rows_of(size: str, chosen: Any) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        ctranslated.write(model_of(size), Path(folder))
        ways = ["packed", "ct2", *(["compiled"] if chosen.compiled else [])]
        names = [f"{way} {kind}" for kind in chosen.kinds for way in ways]
        names += ["plain", "transformers"] if chosen.transformers else []
        lines = {}
        for name in names:
            lines[name], theirs = SPAWN.Pipe()
            SPAWN.Process(
                target=worker, args=(theirs, name, size, folder, chosen.threads, chosen.clock), daemon=True
            ).start()
            assert lines[name].recv() == "ready"
        for width in (1, BEAM):
            for batch in chosen.batches:
                found, said = race(lines, batch, width, chosen.seconds)
                row: dict[str, Any] = {"model": size, "beam": width, "batch": batch}
                row |= {
                    name: round(batch * LENGTH / statistics.median(times)) for name, times in found.items()
                }
                for kind in chosen.kinds:
                    for way in ways:
                        if way != "ct2":
                            pairs = zip(found[f"ct2 {kind}"], found[f"{way} {kind}"], strict=True)
                            row[f"{way} {kind} ratio"] = round(statistics.median(a / b for a, b in pairs), 2)
                    row[f"same {kind}"] = round(same(said[f"packed {kind}"], said[f"ct2 {kind}"]), 2)
                peer_times = found[f"ct2 {chosen.kinds[0]}"]
                row["busy"] = round(statistics.median(peer_times) / min(peer_times), 1)
                print(row, flush=True)
                yield row
        for line in lines.values():
            line.send(None)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="to spend on each row")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--kinds", nargs="+", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--clock", choices=("wall", "process"), default="wall")
    parser.add_argument(
        "--no-transformers", dest="transformers", action="store_false", help="and not our plain side either"
    )
    parser.add_argument(
        "--compiled", action="store_true", help="ours compiled too: some minutes the first time"
    )
    chosen = parser.parse_args()
    print(f"{weather()}, {chosen.threads} threads, {chosen.clock} clock")
    rows = []
    for size in chosen.models:
        some = list(rows_of(size, chosen))
        show(f"{size}: tokens a second, and ours over CTranslate2's (aims: {TARGETS})", some)
        rows += some
    write(chosen.json, {"about": about(), "targets": TARGETS, "rows": rows})


if __name__ == "__main__":
    main()
