"""One branch leaks and the others do not: by precision, compiler, argument, mode, labels or embeddings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..case import case
from ..proofs import BOTH_MODES, future
from .parts import (
    VOCAB,
    Layer,
    MixerLM,
    SelfAttention,
    heads_last,
    honest,
    lower,
    mixers,
    own_and_later,
    prefixes,
)


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """The interface of flash-attn, (B, T, H, D), with its default."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


class KernelAttention(nn.Module):
    def __init__(self, dim: int = 16, num_heads: int = 2) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.Wqkv, self.out_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def kernel(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.Wqkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        if q.dtype in (torch.float16, torch.bfloat16):
            return self.out_proj(self.kernel(q, k, v).flatten(2))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.size(-1) ** -0.5
        scores = scores.masked_fill(~lower(x.size(1), x), float("-inf"))
        return self.out_proj(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2))


class CausalKernelAttention(KernelAttention):
    def kernel(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True)


def _in_bfloat16(model: Any, tokens: Tensor) -> Tensor:
    return model.bfloat16()(tokens)


@case(
    leaks=True,
    kinds=("future",),
    modules=mixers(2),
    after="a common mistake: flash_attn_func without causal=True, used in half precision only",
    prove=lambda: future(half_kernel_not_causal, _in_bfloat16),
)
def half_kernel_not_causal() -> dict[str, Any]:
    """Causal in float32; in bfloat16 and float16 a fast kernel is called with its default, not causal."""
    torch.manual_seed(0)
    return {"target": MixerLM(KernelAttention(), KernelAttention())}


@case(
    leaks=False,
    after="a common mistake, done right: the kernel for half precision is called with causal=True",
    prove=lambda: max(
        honest(half_kernel_causal),
        future(half_kernel_causal, _in_bfloat16, lengths=(1, 2, 7, 16, 33, 64), modes=BOTH_MODES),
    ),
)
def half_kernel_causal() -> dict[str, Any]:
    """Two computations for two precisions, both causal, far apart by rounding."""
    torch.manual_seed(0)
    return {"target": MixerLM(CausalKernelAttention(), CausalKernelAttention())}


class StaticShapeAttention(SelfAttention):
    multiple = 16

    def visible(self, t: int, keys: int, like: Tensor) -> Tensor:
        return (torch.arange(keys, device=like.device) < t).expand(t, -1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x)
        t = x.size(1)
        if torch.compiler.is_compiling():
            # fewer graphs: the keys are filled up
            fill = -t % self.multiple
            k, v = F.pad(k, (0, 0, 0, fill)), F.pad(v, (0, 0, 0, fill))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.visible(t, t + fill, x))
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(heads_last(y))


class StaticCausalAttention(StaticShapeAttention):
    def visible(self, t: int, keys: int, like: Tensor) -> Tensor:
        index = torch.arange(keys, device=like.device)
        return index[None] <= index[:t, None]


def _compiled(model: Any, tokens: Tensor) -> Tensor:
    return torch.compile(model, backend="eager", dynamic=False)(tokens)


def _as_if_compiled(model: Any, tokens: Tensor) -> Tensor:
    with mock.patch("torch.compiler.is_compiling", return_value=True):
        return model(tokens)


@case(
    leaks=True,
    kinds=("future",),
    modules=mixers(1),
    after="a common mistake: a branch for torch.compile that masks the filling and forgets the future",
    prove=lambda: future(compiled_without_mask, _compiled, lengths=(10,)),
)
def compiled_without_mask() -> dict[str, Any]:
    """Causal as it is; under torch.compile only the keys that fill up the length are hidden."""
    torch.manual_seed(0)
    return {"target": MixerLM(StaticShapeAttention())}


@case(
    leaks=False,
    after="a common mistake, done right: the branch for torch.compile hides filling and future",
    prove=lambda: max(
        honest(compiled_with_mask),
        honest(compiled_with_mask, _as_if_compiled),
        future(compiled_with_mask, _compiled, lengths=(10, 16)),
    ),
)
def compiled_with_mask() -> dict[str, Any]:
    """Under torch.compile, keys are filled up to a multiple of 16, none of which is seen."""
    torch.manual_seed(0)
    return {"target": MixerLM(StaticCausalAttention())}


