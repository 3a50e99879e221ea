"""Writing on a CPU, greedily and with a beam of 4: ours, plain and packed, against CTranslate2 and transformers.

All sides have the same weights (made up), read the same 24 tokens and write 24; no text ends before. They take turns, the
medians count. A ratio is tokens a second, ours over CTranslate2's with numbers of the same kind: more is better. `same` is
the share of our tokens that CTranslate2 wrote too. On a busy machine `--threads 1 --clock process` counts processor time.
"""

from __future__ import annotations

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
TARGETS = {"float32": 1.2, "int8": 2.0}
SIZES = {
    "gpt2": kl.presets.gpt2,
    "base": kl.presets.marian.but(vocab=32_000, feedforward=kl.FeedForward(2048, "relu")),
    "small": kl.presets.marian.but(vocab=8_000, dim=256, heads=4, feedforward=kl.FeedForward(1024, "relu"),
                                   encoder=kl.Stack(3, (kl.full,), final_norm=False),
                                   decoder=kl.Stack(3, (kl.causal,), final_norm=False)),
}
Work = Callable[[], list[list[int]]]


def begun(model: Any, texts: Tensor) -> tuple[Tensor, Any]:
    if isinstance(model, kl.EncoderDecoder):
        return model.start(texts.new_zeros(len(texts), 1), memory=model.read(texts))
    return model.start(texts)


@torch.no_grad()
def greedy(model: Any, texts: Tensor) -> list[list[int]]:
    scores, state = begun(model, texts)
    out = [scores.argmax(-1)]
    while len(out) < LENGTH:
        out.append(model.step(out[-1][:, None], state).argmax(-1))
    return torch.stack(out, 1).tolist()


@torch.no_grad()
def beam(model: Any, texts: Tensor) -> list[list[int]]:
    """The likeliest texts of one length: nothing to end, nothing to weigh by length."""
    scores, state = begun(model, texts)
    rows = len(texts)
    first = torch.arange(rows)[:, None] * BEAM
    total, tokens = best(scores)
    written, parents = tokens.view(rows, BEAM, 1), first.expand(-1, BEAM) // BEAM
    while written.shape[-1] < LENGTH:
        state.keep(parents.flatten())
        values, tokens = best(model.step(written[:, :, -1].reshape(-1, 1), state))
        total, place = (total.view(-1, 1) + values).view(rows, -1).topk(BEAM)
        which = place // BEAM
        parents, tokens = first + which, tokens.view(rows, -1).gather(1, place)
        written = torch.cat([written.gather(1, which[..., None].expand_as(written)), tokens[..., None]], -1)
    return written[:, 0].tolist()


def best(scores: Tensor, block: int = 64) -> tuple[Tensor, Tensor]:
    """Log-probabilities and numbers of the likeliest tokens of each row, looked for in the likeliest blocks alone."""
    rows, vocab = scores.shape
    whole = vocab - vocab % block
    blocks = scores[:, :whole].unflatten(1, (-1, block))
    likely = blocks.amax(-1).topk(BEAM).indices
    some = blocks.gather(1, likely[..., None].expand(-1, -1, block)).flatten(1)
    names = (likely[..., None] * block + torch.arange(block)).flatten(1)
    some, names = torch.cat([some, scores[:, whole:]], 1), torch.cat([names, torch.arange(whole, vocab).expand(rows, -1)], 1)
    values, place = some.topk(BEAM)
    return values - scores.logsumexp(-1, keepdim=True), names.gather(1, place)


def translated(engine: Any, texts: Tensor, width: int) -> list[list[int]]:
    rows = [ctranslated.said(row) for row in texts]
    if hasattr(engine, "translate_batch"):
        done = engine.translate_batch(rows, beam_size=width, min_decoding_length=LENGTH, max_decoding_length=LENGTH,
                                      length_penalty=0)
        said = [result.hypotheses[0] for result in done]
        return [[ctranslated.NAMES.index(word) if word in ctranslated.NAMES else int(word) for word in text] for text in said]
    done = engine.generate_batch(rows, beam_size=width, min_length=LENGTH, max_length=LENGTH, length_penalty=0,
                                 include_prompt_in_result=False)
    return [result.sequences_ids[0] for result in done]


