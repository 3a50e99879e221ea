"""Confirm the zoo's findings by brute force, without any code of the audit: change what must not matter.

python bench/confirm.py                          every finding of the newest transformers; confirmed.json
python bench/confirm.py --only FalconForCausalLM
python bench/confirm.py --issues                 run the scripts of docs/zoo/issues: they print what is shown
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import itertools
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
Inputs = dict[str, Any]
Measurement = tuple[float, str]  # how much moved, relative to the largest output, and what was done

LENGTH = 17
LONG_LENGTH = 64  # where torch.topk breaks ties in another way than among few
FLOAT64_TOLERANCE = 1e-6  # above what float32 tables inside a float64 model cause
FLOAT32_TOLERANCE = 1e-3
# parameters with a meaning of their own: decay rates, step sizes
KEPT_PARAMETERS = re.compile(
    r"(A_log|dt_bias|dt_proj\.bias|time_decay|time_first|time_mix\w*|\.A|\.D|recurrent_param)$"
)
DECODER_POSITIONS = (
    "The decoders of BART and its relatives count positions from the first column, padding included: batches "
    "are padded on the right."
)
DECODER_LABELS = (
    "The stand-alone decoders of the BART family expect labels that are shifted already, as an "
    "encoder-decoder's are."
)
MASKED_LABELS = (
    "Trained to fill in tokens at their own position: labels belong to the same position as their logits."
)
BATCH_NORM = "BatchNorm in training takes its statistics over the batch, as it is defined to."
LEARNED_FROM_FIRST_COLUMN = (
    "Its positions are counted from the first column and it takes no position ids: pad on the right."
)
# decoders of encoder-decoders, which are also there by themselves
BART_LIKE_DECODERS = (
    "BartForCausalLM",
    "BigBirdPegasusForCausalLM",
    "BlenderbotForCausalLM",
    "BlenderbotSmallForCausalLM",
    "MBartForCausalLM",
    "MarianForCausalLM",
    "MvpForCausalLM",
    "PLBartForCausalLM",
    "PegasusForCausalLM",
    "TrOCRForCausalLM",
    "WhisperForCausalLM",
)
# (class, kind) → why what was seen is meant, or why it is not seen here
BY_DESIGN: dict[tuple[str, str], str] = {
    ("PaliGemmaForConditionalGeneration", "future"): (
        "A prefix language model: without token type ids all of the prompt is prefix, read both ways."
    ),
    ("XLNetLMHeadModel", "future"): (
        "Permutation language modelling: without perm_mask every position sees every other."
    ),
    (
        "XLNetLMHeadModel",
        "labels",
    ): "Labels belong to the positions of target_mapping, not to the next token.",
    (
        "CpmAntForCausalLM",
        "future",
    ): "The prompt is read in both directions; only the generated part is causal.",
    ("CpmAntForCausalLM", "labels"): MASKED_LABELS,
    ("FlaubertWithLMHeadModel", "labels"): MASKED_LABELS,
    ("XLMWithLMHeadModel", "labels"): MASKED_LABELS,
    ("OpenAIGPTLMHeadModel", "future"): (
        "The first GPT hides the future with -10000, as its original code did; only large scores show it."
    ),
    ("MBartForConditionalGeneration", "labels"): (
        "mBART ends labels with the language code and moves that to the front as the decoder's first token."
    ),
    ("PLBartForConditionalGeneration", "labels"): (
        "PLBART ends labels with the language code and moves that to the front as the decoder's first token."
    ),
    ("CsmDepthDecoderForCausalLM", "labels"): (
        "Its input begins with the backbone's state, so a codebook is read one position after its label."
    ),
    ("CsmDepthDecoderForCausalLM", "padding"): (
        "A sequence is the codebooks of one frame, all of one length; it warns that it ignores position ids."
    ),
    ("RwkvForCausalLM", "padding"): "It takes an attention mask and warns that it does not use it.",
    ("Pix2StructForConditionalGeneration", "labels"): (
        "With decoder_input_ids given, labels belong to the same position, as in every encoder-decoder."
    ),
    ("CanaryForConditionalGeneration", "batch"): BATCH_NORM,
    ("CohereAsrForConditionalGeneration", "batch"): BATCH_NORM,
    ("BlipForConditionalGeneration", "padding"): LEARNED_FROM_FIRST_COLUMN,
    ("MusicgenForCausalLM", "padding"): LEARNED_FROM_FIRST_COLUMN,
    ("MusicgenMelodyForCausalLM", "padding"): LEARNED_FROM_FIRST_COLUMN,
    ("NllbMoeForConditionalGeneration", "batch"): (
        "In training each expert has a capacity that all tokens of the batch share, as in the paper."
    ),
    ("NllbMoeForConditionalGeneration", "padding"): (
        "In training the tokens of other rows, padding too, share the capacity of experts; the row "
        "that moves has no padding, and alone it is not moved by any."
    ),
    **{(name, "padding"): DECODER_POSITIONS for name in BART_LIKE_DECODERS},
    **{(name, "labels"): DECODER_LABELS for name in BART_LIKE_DECODERS},
}

# a class without findings, for --smoke
SMOKE_MODELS = {
    "release": "none",
    "rows": [
        {
            "name": "GPT2LMHeadModel",
            "config class": "GPT2Config",
            "config": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 99}
            | {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
            "inputs": {"input_ids": ["int64", [2, 13]]},
        }
    ],
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "docs/zoo", help="models.json and the findings")
    parser.add_argument("--only", nargs="*", metavar="CLASS")
    parser.add_argument("--issues", action="store_true", help="run the scripts of FOLDER/issues instead")
    parser.add_argument("--out", type=Path, help="default: FOLDER/confirmed.json")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the table there too")
    parser.add_argument("--smoke", action="store_true", help="one clean class: nothing is confirmed")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.issues:
        return run_issues(options.folder / "issues")
    if options.smoke:
        models, kinds = SMOKE_MODELS, {"GPT2LMHeadModel": list(CHECKS)}
    else:
        models = json.loads((options.folder / "models.json").read_text("utf-8"))
        kinds = finding_kinds(options.folder / f"{models['release']}.json")
    names = options.only or list(kinds)
    by_name = {model["name"]: model for model in models["rows"]}
    rows = []
    for name in names:
        for kind in kinds[name]:
            row = confirm(by_name.get(name), name, kind)
            rows.append(row)
            print(f"{name:56} {kind:8} {row['state']:15} {row['measured']:9}  {row['check']}", flush=True)
    import transformers

    table = {
        "release": models["release"],
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    table["rows"] = rows
    text = json.dumps(table, indent=1, ensure_ascii=False) + "\n"
    if not options.smoke and not options.only:
        (options.out or options.folder / "confirmed.json").write_text(text, "utf-8")
    if options.json:
        options.json.write_text(text, "utf-8")
    return 0


def finding_kinds(path: Path) -> dict[str, list[str]]:
    """The kinds of finding of each class, as the audit wrote them."""
    rows = json.loads(path.read_text("utf-8"))["rows"]
    return {
        row["name"]: list(dict.fromkeys(finding["kind"] for finding in row["findings"]))
        for row in rows
        if row.get("findings")
    }


def confirm(model: dict[str, Any] | None, name: str, kind: str) -> dict[str, str]:
    """One line of the table: a finding, whether brute force saw it, and by how much."""
    reason = BY_DESIGN.get((name, kind), "")
    size, check = 0.0, "nothing could be compared"
    try:
        if model is None:
            raise LookupError("models.json has no configuration of it")
        for measured, what, tolerance in measurements(model, kind):
            check = "nothing moved"
            if not measured <= tolerance:  # NaN too is seen
                size, check = measured, what
                break
    except Exception as error:
        size, check = 0.0, f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    state = "not reproduced" if size == 0 else "by design" if reason else "confirmed"
    row = {"name": name, "kind": kind, "state": state, "measured": f"{size:.2g}", "check": check}
    return row | ({"reason": reason} if reason else {})


def measurements(model: dict[str, Any], kind: str) -> Iterator[tuple[float, str, float]]:
    """Everything tried for a kind, plain calls first, with the size above which it is no rounding."""
    for dtype, tolerance in ((torch.float64, FLOAT64_TOLERANCE), (torch.float32, FLOAT32_TOLERANCE)):
        torch.set_default_dtype(dtype)
        try:
            tiny = TinyModel(model, dtype)
            tiny.logits(tiny.inputs)
            for check in CHECKS[kind]:
                for size, what in check(tiny):
                    yield size, f"{what}, {str(dtype).removeprefix('torch.')}", tolerance
        except Exception:
            if dtype is torch.float32:
                raise
        finally:
            torch.set_default_dtype(torch.float32)


# -- the tiny model ----------------------------------------------------------------------------


class TinyModel:
    """A model of a configuration with random weights, and random inputs for it."""

    def __init__(self, description: dict[str, Any], dtype: torch.dtype, rows: int = 2) -> None:
        import transformers

        model_class = getattr(transformers, description["name"])
        config_class = getattr(transformers, description["config class"], model_class.config_class)
        self.description = description
        self.dtype = dtype
        torch.manual_seed(1)
        config = make_config(config_class, description["config"])
        config._experts_implementation = "eager"  # the grouped kernels have no float64
        self.model = model_class(config).eval()
        scramble(self.model)
        self.model.to(dtype)
        self.parameters = inspect.signature(self.model.forward).parameters
        shapes = description["inputs"]
        self.sequence = (
            "decoder_input_ids"
            if "decoder_input_ids" in shapes
            else next(name for name in ("input_ids", "inputs_embeds") if name in shapes)
        )
        self.is_encoder_decoder = self.sequence == "decoder_input_ids"
        self.described_length = shapes[self.sequence][1][1]
        # what is aligned with the sequence grows and shrinks with it
        self.aligned = {
            name: max(n for n, size in enumerate(shape) if size == self.described_length)
            for name, (_, shape) in shapes.items()
            if self.described_length in shape[1:] and (name == self.sequence or not self.is_encoder_decoder)
        }
        self.aligned[self.sequence] = 1
        self.inputs = self.random_inputs(rows, self.described_length, seed=0)

    def random_inputs(self, rows: int, length: int, seed: int) -> Inputs:
        rng = torch.Generator().manual_seed(seed)
        inputs: Inputs = {}
        for name, (dtype, shape) in self.description["inputs"].items():
            shape = [rows, *shape[1:]]
            if name in self.aligned:
                shape[self.aligned[name]] = length
            if name.endswith("mask"):
                inputs[name] = torch.ones(shape, dtype=getattr(torch, dtype))
            elif dtype.startswith("int"):
                inputs[name] = torch.randint(5, 60, shape, generator=rng)
            else:
                inputs[name] = torch.randn(shape, generator=rng).to(self.dtype)
            if name == "flattened_patches":  # which begin with their row and column
                inputs[name][..., :2] = torch.arange(1, shape[1] + 1)[None, :, None]
        return inputs

    def slice(self, inputs: Inputs, start: int, end: int) -> Inputs:
        return {
            name: value.narrow(self.aligned[name], start, end - start) if name in self.aligned else value
            for name, value in inputs.items()
        }

    def replace_from(self, inputs: Inputs, other: Inputs, start: int) -> Inputs:
        """The same up to a position, and other inputs from there on."""
        out = dict(inputs)
        for name, axis in self.aligned.items():
            if not name.endswith("mask"):
                length = inputs[name].shape[axis]
                kept = inputs[name].narrow(axis, 0, start)
                out[name] = torch.cat([kept, other[name].narrow(axis, start, length - start)], axis)
        return out

    def call(self, inputs: Inputs) -> Any:
        torch.manual_seed(2)  # some draw random numbers in training
        with torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return self.model(**inputs)

    def logits(self, inputs: Inputs) -> Tensor:
        return logits_of(self.call(inputs))

    def accepts(self, name: str) -> bool:
        """Is it an argument of forward, or a mask that forward hands on?"""
        handed_on = name == "attention_mask" and "kwargs" in self.parameters and not self.is_encoder_decoder
        return name in self.parameters or handed_on


def logits_of(out: Any) -> Tensor:
    logits = getattr(out, "logits", None)
    return out[0] if logits is None else logits


def make_config(config_class: Any, values: dict[str, Any]) -> Any:
    """A configuration with these values. Some classes refuse them all at once, since their check of one field
    reads others before they are set: those get them one by one.
    """
    try:
        return config_class.from_dict(values)
    except Exception:
        config = config_class()
        set_fields(config, values)
        return config


def set_fields(config: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        old = getattr(config, name, None)
        if isinstance(value, dict) and hasattr(old, "model_type"):
            set_fields(old, value)
        elif name not in ("model_type", "id2label", "label2id", "transformers_version", "dtype"):
            with contextlib.suppress(Exception):  # a property without a setter
                setattr(config, name, tuple(value) if isinstance(old, tuple) else value)


@torch.no_grad()
def scramble(model: torch.nn.Module) -> None:
    """Weights with which everything matters: an initialisation near zero hides what attention does."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for name, weight in model.named_parameters():
        is_table = not weight.requires_grad  # sinusoidal positions, say
        if is_table or not weight.is_floating_point() or not weight.numel() or KEPT_PARAMETERS.search(name):
            continue
        if weight.dim() < 2:
            weight.copy_(torch.nan_to_num(weight) + 0.2 * torch.randn_like(weight))
        elif id(weight) in embeddings:
            weight.normal_(0, 0.5)
        else:
            weight.normal_(
                0, weight[0].numel() ** -0.5 if weight.dim() == 2 else max(weight.shape[-2:]) ** -0.5
            )


