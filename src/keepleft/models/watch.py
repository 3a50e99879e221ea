"""Looking at attention while a model runs, whatever kernel it runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from keepleft.attention.attend import Sight, Watcher
from keepleft.attention.attention_maps import attention_maps
from keepleft.nn.attention import Attention


@contextmanager
def watch(
    model: nn.Module,
    layers: str | Iterable[str] = "*",
    *,
    heads: Iterable[int] | None = None,
    rows: Iterable[int] | None = None,
    queries: Iterable[int] | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Fill a dictionary with the attention weights of each forward pass inside the block.

    Keys are names such as "encoder.0.self", "decoder.3.self", "decoder.3.cross"; values are (B, H, Q, K).
    `layers` are names or patterns ("decoder.*.cross"); `heads`, `rows` (of the batch) and `queries` (slots)
    keep just those. Only what is asked for is worked out: one head of a long text costs one (Q, K) map, not
    all of them. A later pass inside the block overwrites an earlier one.
    """
    patterns = [layers] if isinstance(layers, str) else list(layers)
    modules = attention_modules(model)
    selected = {
        name: module
        for name, module in modules.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    unknown = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in modules)]
    if unknown or not selected:
        raise ValueError(
            f"no attention is called {', '.join(map(repr, unknown))}: there are {', '.join(modules) or 'none'}"
        )
    indices = {
        axis: None if values is None else torch.tensor(list(values), dtype=torch.long)
        for axis, values in (("heads", heads), ("rows", rows), ("queries", queries))
    }
    collected: dict[str, Tensor] = {}

    def make_watcher(name: str) -> Watcher:
        def record(q: Tensor, k: Tensor, sight: Sight, scale: float) -> None:
            for axis, size in (("rows", q.shape[0]), ("heads", q.shape[1]), ("queries", q.shape[2])):
                index = indices[axis]
                if index is not None and (
                    index.numel() == 0 or int(index.min()) < 0 or int(index.max()) >= size
                ):
                    raise ValueError(f"{axis} {index.tolist()} were asked for, but {name} has {size}")
            collected[name] = attention_maps(q, k, sight, scale, **indices)

        return record

    with attach_watchers(selected, make_watcher):
        yield collected


def attention_modules(model: nn.Module) -> dict[str, Attention]:
    """Every attention of a model by its name, such as "decoder.3.cross"."""
    return {
        name.replace(".layers.", "."): module
        for name, module in model.named_modules()
        if isinstance(module, Attention)
    }


@contextmanager
def attach_watchers(modules: dict[str, Attention], make_watcher: Callable[[str], Watcher]) -> Iterator[None]:
    """Let someone see the queries, keys and sight of each of these attentions; afterwards all is as it was."""
    previous = {name: module.watcher for name, module in modules.items()}
    try:
        for name, module in modules.items():
            module.watcher = make_watcher(name)
        yield
    finally:
        for name, module in modules.items():
            module.watcher = previous[name]
