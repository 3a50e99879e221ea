"""How much an engine may hold at once: rows, and pages by the memory that there is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from keepleft.models.build import count_parameters
from keepleft.serving.engine.continuous import DEFAULT_MAX_MODEL_LEN, ContinuousBatchingEngine
from keepleft.serving.engine.request import Engine
from keepleft.serving.engine.sequential import SequentialEngine

GIB = 1 << 30
MEMORY_FRACTION = {"cpu": 0.25, "cuda": 0.8}  # of the memory that is free, for keys and values
DEFAULT_MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
# slots of a page: a CPU looks at pages where they lie, a GPU finds every slot
PAGE_SIZE = {"cpu": 128, "cuda": 16}
MAX_SINGLE_THREAD_PARAMETERS = 4_000_000  # weights up to which one thread is best
PREFILL_CHUNK_SIZE = {"cpu": 512, "cuda": 8192}  # tokens that are read between two steps


@dataclass(frozen=True)
class Capacity:
    """What one engine is made with."""

    max_num_seqs: int
    pages: int  # of texts
    source_pages: int  # of sources
    page_size: int
    prefill_chunk_size: int
    bytes_per_token: int  # bytes of one token in all layers


def kv_bytes_per_token(model: Any) -> int:
    """What one token costs in all layers: a key and a value for each head that has its own."""
    shape, weight = model.design.attention, model.token.weight
    return 2 * len(model.decoder.layers) * shape.kv_heads * shape.head_dim * weight.element_size()


def plan_capacity(
    model: Any,
    *,
    max_num_seqs: int | None = None,
    kv_cache_memory: float | None = None,
    max_model_len: int | None = None,
) -> Capacity:
    """`kv_cache_memory` in GiB, `max_model_len` in tokens; None: what suits the machine."""
    device_type = model.token.weight.device.type
    device_type = device_type if device_type in DEFAULT_MAX_NUM_SEQS else "cpu"
    for name, value in (("max_num_seqs", max_num_seqs), ("kv_cache_memory", kv_cache_memory)):
        if value is not None and value <= 0:
            raise ValueError(f"{name} is {value}: it must be more than nothing")
    max_num_seqs = max_num_seqs or DEFAULT_MAX_NUM_SEQS[device_type]
    page_size = PAGE_SIZE[device_type]
    bytes_per_token = kv_bytes_per_token(model)
    available_bytes = (
        (kv_cache_memory * GIB)
        if kv_cache_memory is not None
        else MEMORY_FRACTION[device_type] * free_memory(device_type)
    )
    num_pools = 1 if model.design.encoder is None else 2
    max_tokens = min(
        max_model_len or DEFAULT_MAX_MODEL_LEN, model.design.max_positions or DEFAULT_MAX_MODEL_LEN
    )
    max_pages = max_num_seqs * -(-max_tokens // page_size)  # more than all rows can fill is of no use
    pages = min(max_pages, int(available_bytes / num_pools / (page_size * bytes_per_token)))
    if pages < 1:
        raise ValueError(
            f"{available_bytes / GIB:.3f} GiB do not hold one page of {page_size} tokens, which takes "
            f"{page_size * bytes_per_token / GIB:.3f} GiB: give more memory"
        )
    return Capacity(
        max_num_seqs,
        pages,
        pages if num_pools == 2 else 0,
        page_size,
        PREFILL_CHUNK_SIZE[device_type],
        bytes_per_token,
    )


def free_memory(device_type: str) -> int:
    """Bytes that nobody uses."""
    if device_type == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def best_threads(model: Any) -> int:
    """How many of a CPU's threads steps are worth: for a small model one.

    Its products are done before a second thread is awake; and where anything else is at work on the same
    cores, the clients for instance, threads that wait for each other some hundred times a step come to a
    standstill.
    """
    is_small = (
        model.token.weight.device.type == "cpu"
        and count_parameters(model.design) < MAX_SINGLE_THREAD_PARAMETERS
    )
    return 1 if is_small else torch.get_num_threads()


def make_engine(
    model: Any,
    tokenizer: Any = None,
    *,
    max_num_seqs: int | None = None,
    kv_cache_memory: float | None = None,
    max_model_len: int | None = None,
) -> Engine:
    """The engine that suits a model; an encoder, which writes nothing, gets one that has nothing to do."""
    if model.design.decoder is None:
        return SequentialEngine(model, tokenizer)
    capacity = plan_capacity(
        model, max_num_seqs=max_num_seqs, kv_cache_memory=kv_cache_memory, max_model_len=max_model_len
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
    )
    engine.runner.warm_up()
    return engine
