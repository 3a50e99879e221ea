"""Watching a model run: attention maps on any kernel, and a forward pass layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from keepleft.attention.attend import Sight, Watcher
from keepleft.attention.attention_maps import attention_maps
from keepleft.attention.cross_memory import Memory
from keepleft.attention.grid import Grid
from keepleft.models.stack import LayerStack
from keepleft.models.transformer import CausalModel, Encoder, EncoderDecoder
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
    select a part. Only that part is computed: one head of a long sequence costs one (Q, K) map, not all of
    them. A later pass inside the block overwrites an earlier one.
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
            f"no attention is called {', '.join(map(repr, unknown))}: "
            f"there are {', '.join(modules) or 'none'}"
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
    """Every attention layer of a model by its name, such as "decoder.3.cross"."""
    return {
        name.replace(".layers.", "."): module
        for name, module in model.named_modules()
        if isinstance(module, Attention)
    }


@contextmanager
def attach_watchers(modules: dict[str, Attention], make_watcher: Callable[[str], Watcher]) -> Iterator[None]:
    """Within the block, call a watcher with the queries, keys and sight of each of these attention layers."""
    previous = {name: module.watcher for name, module in modules.items()}
    try:
        for name, module in modules.items():
            module.watcher = make_watcher(name)
        yield
    finally:
        for name, module in modules.items():
            module.watcher = previous[name]


def iterate_layers(model: Encoder | CausalModel, *inputs: Tensor) -> Iterator[str]:
    """Run the model over (B, T) tokens, or a source and tokens, and yield after each layer: "decoder.3".

    A caller that wants to show the first layers need not wait for the others.
    """
    memory = None
    if isinstance(model, EncoderDecoder):
        x, positions, grid = model.embed_source(inputs[0])
        encoder_output = yield from _run_stack("encoder", model.encoder, x, positions, grid)
        memory = model.decoder.cross_memory(encoder_output, None)
    tokens = inputs[-1]
    positions, grid = model.layout("tokens", tokens, None, None)
    x = model.embed(model.token, tokens, positions)
    if isinstance(model, CausalModel):
        yield from _run_stack("decoder", model.decoder, x, positions, grid, memory)
    else:
        yield from _run_stack("encoder", model.encoder, x, positions, grid)


def _run_stack(
    stack_name: str, stack: LayerStack, x: Tensor, positions: Tensor, grid: Grid, memory: Memory | None = None
) -> Generator[str, None, Tensor]:
    run_layer = stack.layer_runner(x, positions, [grid] * len(stack.masks), memory=memory)
    for n in range(len(stack.layers)):
        x = run_layer(n, x)
        yield f"{stack_name}.{n}"
    return stack.norm(x)  # type: ignore[no-any-return]