def relative_change(a: Tensor, b: Tensor) -> float:
    """The largest difference, by the largest output; NaN where a number became NaN or infinite."""
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("nan")
    a, b = (x.nan_to_num(posinf=0.0, neginf=0.0).double() for x in (a, b))
    return float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) if a.numel() else 0.0


def attempt(what: str, compute: Callable[..., float], *arguments: Any) -> Iterator[Measurement]:
    """A measurement, or nothing where the class does not accept the call."""
    try:
        size = compute(*arguments)
    except Exception:
        return
    yield size, what


ALL = slice(None)


def compare(
    tiny: TinyModel,
    what: str,
    first: Inputs,
    second: Inputs,
    first_columns: slice = ALL,
    second_columns: slice = ALL,
    rows: slice = ALL,
) -> Iterator[Measurement]:
    """How much the logits of two calls differ, at these positions of these rows."""
    yield from attempt(
        what,
        lambda: relative_change(
            tiny.logits(first)[rows, first_columns], tiny.logits(second)[rows, second_columns]
        ),
    )


@contextlib.contextmanager
def training(tiny: TinyModel, active: bool) -> Iterator[str]:
    """Train mode (the configuration has no dropout), and what to call it."""
    tiny.model.train(active)
    try:
        yield ", in training" if active else ""
    finally:
        tiny.model.eval()


