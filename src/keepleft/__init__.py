"""keepleft: Transformers that do not peek. The public names, each imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "attention.attend": "Sight attend see",
    "attention.attention_maps": "attention_maps",
    "attention.cross_memory": "Memory",
    "attention.grid": "Grid",
    "attention.kv_cache": "Cache DynamicCache OffloadedCache QuantizedCache RingCache StaticCache",
    "attention.mask_plot": "draw faults picture",
    "attention.masks": "Mask Where block causal full mask_table parse_mask prefix window",
    "auditing.audit": "audit",
    "auditing.call_forms": "AuditAdapter",
    "auditing.progress": "AuditProgress",
    "auditing.report": "AuditReport Finding LeakError UncheckedError",
    "data.batch": "Batch",
    "data.batches": "Batches BucketedLayout WindowLayout",
    "data.objectives": "Classification Denoising MaskedToken NextToken SpanCorruption Translation",
    "data.packing": "PackedLayout",
    "data.token_store": "TokenStore",
    "data.tokenizer": "train_tokenizer",
    "decoding.beam": "beam",
    "decoding.generate": "Completion completions generate stream",
    "decoding.generation_config": "GenerationConfig",
    "decoding.hypotheses": "FinishedSequence Hypotheses",
    "decoding.loop": "decode",
    "decoding.sampling": "greedy sample",
    "decoding.score": "score_tokens",
    "evaluation.likelihood": "likelihood",
    "inference.prepack": "prepack",
    "models.build": "build count_parameters",
    "models.design": "ClassificationHead Design LMHead MaskedLMHead NormalInit PoolingHead StackDesign "
    "T5Init XavierInit",
    "models.ensemble": "ensemble",
    "models.stack": "positions_from_segments",
    "models.transformer": "Decoder Encoder EncoderDecoder",
    "models.watch": "watch",
    "nn.feedforward": "FeedForward",
    "nn.norm": "LayerNorm RMSNorm",
    "nn.position": "LearnedPositions LinearRopeScaling Llama3RopeScaling RelativeBias Rotary Sinusoidal",
    "pipelines.chat": "ChatSession chat",
    "pipelines.evaluation": "evaluate",
    "pipelines.lm_eval": "lm_eval_model",
    "serving.explorer.notebook": "explore",
    "training.loop": "TrainReport train",
    "training.recipe": "Recipe",
    "weights.model_directory": "load save",
}
_NAMES = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted([*_NAMES, "presets"])  # noqa: PLE0605

if TYPE_CHECKING:
    from keepleft.attention.attend import Sight, attend, see
    from keepleft.attention.attention_maps import attention_maps
    from keepleft.attention.cross_memory import Memory
    from keepleft.attention.grid import Grid
    from keepleft.attention.kv_cache import (
        Cache,
        DynamicCache,
        OffloadedCache,
        QuantizedCache,
        RingCache,
        StaticCache,
    )
    from keepleft.attention.mask_plot import draw, faults, picture
    from keepleft.attention.masks import (
        Mask,
        Where,
        block,
        causal,
        full,
        mask_table,
        parse_mask,
        prefix,
        window,
    )
    from keepleft.auditing.audit import audit
    from keepleft.auditing.call_forms import AuditAdapter
    from keepleft.auditing.progress import AuditProgress
    from keepleft.auditing.report import AuditReport, Finding, LeakError, UncheckedError
    from keepleft.data.batch import Batch
    from keepleft.data.batches import Batches, BucketedLayout, WindowLayout
    from keepleft.data.objectives import (
        Classification,
        Denoising,
        MaskedToken,
        NextToken,
        SpanCorruption,
        Translation,
    )
    from keepleft.data.packing import PackedLayout
    from keepleft.data.token_store import TokenStore
    from keepleft.data.tokenizer import train_tokenizer
    from keepleft.decoding.beam import beam
    from keepleft.decoding.generate import Completion, completions, generate, stream
    from keepleft.decoding.generation_config import GenerationConfig
    from keepleft.decoding.hypotheses import FinishedSequence, Hypotheses
    from keepleft.decoding.loop import decode
    from keepleft.decoding.sampling import greedy, sample
    from keepleft.decoding.score import score_tokens
    from keepleft.evaluation.likelihood import likelihood
    from keepleft.inference.prepack import prepack
    from keepleft.models import presets
    from keepleft.models.build import build, count_parameters
    from keepleft.models.design import (
        ClassificationHead,
        Design,
        LMHead,
        MaskedLMHead,
        NormalInit,
        PoolingHead,
        StackDesign,
        T5Init,
        XavierInit,
    )
    from keepleft.models.ensemble import ensemble
    from keepleft.models.stack import positions_from_segments
    from keepleft.models.transformer import Decoder, Encoder, EncoderDecoder
    from keepleft.models.watch import watch
    from keepleft.nn.feedforward import FeedForward
    from keepleft.nn.norm import LayerNorm, RMSNorm
    from keepleft.nn.position import (
        LearnedPositions,
        LinearRopeScaling,
        Llama3RopeScaling,
        RelativeBias,
        Rotary,
        Sinusoidal,
    )
    from keepleft.pipelines.chat import ChatSession, chat
    from keepleft.pipelines.evaluation import evaluate
    from keepleft.pipelines.lm_eval import lm_eval_model
    from keepleft.serving.explorer.notebook import explore
    from keepleft.training.loop import TrainReport, train
    from keepleft.training.recipe import Recipe
    from keepleft.weights.model_directory import load, save


def __getattr__(name: str) -> Any:
    if name == "presets":
        return import_module("keepleft.models.presets")
    if name not in _NAMES:
        raise AttributeError(f"keepleft has no {name!r}: it has {', '.join(__all__)}")
    value = getattr(import_module(f"keepleft.{_NAMES[name]}"), name)
    globals()[name] = value  # from now on an ordinary attribute
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
