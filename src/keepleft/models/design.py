"""What a Transformer is made of, as data. A design has no behaviour; models are built from it elsewhere.

A choice carries its own numbers (Rotary has a base, Learned has a length), so no field means something
only when another is set. What is absent is None: no decoder, no head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from keepleft.attention.masks import Mask
from keepleft.nn.attention import Heads
from keepleft.nn.feedforward import Activation, FeedForward
from keepleft.nn.norm import Norm
from keepleft.nn.position import Learned, Position, Rotary

# choices that belong to whole models; those of a part live beside it, in nn/ ------------------


@dataclass(frozen=True)
class Stack:
    layers: int
    mask: tuple[Mask, ...]   # taken in turn by the layers: (causal,) or (causal, causal & window(256))
    final_norm: bool = True


@dataclass(frozen=True)
class Vocabulary:
    """A score for every token: the language-model head."""

    tied: bool = True        # its weights are the embedding
    bias: bool = False       # a fixed one that travels with the weights, as in BART and Marian
    scale: bool = False      # by 1/sqrt(dim), as in T5 v1.0


@dataclass(frozen=True)
class Masked:
    """A score for every token through one more layer: BERT's masked-language-model head."""

    activation: Activation = "gelu"


@dataclass(frozen=True)
class Pooled:
    """One vector for each text: the mean of its tokens, its first, its last, or BERT's tanh layer on the first."""

    how: Literal["mean", "first", "last", "tanh"] = "mean"
    unit: bool = False       # scaled to length 1


@dataclass(frozen=True)
class Classes:
    """A score for every label, from one vector for each text."""

    labels: int
    pool: Literal["mean", "first", "last", "tanh"] = "tanh"
    bias: bool = True


@dataclass(frozen=True)
class Normal:
    """Gaussian weights; those that write to the residual stream are smaller the deeper the stack, as in GPT-2."""

    std: float = 0.02
    by_depth: bool = False


@dataclass(frozen=True)
class Xavier:
    """Uniform by fan-in and fan-out; embeddings Gaussian with 1/sqrt(dim)."""


@dataclass(frozen=True)
class Folded:
    """T5's: Gaussian by fan-in, with the scale of the attention scores folded into the queries."""

    factor: float = 1.0


# the design ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Design:
    vocab: int
    dim: int
    heads: int
    feedforward: FeedForward
    position: Position
    norm: Norm
    norm_first: bool
    encoder: Stack | None = None   # encoder, decoder or both: what a model is follows from what is here
    decoder: Stack | None = None
    head: Vocabulary | Masked | Pooled | Classes | None = Vocabulary()
    source_vocab: int | None = None  # None: encoder and decoder share their embedding
    kv_heads: int | None = None    # None: as many as heads
    head_dim: int | None = None    # None: dim / heads
    bias: bool = True
    bias_qkv: bool | None = None   # None: as bias
    bias_out: bool | None = None   # None: as bias
    scale_embedding: bool = False  # by sqrt(dim)
    scale_scores: bool = True      # by 1/sqrt(head_dim)
    norm_embedding: bool = False
    kinds: int = 0                 # BERT's sentence A / B
    dropout: float = 0.1
    attention_dropout: float = 0.0
    initial: Normal | Xavier | Folded = Normal()

    def __post_init__(self) -> None:
        for name in ("vocab", "dim", "heads", "kv_heads", "head_dim", "source_vocab"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is {value!r}: it must be a whole number of at least 1")
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"dim {self.dim} does not divide into {self.heads} heads: give head_dim, or change one")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key heads: one must divide the other")
        if self.encoder is None and self.decoder is None:
            raise ValueError("a design needs an encoder, a decoder or both")
        for stack in (self.encoder, self.decoder):
            if stack is not None and (stack.layers < 1 or not stack.mask):
                raise ValueError(f"a stack of {stack.layers} layers and masks {stack.mask} is none: give at least one of each")
        for name, implied in (("kv_heads", self.heads), ("head_dim", self.dim / self.heads),
                              ("bias_qkv", self.bias), ("bias_out", self.bias)):
            if getattr(self, name) == implied:  # one spelling for one meaning, so that equal designs are equal
                object.__setattr__(self, name, None)
        if isinstance(self.position, Rotary) and (self.head_width % 2):
            raise ValueError(f"rotary positions need heads of even width, not {self.head_width}")
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 0 and below 1")

    @property
    def head_width(self) -> int:
        return self.head_dim or self.dim // self.heads

    @property
    def attention(self) -> Heads:
        """The numbers of each attention."""
        pick = lambda own: self.bias if own is None else own
        return Heads(self.dim, self.heads, self.kv_heads or self.heads, self.head_width, pick(self.bias_qkv),
                     pick(self.bias_out), None if self.scale_scores else 1.0, self.attention_dropout)

    @property
    def longest(self) -> int | None:
        """The most positions it can tell apart; None where there is no end."""
        return self.position.length if isinstance(self.position, Learned) else None

    def but(self, **changes: Any) -> Design:
        """The same design with some choices changed."""
        unknown = sorted(changes.keys() - self.__dataclass_fields__.keys())
        if unknown:
            raise TypeError(f"a design has no {', '.join(unknown)}: it has {', '.join(self.__dataclass_fields__)}")
        return replace(self, **changes)