def describe_options(options: Inputs) -> str:
    return "".join(f", {name}={value}" for name, value in options.items())


# -- the checks --------------------------------------------------------------------------------


def later_tokens(tiny: TinyModel) -> Iterator[Measurement]:
    """Other tokens from a position on: earlier logits must stay."""
    variants: tuple[Inputs, ...] = ({}, {"output_attentions": True}, {"use_cache": False})
    for options, length in itertools.product(variants, (4, tiny.described_length, LENGTH)):
        base, other = (tiny.random_inputs(1, length, seed) for seed in (3, 4))
        for start in range(1, length):
            changed = tiny.replace_from(base, other, start)
            what = f"tokens from {start} on changed, {length} tokens{describe_options(options)}"
            before = slice(0, start)
            yield from compare(tiny, what, {**base, **options}, {**changed, **options}, before, before)


def appended_tokens(tiny: TinyModel) -> Iterator[Measurement]:
    """A sequence against its own beginning: not even the number of later tokens may matter."""
    for total, seed in ((LENGTH, 5), *((LONG_LENGTH, seed) for seed in range(6, 12))):
        inputs = tiny.random_inputs(1, total, seed)
        for length in range(2, total, 1 if total == LENGTH else 5):
            what = f"{total - length} tokens appended to {length}"
            shorter = tiny.slice(inputs, 0, length)
            yield from compare(tiny, what, shorter, inputs, second_columns=slice(0, length))