class VisionLanguageModel(nn.Module):
    def __init__(self, hidden_size: int = 16, num_layers: int = 2) -> None:
        super().__init__()
        self.embed_tokens, self.embed_types = nn.Embedding(VOCAB, hidden_size), nn.Embedding(2, hidden_size)
        self.layers = nn.ModuleList(Layer(SelfAttention(hidden_size), hidden_size) for _ in range(num_layers))
        self.lm_head = nn.Linear(hidden_size, VOCAB)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> SimpleNamespace:
        x = self.embed_tokens(input_ids)
        mask = lower(x.size(1), x)[None]
        if token_type_ids is not None:
            x = x + self.embed_types(token_type_ids)
            # the patches of one image see each other
            new = F.pad(token_type_ids[:, 1:] != token_type_ids[:, :-1], (1, 0), value=True)
            group = new.cumsum(dim=1)
            mask = mask | (group[:, :, None] == group[:, None, :])
        for layer in self.layers:
            x = layer(x, mask[:, None])
        return SimpleNamespace(logits=self.lm_head(x))


@case(
    leaks=True,
    kinds=("future",),
    modules=("", *(f"layers.{i}{rest}" for i in (0, 1) for rest in ("", ".mixer"))),
    after="after transformers' Gemma 3: with token_type_ids, groups that see both ways, here of text too",
    prove=lambda: future(
        image_groups_of_text, lambda m, x: m(x, token_type_ids=torch.zeros_like(x)), modes=BOTH_MODES
    ),
)
def image_groups_of_text() -> dict[str, Any]:
    """Causal without token types; with them, runs of one type see both ways, and text is such a run."""
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (2, 12))
    example = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)}
    return {"target": VisionLanguageModel(), "example": example, "vocab": VOCAB}


class Recommender(nn.Module):
    def __init__(self, items: int = VOCAB, dim: int = 16, max_len: int = 128) -> None:
        super().__init__()
        self.items, self.time_embed = nn.Embedding(items, dim), nn.Embedding(max_len, dim)
        self.blocks = nn.ModuleList(Layer(SelfAttention(dim), dim) for _ in range(2))
        self.norm = nn.LayerNorm(dim)

    def forward(self, input_ids: Tensor, timesteps: Tensor | None = None) -> Tensor:
        if timesteps is None:
            # the most recent item is number 0
            timesteps = torch.arange(input_ids.size(1) - 1, -1, -1, device=input_ids.device)
        x = self.items(input_ids) + self.time_embed(timesteps)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.items.weight.T


@case(
    leaks=True,
    kinds=("future",),
    modules=("", "time_embed"),
    after="a common mistake: recency positions in a SASRec trained at all positions tell how much is to come",
    prove=lambda: prefixes(positions_from_the_end, lengths=(12,), shorter=(5, 11)),
)
def positions_from_the_end() -> dict[str, Any]:
    """Where time steps are left out they count from the end: a position knows how many follow it."""
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (2, 12))
    example = {"input_ids": ids, "timesteps": torch.arange(12).expand(2, -1).contiguous()}
    return {"target": Recommender(), "example": example, "vocab": VOCAB}


class SpeechToText(nn.Module):
    start = 1

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.encoder, self.decoder = nn.GRU(dim, dim, batch_first=True), nn.GRU(dim, dim, batch_first=True)
        self.cross = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def decoder_input(self, labels: Tensor) -> Tensor:
        return labels.masked_fill(labels == -100, 0).roll(1, dims=1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        memory, _ = self.encoder(self.embed(input_ids))
        x, _ = self.decoder(self.embed(self.decoder_input(labels)))
        x = x + self.cross(x, memory, memory, need_weights=False)[0]
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


class SpeechToTextStarted(SpeechToText):
    def decoder_input(self, labels: Tensor) -> Tensor:
        shifted = super().decoder_input(labels)
        shifted[:, 0] = self.start
        return shifted


def _of_labels(model: Any, labels: Tensor) -> Tensor:
    source = torch.arange(1, 8).expand(labels.size(0), -1)
    return model(source, labels)["logits"]


def _label_example() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(2, VOCAB, (2, 7)), "labels": torch.randint(2, VOCAB, (2, 10))}


@case(
    leaks=True,
    kinds=("future", "labels"),
    modules=("", "decoder", "embed"),
    after="a common mistake: decoder inputs by labels.roll(1), which bring the last label to the front",
    prove=lambda: future(labels_rolled_round, _of_labels, hidden=own_and_later),
)
def labels_rolled_round() -> dict[str, Any]:
    """The decoder's input is made of labels by a roll: the first step reads the last label."""
    torch.manual_seed(0)
    return {"target": SpeechToText(), "example": _label_example(), "vocab": VOCAB}


@case(
    leaks=False,
    after="a common mistake, done right: labels rolled by one, then the first is overwritten",
    prove=lambda: honest(labels_rolled_and_started, _of_labels, hidden=own_and_later),
)
def labels_rolled_and_started() -> dict[str, Any]:
    """The decoder's input is made of labels by a roll, and begins with a start token."""
    torch.manual_seed(0)
    return {"target": SpeechToTextStarted(), "example": _label_example(), "vocab": VOCAB}


