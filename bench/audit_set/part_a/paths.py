"""Code that runs only in some mode, on some flag, or with some argument."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from audit_set.case import case
from audit_set.proofs import future, padding, sweep

VOCAB = 50


def heads_first(x: Tensor, heads: int) -> Tensor:
    """(B, T, heads · D) as (B, heads, T, D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class DropoutAttention(nn.Module):
    def __init__(self, dim: int, heads: int, p: float) -> None:
        super().__init__()
        self.heads, self.p = heads, p
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def weigh(self, scores: Tensor) -> Tensor:
        return F.dropout(scores.softmax(dim=-1), self.p)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_first(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        if self.training and self.p > 0:
            # the fused kernel has no dropout on this device
            y = self.weigh(q @ k.mT / math.sqrt(q.size(-1))) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class MaskedDropoutAttention(DropoutAttention):
    def weigh(self, scores: Tensor) -> Tensor:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        return F.dropout(scores.where(keep, -torch.inf).softmax(dim=-1), self.p)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module, dim: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(dim), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def language_model(*inner: nn.Module, dim: int = 16) -> nn.Sequential:
    """An embedding, pre-norm residual layers around the given modules, and a head."""
    blocks = nn.Sequential(*(Residual(module, dim) for module in inner))
    return nn.Sequential(nn.Embedding(VOCAB, dim), blocks, nn.LayerNorm(dim), nn.Linear(dim, VOCAB))


@case(
    leaks=True,
    kinds=("future",),
    modules=("1.0.inner", "1.1.inner"),
    after="after keras #23038 (with dropout, the manual path gets no causal mask)",
    prove=lambda: future(dropout_takes_other_path, modes=("train",)),
)
def dropout_takes_other_path() -> dict[str, Any]:
    """Fused and causal without dropout; by hand, without a mask, in training with dropout above zero."""
    torch.manual_seed(0)
    return {"target": language_model(DropoutAttention(16, 2, 0.1), DropoutAttention(16, 2, 0.1))}


@case(
    leaks=False,
    after="after keras #23038, done right: the path with dropout masks by itself",
    prove=lambda: sweep(dropout_path_with_mask),
)
def dropout_path_with_mask() -> dict[str, Any]:
    """Two computations for two modes, both causal; they differ by rounding and dropout."""
    torch.manual_seed(0)
    return {"target": language_model(MaskedDropoutAttention(16, 2, 0.1))}


class MixedPrecisionAttention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        t = x.size(1)
        if torch.is_autocast_enabled(x.device.type):
            # keep the scores in full precision
            with torch.autocast(x.device.type, enabled=False):
                scores = q.float() @ k.float().mT / q.size(-1) ** 0.5
            return (scores.softmax(dim=-1).to(v.dtype) @ v).to(x.dtype)
        scores = q @ k.mT / q.size(-1) ** 0.5
        hidden = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        return scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ v


def _under_autocast(model: Any, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(tokens)


@case(
    leaks=True,
    kinds=("future",),
    modules=("1.0.inner",),
    after="a common mistake: a branch of its own under autocast, where the mask is missing",
    prove=lambda: future(scores_under_autocast, _under_autocast),
)
def scores_under_autocast() -> dict[str, Any]:
    """Causal in every precision, but not inside torch.autocast."""
    torch.manual_seed(0)
    return {"target": language_model(MixedPrecisionAttention(16))}


class FlexibleAttention(nn.Module):
    def __init__(self, dim: int, heads: int = 2, use_flash: bool = True) -> None:
        super().__init__()
        self.n_head, self.use_flash = heads, use_flash
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.register_buffer("tri", torch.ones(1, 1, 128, 128).tril(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        t = x.size(1)
        q, k, v = (heads_first(part, self.n_head) for part in self.c_attn(x).chunk(3, dim=-1))
        if self.use_flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            att = (q @ k.mT) * (1.0 / math.sqrt(k.size(-1)))
            att.masked_fill(self.tri[:, :, :t, :t] == 0, float("-inf"))
            y = att.softmax(dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).flatten(2))


def _without_flash(model: nn.Module, tokens: Tensor) -> Tensor:
    for module in model.modules():
        if hasattr(module, "use_flash"):
            module.use_flash = False
    return model(tokens)


@case(
    leaks=True,
    kinds=("future",),
    modules=("1.0.inner", "1.1.inner"),
    after="a common mistake: masked_fill, its result unused, on the path without flash",
    prove=lambda: future(flash_flag_off, _without_flash),
)
def flash_flag_off() -> dict[str, Any]:
    """Causal as it is built; the path that runs with use_flash off throws the masked scores away."""
    torch.manual_seed(0)
    return {"target": language_model(FlexibleAttention(16), FlexibleAttention(16))}


class TwoWayAttention(nn.Module):
    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.use_flash = heads, True
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        q, k, v = (heads_first(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        if self.use_flash and not need_weights:
            return self.o(
                F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            ), None
        scores = torch.baddbmm(
            torch.full((1, 1, 1), 0.0, dtype=q.dtype, device=q.device),
            q.flatten(0, 1),
            k.flatten(0, 1).mT,
            beta=0.0,
            alpha=q.size(-1) ** -0.5,
        ).unflatten(0, q.shape[:2])
        index = torch.arange(x.size(1), device=x.device)
        scores = torch.where(index[None] > index[:, None], torch.finfo(scores.dtype).min, scores)
        weights = torch.exp(scores - scores.logsumexp(-1, keepdim=True))
        return self.o((weights @ v).transpose(1, 2).flatten(2)), weights


class InspectableLM(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(TwoWayAttention(dim) for _ in range(2))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids: Tensor, output_attentions: bool = False) -> dict[str, Any]:
        x, maps = self.embed(input_ids), []
        for layer in self.layers:
            y, weights = layer(x, need_weights=output_attentions)
            x = x + y
            maps.append(weights)
        return {"logits": self.head(x), "attentions": tuple(maps) if output_attentions else None}


def _inspected(model: Any, tokens: Tensor) -> Any:
    return model(tokens, output_attentions=True)


@case(
    leaks=False,
    after="after transformers #30652, done right: the path with attention weights builds its own mask",
    prove=lambda: max(
        sweep(two_equal_paths), sweep(two_equal_paths, _inspected), sweep(two_equal_paths, _without_flash)
    ),
)
def two_equal_paths() -> dict[str, Any]:
    """Fused or by hand, by a flag and by output_attentions; the results differ by rounding only."""
    torch.manual_seed(0)
    return {"target": InspectableLM()}


class CheckpointedDecoder(nn.Module):
    def __init__(self, dim: int = 16, use_checkpoint: bool = True) -> None:
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.embedding = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.output = nn.Linear(dim, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), x.device, x.dtype)
        for layer in self.layers:
            if self.use_checkpoint and self.training:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x, src_mask=mask)
        return self.output(x)


@case(
    leaks=True,
    kinds=("future",),
    modules=("layers.0", "layers.1", "layers.0.self_attn", "layers.1.self_attn"),
    after="a common mistake: arguments forgotten where a layer is called through checkpoint()",
    prove=lambda: future(checkpoint_without_mask, modes=("train",)),
)
def checkpoint_without_mask() -> dict[str, Any]:
    """In training, layers are called through checkpoint(), which is not given the mask."""
    torch.manual_seed(0)
    return {"target": CheckpointedDecoder()}


@dataclass
class CausalOutput:
    logits: Tensor
    loss: Tensor | None = None
    attentions: tuple[Tensor, ...] | None = None


class EagerAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, hidden_states: Tensor, mask: Tensor | None, output_attentions: bool = False) -> Any:
        q, k, v = (
            heads_first(p(hidden_states), self.num_heads) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if not output_attentions:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
            return self.o_proj(out.transpose(1, 2).flatten(2)), None
        weights = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.size(-1))
        if mask is not None:
            weights = weights.masked_fill(~mask, torch.finfo(weights.dtype).min)
        weights = F.softmax(weights, dim=-1)
        return self.o_proj(torch.matmul(weights, v).transpose(1, 2).flatten(2)), weights


class EagerForCausalLM(nn.Module):
    def __init__(self, hidden_size: int = 16) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, hidden_size)
        self.layers = nn.ModuleList(EagerAttention(hidden_size, 2) for _ in range(2))
        self.lm_head = nn.Linear(hidden_size, VOCAB, bias=False)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
    ) -> CausalOutput:
        t = input_ids.size(1)
        mask = None
        if attention_mask is not None and not bool(attention_mask.all()):
            real = attention_mask.bool()[:, None, None, :]
            causal = torch.ones(t, t, dtype=torch.bool, device=input_ids.device).tril()
            mask = causal & (real | torch.eye(t, dtype=torch.bool, device=input_ids.device))
        x, maps = self.embed_tokens(input_ids), []
        for layer in self.layers:
            y, weights = layer(x, mask, output_attentions)
            x = x + y
            maps.append(weights)
        return CausalOutput(self.lm_head(x), attentions=tuple(maps) if output_attentions else None)


@case(
    leaks=True,
    kinds=("future", "padding"),
    modules=("layers.0", "layers.1"),
    after="after transformers #30652 (output_attentions=True runs the eager path with the mask None of SDPA)",
    prove=lambda: future(weights_on_request, _inspected),
)
def weights_on_request() -> dict[str, Any]:
    """Where nothing is padded the mask is None: right for the fused path, no mask for the other."""
    torch.manual_seed(0)
    return {"target": EagerForCausalLM()}


class GatedRecurrence(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB, dim)
        self.in_proj, self.decay = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embeddings(input_ids)
        write, gate = self.in_proj(x).chunk(2, dim=-1)
        decay = torch.sigmoid(self.decay(x) + 2.0)
        if attention_mask is not None and attention_mask.shape[0] > 1 and attention_mask.shape[1] > 1:
            real = attention_mask[:, :, None].to(x.dtype)
            write = write * real
        state, states = torch.zeros_like(x[:, 0]), []
        for t in range(x.size(1)):
            state = decay[:, t] * state + write[:, t]
            states.append(state)
        return self.lm_head(torch.stack(states, dim=1) * torch.sigmoid(gate))


@case(
    leaks=True,
    kinds=("padding", "batch"),
    modules=("",),
    after="after transformers #46773 (the padding mask is skipped for a batch of one)",
    prove=lambda: padding(
        padding_in_a_batch_of_one, lambda m, x, mask: m(x, attention_mask=mask), batches=(1,), sides=("left",)
    ),
)
def padding_in_a_batch_of_one() -> dict[str, Any]:
    """A recurrence that is told what is padding, but listens only if the batch has several rows."""
    torch.manual_seed(0)
    return {"target": GatedRecurrence()}


class LookBackAttention(nn.Module):
    def __init__(self, dim: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def allowed(self, device: torch.device) -> Tensor:
        w = self.window
        return torch.ones(w, 2 * w, dtype=torch.bool, device=device).tril(w + 1)

    def blocks(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, -x.size(1) % self.window)).unflatten(1, (-1, self.window))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if x.size(1) <= self.window:
            return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        q, k, v = self.blocks(q), self.blocks(k), self.blocks(v)
        k, v = (torch.cat((F.pad(b, (0, 0, 0, 0, 1, -1)), b), dim=2) for b in (k, v))
        mask = self.allowed(x.device).expand(q.size(1), -1, -1).clone()
        mask[0, :, : self.window] = False  # nothing lies before the first block
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.flatten(1, 2)[:, : x.size(1)])


