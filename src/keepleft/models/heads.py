"""Output heads: hidden states to logits over the vocabulary, logits over labels, or one vector per sequence.

Every head is called with (hidden states, token table, segments): a tied head takes its weight from the table,
a pooling head skips padding. `model_loss` applies a head and its loss without holding all logits at once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepleft.models.design import ClassificationHead, Design, LMHead, MaskedLMHead, PoolingHead
from keepleft.nn.feedforward import ACTIVATIONS
from keepleft.nn.loss import LossSums, classification_loss, linear_cross_entropy, r_drop_loss
from keepleft.nn.norm import make_norm


class LMHeadLayer(nn.Module):
    """The language-model head, (…, dim) → (…, V)"""

    bias: Tensor | None

    def __init__(self, config: LMHead, design: Design) -> None:
        super().__init__()
        self.scale = design.dim**-0.5 if config.scale else 1.0
        self.weight = None if config.tied else nn.Parameter(torch.empty(design.vocab, design.dim))
        self.register_buffer("bias", torch.zeros(design.vocab) if config.bias else None)

    def forward(self, x: Tensor, table: nn.Embedding, segments: Tensor | None = None) -> Tensor:
        return F.linear(self.transform(x), *self.output_weight(table))

    def transform(self, x: Tensor) -> Tensor:
        """What comes before the output matrix, (…, dim) → (…, dim)"""
        return x if self.scale == 1.0 else x * self.scale

    def output_weight(self, table: nn.Embedding) -> tuple[Tensor, Tensor | None]:
        """The output matrix (V, dim) and its bias (V,), if any"""
        return table.weight if self.weight is None else self.weight, self.bias


class MaskedLMHeadLayer(nn.Module):
    """BERT's masked-language-model head, (…, dim) → (…, V)"""

    def __init__(self, config: MaskedLMHead, design: Design) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.dense = nn.Linear(design.dim, design.dim)
        self.norm = make_norm(design.norm, design.dim)
        self.bias = nn.Parameter(torch.zeros(design.vocab))

    def forward(self, x: Tensor, table: nn.Embedding, segments: Tensor | None = None) -> Tensor:
        return F.linear(self.transform(x), *self.output_weight(table))

    def transform(self, x: Tensor) -> Tensor:
        """What comes before the output matrix, (…, dim) → (…, dim)"""
        return self.norm(self.activation(self.dense(x)))

    def output_weight(self, table: nn.Embedding) -> tuple[Tensor, Tensor]:
        """The output matrix (V, dim) and its bias (V,)"""
        return table.weight, self.bias


class Pooler(nn.Module):
    """One vector per sequence, (B, T, dim) → (B, dim); padding is skipped"""

    def __init__(self, config: PoolingHead, design: Design) -> None:
        super().__init__()
        self.config = config
        if config.how == "tanh":
            self.dense = nn.Linear(design.dim, design.dim)

    def forward(self, x: Tensor, table: nn.Embedding, segments: Tensor | None = None) -> Tensor:
        real = torch.ones_like(x[:, :, 0], dtype=torch.bool) if segments is None else segments != 0
        if self.config.how == "mean":
            x = (x * real[..., None]).sum(1) / real.sum(1, keepdim=True).clamp(min=1).to(x.dtype)
        else:
            index = (last_real if self.config.how == "last" else first_real)(real)
            x = x.gather(1, index[:, None, None].expand(-1, 1, x.shape[2]))[:, 0]
            if self.config.how == "tanh":
                x = self.dense(x).tanh()
        return F.normalize(x, dim=-1) if self.config.unit else x


class ClassifierLayer(nn.Module):
    """The classification head, (B, T, dim) → (B, labels)"""

    def __init__(self, config: ClassificationHead, design: Design) -> None:
        super().__init__()
        self.pool = Pooler(PoolingHead(config.pool), design)
        self.dropout = nn.Dropout(design.dropout)
        self.out = nn.Linear(design.dim, config.labels, bias=config.bias)

    def forward(self, x: Tensor, table: nn.Embedding, segments: Tensor | None = None) -> Tensor:
        return self.out(self.dropout(self.pool(x, table, segments)))


class NoHead(nn.Module):
    """Returns the hidden states unchanged"""

    def forward(self, x: Tensor, table: nn.Embedding, segments: Tensor | None = None) -> Tensor:
        return x


def make_head(design: Design) -> nn.Module:
    """The module of design.head."""
    match design.head:
        case LMHead() as config:
            return LMHeadLayer(config, design)
        case MaskedLMHead() as config:
            return MaskedLMHeadLayer(config, design)
        case PoolingHead() as config:
            return Pooler(config, design)
        case ClassificationHead() as config:
            return ClassifierLayer(config, design)
    return NoHead()


def first_real(real: Tensor) -> Tensor:
    """(B, T) booleans → (B,) the index of each row's first real token; 0 where there is none."""
    return real.int().argmax(1)


def last_real(real: Tensor) -> Tensor:
    """(B, T) booleans → (B,) the index of each row's last real token; the end where there is none."""
    return real.shape[1] - 1 - real.flip(1).int().argmax(1)


def model_loss(
    model: nn.Module,
    inputs: dict[str, Tensor],
    targets: Tensor,
    label_smoothing: float = 0.0,
    r_drop: float = 0.0,
) -> LossSums:
    """The sums of loss, cross-entropy and correct predictions over the targets.

    inputs: the arguments of the model   targets: (B, T) tokens or (B,) labels, IGNORE_INDEX to skip
    With `r_drop`, every row goes through the model twice, and both passes should agree despite dropout.
    """
    module: Any = model
    if r_drop:
        inputs = {name: tensor.repeat_interleave(2, 0) for name, tensor in inputs.items()}
    if targets.dim() == 1:
        logits = module(**inputs)
        if r_drop:
            return r_drop_loss(logits.unflatten(0, (-1, 2)), targets, label_smoothing, r_drop)
        return classification_loss(logits, targets, label_smoothing)
    x = module.head.transform(module.hidden_states(**inputs))
    if r_drop:
        x = x.unflatten(0, (-1, 2)).transpose(1, 2)  # (B, T, 2, dim)
    weight, bias = module.head.output_weight(module.token)
    return linear_cross_entropy(x, weight, bias, targets, label_smoothing=label_smoothing, r_drop=r_drop)


class LossModule(nn.Module):
    """A model and its loss as one module, to be compiled or wrapped by DDP or FSDP.

    One forward pass is given the target tokens shifted right (data/teacher_forcing.py) and predicts the next
    token at all positions at once: teacher forcing.
    """

    def __init__(self, model: nn.Module, label_smoothing: float, r_drop: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing
        self.r_drop = r_drop

    def forward(self, inputs: dict[str, Tensor], targets: Tensor) -> LossSums:
        return model_loss(self.model, inputs, targets, self.label_smoothing, self.r_drop)
