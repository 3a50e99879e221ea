"""What the mask is for, as an experiment.

The first part compares gradients: of one pass over a whole target, and of loops that write it token by token. The second trains
one model twice, with the mask and without it, and lets both translate sentences that they have not seen.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from keepleft.attention.masks import Mask, causal, full
from keepleft.attention.memory import Memory
from keepleft.attention.picture import faults
from keepleft.data.batches import Batches, Bucketed
from keepleft.data.encoding import encoder
from keepleft.data.objectives import Translation
from keepleft.data.phrases import corpus
from keepleft.data.ragged import Ragged
from keepleft.data.store import Store
from keepleft.data.teaching import forced
from keepleft.data.tokenizer import learn, marks
from keepleft.disk import atomic
from keepleft.models import presets
from keepleft.models.build import build
from keepleft.models.design import Design, Stack
from keepleft.models.wholes import EncoderDecoder
from keepleft.nn import sense
from keepleft.nn.loss import label_loss
from keepleft.runs.chart import bars, lines
from keepleft.runs.writing import write
from keepleft.training.loop import Report, train
from keepleft.training.recipe import Recipe

LENGTHS = (16, 64, 128, 300)
STEPS = 400
EXACT = 1e-12    # the largest relative difference of float64 gradients that counts as none
CONTROL = 16     # the length at which the comparison is shown to fail without the mask
VOCAB = 512      # of the first part
SOURCE = 16      # tokens in its source
TOKENS = 1024    # in a batch of the second part
SHOWN = 4        # sentences that are printed
NOTHING = "(nothing: it ends at once)"


def design(mask: Mask, vocab: int) -> Design:
    """A small encoder-decoder without dropout; its decoder has this mask."""
    return presets.small(presets.vaswani).but(vocab=vocab, norm_first=True, dropout=0.0, encoder=Stack(2, (full,)),
                                              decoder=Stack(2, (mask,)))


# 1. One pass and the loop: the same gradients -------------------------------------------------


def at_once(model: EncoderDecoder, source: Tensor, shown: Tensor, asked: Tensor) -> None:
    """One pass: every place of the target asks for its next token at the same time."""
    _loss(model(source, shown).transpose(1, 2), asked).backward()


def with_cache(model: EncoderDecoder, source: Tensor, shown: Tensor, asked: Tensor) -> None:
    """The loop as generation does it: one token at a time, keys and values of earlier ones are kept, and so is their graph."""
    scores, state = model.start(shown[:, :1], memory=model.read(source))
    loss = _loss(scores, asked[:, 0])
    for t in range(1, shown.shape[1]):
        loss = loss + _loss(model.step(shown[:, t:t + 1], state), asked[:, t])
    loss.backward()


def from_scratch(model: EncoderDecoder, source: Tensor, shown: Tensor, asked: Tensor) -> None:
    """The plain loop: for every token the whole beginning is read again, and only its last place is asked.

    The source is read once, as in the other ways; what it is blamed for is gathered over the loop and sent back at the end.
    """
    memory = model.read(source)
    held = Memory([(k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in memory.pairs])
    for t in range(shown.shape[1]):
        x = model.hidden(shown[:, :t + 1], memory=held)[:, -1]
        _loss(model.head(x, model.token), asked[:, t]).backward()
    read, blamed = ([part for pair in kept.pairs for part in pair] for kept in (memory, held))
    torch.autograd.backward(read, [part.grad for part in blamed])


def _loss(scores: Tensor, asked: Tensor) -> Tensor:
    return F.cross_entropy(scores, asked, reduction="sum")


Way = Callable[[EncoderDecoder, Tensor, Tensor, Tensor], None]
LOOPS: dict[str, Way] = {"loop with cache": with_cache, "loop from scratch": from_scratch}


@dataclass(frozen=True)
class Same:
    """One target length."""

    length: int
    difference: dict[str, float]  # of the gradients of each loop from those of one pass: the largest of all, relative
    seconds: dict[str, float]     # of one pass and of each loop, forward and backward

    @property
    def ratio(self) -> dict[str, float]:
        """How many times as long as one pass each loop takes."""
        return {name: self.seconds[name] / self.seconds["one pass"] for name in self.difference}


def same(lengths: Sequence[int] = LENGTHS, *, mask: Mask = causal, timed: bool = True) -> Iterator[Same]:
    """Gradients in float64 and times in float32, at each target length."""
    for length in lengths:
        sense.whole("a length", length)
    for length in lengths:
        given = example(length)
        exact, quick = (build(design(mask, VOCAB), generator=torch.Generator().manual_seed(0)).to(kind)
                        for kind in (torch.float64, torch.float32))
        once = gradients(exact, at_once, given)
        difference = {name: apart(once, gradients(exact, way, given)) for name, way in LOOPS.items()}
        ways = {"one pass": at_once, **LOOPS} if timed else {}
        yield Same(length, difference, {name: _seconds(quick, way, given) for name, way in ways.items()})


def example(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """A source and a target of tokens at random, as (1, T) tensors: source, what is shown, what is asked."""
    chance = np.random.default_rng(length)
    shown, asked = forced(1, Ragged.of([chance.integers(2, VOCAB, length).tolist()]))
    source, *target = (torch.from_numpy(part)[None] for part in (chance.integers(2, VOCAB, SOURCE), shown.flat, asked.flat))
    return source, target[0], target[1]


def gradients(model: Any, way: Way, given: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    way(model, *given)
    return {name: weights.grad for name, weights in model.named_parameters()}


def apart(these: dict[str, Tensor], those: dict[str, Tensor]) -> float:
    """The largest difference of two sets of gradients, each tensor measured by its own largest number."""
    return max(float((these[name] - those[name]).abs().max() / these[name].abs().max()) for name in these)


def _seconds(model: Any, way: Way, given: tuple[Tensor, Tensor, Tensor]) -> float:
    """The quickest of five runs, or of those that fit into a second."""
    took: list[float] = []
    while not took or (len(took) < 5 and sum(took) < 1):
        began = time.perf_counter()
        gradients(model, way, given)
        took.append(time.perf_counter() - began)
    return min(took)


# 2. With the mask and without it --------------------------------------------------------------


class Phrases:
    """English and French to learn from, and sentences held out; each word is a token."""

    def __init__(self) -> None:
        self.learned, self.held = corpus.split("fr")
        self.tokenizer = learn("word", [text for pair in self.learned for text in pair], 1 << 14, least=1)

    @cached_property
    def lessons(self) -> Batches:
        return self._batches(self.learned)

    @cached_property
    def exam(self) -> Batches:
        return self._batches(self.held)

    def _batches(self, pairs: list[corpus.Pair]) -> Batches:
        kind = np.dtype(np.int64)
        start, end = marks(self.tokenizer).need("start", "end")
        encode = encoder(self.tokenizer, kind, after=[end])
        sides = ([np.frombuffer(row, kind).tolist() for row in encode(side)] for side in zip(*pairs, strict=True))
        return Batches(Store.of(src=next(sides), tgt=next(sides)), Translation(start), Bucketed(), TOKENS)  # type: ignore[arg-type]


@dataclass
class Side:
    """One of the two models: how it learned, and what it can do."""

    mask: str
    faults: list[str]                                               # of its mask, over four positions
    curve: list[tuple[int, float]] = field(default_factory=list)    # step, training loss
    loss: float = 0.0              # on held-out sentences, in one pass as in training: what a validation loss says
    accuracy: float = 0.0          # and the share of tokens that are right
    honest: float = 0.0            # the same share when nothing is there after the place that is asked
    exact: float = 0.0             # the share of held-out sentences that it writes word for word, from the start token alone
    words: float = 0.0             # the share of their words that it writes in the right place
    samples: list[dict[str, str]] = field(default_factory=list)  # english, french, written
    seen: str = ""                 # what this shows, in a sentence


class Trial:
    """One model, to be trained and examined."""

    def __init__(self, mask: Mask, phrases: Phrases, steps: int) -> None:
        sense.whole("steps", steps)
        self.phrases, self.steps, self.report = phrases, steps, max(1, steps // 40)
        self.reports = -(-steps // self.report)
        self.model = build(design(mask, phrases.tokenizer.get_vocab_size()), generator=torch.Generator().manual_seed(0))
        self.side = Side(str(mask), faults(mask, 4))

    def train(self) -> Iterator[Report]:
        """All chance is seeded: two trials differ in their mask alone."""
        recipe = Recipe(steps=self.steps, peak=4e-3, warmup=self.steps // 10, report=self.report)
        for report in train(self.model, self.phrases.lessons, recipe):
            self.side.curve.append((report.step, report.plain))
            yield report

    @torch.no_grad()
    def examine(self) -> Side:
        """Held-out sentences: in one pass as in training, then with the future cut off, then written from the start token."""
        side, held = self.side, self.phrases.held
        self.model.eval()
        batches = list(self.phrases.exam.once())
        sums = [label_loss(self.model(**batch.inputs).flatten(0, 1), batch.targets.flatten()) for batch in batches]
        asked = sum(batch.tokens for batch in batches)
        side.loss, side.accuracy = sum(float(s.plain) for s in sums) / asked, sum(int(s.right) for s in sums) / asked
        side.honest = sum(_cut_off(self.model, **batch.inputs).eq(batch.targets).sum().item() for batch in batches) / asked
        written = write(self.model, self.phrases.tokenizer, [english for english, _ in held], max_new_tokens=2 * corpus.LONGEST)
        wanted = [french for _, french in held]
        side.exact = sum(a == b for a, b in zip(written, wanted, strict=True)) / len(held)
        hits = [[a == b for a, b in zip_longest(x.split(), y.split())] for x, y in zip(written, wanted, strict=True)]
        side.words = sum(map(sum, hits)) / sum(map(len, hits))
        side.samples = [{"english": held[n][0], "french": held[n][1], "written": written[n]}
                        for n in range(0, len(held), -(-len(held) // SHOWN))]
        side.seen = _seen(side)
        return side


def _cut_off(model: Any, source: Tensor, source_segments: Tensor, tokens: Tensor, segments: Tensor) -> Tensor:
    """The likeliest token after each beginning, (B, T), where there is nothing but that beginning."""
    memory = model.read(source, segments=source_segments)
    ends = [model.hidden(tokens[:, :t], segments=segments[:, :t], memory=memory)[:, -1] for t in range(1, tokens.shape[1] + 1)]
    return model.head(torch.stack(ends, 1), model.token).argmax(-1)


def _seen(side: Side) -> str:
    if side.faults:
        return (f"Without the mask {side.faults[0]}, where its answer stands: {side.accuracy:.1%} of the tokens of new "
                f"sentences are right as long as it can peek, {side.honest:.1%} when the future is cut off, and "
                f"{side.exact:.1%} of the sentences that it writes alone.")
    return (f"With the mask a position sees the past alone, in training as in writing: {side.accuracy:.1%} of the tokens of "
            f"new sentences are right, {side.honest:.1%} when the future is cut off, and {side.exact:.1%} of the sentences "
            "that it writes alone.")


# What was found -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    same: list[Same]
    control: Same        # the same without the mask: here the gradients must differ
    masked: Side
    unmasked: Side
    threads: int = field(default_factory=torch.get_num_threads)

    @property
    def equal(self) -> bool:
        """The gradients agree where the mask is, and the measure notices where it is not."""
        return (max(max(row.difference.values()) for row in self.same) <= EXACT < min(self.control.difference.values()))

    @property
    def needed(self) -> bool:
        """The model with the mask writes better than the one without."""
        return self.masked.exact > self.unmasked.exact

    @property
    def early(self) -> bool:
        """Were there fewer steps than it takes to learn to write?"""
        return bool(self.masked.curve) and self.masked.curve[-1][0] < STEPS

    @property
    def ok(self) -> bool:
        return self.equal and (self.needed or self.early)

    def record(self) -> dict[str, Any]:
        """Every number, as plain data."""
        return {"ok": self.ok, "equal": self.equal, "needed": self.needed, "early": self.early,
                "threads": self.threads, "torch": str(torch.__version__),
                "same": [{**asdict(row), "ratio": row.ratio} for row in self.same],
                "control": {"length": self.control.length, "difference": self.control.difference},
                "masked": asdict(self.masked), "unmasked": asdict(self.unmasked)}


def save(found: Found, folder: Path) -> list[Path]:
    """compare.json with every number, and two pictures, into a folder that is there."""
    atomic.text(folder / "compare.json", json.dumps(found.record(), indent=2, ensure_ascii=False) + "\n")
    worst = max(max(row.difference.values()) for row in found.same)
    speed = bars(folder / "speed.svg", {name: [row.ratio[name] for row in found.same] for name in LOOPS},
                 [str(row.length) for row in found.same], log_y=True,
                 title=f"The loop against one masked pass: gradients differ by {worst:.0e}",
                 x="target length in tokens", y="times the time of one pass")
    below = [line for ours, other in zip(found.masked.samples, found.unmasked.samples, strict=True) for line in (
        ("", ""), ("English", ours["english"]), ("French", ours["french"]), ("with the mask", ours["written"] or NOTHING),
        ("without it", other["written"] or NOTHING))]
    curves = {f"with the mask: writes {found.masked.exact:.0%} of new sentences right": found.masked.curve,
              f"without it: {found.unmasked.exact:.0%}": found.unmasked.curve}
    leak = lines(folder / "leak.svg", curves, log_y=True, below=below, x="step", y="training loss per token",
                 title="The same model, data and seed, with the mask and without it")
    return [folder / "compare.json", speed, leak]