class LocalAttention(LookBackAttention):
    def allowed(self, device: torch.device) -> Tensor:
        w = self.window
        return torch.ones(w, 2 * w, dtype=torch.bool, device=device).tril(w)


@case(
    leaks=True,
    kinds=("future",),
    modules=("1.0.inner", "1.1.inner"),
    after="a common mistake: off by one in the block mask of local attention, used beyond one block",
    prove=lambda: future(blocks_with_look_back, lengths=(26, 40, 49), most=60, values=1),
)
def blocks_with_look_back() -> dict[str, Any]:
    """Plain causal attention up to 24 positions; beyond, blocks whose mask has one diagonal too many."""
    torch.manual_seed(0)
    return {"target": language_model(LookBackAttention(16, 24), LookBackAttention(16, 24))}


@case(
    leaks=False,
    after="a common mistake, done right: local attention in blocks, the mask's diagonal at the block's size",
    prove=lambda: sweep(blocks_in_order),
)
def blocks_in_order() -> dict[str, Any]:
    """Two paths by length: plain up to 24 positions, blocks that look back beyond; filled up at the end."""
    torch.manual_seed(0)
    return {"target": language_model(LocalAttention(16, 24), LocalAttention(16, 24))}


class TeacherForcedLM(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCAB, dim)
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.shared(input_ids)
        t = x.size(1)
        if labels is None:
            mask = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        else:
            # the loss looks at the answer only, so the prompt may be read both ways
            mask = torch.zeros(t, t, dtype=torch.bool, device=x.device)
        x = x + self.attn(x, x, x, attn_mask=mask, need_weights=False)[0]
        output = {"logits": self.head(x)}
        if labels is not None:
            flat = output["logits"][:, :-1].flatten(0, 1)
            output["loss"] = F.cross_entropy(flat, labels[:, 1:].flatten())
        return output