def peer(model: Any) -> Any:
    """The same weights in transformers."""
    from transformers import GPT2LMHeadModel, MarianMTModel

    with tempfile.TemporaryDirectory() as folder:
        kl.save(model, None, folder)
        return (MarianMTModel if isinstance(model, kl.EncoderDecoder) else GPT2LMHeadModel).from_pretrained(folder).eval()


@torch.no_grad()
def generated(theirs: Any, texts: Tensor, width: int) -> list[list[int]]:
    out = theirs.generate(texts, attention_mask=torch.ones_like(texts), num_beams=width, do_sample=False,
                          min_new_tokens=LENGTH, max_new_tokens=LENGTH, length_penalty=0.0, forced_eos_token_id=None)
    return [row[-LENGTH:].tolist() for row in out]


def sides(model: Any, folder: Path, threads: int, with_peer: bool) -> dict[str, Callable[[Tensor, int], list[list[int]]]]:
    out: dict[str, Callable[[Tensor, int], list[list[int]]]] = {}
    for kind in TARGETS:
        engine = ctranslated.opened(folder, model.design, kind, threads)
        out[f"ct2 {kind}"] = lambda texts, width, engine=engine: translated(engine, texts, width)
        packed = kl.pack(model, kind)
        out[f"packed {kind}"] = lambda texts, width, packed=packed: (greedy if width == 1 else beam)(packed, texts)
    out["plain"] = lambda texts, width: (greedy if width == 1 else beam)(model, texts)
    if with_peer:
        theirs = peer(model)
        out["transformers"] = lambda texts, width: generated(theirs, texts, width)
    return out


def race(works: dict[str, Work], seconds: float, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each side, in rounds; each round begins with another side."""
    found: dict[str, list[float]] = {name: [] for name in works}
    names, until = list(works), time.perf_counter() + seconds
    for work in works.values():
        work()
    while time.perf_counter() < until or len(found[names[0]]) < 3:
        for name in names:
            before = clock()
            works[name]()
            found[name].append(clock() - before)
        names.append(names.pop(0))
    return found


def same(ours: list[list[int]], theirs: list[list[int]]) -> float:
    pairs = [a == b for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine, other, strict=True)]
    return sum(pairs) / len(pairs)


def rows_of(size: str, chosen: Any, clock: Callable[[], float]) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    model = kl.build(SIZES[size]).eval()
    model.notes = {"bos_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    with tempfile.TemporaryDirectory() as folder:
        ways = sides(model, ctranslated.write(model, Path(folder)), chosen.threads, chosen.transformers)
        for width in (1, BEAM):
            for batch in chosen.batches:
                texts = torch.randint(3, model.design.vocab, (batch, LENGTH), generator=torch.Generator().manual_seed(1))
                works = {name: partial(way, texts, width) for name, way in ways.items()}
                agreed = {kind: same(works[f"packed {kind}"](), works[f"ct2 {kind}"]()) for kind in TARGETS}
                found = race(works, chosen.seconds, clock)
                row: dict[str, Any] = {"model": size, "beam": width, "batch": batch}
                row |= {name: round(batch * LENGTH / statistics.median(times)) for name, times in found.items()}
                for kind in TARGETS:
                    pairs = zip(found[f"ct2 {kind}"], found[f"packed {kind}"], strict=True)
                    row[f"{kind} ratio"] = round(statistics.median(a / b for a, b in pairs), 2)
                    row[f"same {kind}"] = round(agreed[kind], 2)
                row["busy"] = round(statistics.median(found["ct2 float32"]) / min(found["ct2 float32"]), 1)
                yield row


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="to spend on each row")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--clock", choices=("wall", "process"), default="wall")
    parser.add_argument("--no-transformers", dest="transformers", action="store_false")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    clock = time.perf_counter if chosen.clock == "wall" else time.process_time
    print(f"{weather()}, {chosen.threads} threads, {chosen.clock} clock")
    rows = []
    for size in chosen.models:
        some = list(rows_of(size, chosen, clock))
        show(f"{size}: tokens a second, and ours over CTranslate2's (aims: {TARGETS})", some)
        rows += some
    write(chosen.json, {"about": about(), "targets": TARGETS, "rows": rows})


if __name__ == "__main__":
    main()
