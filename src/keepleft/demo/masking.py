"""The masking experiment: parallel teacher forcing against step-by-step decoding, with and without the mask.

The first part compares gradients: of one forward pass over a whole target, and of loops that decode it token
by token. The second trains one model twice, with the causal mask and without it, and lets both translate
held-out sentences.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from keepleft import checks
from keepleft.attention.cross_memory import Memory
from keepleft.attention.mask_plot import faults
from keepleft.attention.masks import Mask, causal, full
from keepleft.data.batches import Batches, BucketedLayout
from keepleft.data.fast_encode import encoder
from keepleft.data.objectives import Translation
from keepleft.data.ragged import Ragged
from keepleft.data.teacher_forcing import shift_right
from keepleft.data.token_store import TokenStore
from keepleft.data.tokenizer import special_tokens, train_tokenizer
from keepleft.demo.phrases import corpus
from keepleft.disk import atomic
from keepleft.models import presets
from keepleft.models.build import build
from keepleft.models.design import Design, StackDesign
from keepleft.models.transformer import EncoderDecoder
from keepleft.nn.loss import classification_loss
from keepleft.pipelines.text_generation import generate_targets
from keepleft.plots.charts import bar_chart, line_chart
from keepleft.training.loop import TrainReport, train
from keepleft.training.recipe import Recipe

DEFAULT_LENGTHS = (16, 64, 128, 300)
DEFAULT_STEPS = 400
MAX_GRADIENT_DIFFERENCE = 1e-12  # float64 gradients with a smaller relative difference count as equal
CONTROL_LENGTH = 16  # target length at which the gradients are shown to differ without the mask
VOCAB_SIZE = 512  # of the first part
SOURCE_LENGTH = 16  # tokens in the source of the first part
BATCH_TOKENS = 1024  # of the second part
NUM_SAMPLES = 4  # sentences that are printed
EMPTY_OUTPUT = "(nothing: it ends at once)"


def design(mask: Mask, vocab: int) -> Design:
    """A small encoder-decoder without dropout, with this mask in its decoder."""
    return presets.small(presets.vaswani).but(
        vocab=vocab,
        norm_first=True,
        dropout=0.0,
        encoder=StackDesign(2, (full,)),
        decoder=StackDesign(2, (mask,)),
    )


# 1. One pass and the loop: the same gradients -------------------------------------------------


def parallel_pass(model: EncoderDecoder, source: Tensor, inputs: Tensor, targets: Tensor) -> None:
    """Parallel teacher forcing: one forward pass predicts the next token at every position of the target."""
    _loss(model(source, inputs).transpose(1, 2), targets).backward()


def cached_loop(model: EncoderDecoder, source: Tensor, inputs: Tensor, targets: Tensor) -> None:
    """Decode one token at a time with a KV cache, as generation does, and keep the autograd graph."""
    logits, state = model.start(inputs[:, :1], memory=model.encode_memory(source))
    loss = _loss(logits, targets[:, 0])
    for t in range(1, inputs.shape[1]):
        loss = loss + _loss(model.step(inputs[:, t : t + 1], state), targets[:, t])
    loss.backward()


def naive_loop(model: EncoderDecoder, source: Tensor, inputs: Tensor, targets: Tensor) -> None:
    """Decode without a cache: for every token a forward pass over its whole prefix.

    The source is encoded once, as in the other passes: the gradients of its memory are accumulated over the
    loop and backpropagated at the end.
    """
    memory = model.encode_memory(source)
    detached_memory = Memory(
        [(k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in memory.layers]
    )
    for t in range(inputs.shape[1]):
        x = model.decoder_hidden_states(inputs[:, : t + 1], memory=detached_memory)[:, -1]
        _loss(model.head(x, model.token), targets[:, t]).backward()
    flatten = lambda layers: [tensor for kv in layers for tensor in kv]
    memory_gradients = [tensor.grad for tensor in flatten(detached_memory.layers)]
    torch.autograd.backward(flatten(memory.layers), memory_gradients)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="sum")


TrainingPass = Callable[[EncoderDecoder, Tensor, Tensor, Tensor], None]
LOOPS: dict[str, TrainingPass] = {"loop with cache": cached_loop, "loop from scratch": naive_loop}


@dataclass(frozen=True)
class GradientMatch:
    """Gradients and times of the loops, compared with one pass, at one target length."""

    length: int
    difference: dict[str, float]  # largest relative difference of the gradients of each loop from one pass
    seconds: dict[str, float]  # of one pass and of each loop, forward and backward

    @property
    def ratio(self) -> dict[str, float]:
        """The time of each loop, as a multiple of one pass."""
        return {name: self.seconds[name] / self.seconds["one pass"] for name in self.difference}


def match_gradients(
    lengths: Sequence[int] = DEFAULT_LENGTHS, *, mask: Mask = causal, measure_time: bool = True
) -> Iterator[GradientMatch]:
    """Compare gradients in float64 and times in float32, at each target length."""
    for length in lengths:
        checks.check_int("a length", length)
    for length in lengths:
        tensors = example(length)
        float64_model, float32_model = (
            _build_encoder_decoder(mask, VOCAB_SIZE).to(dtype) for dtype in (torch.float64, torch.float32)
        )
        parallel_gradients = gradients(float64_model, parallel_pass, tensors)
        difference = {
            name: max_difference(parallel_gradients, gradients(float64_model, training_pass, tensors))
            for name, training_pass in LOOPS.items()
        }
        passes = {"one pass": parallel_pass, **LOOPS} if measure_time else {}
        seconds = {
            name: _time_pass(float32_model, training_pass, tensors) for name, training_pass in passes.items()
        }
        yield GradientMatch(length, difference, seconds)


def _build_encoder_decoder(mask: Mask, vocab: int) -> EncoderDecoder:
    """A model with fresh weights, always the same."""
    model = build(design(mask, vocab), generator=torch.Generator().manual_seed(0))
    return cast(EncoderDecoder, model)


def example(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens as (1, T) tensors: source, decoder inputs (the target shifted right), targets."""
    rng = np.random.default_rng(length)
    inputs, targets = shift_right(1, Ragged.from_lists([rng.integers(2, VOCAB_SIZE, length).tolist()]))
    source = rng.integers(2, VOCAB_SIZE, SOURCE_LENGTH)
    to_row = lambda array: torch.from_numpy(array)[None]
    return to_row(source), to_row(inputs.flat), to_row(targets.flat)


