"""Multi-head attention around the one door: self-attention (masked or not) and cross-attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from keepleft.attention.attend import Sight, Watcher, attend
from keepleft.nn.position import rotate

Remember = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # new keys and values in, all that may be looked at out


@dataclass(frozen=True)
class Heads:
    """The numbers of one attention."""

    dim: int
    heads: int
    kv_heads: int
    width: int                 # of one head
    bias_qkv: bool = True
    bias_out: bool = True
    scale: float | None = None  # None: 1/sqrt(width)
    dropout: float = 0.0

    @property
    def factor(self) -> float:
        """What scores are multiplied by."""
        return self.width ** -0.5 if self.scale is None else self.scale


class Attention(nn.Module):
    """What both kinds share: the way out, and a place for someone to watch from."""

    def __init__(self, shape: Heads) -> None:
        super().__init__()
        self.shape = shape
        self.out = nn.Linear(shape.heads * shape.width, shape.dim, bias=shape.bias_out)
        self.watcher: Watcher | None = None

    def look(self, q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
        """(B, H, T, D) queries, keys, values → (B, T, dim)"""
        found = attend(q, k, v, sight, scale=self.shape.scale, watcher=self.watcher,
                       dropout=self.shape.dropout if self.training else 0.0)
        return self.out(found.transpose(1, 2).flatten(2))

    def apart(self, x: Tensor) -> Tensor:
        """(B, T, H·D) → (B, H, T, D)"""
        return x.unflatten(-1, (-1, self.shape.width)).transpose(1, 2)


class SelfAttention(Attention):
    """Queries, keys and values from the same tokens; what each may look at is the sight's business."""

    def __init__(self, shape: Heads) -> None:
        super().__init__(shape)
        self.counts = [shape.heads, shape.kv_heads, shape.kv_heads]
        self.sizes = [n * shape.width for n in self.counts]
        self.qkv = nn.Linear(shape.dim, sum(self.sizes), bias=shape.bias_qkv)

    def forward(self, x: Tensor, sight: Sight, turn: tuple[Tensor, Tensor] | None = None,
                remember: Remember | None = None) -> Tensor:
        q, k, v = self.apart(self.qkv(x)).split(self.counts, 1)
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        if remember is not None:
            k, v = remember(k, v)
        return self.look(q, k, v, sight)


class CrossAttention(Attention):
    """Queries from these tokens, keys and values from the memory of other tokens."""

    def __init__(self, shape: Heads) -> None:
        super().__init__(shape)
        self.q = nn.Linear(shape.dim, shape.heads * shape.width, bias=shape.bias_qkv)
        self.kv = nn.Linear(shape.dim, 2 * shape.kv_heads * shape.width, bias=shape.bias_qkv)

    def memorise(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, dim) of the source → its keys and values, once for all that will be asked."""
        k, v = self.apart(self.kv(memory)).chunk(2, 1)
        return k, v

    def forward(self, x: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
        """Rows that share a source are asked as one row with all their queries: (B · share, T, dim) over (B, H, S, D)."""
        if x.shape[0] == k.shape[0]:
            return self.look(self.apart(self.q(x)), k, v, sight)
        together = x.reshape(k.shape[0], -1, x.shape[-1])
        return self.look(self.apart(self.q(together)), k, v, sight).view(x.shape)
