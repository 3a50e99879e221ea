"""The architecture of a Transformer as data. A design has no behaviour; models/build.py makes models from it.

A choice carries its own numbers (Rotary has a base, LearnedPositions has a length), so no field means
something only when another is set. What is absent is None: no decoder, no head.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

from keepleft import checks
from keepleft.attention.masks import Mask, parse_mask
from keepleft.nn import feedforward, norm, position
from keepleft.nn.attention import AttentionConfig
from keepleft.nn.feedforward import ACTIVATIONS, Activation, FeedForward
from keepleft.nn.norm import LayerNorm, Norm, RMSNorm
from keepleft.nn.position import LearnedPositions, Position, RelativeBias, Rotary, Sinusoidal

POOLING_MODES = ("mean", "first", "last", "tanh")

# choices that concern a model; those of a single layer are defined beside it, in nn/ ----------


@dataclass(frozen=True)
class StackDesign:
    """The layers of an encoder or a decoder."""

    layers: int
    mask: tuple[Mask, ...]  # the layers cycle through these: (causal,) or (causal, causal & window(256))
    final_norm: bool = True
    heads: int | None = None  # None: the design's; only an encoder beside a decoder may differ
    feedforward: FeedForward | None = None  # None: the design's; likewise

    def __post_init__(self) -> None:
        checks.check_int("layers", self.layers)
        checks.check_bool("final_norm", self.final_norm)
        if self.heads is not None:
            checks.check_int("heads", self.heads)
        if not isinstance(self.feedforward, FeedForward | None):
            raise ValueError(f"feedforward is {self.feedforward!r}: it must be a FeedForward, or None")
        if (
            not isinstance(self.mask, tuple)
            or not self.mask
            or not all(isinstance(mask, Mask) for mask in self.mask)
        ):
            raise ValueError(f"mask is {self.mask!r}: give a tuple of masks such as (causal,), at least one")


@dataclass(frozen=True)
class LMHead:
    """The language-model head: a logit for every token of the vocabulary."""

    tied: bool = True  # its weights are the token embedding
    bias: bool = False  # a buffer that is not trained, as final_logits_bias of BART and Marian
    scale: bool = False  # by 1/sqrt(dim), as in T5 v1.0

    def __post_init__(self) -> None:
        for name in ("tied", "bias", "scale"):
            checks.check_bool(name, getattr(self, name))


@dataclass(frozen=True)
class MaskedLMHead:
    """BERT's masked-language-model head: a logit for every token, after one more dense layer and norm."""

    activation: Activation = "gelu"

    def __post_init__(self) -> None:
        checks.check_choice("activation", self.activation, ACTIVATIONS)


@dataclass(frozen=True)
class PoolingHead:
    """One vector per sequence: the mean of its tokens, its first, its last, or BERT's tanh of the first."""

    how: Literal["mean", "first", "last", "tanh"] = "mean"
    unit: bool = False  # scaled to length 1

    def __post_init__(self) -> None:
        checks.check_choice("pooling", self.how, POOLING_MODES)
        checks.check_bool("unit", self.unit)


@dataclass(frozen=True)
class ClassificationHead:
    """A logit for every label, from one pooled vector per sequence."""

    labels: int
    pool: Literal["mean", "first", "last", "tanh"] = "tanh"
    bias: bool = True

    def __post_init__(self) -> None:
        checks.check_int("labels", self.labels)
        checks.check_choice("pooling", self.pool, POOLING_MODES)
        checks.check_bool("bias", self.bias)


@dataclass(frozen=True)
class NormalInit:
    """Gaussian weights."""

    std: float = 0.02
    by_depth: bool = False  # as in GPT-2: layers that write to the residual stream divide by sqrt(2 · depth)

    def __post_init__(self) -> None:
        checks.check_number("std", self.std)
        checks.check_bool("by_depth", self.by_depth)


@dataclass(frozen=True)
class XavierInit:
    """Xavier (Glorot) uniform by fan-in and fan-out; embeddings Gaussian with 1/sqrt(dim)."""