def large_scores(tiny: TinyModel) -> Iterator[Measurement]:
    """Attention scores so large that a finite mask no longer hides anything."""
    weights = [
        weight
        for name, weight in tiny.model.named_parameters()
        if re.search(r"c_attn|q_proj|k_proj|query|key|qkv|q_lin|k_lin", name) and name.endswith("weight")
    ]
    scale_weights(weights, 300)
    try:
        for size, what in later_tokens(tiny):
            yield size, f"{what}, queries and keys × 300"
    finally:
        scale_weights(weights, 1 / 300)


@torch.no_grad()
def scale_weights(weights: Sequence[Tensor], factor: float) -> None:
    for weight in weights:
        weight.mul_(factor)


def sequence_padding(tiny: TinyModel) -> Iterator[Measurement]:
    """Padding beside the sequence, hidden by its mask, positions counted from the first real token."""
    mask_name = "decoder_attention_mask" if tiny.is_encoder_decoder else "attention_mask"
    positions_name = "decoder_position_ids" if tiny.is_encoder_decoder else "position_ids"
    if not tiny.accepts(mask_name):
        return
    variants: tuple[Inputs, ...] = ({}, {"output_attentions": True})
    for in_training, options, length, pads, left, seed in itertools.product(
        (False, True), variants, (tiny.described_length, 10), (1, 3), (True, False), (6, 26, 46)
    ):
        short = tiny.random_inputs(1, length, seed)
        padded, other = (pad(tiny, short, tiny.random_inputs(1, pads, seed + n), left) for n in (1, 2))
        real = slice(pads, None) if left else slice(0, length)
        mask = torch.zeros(1, length + pads, dtype=torch.long)
        mask[:, real] = 1
        given: Inputs = {mask_name: mask, **options}
        if tiny.accepts(positions_name):
            given[positions_name] = (mask.cumsum(1) - 1).clamp(min=0)
        padded, other = {**padded, **given}, {**other, **given}
        with training(tiny, in_training) as mode:
            what = f"{pads} of padding on the {'left' if left else 'right'}{mode}{describe_options(options)}"
            yield from compare(tiny, f"the content of {what}", padded, other, real, real)
            # by convention, padding on the left of a target moves its positions
            if not (left and tiny.is_encoder_decoder and positions_name not in given):
                yield from compare(tiny, what, {**short, **options}, padded, second_columns=real)