def gradients(
    model: EncoderDecoder, training_pass: TrainingPass, tensors: tuple[Tensor, Tensor, Tensor]
) -> dict[str, Tensor]:
    """The gradient of each parameter after one training pass."""
    model.zero_grad(set_to_none=True)
    training_pass(model, *tensors)
    return {name: cast(Tensor, parameter.grad) for name, parameter in model.named_parameters()}


def max_difference(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> float:
    """The largest difference of two sets of gradients, relative to the largest value of each tensor."""
    return max(
        float((expected[name] - actual[name]).abs().max() / expected[name].abs().max()) for name in expected
    )


def _time_pass(
    model: EncoderDecoder, training_pass: TrainingPass, tensors: tuple[Tensor, Tensor, Tensor]
) -> float:
    """Seconds of the fastest of five runs, or of those that fit into a second."""
    times: list[float] = []
    while not times or (len(times) < 5 and sum(times) < 1):
        start_time = time.perf_counter()
        gradients(model, training_pass, tensors)
        times.append(time.perf_counter() - start_time)
    return min(times)


# 2. With the mask and without it --------------------------------------------------------------


class PhraseData:
    """English-French training pairs and held-out ones, with a word tokenizer."""

    def __init__(self) -> None:
        self.train_pairs, self.heldout_pairs = corpus.split("fr")
        self.tokenizer = train_tokenizer(
            "word", [text for pair in self.train_pairs for text in pair], 1 << 14, min_frequency=1
        )

    @cached_property
    def train_batches(self) -> Batches:
        return self._batches(self.train_pairs)

    @cached_property
    def heldout_batches(self) -> Batches:
        return self._batches(self.heldout_pairs)

    def _batches(self, pairs: list[corpus.SentencePair]) -> Batches:
        dtype = np.dtype(np.int64)
        start, end = special_tokens(self.tokenizer).require("start", "end")
        encode = encoder(self.tokenizer, dtype, suffix=[end])
        source, target = (
            [np.frombuffer(row, dtype).tolist() for row in encode(side)] for side in zip(*pairs, strict=True)
        )
        store = TokenStore.from_lists(src=source, tgt=target)
        return Batches(store, Translation(start), BucketedLayout(), BATCH_TOKENS)


@dataclass
class TrainedSide:
    """Training and results of one of the two models. The field names are keys of compare.json."""

    mask: str
    faults: list[str]  # of its mask, over four positions
    curve: list[tuple[int, float]] = field(default_factory=list)  # step, training loss
    loss: float = 0.0  # teacher-forced, on held-out sentences: what a validation loss says
    accuracy: float = 0.0  # teacher-forced: the share of held-out tokens that are right
    honest: float = 0.0  # the same share when every token after the predicted position is removed
    exact: float = 0.0  # the share of held-out sentences that it generates exactly
    words: float = 0.0  # the share of their words that it generates in the right place
    samples: list[dict[str, str]] = field(default_factory=list)  # english, french, written
    seen: str = ""  # the result in a sentence


class MaskTrial:
    """One of the two models: trained, then evaluated on held-out sentences."""

    def __init__(self, mask: Mask, phrases: PhraseData, steps: int) -> None:
        checks.check_int("steps", steps)
        self.phrases = phrases
        self.steps = steps
        self.log_every = max(1, steps // 40)
        self.num_reports = -(-steps // self.log_every)
        self.model = _build_encoder_decoder(mask, phrases.tokenizer.get_vocab_size())
        self.side = TrainedSide(str(mask), faults(mask, 4))

    def train(self) -> Iterator[TrainReport]:
        """Train, with everything seeded: two trials differ only in their mask."""
        recipe = Recipe(steps=self.steps, lr=4e-3, warmup=self.steps // 10, log_every=self.log_every)
        for report in train(self.model, self.phrases.train_batches, recipe):
            self.side.curve.append((report.step, report.cross_entropy))
            yield report

    @torch.no_grad()
    def examine(self) -> TrainedSide:
        """Evaluate on held-out sentences: teacher-forced, then without the future tokens, then generated."""
        side = self.side
        heldout_pairs = self.phrases.heldout_pairs
        self.model.eval()
        batches = list(self.phrases.heldout_batches.one_epoch())
        sums = [
            classification_loss(self.model(**batch.inputs).flatten(0, 1), batch.targets.flatten())
            for batch in batches
        ]
        num_targets = sum(batch.tokens for batch in batches)
        side.loss = sum(float(s.cross_entropy) for s in sums) / num_targets
        side.accuracy = sum(int(s.correct) for s in sums) / num_targets
        num_honest = sum(
            int(_predict_without_future(self.model, **batch.inputs).eq(batch.targets).sum())
            for batch in batches
        )
        side.honest = num_honest / num_targets
        translations = generate_targets(
            self.model,
            self.phrases.tokenizer,
            [english for english, _ in heldout_pairs],
            max_new_tokens=2 * corpus.MAX_SENTENCE_WORDS,
        )
        references = [french for _, french in heldout_pairs]
        side.exact = sum(a == b for a, b in zip(translations, references, strict=True)) / len(heldout_pairs)
        word_matches = [
            [a == b for a, b in zip_longest(translation.split(), reference.split())]
            for translation, reference in zip(translations, references, strict=True)
        ]
        side.words = sum(map(sum, word_matches)) / sum(map(len, word_matches))
        side.samples = [
            {"english": heldout_pairs[n][0], "french": heldout_pairs[n][1], "written": translations[n]}
            for n in range(0, len(heldout_pairs), -(-len(heldout_pairs) // NUM_SAMPLES))
        ]
        side.seen = _describe_side(side)
        return side


def _predict_without_future(
    model: EncoderDecoder, source: Tensor, source_segments: Tensor, tokens: Tensor, segments: Tensor
) -> Tensor:
    """(B, T) the likeliest token after each prefix, each computed from that prefix alone"""
    memory = model.encode_memory(source, segments=source_segments)
    last_states = [
        model.decoder_hidden_states(tokens[:, :t], segments=segments[:, :t], memory=memory)[:, -1]
        for t in range(1, tokens.shape[1] + 1)
    ]
    return model.head(torch.stack(last_states, 1), model.token).argmax(-1)


def _describe_side(side: TrainedSide) -> str:
    if side.faults:
        return (
            f"Without the mask {side.faults[0]}, where its answer stands: {side.accuracy:.1%} of the tokens "
            f"of new sentences are right as long as it can peek, {side.honest:.1%} when the future is cut "
            f"off, and {side.exact:.1%} of the sentences that it writes alone."
        )
    return (
        f"With the mask a position sees only the past, in training and in generation: {side.accuracy:.1%} of "
        f"the tokens of new sentences are right, {side.honest:.1%} when the future is cut off, and "
        f"{side.exact:.1%} of the sentences that it writes alone."
    )


# 3. The result --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExperimentResult:
    matches: list[GradientMatch]
    control: GradientMatch  # the same without the mask: here the gradients must differ
    masked: TrainedSide
    unmasked: TrainedSide
    threads: int = field(default_factory=torch.get_num_threads)

    @property
    def gradients_equal(self) -> bool:
        """Are the gradients equal with the mask, and noticeably different without it?"""
        return (
            max(max(row.difference.values()) for row in self.matches)
            <= MAX_GRADIENT_DIFFERENCE
            < min(self.control.difference.values())
        )

    @property
    def mask_needed(self) -> bool:
        """Does the model with the mask translate better than the one without?"""
        return self.masked.exact > self.unmasked.exact

    @property
    def too_few_steps(self) -> bool:
        """Were there fewer steps than it takes to learn to translate?"""
        return bool(self.masked.curve) and self.masked.curve[-1][0] < DEFAULT_STEPS

    @property
    def ok(self) -> bool:
        return self.gradients_equal and (self.mask_needed or self.too_few_steps)

    def to_dict(self) -> dict[str, Any]:
        """The content of compare.json."""
        return {
            "ok": self.ok,
            "equal": self.gradients_equal,
            "needed": self.mask_needed,
            "early": self.too_few_steps,
            "threads": self.threads,
            "torch": str(torch.__version__),
            "same": [{**asdict(row), "ratio": row.ratio} for row in self.matches],
            "control": {"length": self.control.length, "difference": self.control.difference},
            "masked": asdict(self.masked),
            "unmasked": asdict(self.unmasked),
        }


def save(result: ExperimentResult, folder: Path) -> list[Path]:
    """Write compare.json and two charts into an existing folder; return their paths."""
    atomic.write_text(
        folder / "compare.json", json.dumps(result.to_dict(), indent=2, ensure_ascii=False) + "\n"
    )
    worst = max(max(row.difference.values()) for row in result.matches)
    speed_chart = bar_chart(
        folder / "speed.svg",
        {name: [row.ratio[name] for row in result.matches] for name in LOOPS},
        [str(row.length) for row in result.matches],
        log_y=True,
        title=f"The loop against one masked pass: gradients differ by {worst:.0e}",
        x_label="target length in tokens",
        y_label="times the time of one pass",
    )
    captions = [
        line
        for masked, unmasked in zip(result.masked.samples, result.unmasked.samples, strict=True)
        for line in (
            ("", ""),
            ("English", masked["english"]),
            ("French", masked["french"]),
            ("with the mask", masked["written"] or EMPTY_OUTPUT),
            ("without it", unmasked["written"] or EMPTY_OUTPUT),
        )
    ]
    curves = {
        f"with the mask: writes {result.masked.exact:.0%} of new sentences right": result.masked.curve,
        f"without it: {result.unmasked.exact:.0%}": result.unmasked.curve,
    }
    leak_chart = line_chart(
        folder / "leak.svg",
        curves,
        log_y=True,
        captions=captions,
        x_label="step",
        y_label="training loss per token",
        title="The same model, data and seed, with the mask and without it",
    )
    return [folder / "compare.json", speed_chart, leak_chart]
