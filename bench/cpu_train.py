"""A training step of a small encoder-decoder on a CPU in float32 against transformers.

The same weights and batches: 3 + 3 layers, dim 256, a vocabulary of 8,000, 32 pairs of 8 to 32 tokens,
dropout 0.1; forward, loss, backward, clipping, fused AdamW on both sides. "packed": keepleft on the same
pairs, several to a row, with less padding. "bucketed": keepleft on batches of pairs of similar length.
transformers always gets random padded batches; only real target tokens count.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor, nn

from command_line import make_parser, parse_arguments
from keepleft.nn.loss import IGNORE_INDEX, linear_cross_entropy
from report import environment, print_table, system_load, write_json
from timing import race
from transformers_models import from_transformers, marian

TARGET = 1.3  # times the speed of transformers
DECODER_START = 2
NUM_BATCHES = 12
ROW_LENGTH = 64  # of packed batches
Pair = tuple[list[int], list[int]]  # source and target tokens
Batch = tuple[Tensor, ...]


def make_models(vocab: int, dim: int, layers: int) -> tuple[Any, Any]:
    """The same weights in keepleft and in transformers."""
    torch.manual_seed(0)
    transformers = marian(vocab, dim, layers, 4 * dim)
    return from_transformers(transformers).train(), transformers.train()


def make_pairs(count: int, vocab: int) -> list[Pair]:
    rng = random.Random(0)
    sequence = lambda: [rng.randrange(3, vocab) for _ in range(rng.randint(8, 32))]
    return [(sequence(), sequence()) for _ in range(count)]


def pad(sequences: list[list[int]], value: int) -> Tensor:
    length = max(map(len, sequences))
    return torch.tensor([sequence + [value] * (length - len(sequence)) for sequence in sequences])


def make_batches(pairs: list[Pair], size: int, row_length: int | None = None) -> list[Batch]:
    """Source, decoder input, targets, source segments and target segments, each (B, T), padded.

    With a row length, rows of several pairs.
    """
    batches = []
    for begin in range(0, len(pairs), size):
        chunk = pairs[begin : begin + size]
        rows = pack_pairs(chunk, row_length) if row_length else [[pair] for pair in chunk]
        sources = [[token for source, _ in row for token in source] for row in rows]
        tokens = [[token for _, target in row for token in (DECODER_START, *target[:-1])] for row in rows]
        targets = [[token for _, target in row for token in target] for row in rows]
        segments = [
            [[number for number, pair in enumerate(row, 1) for _ in pair[side]] for row in rows]
            for side in range(2)
        ]
        batches.append(
            (
                pad(sources, 0),
                pad(tokens, 0),
                pad(targets, IGNORE_INDEX),
                *(pad(side, 0) for side in segments),
            )
        )
    return batches


def pack_pairs(pairs: list[Pair], row_length: int) -> list[list[Pair]]:
    """Rows of pairs, first fit: each pair, long ones first, goes into the first row with room for it."""
    rows: list[list[Pair]] = []
    for pair in sorted(pairs, key=lambda pair: -max(map(len, pair))):
        rows_with_room = (
            row
            for row in rows
            if all(
                sum(len(other[side]) for other in row) + len(pair[side]) <= row_length for side in range(2)
            )
        )
        row = next(rows_with_room, None)
        rows.append([pair]) if row is None else row.append(pair)
    return rows


def make_step(model: nn.Module, loss: Callable[..., Tensor], batches: list[Batch]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    endless = cycle(batches)

    def step() -> None:
        loss(*next(endless)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="to spend on each row")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=32, help="in a batch")
    options = parse_arguments(parser, argv, seconds=0.0, threads=1, pairs=4)
    torch.set_num_threads(options.threads)
    print(f"{system_load()}, {options.threads} threads")
    vocab, dim, layers = (512, 64, 1) if options.smoke else (8_000, 256, 3)
    keepleft, transformers = make_models(vocab, dim, layers)

    def keepleft_loss(
        source: Tensor, tokens: Tensor, targets: Tensor, source_segments: Tensor, segments: Tensor
    ) -> Tensor:
        x = keepleft.hidden_states(source, tokens, source_segments=source_segments, segments=segments)
        output_weight = keepleft.head.output_weight(keepleft.token)
        loss = linear_cross_entropy(keepleft.head.transform(x), *output_weight, targets).loss
        return loss / (targets != IGNORE_INDEX).sum()

    def transformers_loss(source: Tensor, tokens: Tensor, targets: Tensor, *_: Tensor) -> Tensor:
        return transformers(
            input_ids=source, attention_mask=(source != 0).long(), decoder_input_ids=tokens, labels=targets
        ).loss

    pairs = make_pairs(NUM_BATCHES * options.pairs, vocab)
    random_batches = make_batches(pairs, options.pairs)
    packed_batches = make_batches(pairs, options.pairs, ROW_LENGTH)
    by_length = sorted(pairs, key=lambda pair: (len(pair[1]), len(pair[0])))
    bucketed_batches = make_batches(by_length, options.pairs)
    random.Random(1).shuffle(bucketed_batches)
    keepleft.eval(), transformers.eval()
    for batch in (random_batches[0], packed_batches[0]):
        torch.testing.assert_close(
            keepleft_loss(*batch), transformers_loss(*random_batches[0]), atol=1e-4, rtol=1e-4
        )
    keepleft.train(), transformers.train()
    tokens = sum(len(target) for _, target in pairs) / NUM_BATCHES
    rows = []
    for name, batches in (
        ("same", random_batches),
        ("packed", packed_batches),
        ("bucketed", bucketed_batches),
    ):
        result = race(
            make_step(keepleft, keepleft_loss, batches),
            make_step(transformers, transformers_loss, random_batches),
            seconds=options.seconds,
            sample_seconds=0.0,
        )
        rows.append(
            {
                "batches": name,
                "keepleft ms": round(result.keepleft * 1e3, 1),
                "transformers ms": round(result.peer * 1e3, 1),
                "keepleft tok/s": round(tokens / result.keepleft),
                "transformers tok/s": round(tokens / result.peer),
                "speedup": round(1 / result.ratio, 2),
                "≥ 1.3": "yes" if 1 / result.ratio >= TARGET else "no",
                "speedup of the fastest samples": round(1 / result.min_ratio, 2),
                "noise": round(result.noise, 1),
            }
        )
    print_table("a training step of a small encoder-decoder against transformers", rows)
    write_json(options.json, {"environment": environment(), "target": TARGET, "rows": rows})


if __name__ == "__main__":
    main()