@case(
    leaks=True,
    kinds=("future",),
    modules=("attn", ""),
    after="a common mistake: another mask where labels are given, that is in training, than in generation",
    prove=lambda: future(labels_change_the_mask, lambda m, x: m(x, labels=torch.full_like(x, 4))),
)
def labels_change_the_mask() -> dict[str, Any]:
    """Causal without labels; with labels every position reads every other."""
    torch.manual_seed(0)
    return {"target": TeacherForcedLM()}


class EmbedsLM(nn.Module):
    def __init__(self, hidden_size: int = 16) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, hidden_size)
        self.encoder = nn.TransformerEncoderLayer(hidden_size, 2, 32, dropout=0.0, batch_first=True)
        self.lm_head = nn.Linear(hidden_size, VOCAB)

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> CausalOutput:
        mask = None
        if input_ids is not None:
            n = input_ids.shape[-1]
            mask = (
                torch.full((n, n), float("-inf"), device=input_ids.device).triu(1).to(self.wte.weight.dtype)
            )
            inputs_embeds = self.wte(input_ids)
        return CausalOutput(logits=self.lm_head(self.encoder(inputs_embeds, src_mask=mask)))


@case(
    leaks=True,
    kinds=("future",),
    modules=("encoder", "encoder.self_attn"),
    after="a common mistake: the mask is built from input_ids, so that inputs_embeds get none",
    prove=lambda: future(embeddings_instead_of_ids, lambda m, x: m(inputs_embeds=m.wte(x))),
)
def embeddings_instead_of_ids() -> dict[str, Any]:
    """Causal with input_ids, and without any mask with inputs_embeds."""
    torch.manual_seed(0)
    return {"target": EmbedsLM()}


