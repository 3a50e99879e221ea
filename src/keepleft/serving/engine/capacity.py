"""Capacity planning: how many sequences and KV pages fit into memory, and the engine built accordingly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from keepleft.cgroup import free_memory
from keepleft.models.build import count_parameters
from keepleft.models.transformer import CausalModel, Encoder, Model
from keepleft.serving.engine.continuous import ContinuousBatchingEngine, resolve_max_length
from keepleft.serving.engine.encoder import EncoderEngine
from keepleft.serving.engine.request import Engine

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GIB = 1 << 30
MEMORY_FRACTION = {"cpu": 0.25, "cuda": 0.8}  # of the free memory, for the KV cache
DEFAULT_MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
# KV slots of a page: on a CPU attention runs page by page, on a GPU slot by slot through a table
PAGE_SIZE = {"cpu": 128, "cuda": 16}
PREFILL_CHUNK_SIZE = {"cpu": 512, "cuda": 8192}  # tokens prefilled per step
MAX_SINGLE_THREAD_PARAMETERS = 4_000_000  # up to this many, one thread is fastest


@dataclass(frozen=True)
class Capacity:
    """The sizes of an engine."""

    max_num_seqs: int
    pages: int
    source_pages: int
    page_size: int
    prefill_chunk_size: int
    bytes_per_token: int  # of the KV cache, over all layers


def kv_bytes_per_token(model: CausalModel) -> int:
    """Bytes of one token in the KV cache: a key and a value per layer and KV head."""
    config, weight = model.design.attention, model.token.weight
    return 2 * len(model.decoder.layers) * config.kv_heads * config.head_dim * weight.element_size()


def plan_capacity(
    model: CausalModel,
    *,
    max_num_seqs: int | None = None,
    kv_cache_memory: float | None = None,
    max_model_len: int | None = None,
    memory_share: float = 1.0,
) -> Capacity:
    """Sizes for a model on its device. `kv_cache_memory` is in GiB; None: what suits the machine.

    `memory_share`: of that, where other engines share the machine or the GPU.
    """
    device_type = model.token.weight.device.type
    device_type = device_type if device_type in DEFAULT_MAX_NUM_SEQS else "cpu"
    for name, value in (("max_num_seqs", max_num_seqs), ("kv_cache_memory", kv_cache_memory)):
        if value is not None and value <= 0:
            raise ValueError(f"{name} is {value}: it must be more than nothing")
    max_num_seqs = max_num_seqs or DEFAULT_MAX_NUM_SEQS[device_type]
    page_size = PAGE_SIZE[device_type]
    bytes_per_token = kv_bytes_per_token(model)
    if kv_cache_memory is not None:
        available_bytes = kv_cache_memory * GIB
    else:
        free_bytes = torch.cuda.mem_get_info()[0] if device_type == "cuda" else free_memory()
        available_bytes = MEMORY_FRACTION[device_type] * memory_share * free_bytes
    num_pools = 2 if model.design.is_encoder_decoder else 1
    max_length = resolve_max_length(model.design, max_model_len)
    max_pages = max_num_seqs * -(-max_length // page_size)  # more could never be filled
    pages = min(max_pages, int(available_bytes / num_pools / (page_size * bytes_per_token)))
    if pages < 1:
        raise ValueError(
            f"{available_bytes / GIB:.3f} GiB do not hold one page of {page_size} tokens, which takes "
            f"{page_size * bytes_per_token / GIB:.3f} GiB: give more memory"
        )
    return Capacity(
        max_num_seqs=max_num_seqs,
        pages=pages,
        source_pages=pages if num_pools == 2 else 0,
        page_size=page_size,
        prefill_chunk_size=PREFILL_CHUNK_SIZE[device_type],
        bytes_per_token=bytes_per_token,
    )


def best_threads(model: Model) -> int:
    """CPU threads worth using for decode steps: one for a small model, else PyTorch's default.

    The matrix products of a small model are done before a second thread is awake. Where anything else runs on
    the same cores, the clients for instance, threads that wait for each other some hundred times a step come
    to a standstill.
    """
    is_small = (
        model.token.weight.device.type == "cpu"
        and count_parameters(model.design) < MAX_SINGLE_THREAD_PARAMETERS
    )
    return 1 if is_small else torch.get_num_threads()


def make_engine(
    model: Model,
    tokenizer: Tokenizer | None = None,
    *,
    max_num_seqs: int | None = None,
    kv_cache_memory: float | None = None,
    max_model_len: int | None = None,
    memory_share: float = 1.0,
    weights: Mapping[str, float] | None = None,
) -> Engine:
    """The engine for a model, warmed up. Sizes as in `plan_capacity`; `weights`: the shares of API keys, 1 if
    not given.
    """
    if isinstance(model, Encoder):
        return EncoderEngine(model, tokenizer, weights=weights)
    assert isinstance(model, CausalModel)
    capacity = plan_capacity(
        model,
        max_num_seqs=max_num_seqs,
        kv_cache_memory=kv_cache_memory,
        max_model_len=max_model_len,
        memory_share=memory_share,
    )
    engine = ContinuousBatchingEngine(
        model,
        tokenizer,
        max_num_seqs=capacity.max_num_seqs,
        pages=capacity.pages,
        source_pages=capacity.source_pages,
        page_size=capacity.page_size,
        prefill_chunk_size=capacity.prefill_chunk_size,
        max_model_len=max_model_len,
        weights=weights,
    )
    engine.runner.warm_up()
    return engine