def pad(tiny: TinyModel, inputs: Inputs, filler: Inputs, left: bool) -> Inputs:
    """The filler beside the inputs, in everything that is aligned with the sequence."""
    out = dict(inputs)
    for name, axis in tiny.aligned.items():
        parts = [filler[name], inputs[name]] if left else [inputs[name], filler[name]]
        out[name] = torch.cat(parts, axis)
    return out


def source_padding(tiny: TinyModel) -> Iterator[Measurement]:
    """Padding in the encoder's input, hidden by its mask."""
    if not tiny.is_encoder_decoder or not tiny.accepts("attention_mask"):
        return
    source = next(name for name in tiny.inputs if name != tiny.sequence and tiny.inputs[name].dim() > 1)
    shape = tiny.inputs[source].shape
    # features of Whisper are (rows, mel bands, frames), of others (rows, frames, mel bands)
    axis = 2 if source == "input_features" and shape[1] < 20 else 1
    frames = shape[axis]
    variants: tuple[Inputs, ...] = ({}, {"output_attentions": True})
    for in_training, options, pads, left in itertools.product((False, True), variants, (1, 3), (True, False)):
        inputs, other = (tiny.random_inputs(1, tiny.described_length, seed) for seed in (9, 10))
        real = slice(pads, frames) if left else slice(0, frames - pads)
        mask = torch.zeros(1, frames, dtype=torch.long)
        mask[:, real] = 1
        changed = other[source].movedim(axis, 1).clone()
        changed[:, real] = inputs[source].movedim(axis, 1)[:, real]
        padded = {**inputs, "attention_mask": mask, **options}
        short = {**padded, source: inputs[source].movedim(axis, 1)[:, real].movedim(1, axis)}
        short["attention_mask"] = mask[:, real]
        with training(tiny, in_training) as mode:
            what = f"{pads} of padding on the {'left' if left else 'right'} of the source"
            what += f"{mode}{describe_options(options)}"
            yield from compare(
                tiny, f"the content of {what}", padded, {**padded, source: changed.movedim(1, axis)}
            )
            if not left:
                yield from compare(tiny, what, short, padded)


CHUNKS = (
    [5, *[1] * 8],
    [4, 3, 2, 4],
    [1, 2, 10],
    [1] * 13,
    [15, 1, 1],
    [3, *[1] * 14],
    [8, 1, 2, 1],
    [2, 8, 7],
)


