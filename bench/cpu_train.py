"""A training step of a small encoder-decoder on a CPU in float32 against transformers: same weights, same
batches.

3 + 3 layers, width 256, a vocabulary of 8,000, 32 pairs of 8 to 32 tokens, dropout 0.1; forward, loss,
backward, clipping, fused AdamW on both sides. "packed": the same pairs in ours, several in a row, so that
less is padding. "sorted": ours on batches of pairs of like length. Theirs is always on random padded batches;
tokens are real target tokens.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor, nn
from transformers import MarianConfig, MarianMTModel

import keepleft as kl
from keepleft.nn.loss import IGNORE_INDEX, linear_cross_entropy
from report import about, arguments, show, weather, write
from timing import race

TARGET = 1.3  # times as quick
VOCAB = 8_000
START = 2
BATCHES = 12
WIDTH = 64
Pair = tuple[list[int], list[int]]
Batch = tuple[Tensor, ...]


def both() -> tuple[Any, Any]:
    """The same weights in our model and in theirs."""
    torch.manual_seed(0)
    theirs = MarianMTModel(
        MarianConfig(
            vocab_size=VOCAB,
            d_model=256,
            encoder_layers=3,
            decoder_layers=3,
            encoder_ffn_dim=1024,
            decoder_ffn_dim=1024,
            encoder_attention_heads=8,
            decoder_attention_heads=8,
            activation_function="swish",
            dropout=0.1,
            scale_embedding=True,
            max_position_embeddings=512,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=START,
            use_cache=False,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours, _ = kl.load(folder)
    return ours.train(), theirs.train()


def pairs(count: int) -> list[Pair]:
    dice = random.Random(0)
    text = lambda: [dice.randrange(3, VOCAB) for _ in range(dice.randint(8, 32))]
    return [(text(), text()) for _ in range(count)]


def padded(texts: list[list[int]], blank: int) -> Tensor:
    length = max(map(len, texts))
    return torch.tensor([text + [blank] * (length - len(text)) for text in texts])


def batches(some: list[Pair], size: int, width: int | None = None) -> list[Batch]:
    """Source and target so far, padded with 0, what is asked, and the segments; rows of several pairs if a
    width is given.
    """
    out = []
    for begin in range(0, len(some), size):
        rows = (
            packed(some[begin : begin + size], width)
            if width
            else [[pair] for pair in some[begin : begin + size]]
        )
        sources = [[token for source, _ in row for token in source] for row in rows]
        tokens = [[token for _, target in row for token in (START, *target[:-1])] for row in rows]
        targets = [[token for _, target in row for token in target] for row in rows]
        numbers = [
            [[n for n, pair in enumerate(row, 1) for _ in pair[side]] for row in rows] for side in range(2)
        ]
        out.append(
            (
                padded(sources, 0),
                padded(tokens, 0),
                padded(targets, IGNORE_INDEX),
                *(padded(side, 0) for side in numbers),
            )
        )
    return out


def packed(some: list[Pair], width: int) -> list[list[Pair]]:
    """Pairs in rows: each, the long ones first, in the first row that has room for both its texts."""
    rows: list[list[Pair]] = []
    for pair in sorted(some, key=lambda pair: -max(map(len, pair))):
        has_room = (
            row
            for row in rows
            if all(sum(len(other[side]) for other in row) + len(pair[side]) <= width for side in range(2))
        )
        row = next(has_room, None)
        rows.append([pair]) if row is None else row.append(pair)
    return rows


def learn(model: nn.Module, loss: Callable[..., Tensor], given: list[Batch]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    turn = cycle(given)

    def step() -> None:
        loss(*next(turn)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="to spend on each row")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=32, help="in a batch")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    print(f"{weather()}, {chosen.threads} threads")
    ours, theirs = both()

    def mine(
        source: Tensor, tokens: Tensor, targets: Tensor, source_segments: Tensor, segments: Tensor
    ) -> Tensor:
        x = ours.hidden_states(source, tokens, source_segments=source_segments, segments=segments)
        return (
            linear_cross_entropy(ours.head.transform(x), *ours.head.output_weight(ours.token), targets).loss
            / (targets != IGNORE_INDEX).sum()
        )

    def other(source: Tensor, tokens: Tensor, targets: Tensor, *_: Tensor) -> Tensor:
        return theirs(
            input_ids=source, attention_mask=(source != 0).long(), decoder_input_ids=tokens, labels=targets
        ).loss

    some = pairs(BATCHES * chosen.pairs)
    random_order = batches(some, chosen.pairs)
    in_rows = batches(some, chosen.pairs, WIDTH)
    in_order = batches(sorted(some, key=lambda pair: (len(pair[1]), len(pair[0]))), chosen.pairs)
    random.Random(1).shuffle(in_order)
    ours.eval(), theirs.eval()
    for batch in (random_order[0], in_rows[0]):
        torch.testing.assert_close(mine(*batch), other(*random_order[0]), atol=1e-4, rtol=1e-4)
    ours.train(), theirs.train()
    tokens = sum(len(target) for _, target in some) / BATCHES
    rows = []
    for name, given in (("the same", random_order), ("packed", in_rows), ("sorted", in_order)):
        found = race(
            learn(ours, mine, given), learn(theirs, other, random_order), seconds=chosen.seconds, sample=0.0
        )
        rows.append(
            {
                "batches": name,
                "ours ms": round(found.ours * 1e3, 1),
                "transformers ms": round(found.theirs * 1e3, 1),
                "ours tok/s": round(tokens / found.ours),
                "transformers tok/s": round(tokens / found.theirs),
                "times as quick": round(1 / found.ratio, 2),
                "≥ 1.3": "yes" if 1 / found.ratio >= TARGET else "no",
                "of the quickest": round(1 / found.quickest, 2),
                "busy": round(found.busy, 1),
            }
        )
    show("a training step of a small encoder-decoder against transformers", rows)
    write(chosen.json, {"about": about(), "target": TARGET, "rows": rows})


if __name__ == "__main__":
    main()
