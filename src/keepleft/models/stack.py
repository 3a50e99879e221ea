"""The layers of an encoder or decoder, and what they share: sights, rotary angles, relative position bias."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from keepleft.attention.attend import Sight, see
from keepleft.attention.cross_memory import Memory
from keepleft.attention.grid import Grid
from keepleft.attention.kv_cache import Cache
from keepleft.attention.masks import Mask, full
from keepleft.models.design import Design, StackDesign
from keepleft.nn.block import CrossInput, TransformerBlock
from keepleft.nn.norm import make_norm
from keepleft.nn.position import RelativeBias, RelativePositionBias, Rotary, rope_cos_sin


class LayerStack(nn.Module):
    """The layers of an encoder or a decoder, and the final norm: (B, T, dim) → (B, T, dim)."""

    def __init__(self, design: Design, config: StackDesign, *, cross: bool) -> None:
        super().__init__()
        self.design = design
        self.masks = config.mask
        self.attention = design.stack_attention(config)
        self.layers = nn.ModuleList(
            TransformerBlock(
                self.attention,
                design.stack_feedforward(config),
                design.norm,
                norm_first=design.norm_first,
                cross=cross,
                bias=design.bias,
                dropout=design.dropout,
            )
            for _ in range(config.layers)
        )
        self.norm = make_norm(design.norm, design.dim) if config.final_norm else nn.Identity()
        if isinstance(design.position, RelativeBias):
            # the attribute is named as in saved checkpoints
            self.nearness = RelativePositionBias(
                design.position, self.attention.heads, bidirectional=config.mask == (full,)
            )
        self.backend: str | None = None  # of attention; None: the cheapest that can express the mask

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        grids: list[Grid],
        caches: list[Cache] | None = None,
        memory: Memory | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """One grid, and in incremental decoding one cache, for each mask that the layers cycle through.

        x: (B, T, dim)   positions: (B or 1, T)   segments: (B, T), of the queries of cross-attention
        """
        run_layer = self.layer_runner(x, positions, grids, caches, memory, segments)
        for n in range(len(self.layers)):
            x = run_layer(n, x)
        return self.norm(x)

    def layer_runner(
        self,
        x: Tensor,
        positions: Tensor,
        grids: list[Grid],
        caches: list[Cache] | None = None,
        memory: Memory | None = None,
        segments: Tensor | None = None,
    ) -> Callable[[int, Tensor], Tensor]:
        """A function (layer number, x) → x, with what the layers share computed once for this pass."""
        sights = [self.see(mask, grid, x) for mask, grid in zip(self.masks, grids, strict=True)]
        rotary = None
        if isinstance(self.design.position, Rotary):
            rotary = rope_cos_sin(self.design.position, positions, self.attention.head_dim, x.dtype)
        cross_sight = None
        if memory is not None:
            is_watched = any(layer.cross.watcher for layer in self.layers)  # type: ignore[union-attr]
            if memory.rows_per_source > 1 and is_watched:
                memory = memory.unshare()  # a watcher wants a map for each row
            cross_sight = self.sight(
                full, memory.grid(x.shape[1], segments), len(x) // memory.rows_per_source, x
            )

        def run_layer(n: int, x: Tensor) -> Tensor:
            mask_index = n % len(self.masks)
            kv_write = None if caches is None else partial(caches[mask_index].update, n)
            cross_input = (
                None if memory is None or cross_sight is None else CrossInput(*memory.layers[n], cross_sight)
            )
            layer: Callable[..., Tensor] = self.layers[n]
            return layer(x, sights[mask_index], rotary, kv_write, cross_input)

        return run_layer

    def layer_by_layer(
        self, x: Tensor, positions: Tensor, grids: list[Grid]
    ) -> Generator[None, None, Tensor]:
        """Run the layers and yield after each; returns what `forward` returns."""
        run_layer = self.layer_runner(x, positions, grids)
        for n in range(len(self.layers)):
            x = run_layer(n, x)
            yield
        return self.norm(x)  # type: ignore[no-any-return]

    def see(self, mask: Mask, grid: Grid, x: Tensor) -> Sight:
        """The sight of a layer's self-attention, with the relative position bias where the design has one."""
        sight = self.sight(mask, grid, len(x), x)
        if isinstance(self.design.position, RelativeBias):
            return sight.add_bias(self.nearness(*grid_positions(grid, x.device)))
        return sight

    def sight(self, mask: Mask, grid: Grid, batch: int, x: Tensor) -> Sight:
        """The mask over the grid, lowered for this stack's heads and backend and for x's device and type."""
        return see(
            mask,
            grid,
            batch=batch,
            heads=self.attention.heads,
            device=x.device,
            dtype=x.dtype,
            backend=self.backend,
        )

    def cross_memory(self, encoder_output: Tensor, segments: Tensor | None) -> Memory:
        """Every layer's keys and values of the source, from the encoder's output (B, S, dim)."""
        cross_attentions: list[Any] = [layer.cross for layer in self.layers]
        return Memory([cross.project_kv(encoder_output) for cross in cross_attentions], segments)


def grid_positions(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """The positions of a grid's queries and keys as tensors, (B or 1, Q) and (B or 1, K)."""
    q, k = grid.q_pos, grid.k_pos
    if q is None:
        q = torch.arange(grid.start, grid.start + grid.queries, device=device)[None]
    if k is None:
        k = torch.arange(grid.keys, device=device)[None]
    return q, k


def positions_from_segments(segments: Tensor) -> Tensor:
    """(B, T) segments → (B, T) positions, counted from 0 in each segment; padding is at 0.

    Tokens of one number are one sequence, even where others lie between them: were each piece counted from 0,
    a later piece would look like the past of an earlier one.
    """
    if torch.compiler.is_compiling():  # a sort takes minutes to compile: count instead
        same = segments[:, :, None] == segments[:, None, :]
        return torch.where(segments == 0, 0, same.tril(-1).sum(2))
    sorted_segments, order = segments.sort(dim=1, stable=True)
    index = torch.arange(segments.shape[1], device=segments.device)
    is_start = torch.ones_like(segments, dtype=torch.bool)
    is_start[:, 1:] = sorted_segments[:, 1:] != sorted_segments[:, :-1]
    offsets = index - torch.where(is_start, index, 0).cummax(1).values
    return torch.zeros_like(order).scatter(1, order, torch.where(sorted_segments == 0, 0, offsets))