class CachedMaskAttention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.cached: Tensor | None = None

    def mask(self, n: int, like: Tensor) -> Tensor:
        if self.cached is None:
            self.cached = torch.full((n, n), -torch.inf).triu(1)
        if self.cached.size(0) < n:
            grow = n - self.cached.size(0)
            self.cached = F.pad(self.cached, (0, grow, 0, grow))
        return self.cached[:n, :n].to(like)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return (q @ k.mT / q.size(-1) ** 0.5 + self.mask(x.size(1), q)).softmax(-1) @ v


class GrowingMaskAttention(CachedMaskAttention):
    def mask(self, n: int, like: Tensor) -> Tensor:
        if self.cached is None or self.cached.size(0) < n:
            self.cached = torch.full((2 * n, 2 * n), -torch.inf).triu(1)
        return self.cached[:n, :n].to(like)


def _after_a_short_one(model: Any, tokens: Tensor) -> Tensor:
    model(tokens[:, :3])
    return model(tokens)


@case(
    leaks=True,
    kinds=("future",),
    modules=("1.0.inner",),
    after="a common mistake: a cached mask grown with F.pad, whose zeros mean visible",
    prove=lambda: future(mask_grown_with_zeros, _after_a_short_one, fresh=True),
)
def mask_grown_with_zeros() -> dict[str, Any]:
    """Causal at the length of the first call and below; a longer call afterwards sees its own future."""
    torch.manual_seed(0)
    return {"target": language_model(CachedMaskAttention(16))}


@case(
    leaks=False,
    after="a common mistake, done right: a cached mask that is built again when a call is longer",
    prove=lambda: max(sweep(mask_built_again), sweep(mask_built_again, _after_a_short_one)),
)
def mask_built_again() -> dict[str, Any]:
    """State between calls, a cached mask of twice the longest length, which changes no output."""
    torch.manual_seed(0)
    return {"target": language_model(GrowingMaskAttention(16))}


