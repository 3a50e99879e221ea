"""Multi-head attention: self-attention (any mask, rotary positions, a KV cache) and cross-attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from keepleft.attention.attend import Sight, Watcher, attend
from keepleft.nn.position import apply_rotary

KVWrite = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # new keys and values in, all visible ones out


@dataclass(frozen=True)
class AttentionConfig:
    """The numbers of one attention layer."""

    dim: int
    heads: int
    kv_heads: int  # fewer than heads: grouped-query attention; 1: multi-query
    head_dim: int
    bias_qkv: bool = True
    bias_out: bool = True
    scale: float | None = None  # None: 1/sqrt(head_dim)
    dropout: float = 0.0

    @property
    def softmax_scale(self) -> float:
        """The factor of the scores before softmax."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


class Attention(nn.Module):
    """What self- and cross-attention share: the output projection, and the watcher that models.watch sets."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.config = config
        self.out = nn.Linear(config.heads * config.head_dim, config.dim, bias=config.bias_out)
        self.watcher: Watcher | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
        """(B, H, T, D) queries, (B, Hk, K, D) keys and values → (B, T, dim)"""
        attended = attend(
            q,
            k,
            v,
            sight,
            scale=self.config.scale,
            watcher=self.watcher,
            dropout=self.config.dropout if self.training else 0.0,
        )
        return self.out(attended.transpose(1, 2).flatten(2))

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, T, H·D) → (B, H, T, D)"""
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)


class SelfAttention(Attention):
    """Queries, keys and values from the same tokens; the sight says which of them each may attend to."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.head_counts = [config.heads, config.kv_heads, config.kv_heads]
        self.qkv_sizes = [n * config.head_dim for n in self.head_counts]
        self.qkv = nn.Linear(config.dim, sum(self.qkv_sizes), bias=config.bias_qkv)

    def forward(
        self,
        x: Tensor,
        sight: Sight,
        rotary: tuple[Tensor, Tensor] | None = None,
        kv_write: KVWrite | None = None,
    ) -> Tensor:
        """(B, T, dim) → (B, T, dim), with the cosines and sines of RoPE, and a cache to write to"""
        q, k, v = self.split_heads(self.qkv(x)).split(self.head_counts, 1)
        if rotary is not None:
            q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        if kv_write is not None:
            k, v = kv_write(k, v)
        return self.attend(q, k, v, sight)


class CrossAttention(Attention):
    """Queries from the target, keys and values from the encoder's output."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.q = nn.Linear(config.dim, config.heads * config.head_dim, bias=config.bias_qkv)
        self.kv = nn.Linear(config.dim, 2 * config.kv_heads * config.head_dim, bias=config.bias_qkv)

    def project_kv(self, encoder_output: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, dim) → keys and values (B, Hk, S, D), computed once per source"""
        k, v = self.split_heads(self.kv(encoder_output)).chunk(2, 1)
        return k, v

    def forward(self, x: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
        """(B · n, T, dim) over keys and values (B, Hk, S, D): n rows that share a source become one."""
        if x.shape[0] == k.shape[0]:
            return self.attend(self.split_heads(self.q(x)), k, v, sight)
        joined_rows = x.reshape(k.shape[0], -1, x.shape[-1])
        return self.attend(self.split_heads(self.q(joined_rows)), k, v, sight).view(x.shape)