def cached_chunks(tiny: TinyModel) -> Iterator[Measurement]:
    """Chunks read with a cache against one pass."""
    for static, sizes, with_mask in itertools.product((False, True), CHUNKS, (False, True)):
        inputs = tiny.random_inputs(2, sum(sizes), 11)
        what = f"chunks of {format_sizes(sizes)} with a {'static' if static else 'growing'} cache"
        yield from attempt(what, change_by_chunks, tiny, inputs, sizes, with_mask, static)


def change_by_chunks(
    tiny: TinyModel, inputs: Inputs, sizes: Sequence[int], with_mask: bool, static: bool
) -> float:
    return relative_change(tiny.logits(inputs), run_chunks(tiny, inputs, sizes, with_mask, static))


def cached_chunks_with_padding(tiny: TinyModel) -> Iterator[Measurement]:
    """Chunks with a cache and padding on the left, against one chunk with the same mask."""
    for pads, sizes in itertools.product((1, 2, 3), ([8, 1], [8, 1, 1, 1], [5, 4])):
        inputs = tiny.random_inputs(2, sum(sizes), 12)
        what = f"chunks of {format_sizes(sizes)} with {pads} of padding on the left"
        yield from attempt(what, change_by_padded_chunks, tiny, inputs, sizes, pads)


def change_by_padded_chunks(tiny: TinyModel, inputs: Inputs, sizes: Sequence[int], pads: int) -> float:
    one_pass = run_chunks(tiny, inputs, [sum(sizes)], True, False, pads)
    return relative_change(one_pass[:, pads:], run_chunks(tiny, inputs, sizes, True, False, pads)[:, pads:])


def format_sizes(sizes: Sequence[int]) -> str:
    """5, 1 × 8"""
    groups = [(size, len(list(group))) for size, group in itertools.groupby(sizes)]
    return ", ".join(f"{size} × {times}" if times > 1 else str(size) for size, times in groups)


def run_chunks(
    tiny: TinyModel, inputs: Inputs, sizes: Sequence[int], with_mask: bool, static: bool, pads: int = 0
) -> Tensor:
    """The logits of all chunks. pads: columns on the left that the mask hides."""
    name = next(name for name in ("cache_params", "past_key_values") if name in tiny.parameters)
    mask_name = "decoder_attention_mask" if tiny.is_encoder_decoder else "attention_mask"
    state = None
    if static:
        from transformers import StaticCache

        state = StaticCache(config=tiny.model.config, max_cache_len=sum(sizes) + 3)
    outputs, start = [], 0
    for size in sizes:
        options: Inputs = {"use_cache": True}
        if state is not None:
            options[name] = state
        if with_mask:
            rows = inputs[tiny.sequence].shape[0]
            options[mask_name] = torch.ones(rows, start + size, dtype=torch.long)
            options[mask_name][:, :pads] = 0
            if tiny.accepts("position_ids") and pads:
                positions = (options[mask_name].cumsum(1) - 1).clamp(min=0)
                options["position_ids"] = positions[:, start:]
        out = tiny.call({**tiny.slice(inputs, start, start + size), **options})
        state = getattr(out, name)
        outputs.append(logits_of(out))
        start += size
    if state is None:
        raise TypeError("no cache came back")
    return torch.cat(outputs, 1)


def reordered_cache(tiny: TinyModel) -> Iterator[Measurement]:
    """The rows of a cache in another order, as beam search needs it."""
    yield from attempt("the rows of the cache in another order", change_by_reordering, tiny)


def change_by_reordering(tiny: TinyModel) -> float:
    inputs = tiny.random_inputs(2, 10, 13)
    state = tiny.call({**tiny.slice(inputs, 0, 7), "use_cache": True}).past_key_values
    state.reorder_cache(torch.tensor([1, 0]))
    swapped = {name: value.flip(0) for name, value in inputs.items()}
    rest = {**tiny.slice(swapped, 7, 10), "past_key_values": state, "use_cache": True}
    return relative_change(tiny.logits(swapped)[:, 7:], tiny.logits(rest))


