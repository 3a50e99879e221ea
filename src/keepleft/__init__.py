"""keepleft: Transformers that do not peek. The public names; each is imported when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "attention.attend": "Sight attend see",
    "attention.backends.watching": "maps",
    "attention.cache": "Growing Ring Static",
    "attention.grid": "Grid",
    "attention.lean": "Offloaded Quantized",
    "attention.masks": "Mask Where block causal full prefix window",
    "attention.memory": "Memory",
    "attention.picture": "draw faults picture table",
    "attention.reading": "mask",
    "auditing.audit": "audit",
    "auditing.report": "Finding LeakError UncheckedError",
    "data.batch": "Batch",
    "data.batches": "Batches Bucketed Packed Windows",
    "data.objectives": "Classification Denoising MaskedToken NextToken SpanCorruption Translation",
    "data.store": "Store",
    "decoding.beam": "beam",
    "decoding.generate": "Answer answers generate stream",
    "decoding.hypotheses": "Hypotheses Written",
    "decoding.loop": "decode",
    "decoding.options": "Options",
    "decoding.single": "greedy sample",
    "evaluate.likelihood": "likelihood",
    "models.build": "build parameters",
    "models.design": "Classes Design Folded Masked Normal Pooled Stack Vocabulary Xavier",
    "models.pack": "pack",
    "models.stack": "positions_of",
    "models.watch": "watch",
    "models.wholes": "Decoder Encoder EncoderDecoder",
    "nn.feedforward": "FeedForward",
    "nn.norm": "LayerNorm RMSNorm",
    "nn.position": "Learned Llama3 RelativeBias Rotary Sinusoidal Stretched",
    "serving.explorer.notebook": "explore",
    "training.loop": "Report train",
    "training.recipe": "Recipe",
    "weights.files": "load save",
}
_NAMES = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted([*_NAMES, "presets"])  # noqa: PLE0605

if TYPE_CHECKING:
    from keepleft.attention.attend import Sight, attend, see
    from keepleft.attention.backends.watching import attention_maps
    from keepleft.attention.cache import DynamicCache, RingCache, StaticCache
    from keepleft.attention.grid import Grid
    from keepleft.attention.lean import OffloadedCache, QuantizedCache
    from keepleft.attention.masks import Mask, Where, block, causal, full, prefix, window
    from keepleft.attention.memory import Memory
    from keepleft.attention.picture import draw, faults, picture, mask_table
    from keepleft.attention.reading import parse_mask
    from keepleft.auditing.audit import audit
    from keepleft.auditing.report import Finding, LeakError, UncheckedError
    from keepleft.data.batch import Batch
    from keepleft.data.batches import Batches, BucketedLayout, PackedLayout, WindowLayout
    from keepleft.data.objectives import Classification, Denoising, MaskedToken, NextToken, SpanCorruption, Translation
    from keepleft.data.store import TokenStore
    from keepleft.decoding.beam import beam
    from keepleft.decoding.generate import Completion, completions, generate, stream
    from keepleft.decoding.hypotheses import Hypotheses, FinishedSequence
    from keepleft.decoding.loop import decode
    from keepleft.decoding.options import GenerationConfig
    from keepleft.decoding.single import greedy, sample
    from keepleft.evaluate.likelihood import likelihood
    from keepleft.models import presets
    from keepleft.models.build import build, count_parameters
    from keepleft.models.design import ClassificationHead, Design, T5Init, MaskedLMHead, NormalInit, PoolingHead, StackDesign, LMHead, XavierInit
    from keepleft.models.pack import prepack
    from keepleft.models.stack import positions_from_segments
    from keepleft.models.watch import watch
    from keepleft.models.wholes import Decoder, Encoder, EncoderDecoder
    from keepleft.nn.feedforward import FeedForward
    from keepleft.nn.norm import LayerNorm, RMSNorm
    from keepleft.nn.position import LearnedPositions, Llama3RopeScaling, RelativeBias, Rotary, Sinusoidal, LinearRopeScaling
    from keepleft.serving.explorer.notebook import explore
    from keepleft.training.loop import TrainReport, train
    from keepleft.training.recipe import Recipe
    from keepleft.weights.files import load, save


def __getattr__(name: str) -> Any:
    if name == "presets":
        return import_module("keepleft.models.presets")
    if name not in _NAMES:
        raise AttributeError(f"keepleft has no {name!r}: it has {', '.join(__all__)}")
    found = globals()[name] = getattr(import_module(f"keepleft.{_NAMES[name]}"), name)  # the next look costs nothing
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