class TokenDropping(nn.Module):
    def __init__(self, inner: nn.Module, drop: float = 0.4) -> None:
        super().__init__()
        self.inner, self.drop = inner, drop

    def importance(self, x: Tensor) -> Tensor:
        return x.detach().square().mean(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.drop > 0):
            return self.inner(x)
        count = max(1, round(x.size(1) * (1 - self.drop)))
        kept = self.importance(x).topk(count, dim=1).indices.sort(dim=1).values
        kept = kept[..., None].expand(-1, -1, x.size(-1))
        return torch.zeros_like(x).scatter(1, kept, self.inner(x.gather(1, kept)))


class RandomTokenDropping(TokenDropping):
    def importance(self, x: Tensor) -> Tensor:
        return torch.rand(x.shape[:2], device=x.device)


class DroppingLM(nn.Module):
    def __init__(self, dropping: type[TokenDropping], dim: int = 16) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, dim), nn.Embedding(128, dim)
        self.first, self.middle = SelfAttention(dim), dropping(SelfAttention(dim))
        self.ln, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.size(1)]
        x = x + self.first(x)
        return self.head(self.ln(x + self.middle(x)))


@case(
    leaks=True,
    kinds=("future",),
    modules=("middle",),
    after="a common mistake: tokens dropped in training by importance, compared over the whole sequence",
    prove=lambda: future(tokens_dropped_by_importance, modes=("train",)),
)
def tokens_dropped_by_importance() -> dict[str, Any]:
    """In training a layer skips the least important tokens; which these are depends on later ones."""
    torch.manual_seed(0)
    return {"target": DroppingLM(TokenDropping)}


@case(
    leaks=False,
    after="random layerwise token dropping (DeepSpeed): tokens dropped in training at random",
    prove=lambda: honest(tokens_dropped_at_random),
)
def tokens_dropped_at_random() -> dict[str, Any]:
    """In training a layer skips random tokens; with the same seed, the same."""
    torch.manual_seed(0)
    return {"target": DroppingLM(RandomTokenDropping)}


class PromptedLM(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, dim)
        self.prompt_lstm = nn.LSTM(dim, dim // 2, batch_first=True, bidirectional=True)
        self.h = nn.ModuleList(Layer(SelfAttention(dim), dim) for _ in range(2))
        self.lm_head = nn.Linear(dim, VOCAB)

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> dict[str, Any]:
        if inputs_embeds is None:
            x = self.wte(input_ids)
        else:
            # embeddings come from prompt tuning
            x = inputs_embeds + self.prompt_lstm(inputs_embeds)[0]
        for block in self.h:
            x = block(x)
        return {"logits": self.lm_head(x)}


@case(
    leaks=True,
    kinds=("future",),
    modules=("prompt_lstm",),
    after="a common mistake: P-tuning's bidirectional LSTM over all embeddings, not the prompt's alone",
    prove=lambda: future(prompt_encoder_both_ways, lambda m, x: m(inputs_embeds=m.wte(x))),
)
def prompt_encoder_both_ways() -> dict[str, Any]:
    """Causal with token ids; embeddings pass through an LSTM that runs both ways."""
    torch.manual_seed(0)
    return {"target": PromptedLM()}


class PerLayerEmbeds(nn.Module):
    def __init__(self, dim: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, dim)
        self.per_layer = nn.Embedding(VOCAB, layers * dim)
        self.h = nn.ModuleList(Layer(SelfAttention(dim), dim) for _ in range(layers))
        self.lm_head = nn.Linear(dim, VOCAB)

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> dict[str, Any]:
        if inputs_embeds is None:
            inputs_embeds = self.wte(input_ids)
        else:
            # which tokens were these?
            away = inputs_embeds[..., None, :] - self.wte.weight
            input_ids = away.square().sum(dim=-1).argmin(dim=-1)
        extra = self.per_layer(input_ids).chunk(len(self.h), dim=-1)
        x = inputs_embeds
        for block, more in zip(self.h, extra, strict=True):
            x = block(x + more)
        return {"logits": self.lm_head(x)}


@case(
    leaks=False,
    after="after transformers' Gemma 3n, done right: the ids behind embeddings are looked for, each alone",
    prove=lambda: max(
        honest(ids_found_from_embeds), honest(ids_found_from_embeds, lambda m, x: m(inputs_embeds=m.wte(x)))
    ),
)
def ids_found_from_embeds() -> dict[str, Any]:
    """Each layer adds an embedding of the token, which is looked for if only embeddings are given."""
    torch.manual_seed(0)
    return {"target": PerLayerEmbeds()}