@dataclass(frozen=True)
class T5Init:
    """T5's initialisation: Gaussian by fan-in, with 1/sqrt(head_dim) folded into the query weights."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        checks.check_number("factor", self.factor, above=0)


# the design -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Design:
    """The architecture of a model; presets.py has the published ones.

    Raises ValueError for choices that contradict each other.
    """

    vocab: int
    dim: int
    heads: int  # of the decoder where there is one; an encoder beside it may have its own
    feedforward: FeedForward  # likewise
    position: Position
    norm: Norm
    norm_first: bool
    encoder: StackDesign | None = None  # encoder, decoder or both: `kind` follows from what is here
    decoder: StackDesign | None = None
    head: LMHead | MaskedLMHead | PoolingHead | ClassificationHead | None = LMHead()
    source_vocab: int | None = None  # None: encoder and decoder share their token embedding
    kv_heads: int | None = None  # None: as many as heads, in each stack
    head_dim: int | None = None  # None: dim / heads, in each stack
    bias: bool = True
    bias_qkv: bool | None = None  # None: as bias
    bias_out: bool | None = None  # None: as bias
    scale_embedding: bool = False  # by sqrt(dim)
    scale_scores: bool = True  # by 1/sqrt(head_dim)
    norm_embedding: bool = False
    token_types: int = 0  # BERT's sentence A / B
    dropout: float = 0.1
    attention_dropout: float = 0.0
    initial: NormalInit | XavierInit | T5Init = NormalInit()

    def __post_init__(self) -> None:
        for name in ("vocab", "dim", "heads", "kv_heads", "head_dim", "source_vocab"):
            if getattr(self, name) is not None or name in ("vocab", "dim", "heads"):
                checks.check_int(name, getattr(self, name))
        checks.check_int("token_types", self.token_types, minimum=0)
        for name in _BOOL_FIELDS:
            if getattr(self, name) is not None or name == "bias":
                checks.check_bool(name, getattr(self, name))
        for name, types in _FIELD_TYPES.items():
            if not isinstance(getattr(self, name), types):
                known = ", ".join(cls.__name__ for cls in types if cls is not type(None))
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be one of {known}")
        if self.encoder is None and self.decoder is None:
            raise ValueError("a design needs an encoder, a decoder or both")
        self._normalize_stacks()
        own_heads = None if self.encoder is None else self.encoder.heads
        for name, heads in {"heads": self.heads, "encoder.heads": own_heads or self.heads}.items():
            if self.head_dim is None and self.dim % heads:
                raise ValueError(
                    f"dim {self.dim} does not divide into {heads} {name}: give head_dim, or change one"
                )
            if heads % (self.kv_heads or heads):
                raise ValueError(
                    f"{heads} {name} cannot share {self.kv_heads} key heads: one must divide the other"
                )
        if self.source_vocab is not None and not self.is_encoder_decoder:
            raise ValueError(
                f"source_vocab is {self.source_vocab}, but only an encoder with a decoder has a source"
            )
        for name, implied in (
            ("kv_heads", self.heads),
            ("head_dim", self.dim / self.heads),
            ("bias_qkv", self.bias),
            ("bias_out", self.bias),
        ):
            # one spelling for one meaning, so that equal designs are equal
            if getattr(self, name) == implied and (own_heads is None or name.startswith("bias")):
                object.__setattr__(self, name, None)
        for stack in filter(None, (self.encoder, self.decoder)):
            head_dim = self.stack_attention(stack).head_dim
            if isinstance(self.position, Rotary) and head_dim % 2:
                raise ValueError(f"rotary positions need heads of even width, not {head_dim}")
        for name in ("dropout", "attention_dropout"):
            checks.check_number(name, getattr(self, name))
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 0 and below 1")

    def _normalize_stacks(self) -> None:
        """Set overrides equal to the design's to None; refuse others outside an encoder beside a decoder."""
        for side in ("encoder", "decoder"):
            stack = getattr(self, side)
            for name in ("heads", "feedforward"):
                override = getattr(stack, name, None)
                if override is None:
                    continue
                if override == getattr(self, name):
                    stack = replace(stack, **{name: None})
                    object.__setattr__(self, side, stack)
                elif side == "decoder" or self.decoder is None:
                    raise ValueError(
                        f"{side}.{name} is {override!r}, but the design's {name} is {getattr(self, name)!r}: "
                        f"only an encoder beside a decoder may differ, so set {name} of the design itself"
                    )

    @property
    def is_encoder_decoder(self) -> bool:
        return self.encoder is not None and self.decoder is not None

    @property
    def kind(self) -> Literal["encoder", "decoder", "encoder-decoder"]:
        """Which of the three classes of models/transformer.py it builds."""
        if self.is_encoder_decoder:
            return "encoder-decoder"
        return "encoder" if self.decoder is None else "decoder"

    @property
    def head_width(self) -> int:
        """The width of one attention head: head_dim where it is given, else dim / heads."""
        return self.head_dim or self.dim // self.heads

    @property
    def attention(self) -> AttentionConfig:
        """The config of each attention layer; the decoder's where an encoder beside it has its own."""
        return self._attention(self.heads)

    def stack_attention(self, stack: StackDesign) -> AttentionConfig:
        """The config of each attention layer of the encoder or the decoder."""
        return self._attention(stack.heads or self.heads)

    def stack_feedforward(self, stack: StackDesign) -> FeedForward:
        """The config of each feed-forward layer of the encoder or the decoder."""
        return stack.feedforward or self.feedforward

    def _attention(self, heads: int) -> AttentionConfig:
        resolve = lambda override: self.bias if override is None else override
        return AttentionConfig(
            self.dim,
            heads,
            self.kv_heads or heads,
            self.head_dim or self.dim // heads,
            resolve(self.bias_qkv),
            resolve(self.bias_out),
            None if self.scale_scores else 1.0,
            self.attention_dropout,
        )

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that its positions allow; None where they have no limit."""
        return self.position.length if isinstance(self.position, LearnedPositions) else None

    def but(self, **changes: Any) -> Design:
        """The same design with these fields changed; TypeError for a field it does not have."""
        unknown = sorted(changes.keys() - self.__dataclass_fields__.keys())
        if unknown:
            raise TypeError(
                f"a design has no {', '.join(unknown)}: it has {', '.join(self.__dataclass_fields__)}"
            )
        return replace(self, **changes)


_BOOL_FIELDS = (
    "bias", "bias_qkv", "bias_out", "norm_first", "scale_embedding", "scale_scores", "norm_embedding"
)  # fmt: skip
_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "feedforward": (FeedForward,),
    "position": (Sinusoidal, LearnedPositions, Rotary, RelativeBias),
    "norm": (LayerNorm, RMSNorm),
    "encoder": (StackDesign, type(None)),
    "decoder": (StackDesign, type(None)),
    "head": (LMHead, MaskedLMHead, PoolingHead, ClassificationHead, type(None)),
    "initial": (NormalInit, XavierInit, T5Init),
}


# as JSON ----------------------------------------------------------------------------------------

_CLASSES = {
    cls.__name__: cls
    for namespace in (globals(), vars(feedforward), vars(norm), vars(position))
    for cls in list(namespace.values())
    if isinstance(cls, type) and is_dataclass(cls)
}
_OLD_NAMES = {  # class and field names of older files, which are read but no longer written
    "Stack": "StackDesign",
    "Vocabulary": "LMHead",
    "Masked": "MaskedLMHead",
    "Pooled": "PoolingHead",
    "Classes": "ClassificationHead",
    "Normal": "NormalInit",
    "Xavier": "XavierInit",
    "Folded": "T5Init",
    "Learned": "LearnedPositions",
    "Stretched": "LinearRopeScaling",
    "Llama3": "Llama3RopeScaling",
    "kinds": "token_types",
}


def to_json(design: Design) -> dict[str, Any]:
    """The design as dictionaries, lists, strings and numbers; ValueError where it would not read back."""
    out = _to_json(design)
    if from_json(out) != design:  # the name of a Where mask means nothing to another program
        raise ValueError(f"the design {design} cannot be written as JSON")
    return out


def from_json(data: dict[str, Any]) -> Design:
    """The design that to_json wrote; ValueError names an unknown or missing field."""
    out = _from_json(data, "design")
    if not isinstance(out, Design):
        raise ValueError(f"the design is a {type(out).__name__}, not a Design")
    return out


def _to_json(value: Any) -> Any:
    if isinstance(value, Mask):
        return {"mask": repr(value)}
    if is_dataclass(value) and not isinstance(value, type):
        return {"kind": type(value).__name__} | {
            f.name: _to_json(getattr(value, f.name)) for f in fields(value)
        }
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    return value


def _from_json(value: Any, path: str) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(item, path) for item in value)
    if not isinstance(value, dict):
        return value
    if value.keys() == {"mask"}:
        return parse_mask(value["mask"])
    value = {_OLD_NAMES.get(name, name): item for name, item in value.items()}
    kind = value.pop("kind", None)
    cls = _CLASSES.get(_OLD_NAMES.get(kind, kind))
    if cls is None:
        raise ValueError(f"{path} has the kind {kind!r}: there are {', '.join(sorted(_CLASSES))}")
    known = {f.name for f in fields(cls)}
    unknown = sorted(value.keys() - known)
    if unknown:
        raise ValueError(
            f"{path} has unknown fields {', '.join(unknown)}: a {cls.__name__} has {', '.join(sorted(known))}"
        )
    try:
        return cls(**{name: _from_json(item, f"{path}.{name}") for name, item in value.items()})
    except TypeError as error:
        raise ValueError(f"{path} is no complete {cls.__name__}: {error}") from error