class CompressiveMemory(nn.Module):
    def __init__(self, dim: int = 16, segment: int = 16) -> None:
        super().__init__()
        self.segment = segment
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.gate = nn.Parameter(torch.zeros(()))

    def write(self, memory: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return memory + (F.elu(k) + 1.0).mT @ v / self.segment

    def forward(self, x: Tensor) -> Tensor:
        memory, outputs = x.new_zeros(x.size(0), x.size(2), x.size(2)), []
        for part in x.split(self.segment, dim=1):
            q, k, v = self.q(part), self.k(part), self.v(part)
            local = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            memory = self.write(memory, k, v)
            recalled = (F.elu(q) + 1.0) @ memory
            mix = torch.sigmoid(self.gate)
            outputs.append(mix * recalled + (1.0 - mix) * local)
        return torch.cat(outputs, dim=1)


class SegmentMemory(CompressiveMemory):
    def forward(self, x: Tensor) -> Tensor:
        self.memory = x.new_zeros(x.size(0), x.size(2), x.size(2))
        outputs = []
        for part in x.split(self.segment, dim=1):
            q, k, v = self.q(part), self.k(part), self.v(part)
            local = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            recalled = (F.elu(q) + 1.0) @ self.memory
            self.memory = self.write(self.memory, k, v)
            outputs.append(local + torch.tanh(self.gate + 0.5) * recalled)
        return torch.cat(outputs, dim=1)


@case(
    leaks=True,
    kinds=("future",),
    modules=("1.0.inner", "1.1.inner"),
    after="after dingo-actual/infini-transformer #4 (the memory holds the future of the segment)",
    prove=lambda: future(memory_written_first),
)
def memory_written_first() -> dict[str, Any]:
    """A compressive memory in segments of 16 that is written before it is read."""
    torch.manual_seed(0)
    return {"target": language_model(CompressiveMemory(), CompressiveMemory())}


@case(
    leaks=False,
    after="after dingo-actual/infini-transformer #4, done right: memory read first, emptied for each call",
    prove=lambda: max(sweep(memory_read_first), sweep(memory_read_first, _after_a_short_one)),
)
def memory_read_first() -> dict[str, Any]:
    """A memory kept on the module, reset at the start of each call, read before each write."""
    torch.manual_seed(0)
    return {"target": language_model(SegmentMemory(), SegmentMemory())}


class TableGPT(nn.Module):
    def __init__(self, max_len: int = 48, dim: int = 16) -> None:
        super().__init__()
        self.max_len = max_len
        self.tokens, self.positions = nn.Embedding(VOCAB, dim), nn.Embedding(max_len, dim)
        self.qkv, self.o, self.unembed = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Linear(dim, VOCAB)
        mask = torch.ones(max_len, max_len, dtype=torch.bool).triu(1)
        self.register_buffer("hidden", mask, persistent=False)

    def forward(self, idx: Tensor) -> Tensor:
        t = idx.size(1)
        if t > self.max_len:
            raise ValueError(f"{t} tokens, but only {self.max_len} positions")
        x = self.tokens(idx) + self.positions.weight[:t]
        q, k, v = self.qkv(x).chunk(3, -1)
        hidden = self.hidden[self.max_len - t :, self.max_len - t :]
        scores = (q @ k.mT).div(q.size(-1) ** 0.5).masked_fill(hidden, -torch.inf)
        return self.unembed(x + self.o(scores.softmax(-1) @ v))


@case(
    leaks=False,
    after="a common mistake, done right: the last rows and columns of a mask for a maximal length",
    prove=lambda: sweep(table_of_48_positions),
)
def table_of_48_positions() -> dict[str, Any]:
    """The bottom right corner of a mask of 48, as good as the top left; longer inputs are refused."""
    torch.manual_seed(0)
    return {"target": TableGPT()}


class RecurrentOrParallel(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB)
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def recurrent(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, out = torch.zeros_like(k[:, 0, :, None] * v[:, 0, None, :]), []
        for t in range(q.size(1)):
            state = state + k[:, t, :, None] * v[:, t, None, :]
            out.append((q[:, t, None, :] @ state).squeeze(1))
        return torch.stack(out, dim=1)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        x = self.emb(input_ids)
        q, k, v = self.q(x).softmax(-1), self.k(x).softmax(-1), self.v(x)
        if input_ids.size(0) == 1:
            y = self.recurrent(q, k, v)
        else:
            y = (q @ k.mT).tril() @ v
        logits = self.head(x + y)
        if labels is None:
            return (logits,)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (logits, loss)


@case(
    leaks=False,
    after="a common mistake, done right: one row as a recurrence, several in parallel, equal up to rounding",
    prove=lambda: max(
        sweep(one_row_as_a_recurrence),
        sweep(one_row_as_a_recurrence, lambda m, x: m(x, labels=torch.full_like(x, 4)), lengths=range(2, 40)),
    ),
)
def one_row_as_a_recurrence() -> dict[str, Any]:
    """Linear attention in two forms, chosen by the size of the batch."""
    torch.manual_seed(0)
    return {"target": RecurrentOrParallel()}
