"""How much an engine may hold at once: rows, and pages by the memory that there is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from keepleft.models.build import parameters
from keepleft.serving.alone import Alone
from keepleft.serving.asks import Engine
from keepleft.serving.together import MOST, Together

GIB = 1 << 30
SHARE = {"cpu": 0.25, "cuda": 0.8}  # of the memory that is free, for keys and values
ROWS = {"cpu": 64, "cuda": 256}
SIZE = {"cpu": 128, "cuda": 16}     # slots of a page: a CPU looks at pages where they lie, a GPU finds every slot
SMALL = 4_000_000                   # weights up to which one thread is best
CHUNK = {"cpu": 512, "cuda": 8192}  # tokens that are read between two steps


@dataclass(frozen=True)
class Sizes:
    """What one engine is made with."""

    rows: int
    pages: int          # of texts
    source_pages: int   # of sources
    size: int
    chunk: int
    token: int          # bytes of one token in all layers


def token_bytes(model: Any) -> int:
    """What one token costs in all layers: a key and a value for each head that has its own."""
    shape, weight = model.design.attention, model.token.weight
    return 2 * len(model.decoder.layers) * shape.kv_heads * shape.width * weight.element_size()


def sizes(model: Any, *, rows: int | None = None, memory: float | None = None, reach: int | None = None) -> Sizes:
    """`memory` in GiB, `reach` in tokens; None: what suits the machine."""
    kind = model.token.weight.device.type
    kind = kind if kind in ROWS else "cpu"
    for name, value in (("rows", rows), ("memory", memory)):
        if value is not None and value <= 0:
            raise ValueError(f"{name} is {value}: it must be more than nothing")
    rows, size, token = rows or ROWS[kind], SIZE[kind], token_bytes(model)
    there = (memory * GIB) if memory is not None else SHARE[kind] * free(kind)
    pools = 1 if model.design.encoder is None else 2
    farthest = min(reach or MOST, model.design.longest or MOST)
    useful = rows * -(-farthest // size)  # more than all rows can fill is of no use
    pages = min(useful, int(there / pools / (size * token)))
    if pages < 1:
        raise ValueError(f"{there / GIB:.3f} GiB do not hold one page of {size} tokens, which takes "
                         f"{size * token / GIB:.3f} GiB: give more memory")
    return Sizes(rows, pages, pages if pools == 2 else 0, size, CHUNK[kind], token)


def free(kind: str) -> int:
    """Bytes that nobody uses."""
    if kind == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def threads(model: Any) -> int:
    """How many of a CPU's threads steps are worth: for a small model one.

    Its products are done before a second thread is awake; and where anything else is at work on the same cores, the clients for
    instance, threads that wait for each other some hundred times a step come to a standstill.
    """
    small = model.token.weight.device.type == "cpu" and parameters(model.design) < SMALL
    return 1 if small else torch.get_num_threads()


def engine(model: Any, tokenizer: Any = None, *, rows: int | None = None, memory: float | None = None,
           reach: int | None = None) -> Engine:
    """The engine that suits a model; an encoder, which writes nothing, gets one that has nothing to do."""
    if model.design.decoder is None:
        return Alone(model, tokenizer)
    found = sizes(model, rows=rows, memory=memory, reach=reach)
    out = Together(model, tokenizer, rows=found.rows, pages=found.pages, source_pages=found.source_pages, size=found.size,
                   chunk=found.chunk, longest=reach)
    out.paged.warm()
    return out