def other_rows(tiny: TinyModel) -> Iterator[Measurement]:
    """A row beside other rows, of random tokens or of one token (which sends all of it to one expert)."""
    tokens = (None, *range(5, 60, 12))
    # many rows before few: a capacity kept from the last call in eval is then too small for many in training
    for in_training, count, seed, one_token in itertools.product(
        (False, True), (12, 3), range(14, 24, 2), tokens
    ):
        inputs, others = (tiny.random_inputs(count, tiny.described_length, seed + n) for n in (0, 1))
        changed = {}
        for name, value in inputs.items():
            other = others[name]
            if one_token is not None and not other.is_floating_point() and not name.endswith("mask"):
                other = torch.full_like(other, one_token)
            changed[name] = torch.cat([value[:1], other[1:]])
        with training(tiny, in_training) as mode:
            what = f"other rows {'changed' if one_token is None else 'of one token'}{mode}"
            yield from compare(tiny, what, inputs, changed, rows=slice(0, 1))


def not_a_number(tiny: TinyModel) -> Iterator[Measurement]:
    """A source of nothing but padding, in half precision too."""
    length = next(iter(tiny.inputs.values())).shape[1]
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0] = 0
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        half = TinyModel(tiny.description, dtype)
        inputs = {**half.random_inputs(2, half.described_length, 16), "attention_mask": mask}
        what = f"a source of nothing but padding, {str(dtype).removeprefix('torch.')}"
        yield from attempt(what, count_nan, half, inputs)


def count_nan(tiny: TinyModel, inputs: Inputs) -> float:
    return float("nan") if tiny.logits(inputs).isnan().any() else 0.0


def label_positions(tiny: TinyModel) -> Iterator[Measurement]:
    """The loss of one label must be that of the logits before it. For an encoder-decoder that makes its
    decoder's input of the labels: no label may move the logits at its own position or before.
    """
    length = tiny.described_length
    inputs = tiny.random_inputs(1, length, 17)
    tokens = inputs[tiny.sequence]
    if tiny.is_encoder_decoder:
        source = {name: value for name, value in inputs.items() if name != tiny.sequence}
        for position in range(length):
            changed = tokens.clone()
            changed[0, position] = 5 + (changed[0, position] - 5 + 7) % 55
            first, second = ({**source, "labels": labels} for labels in (tokens, changed))
            before = slice(0, position + 1)
            what = f"the label at {position} changed, logits up to there"
            yield from compare(tiny, what, first, second, before, before)
    for position in range(2, length):
        what = f"the label at {position} is judged by the logits at {position}"
        yield from attempt(what, judged_by_own_logits, tiny, inputs, position)


def judged_by_own_logits(tiny: TinyModel, inputs: Inputs, position: int) -> float:
    """How far the loss is from that of the logits before the label, where it is that of the logits at it."""
    tokens = inputs[tiny.sequence]
    labels = torch.full_like(tokens, -100)
    labels[0, position] = tokens[0, position]
    out = tiny.call({**inputs, "labels": labels})
    logits = out.logits[0].double()
    left_out = tokens.shape[1] - len(logits)  # some give no logits for the first position
    before, at = (logits[column - left_out] for column in (position - 1, position))
    wanted = abs(float(out.loss - F.cross_entropy(before, labels[0, position])))
    own = abs(float(out.loss - F.cross_entropy(at, labels[0, position])))
    return wanted if own < 1e-4 < wanted else 0.0


CHECKS: dict[str, tuple[Callable[[TinyModel], Iterator[Measurement]], ...]] = {
    "future": (later_tokens, appended_tokens, large_scores),
    "padding": (sequence_padding, source_padding),
    "cache": (cached_chunks, cached_chunks_with_padding, reordered_cache),
    "batch": (other_rows,),
    "nan": (not_a_number,),
    "labels": (label_positions,),
}


# -- the issues --------------------------------------------------------------------------------


def run_issues(folder: Path) -> int:
    """Run the Python of every issue; what it prints must be the block of text that follows it."""
    failures = 0
    for path in sorted(folder.glob("*.md")):
        text = path.read_text("utf-8")
        for script, shown in re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", text, re.S):
            environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
            ran = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", script],
                env=environment,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            same = ran.stdout.split() == shown.split()
            failures += not same
            print(
                f"{path.name:50} {'as shown' if same else 'NOT as shown: ' + ran.stdout + ran.stderr[-500:]}",
                flush=True,
            )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
