"""Families of models: sorted, gathered, routed, retained, turned round, patched, and expert mixtures."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..case import case
from ..proofs import future
from .parts import VOCAB, Layer, MixerLM, SelfAttention, heads_first, heads_last, honest, lower, mixers


class HashAttention(nn.Module):
    """Reformer: one round of hashing, shared queries and keys, chunks after a sort by bucket."""

    def __init__(self, dim: int = 16, buckets: int = 4, chunk: int = 8) -> None:
        super().__init__()
        self.chunk = chunk
        self.qk, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.register_buffer("rotation", torch.randn(dim, buckets // 2))

    def forward(self, x: Tensor) -> Tensor:
        t, c = x.size(1), self.chunk
        qk, v = self.qk(x), self.v(x)
        turned = qk.detach() @ self.rotation
        bucket = torch.cat((turned, -turned), dim=-1).argmax(dim=-1)
        place = torch.arange(t, device=x.device)
        order = (bucket * t + place).argsort(dim=1)
        take = order[..., None].expand_as(x)
        q, v = qk.gather(1, take), v.gather(1, take)
        q, v = (F.pad(y, (0, 0, 0, -t % c)).unflatten(1, (-1, c)) for y in (q, v))
        position = F.pad(order, (0, -t % c), value=t).unflatten(1, (-1, c))
        k = F.normalize(q, dim=-1)
        k, v, other = (torch.cat((y, y.roll(1, dims=1)), dim=2) for y in (k, v, position))
        scores = (q @ k.mT) * q.size(-1) ** -0.5
        scores = scores.masked_fill(position[..., :, None] < other[..., None, :], -torch.inf)
        y = (scores.softmax(dim=-1) @ v).flatten(1, 2)[:, :t]
        return self.out(torch.zeros_like(y).scatter(1, take, y))


@case(
    leaks=True,
    kinds=("future",),
    modules=mixers(2),
    after="Reformer's hashed attention: scores are masked, but later tokens move the borders of the chunks",
    prove=lambda: future(buckets_sorted_over_time, lengths=(20, 30)),
)
def buckets_sorted_over_time() -> dict[str, Any]:
    """Positions are sorted by bucket and cut into chunks; the sort has no gradient."""
    torch.manual_seed(0)
    return {"target": MixerLM(HashAttention(), HashAttention())}


class NearestKeysAttention(SelfAttention):
    def __init__(self, dim: int = 16, heads: int = 2, k: int = 4) -> None:
        super().__init__(dim, heads)
        self.k = k

    def keep(self, scores: Tensor, causal: Tensor) -> Tensor:
        best = scores.topk(min(self.k, scores.size(-1)), dim=-1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x)
        place = torch.arange(x.size(1), device=x.device, dtype=x.dtype)
        # of equal keys, the nearer one
        scores = (q @ k.mT) / q.size(-1) ** 0.5 - 0.03 * (place[:, None] - place).abs()
        causal = lower(x.size(1), x)
        own = torch.eye(x.size(1), dtype=torch.bool, device=x.device)
        visible = (self.keep(scores, causal) & causal) | own
        return self.out(heads_last(scores.masked_fill(~visible, -torch.inf).softmax(dim=-1) @ v))


class NearestPastAttention(NearestKeysAttention):
    def keep(self, scores: Tensor, causal: Tensor) -> Tensor:
        return super().keep(scores.masked_fill(~causal, -torch.inf), causal)


@case(
    leaks=True,
    kinds=("future",),
    modules=mixers(2),
    after="a common mistake: the nearest keys are chosen before the mask, so later ones take places",
    prove=lambda: future(neighbours_before_the_mask),
)
def neighbours_before_the_mask() -> dict[str, Any]:
    """Attention to the four best keys of all; those that lie ahead are hidden after the choice."""
    torch.manual_seed(0)
    return {"target": MixerLM(NearestKeysAttention(), NearestKeysAttention())}


@case(
    leaks=False,
    after="a common mistake, done right: the nearest keys are chosen among those of the past",
    prove=lambda: honest(neighbours_after_the_mask),
)
def neighbours_after_the_mask() -> dict[str, Any]:
    """Attention to the four best keys of the past and to the own position."""
    torch.manual_seed(0)
    return {"target": MixerLM(NearestPastAttention(), NearestPastAttention())}


class DepthBlock(nn.Module):
    """Mixture of depths: only some tokens pass through the inner layer."""

    def __init__(self, dim: int = 16, capacity: float = 0.5) -> None:
        super().__init__()
        self.router, self.capacity = nn.Linear(dim, 1), capacity
        self.inner = SelfAttention(dim)

    def selected(self, logits: Tensor) -> Tensor:
        count = max(1, int(self.capacity * logits.size(1)))
        return torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(count, dim=1).indices, True)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x).squeeze(-1)
        chosen = self.selected(logits)
        own = torch.eye(x.size(1), dtype=torch.bool, device=x.device)
        visible = (lower(x.size(1), x) & chosen[:, None, :]) | own
        y = self.inner(x, visible[:, None]) * torch.sigmoid(logits)[..., None]
        return torch.where(chosen[..., None], y, 0.0)


class ThresholdDepthBlock(DepthBlock):
    def selected(self, logits: Tensor) -> Tensor:
        return logits > 0


@case(
    leaks=True,
    kinds=("future",),
    modules=mixers(2, "router", "inner"),
    after="mixture of depths: the best tokens of the whole sequence are chosen, which no causal model can do",
    prove=lambda: future(depth_by_topk),
)
def depth_by_topk() -> dict[str, Any]:
    """Half of the tokens pass through each layer: those that score best over the whole sequence."""
    torch.manual_seed(0)
    return {"target": MixerLM(DepthBlock(), DepthBlock())}


@case(
    leaks=False,
    after="mixture of depths, done right: each token passes if its own score exceeds a threshold",
    prove=lambda: honest(depth_by_threshold),
)
def depth_by_threshold() -> dict[str, Any]:
    """Tokens pass through each layer by their own score."""
    torch.manual_seed(0)
    return {"target": MixerLM(ThresholdDepthBlock(), ThresholdDepthBlock())}


class Retention(nn.Module):
    """Parallel up to one chunk, chunk by chunk beyond."""

    def __init__(self, dim: int = 16, heads: int = 2, chunk: int = 16) -> None:
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.qkv, self.gate, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.register_buffer("log_gamma", torch.log(1 - 2.0 ** (-2.0 - torch.arange(heads))))

    def decay(self, t: int, like: Tensor) -> Tensor:
        step = torch.arange(t, device=like.device, dtype=like.dtype)
        gap = step[:, None] - step[None]
        decay = torch.exp(gap.clamp(min=0) * self.log_gamma.to(like)[:, None, None])
        return decay * (gap >= 0)

    def parallel(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT) * self.decay(q.size(2), q)) @ v

    def next_state(self, state: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t = k.size(2)
        left = torch.arange(t - 1, -1, -1, device=k.device, dtype=k.dtype)
        log_gamma = self.log_gamma.to(k)[:, None, None]
        return torch.exp(t * log_gamma) * state + (k * torch.exp(left[:, None] * log_gamma)).mT @ v

    def read(self, state: Tensor, q: Tensor) -> Tensor:
        step = torch.arange(1, q.size(2) + 1, device=q.device, dtype=q.dtype)
        return (q * torch.exp(step[:, None] * self.log_gamma.to(q)[:, None, None])) @ state

    def chunkwise(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, out = q.new_zeros(q.size(0), self.heads, q.size(-1), v.size(-1)), []
        for a, b, c in zip(*(x.split(self.chunk, dim=2) for x in (q, k, v)), strict=True):
            state = self.next_state(state, b, c)
            out.append(self.parallel(a, b, c) + self.read(state, a))
        return torch.cat(out, dim=2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_first(y, self.heads) for y in self.qkv(x).chunk(3, dim=-1))
        k = k * k.size(-1) ** -0.5
        y = self.parallel(q, k, v) if x.size(1) <= self.chunk else self.chunkwise(q, k, v)
        return self.out(heads_last(y) * F.silu(self.gate(x)))


class ThreeFormRetention(Retention):
    def chunkwise(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, out = q.new_zeros(q.size(0), self.heads, q.size(-1), v.size(-1)), []
        for a, b, c in zip(*(x.split(self.chunk, dim=2) for x in (q, k, v)), strict=True):
            out.append(self.parallel(a, b, c) + self.read(state, a))
            state = self.next_state(state, b, c)
        return torch.cat(out, dim=2)

    def parallel(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.size(0) > 1 or self.training:
            return super().parallel(q, k, v)
        # one row in eval mode: step by step
        state, out = torch.zeros_like(k[:, :, 0, :, None] * v[:, :, 0, None, :]), []
        for i in range(q.size(2)):
            state = self.log_gamma.exp().to(q)[:, None, None] * state
            state = state + k[:, :, i, :, None] * v[:, :, i, None, :]
            out.append(q[:, :, i, None] @ state)
        return torch.cat(out, dim=2)


@case(
    leaks=True,
    kinds=("future",),
    modules=mixers(2),
    after="a common mistake: chunkwise retention whose state takes in a chunk before the chunk reads it",
    prove=lambda: future(retention_state_early, lengths=(17, 24, 33)),
)
def retention_state_early() -> dict[str, Any]:
    """Retention, parallel up to 16 positions; beyond, each chunk reads a state that contains itself."""
    torch.manual_seed(0)
    return {"target": MixerLM(Retention(), Retention())}


@case(
    leaks=False,
    after="RetNet's three forms, done right: parallel, recurrent and chunkwise agree",
    prove=lambda: honest(retention_in_three_forms),
)
def retention_in_three_forms() -> dict[str, Any]:
    """Retention in parallel, step by step for one row, in chunks beyond 16; equal up to rounding."""
    torch.manual_seed(0)
    return {"target": MixerLM(ThreeFormRetention(), ThreeFormRetention())}


class LinearAttention(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def total(self, k: Tensor) -> Tensor:
        return k.sum(dim=2, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_first(f(x), self.heads) for f in (self.to_q, self.to_k, self.to_v))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        context = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(dim=2)
        y = torch.einsum("bhtd,bhtde->bhte", q, context)
        return self.to_out(heads_last(y / ((q * self.total(k)).sum(dim=-1, keepdim=True) + 1e-6)))


class CumulativeLinearAttention(LinearAttention):
    def total(self, k: Tensor) -> Tensor:
        return k.cumsum(dim=2)


@case(
    leaks=True,
    kinds=("future",),
    modules=mixers(2),
    after="a common mistake: causal linear attention divided by the sum over all keys",
    prove=lambda: future(normaliser_of_all_keys),
)
def normaliser_of_all_keys() -> dict[str, Any]:
    """Linear attention: the numerator is a running sum, the denominator is not."""
    torch.manual_seed(0)
    return {"target": MixerLM(LinearAttention(), LinearAttention())}


@case(
    leaks=False,
    after="a common mistake, done right: causal linear attention divided by the running sum of keys",
    prove=lambda: honest(normaliser_so_far),
)
def normaliser_so_far() -> dict[str, Any]:
    """Linear attention with running sums in numerator and denominator."""
    torch.manual_seed(0)
    return {"target": MixerLM(CumulativeLinearAttention(), CumulativeLinearAttention())}


class SelectiveScan(nn.Module):
    """A small Mamba block, which may run from right to left."""

    def __init__(self, dim: int = 16, states: int = 4, kernel: int = 3, reverse: bool = False) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.conv1d = nn.Conv1d(dim, dim, kernel, groups=dim, padding=kernel - 1)
        self.x_proj, self.dt_proj = nn.Linear(dim, 2 * states + 1), nn.Linear(1, dim)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(dim, 1))
        self.reverse = reverse

    def scan(self, x: Tensor) -> Tensor:
        a = -self.A_log.exp()
        b, c, dt = self.x_proj(x).split((a.size(1), a.size(1), 1), dim=-1)
        dt = F.softplus(self.dt_proj(dt))
        h, out = x.new_zeros(*x[:, 0].shape, a.size(1)), []
        for t in range(x.size(1)):
            h = torch.exp(dt[:, t, :, None] * a) * h + (dt * x)[:, t, :, None] * b[:, t, None]
            out.append((h * c[:, t, None]).sum(dim=-1))
        return torch.stack(out, dim=1)

    def mix(self, x: Tensor) -> Tensor:
        return self.scan(F.silu(self.conv1d(x.mT)[..., : x.size(1)].mT))

    def forward(self, hidden: Tensor) -> Tensor:
        x, z = self.in_proj(hidden).chunk(2, dim=-1)
        y = self.mix(x.flip(1)).flip(1) if self.reverse else self.mix(x)
        return self.out_proj(y * F.silu(z))


class RightToLeftScan(SelectiveScan):
    """Computes on the sequence turned round, from its end to its start: the original order."""

    def mix(self, x: Tensor) -> Tensor:
        kernel = self.conv1d.kernel_size[0]
        turned = F.pad(x.flip(1).mT, (0, kernel - 1))
        y = F.conv1d(turned, self.conv1d.weight.flip(-1), self.conv1d.bias, groups=x.size(-1))
        return self.scan(F.silu(y.mT).flip(1))


@case(
    leaks=True,
    kinds=("future",),
    modules=(
        "layers.1",
        "layers.1.mixer",
        *(f"layers.1.mixer.{n}" for n in ("conv1d", "in_proj", "x_proj", "dt_proj")),
    ),
    after="a common mistake: a Vision Mamba whose odd layers scan from right to left, used as a decoder",
    prove=lambda: future(scan_turned_round),
)
def scan_turned_round() -> dict[str, Any]:
    """Two Mamba blocks, the second in the other direction."""
    torch.manual_seed(0)
    return {"target": MixerLM(SelectiveScan(), SelectiveScan(reverse=True))}


@case(
    leaks=False,
    after="a common mistake, done right: flipped twice, and the convolution with it, so that nothing turns",
    prove=lambda: honest(scan_flipped_twice, lengths=(1, 2, 3, 7, 12, 16, 17, 24, 33, 40)),
)
def scan_flipped_twice() -> dict[str, Any]:
    """Mamba blocks that flip the sequence, pad on the right, and scan from the end: causal after all."""
    torch.manual_seed(0)
    return {"target": MixerLM(RightToLeftScan(), SelectiveScan())}


class LatentAttention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.to_q, self.to_kv, self.to_out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, latents: Tensor, inputs: Tensor) -> Tensor:
        n, t = latents.size(1), inputs.size(1)
        q, (k, v) = self.to_q(latents), self.to_kv(inputs).chunk(2, dim=-1)
        hidden = torch.ones(n, t, dtype=torch.bool, device=q.device).triu(t - n + 2)
        scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(hidden, -torch.finfo(q.dtype).max)
        return self.to_out(scores.softmax(dim=-1) @ v)


class PerceiverAR(nn.Module):
    def __init__(self, dim: int = 16, num_latents: int = 16) -> None:
        super().__init__()
        self.num_latents = num_latents
        self.token_emb, self.pos_emb = nn.Embedding(VOCAB, dim), nn.Embedding(128, dim)
        self.history = Layer(SelfAttention(dim), dim)
        self.cross_attend = LatentAttention(dim)
        self.perceive = nn.ModuleList(Layer(SelfAttention(dim), dim) for _ in range(2))
        self.to_logits = nn.Linear(dim, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        t = x.size(1)
        if t > self.pos_emb.num_embeddings:
            raise ValueError("too long")
        x = self.history(self.token_emb(x) + self.pos_emb.weight[:t])
        split = max(0, t - self.num_latents)
        latents = x[:, split:]
        if split:
            latents = latents + self.cross_attend(latents, x)
        for layer in self.perceive:
            latents = layer(latents)
        return self.to_logits(torch.cat((x[:, :split], latents), dim=1))


@case(
    leaks=True,
    kinds=("future",),
    modules=("", "cross_attend"),
    after="a common mistake: off by one in Perceiver AR's mask of latents (triu(t - n + 1) hides the future)",
    prove=lambda: future(latents_look_ahead, lengths=(20, 33)),
)
def latents_look_ahead() -> dict[str, Any]:
    """Beyond 16 positions, the last 16 attend to all, and see one position too many."""
    torch.manual_seed(0)
    return {"target": PerceiverAR()}


class MegaByte(nn.Module):
    def __init__(self, dim: int = 16, patch_size: int = 4, vocab: int = VOCAB) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.byte_emb, self.local_emb = nn.Embedding(vocab, dim), nn.Embedding(vocab, dim)
        self.to_patch, self.from_patch = nn.Linear(patch_size * dim, dim), nn.Linear(dim, patch_size * dim)
        self.start = nn.Parameter(torch.randn(1, 1, dim))
        self.globals, self.locals = Layer(SelfAttention(dim), dim), nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def shift(self, patches: Tensor) -> Tensor:
        return patches

    def forward(self, ids: Tensor) -> Tensor:
        t, p = ids.size(1), self.patch_size
        full = F.pad(ids, (0, -t % p))
        patches = self.to_patch(self.byte_emb(full).unflatten(1, (-1, p)).flatten(2))
        context = self.from_patch(self.globals(self.shift(patches))).unflatten(2, (p, -1))
        x = self.local_emb(full).unflatten(1, (-1, p)) + context
        h, _ = self.locals(x.flatten(0, 1))
        return self.head(h.unflatten(0, x.shape[:2]).flatten(1, 2)[:, :t])


class ShiftedMegaByte(MegaByte):
    def shift(self, patches: Tensor) -> Tensor:
        return torch.cat((self.start.expand(patches.size(0), -1, -1), patches[:, :-1]), dim=1)


@case(
    leaks=True,
    kinds=("future",),
    modules=("", "to_patch", "globals", "from_patch"),
    after="a common mistake: MegaByte without its shift, so that a patch is known to its first byte",
    prove=lambda: future(patches_of_their_own_bytes),
)
def patches_of_their_own_bytes() -> dict[str, Any]:
    """Patches of four bytes go through a global model, whose output each byte of the same patch gets."""
    torch.manual_seed(0)
    return {"target": MegaByte()}


@case(
    leaks=False,
    after="MegaByte, done right: patches are shifted by one, behind a start patch",
    prove=lambda: honest(patches_shifted_by_one),
)
def patches_shifted_by_one() -> dict[str, Any]:
    """Patches of four bytes go through a global model; each byte gets the output of the patches before."""
    torch.manual_seed(0)
    return {"target": ShiftedMegaByte()}


class WordLM(nn.Module):
    """Bytes end a word if they are below 8; the sum of a word is known to the words after it."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.byte_emb, self.word_norm = nn.Embedding(VOCAB, dim), nn.LayerNorm(dim)
        self.word_rnn = nn.GRU(dim, dim, batch_first=True)
        self.byte_rnn, self.head = nn.GRU(2 * dim, dim, batch_first=True), nn.Linear(dim, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.byte_emb(input_ids)
        ends = (input_ids < 8).long()
        word = ends.cumsum(dim=1) - ends  # a word's last byte belongs to it
        sums = x.new_zeros(x.size(0), x.size(1) + 1, x.size(2))
        sums = sums.scatter_add(1, (word + 1)[..., None].expand_as(x), x)
        context, _ = self.word_rnn(self.word_norm(sums))  # in slot n: the words before word n
        context = context.gather(1, word[..., None].expand_as(x))
        h, _ = self.byte_rnn(torch.cat((x, context), dim=-1))
        return self.head(h)


@case(
    leaks=False,
    after="byte models with words (SpaceByte, BLT), done right: a word is known when it has ended",
    prove=lambda: honest(words_after_their_end),
)
def words_after_their_end() -> dict[str, Any]:
    """Words of any length are summed up, also those not yet ended, but read only after their end."""
    torch.manual_seed(0)
    return {"target": WordLM()}


class RoomyExperts(nn.Module):
    """Switch: experts of fixed capacity, here for every token there is; tokens beyond would be dropped."""

    def __init__(self, dim: int = 16, experts: int = 4, capacity_factor: float = 4.0) -> None:
        super().__init__()
        self.router, self.capacity_factor = nn.Linear(dim, experts, bias=False), capacity_factor
        self.w1 = nn.Parameter(torch.randn(experts, dim, 2 * dim) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, 2 * dim, dim) * (2 * dim) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        count, experts = tokens.size(0), self.w1.size(0)
        capacity = -int(-self.capacity_factor * count // experts)
        weight, expert = self.router(tokens).softmax(dim=-1).max(dim=-1)
        chosen = F.one_hot(expert, experts)
        slot = ((chosen.cumsum(dim=0) - 1) * chosen).sum(dim=-1)
        kept = slot < capacity
        slots = tokens.new_zeros(experts, capacity, tokens.size(-1))
        slots[expert[kept], slot[kept]] = tokens[kept]
        served = F.gelu(slots @ self.w1) @ self.w2
        y = torch.zeros_like(tokens)
        y[kept] = served[expert[kept], slot[kept]] * weight[kept, None]
        return y.unflatten(0, x.shape[:2])


class MoELayer(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.attention, self.experts = SelfAttention(dim), RoomyExperts(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x + self.attention(x))


@case(
    leaks=False,
    after="Switch's capacity, done right: the factor is the number of experts, so nothing is ever dropped",
    prove=lambda: honest(experts_with_room, double=True),
)
def experts_with_room() -> dict[str, Any]:
    """Experts with a capacity over batch and time that is never reached; slots depend on other tokens."""
    torch.manual_seed(0)
    return {"target": MixerLM(MoELayer(), MoELayer())}
