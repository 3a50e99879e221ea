"""Inputs and outputs of many shapes: other axes, codebooks, distributions, batches as dicts, losses only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal, StudentT

import keepleft as kl
from audit_set.case import case
from audit_set.proofs import feature_maker, future, loss_of_each_label, padding, rows, sweep

VOCAB = 50


class TimeFirstTransformer(nn.Module):
    def __init__(self, ntoken: int = VOCAB, ninp: int = 16, nhead: int = 2, nlayers: int = 2) -> None:
        super().__init__()
        self.src_mask: Tensor | None = None
        layer = nn.TransformerEncoderLayer(ninp, nhead, 32, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, nlayers, enable_nested_tensor=False)
        self.input_emb, self.decoder = nn.Embedding(ntoken, ninp), nn.Linear(ninp, ntoken)

    def _square_mask(self, size: int, device: torch.device) -> Tensor:
        return torch.ones(size, size, dtype=torch.bool, device=device).tril(-1)

    def forward(self, src: Tensor) -> Tensor:
        if self.src_mask is None or self.src_mask.size(0) != len(src):
            self.src_mask = self._square_mask(len(src), src.device)
        return self.decoder(self.encoder(self.input_emb(src), mask=self.src_mask))


class TimeFirstDecoder(TimeFirstTransformer):
    def _square_mask(self, size: int, device: torch.device) -> Tensor:
        return ~torch.ones(size, size, dtype=torch.bool, device=device).tril()


def _time_first(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens.T).transpose(0, 1)


@case(
    leaks=True,
    kinds=("future",),
    modules=("encoder", *(f"encoder.layers.{i}{rest}" for i in (0, 1) for rest in ("", ".self_attn"))),
    after="a common mistake: a boolean mask for nn.Transformer with True for visible (there it means hidden)",
    prove=lambda: future(time_first_mask_sense, _time_first),
)
def time_first_mask_sense() -> dict[str, Any]:
    """PyTorch's word language model, (T, B) to (T, B, V), which hides the past and shows the future."""
    torch.manual_seed(0)
    example = torch.randint(VOCAB, (12, 2))
    return {"target": TimeFirstTransformer(), "example": example, "time": 0, "vocab": VOCAB}


@case(
    leaks=False,
    after="a common mistake, done right: True for hidden in nn.Transformer, kept by length",
    prove=lambda: sweep(time_first_decoder, _time_first),
)
def time_first_decoder() -> dict[str, Any]:
    """A word language model, (T, B) to (T, B, V), that keeps the mask of its last length."""
    torch.manual_seed(0)
    example = torch.randint(VOCAB, (12, 2))
    return {"target": TimeFirstDecoder(), "example": example, "time": 0, "vocab": VOCAB}


class Excitation(nn.Module):
    def __init__(self, channels: int, reduction: int = 4) -> None:
        super().__init__()
        self.fc = nn.Sequential(
            nn.Linear(channels, channels // reduction), nn.ReLU(), nn.Linear(channels // reduction, channels)
        )

    def squeeze(self, x: Tensor) -> Tensor:
        return x.mean(dim=-1, keepdim=True).expand_as(x)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.fc(self.squeeze(x).mT).mT)


class RunningExcitation(Excitation):
    def squeeze(self, x: Tensor) -> Tensor:
        return x.cumsum(dim=-1) / torch.arange(1, x.size(-1) + 1, device=x.device, dtype=x.dtype)


class AudioDecoder(nn.Module):
    def __init__(self, attend: type[Excitation], channels: int = 16) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, channels)
        self.convs = nn.ModuleList(nn.Conv1d(channels, channels, 2, dilation=d) for d in (1, 2, 4))
        self.se = attend(channels)
        self.post = nn.Conv1d(channels, VOCAB, 1)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.table(codes).permute(0, 2, 1)
        for conv in self.convs:
            x = x + torch.tanh(conv(F.pad(x, (conv.dilation[0], 0))))
        return self.post(self.se(x))


def _channels_first(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens).transpose(1, 2)


@case(
    leaks=True,
    kinds=("future",),
    modules=("se",),
    after="a common mistake: squeeze and excitation over all of time in a causal network",
    prove=lambda: future(squeeze_over_time, _channels_first),
)
def squeeze_over_time() -> dict[str, Any]:
    """Causal convolutions from (B, T) to (B, V, T); channel gates come from the mean over time."""
    torch.manual_seed(0)
    return {"target": AudioDecoder(Excitation)}


@case(
    leaks=False,
    after="a common mistake, done right: squeeze and excitation with a running mean",
    prove=lambda: sweep(squeeze_so_far, _channels_first),
)
def squeeze_so_far() -> dict[str, Any]:
    """Causal convolutions from (B, T) to (B, V, T); channel gates come from the mean so far."""
    torch.manual_seed(0)
    return {"target": AudioDecoder(RunningExcitation)}


class CodebookLM(nn.Module):
    def __init__(self, codebooks: int = 4, card: int = 20, dim: int = 24) -> None:
        super().__init__()
        self.card = card
        self.emb = nn.ModuleList(nn.Embedding(card + 1, dim) for _ in range(codebooks))
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.linears = nn.ModuleList(nn.Linear(dim, card) for _ in range(codebooks))

    def delay(self, codes: Tensor) -> Tensor:
        """Codebook k moved by k steps, with the special code where there is nothing."""
        t = codes.size(1)
        columns = [F.pad(codes[..., k], (0, k), value=self.card)[:, k:] for k in range(codes.size(2))]
        return torch.stack([column[:, :t] for column in columns], dim=-1)

    def forward(self, codes: Tensor) -> Tensor:
        delayed = self.delay(codes)
        x = sum(emb(delayed[..., k]) for k, emb in enumerate(self.emb))
        h, _ = self.rnn(x)
        return torch.stack([linear(h) for linear in self.linears], dim=2)


class DelayedCodebookLM(CodebookLM):
    def delay(self, codes: Tensor) -> Tensor:
        t = codes.size(1)
        columns = [F.pad(codes[..., k], (k, 0), value=self.card)[:, :t] for k in range(codes.size(2))]
        return torch.stack(columns, dim=-1)


def _codes(batch: int, length: int) -> Tensor:
    return torch.randint(0, 20, (batch, length, 4))


@case(
    leaks=True,
    kinds=("future",),
    modules=("",),
    after="a common mistake: MusicGen's delay pattern in the wrong direction",
    prove=lambda: future(codebooks_brought_forward, inputs=_codes),
)
def codebooks_brought_forward() -> dict[str, Any]:
    """Codes (B, T, K) to logits (B, T, K, V): codebook k comes k steps early instead of late."""
    torch.manual_seed(0)
    return {"target": CodebookLM(), "example": _codes(2, 12), "vocab": 20}


@case(
    leaks=False,
    after="a common mistake, done right: MusicGen's delay pattern",
    prove=lambda: sweep(codebooks_delayed, inputs=_codes),
)
def codebooks_delayed() -> dict[str, Any]:
    """Codes (B, T, K) to logits (B, T, K, V): codebook k comes k steps late."""
    torch.manual_seed(0)
    return {"target": DelayedCodebookLM(), "example": _codes(2, 12), "vocab": 20}


class DeepAR(nn.Module):
    def __init__(self, features: int = 3, hidden: int = 16) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, num_layers=2, batch_first=True)
        self.param_proj = nn.Linear(hidden, 3 * features)

    def scale(self, target: Tensor) -> Tensor:
        return target.abs().mean(dim=1, keepdim=True).clamp(min=1e-3)

    def forward(self, target: Tensor) -> StudentT:
        scale = self.scale(target)
        h, _ = self.lstm(target / scale)
        df, loc, width = self.param_proj(h).chunk(3, dim=-1)
        return StudentT(2.0 + F.softplus(df), loc * scale, (F.softplus(width) + 1e-3) * scale)


class GaussianForecaster(nn.Module):
    def __init__(self, features: int = 3, hidden: int = 16) -> None:
        super().__init__()
        self.rnn = nn.GRU(2 * features, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 2 * features)

    def forward(self, past_values: Tensor) -> Normal:
        count = torch.arange(1, past_values.size(1) + 1, device=past_values.device)[None, :, None]
        mean = past_values.cumsum(dim=1) / count
        scale = (past_values.abs().cumsum(dim=1) / count).clamp(min=1e-3)
        h, _ = self.rnn(torch.cat(((past_values - mean) / scale, scale.log()), dim=-1))
        loc, log_width = self.head(h).chunk(2, dim=-1)
        return Normal(loc * scale + mean, F.softplus(log_width) * scale + 1e-4)


def _mean_and_spread(model: Any, values: Tensor) -> Tensor:
    output = model(values)
    return torch.cat((output.loc, output.scale), dim=-1)


@case(
    leaks=True,
    kinds=("future",),
    modules=("",),
    after="after philipperemy/n-beats #3 (a series scaled by statistics that include its future)",
    prove=lambda: future(series_scaled_as_a_whole, _mean_and_spread, inputs=feature_maker(3)),
)
def series_scaled_as_a_whole() -> dict[str, Any]:
    """Features (B, T, 3) to a Student t distribution: an LSTM over a series scaled as a whole."""
    torch.manual_seed(0)
    return {"target": DeepAR(), "example": torch.randn(2, 12, 3)}


@case(
    leaks=False,
    after="after philipperemy/n-beats #3, done right: statistics of the series so far",
    prove=lambda: sweep(series_scaled_so_far, _mean_and_spread, inputs=feature_maker(3)),
)
def series_scaled_so_far() -> dict[str, Any]:
    """Features (B, T, 3) to a normal distribution, scaled by running means."""
    torch.manual_seed(0)
    return {"target": GaussianForecaster(), "example": torch.randn(2, 12, 3)}


@dataclass
class ModelOutput:
    logits: Tensor
    loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class DecoderAttention(nn.Module):
    def __init__(self, hidden_size: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj, self.o_proj = (
            nn.Linear(hidden_size, 3 * hidden_size),
            nn.Linear(hidden_size, hidden_size),
        )

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv_proj(hidden_states).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        is_causal = attention_mask is None and q.shape[2] > 1
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, is_causal=is_causal)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class DecoderForCausalLM(nn.Module):
    def __init__(self, vocab_size: int = VOCAB, hidden_size: int = 16, num_hidden_layers: int = 2) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(DecoderAttention(hidden_size) for _ in range(num_hidden_layers))
        self.norm, self.lm_head = nn.LayerNorm(hidden_size), nn.Linear(hidden_size, vocab_size, bias=False)

    def expand(self, attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
        inverted = 1.0 - attention_mask[:, None, None, :].to(dtype)
        return inverted * torch.finfo(dtype).min

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> ModelOutput:
        x = self.embed_tokens(input_ids)
        mask = None if attention_mask is None else self.expand(attention_mask, x.dtype)
        states = [x]
        for layer in self.layers:
            x = x + layer(x, mask)
            states.append(x)
        logits, loss = self.lm_head(self.norm(x)), None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return ModelOutput(logits, loss, tuple(states))


@case(
    leaks=True,
    kinds=("future", "padding"),
    modules=("", "layers.0", "layers.1"),
    after="after transformers #41966 (causal masking is off as soon as a padding mask is given)",
    prove=lambda: future(padding_mask_only, lambda m, x: m(x, attention_mask=torch.ones_like(x))),
)
def padding_mask_only() -> dict[str, Any]:
    """Causal without attention_mask; with one, even of ones, only padding is hidden. Returns a dataclass."""
    torch.manual_seed(0)
    return {"target": DecoderForCausalLM()}


class EncoderModel(nn.Module):
    def __init__(self, vocab_size: int = VOCAB, dim: int = 16, max_len: int = 96) -> None:
        super().__init__()
        self.word_embeddings, self.position_embeddings = (
            nn.Embedding(vocab_size, dim),
            nn.Embedding(max_len, dim),
        )
        self.attention = nn.ModuleList(nn.MultiheadAttention(dim, 2, batch_first=True) for _ in range(2))
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)
        self.norm, self.tagger = nn.LayerNorm(dim), nn.Linear(dim, 7)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> ModelOutput:
        if input_ids.size(1) > self.position_embeddings.num_embeddings:
            raise ValueError("too long")
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        empty = (real == 0).all(dim=1, keepdim=True)
        ignore = (real == 0) & ~empty
        keep = (~ignore)[..., None]
        x = self.word_embeddings(input_ids) + self.position_embeddings.weight[: input_ids.size(1)]
        for layer in self.attention:
            x = x + layer(x, x, x, key_padding_mask=ignore, need_weights=False)[0]
            x = x + self.conv((x * keep).mT).mT
        pooled = (x * keep).sum(1, keepdim=True) / keep.sum(1, keepdim=True)
        return ModelOutput(self.tagger(self.norm(x + pooled)))


@case(
    leaks=False,
    after="a common mistake, done right: padding kept out of attention, convolution and pooling",
    prove=lambda: max(
        rows(encoder_with_padding),
        padding(encoder_with_padding, lambda m, x, mask: m(x, attention_mask=mask), sides=("right",)),
    ),
)
def encoder_with_padding() -> dict[str, Any]:
    """An encoder that looks both ways, convolves and pools, and leaves padding on the right out."""
    torch.manual_seed(0)
    return {"target": EncoderModel(), "claim": kl.full}


class EventModel(nn.Module):
    def __init__(self, num_types: int = VOCAB, dim: int = 16) -> None:
        super().__init__()
        self.type_emb, self.time_proj = nn.Embedding(num_types, dim), nn.Linear(1, dim)
        self.rnn = nn.GRU(2 * dim, dim, batch_first=True)
        self.mark_head, self.rate_head = nn.Linear(dim, num_types), nn.Linear(dim, 1)

    def gaps(self, times: Tensor) -> Tensor:
        return F.pad(times[:, 1:] - times[:, :-1], (0, 1))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        gaps = self.gaps(batch["time"])
        x = torch.cat((self.type_emb(batch["tokens"]), self.time_proj(gaps[..., None])), dim=-1)
        h, _ = self.rnn(x)
        return {"mark": {"logits": self.mark_head(h)}, "rate": {"value": F.softplus(self.rate_head(h))}}


class HistoryModel(EventModel):
    def gaps(self, times: Tensor) -> Tensor:
        return torch.diff(times, dim=1, prepend=times[:, :1])


def _event_batch(batch: int = 2, length: int = 12) -> dict[str, Tensor]:
    return {"tokens": torch.randint(VOCAB, (batch, length)), "time": torch.rand(batch, length).cumsum(1)}


def _events(model: Any, x: Tensor) -> Tensor:
    """The marks from (B, T, 2): tokens and times."""
    return model({"tokens": x[..., 0].long(), "time": x[..., 1]})["mark"]["logits"]


def _tokens_and_times(batch: int, length: int) -> Tensor:
    return torch.stack((torch.randint(VOCAB, (batch, length)).float(), torch.rand(batch, length)), dim=-1)


@case(
    leaks=True,
    kinds=("future",),
    modules=("",),
    after="a common mistake: in event sequences, the gap to the next event as a feature of this one",
    prove=lambda: future(gap_to_the_next_event, _events, inputs=_tokens_and_times),
)
def gap_to_the_next_event() -> dict[str, Any]:
    """A dict of tokens and times to a nested dict: the time of the next event tells of it."""
    torch.manual_seed(0)
    return {"target": EventModel(), "example": (_event_batch(),), "vocab": VOCAB}


@case(
    leaks=False,
    after="a common mistake, done right: the gap since the previous event as a feature",
    prove=lambda: sweep(gap_since_the_last_event, _events, inputs=_tokens_and_times),
)
def gap_since_the_last_event() -> dict[str, Any]:
    """A dict of tokens and times to a nested dict: gaps reach back only."""
    torch.manual_seed(0)
    return {"target": HistoryModel(), "example": (_event_batch(),), "vocab": VOCAB}


class WorldModel(nn.Module):
    def __init__(self, obs_dim: int = 5, action_dim: int = 2, hidden: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ELU())
        self.cell = nn.GRUCell(hidden + action_dim, hidden)
        self.decoder, self.reward = nn.Linear(hidden, obs_dim), nn.Linear(hidden, 1)

    def previous(self, actions: Tensor) -> Tensor:
        shifted = actions.roll(-1, dims=1).clone()
        shifted[:, 0] = 0.0
        return shifted

    def forward(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        embedded, previous = self.encoder(obs), self.previous(actions)
        state = obs.new_zeros(obs.size(0), self.cell.hidden_size)
        states = []
        for t in range(obs.size(1)):
            state = self.cell(torch.cat((embedded[:, t], previous[:, t]), dim=-1), state)
            states.append(state)
        h = torch.stack(states, dim=1)
        return self.decoder(h), self.reward(h).squeeze(-1)


def _world(model: Any, x: Tensor) -> Tensor:
    """The reconstruction from (B, T, 7): observations and actions."""
    return model(x[..., :5], x[..., 5:])[0]


@case(
    leaks=True,
    kinds=("future",),
    modules=("",),
    after="a common mistake: previous actions by torch.roll(actions, -1), which are the next actions",
    prove=lambda: future(next_actions_for_previous, _world, inputs=feature_maker(7)),
)
def next_actions_for_previous() -> dict[str, Any]:
    """Observations and actions to a tuple: each step is told the action of the next one."""
    torch.manual_seed(0)
    return {"target": WorldModel(), "example": (torch.randn(2, 10, 5), torch.randn(2, 10, 2))}


class LossOnlyLM(nn.Module):
    def __init__(self, n_embd: int = 16) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, n_embd)
        self.mix = nn.Conv1d(n_embd, n_embd, 3, padding=2, dilation=2)
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, VOCAB, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens)
        x = x + F.gelu(self.mix(x.mT)).mT
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@case(
    leaks=True,
    kinds=("future",),
    modules=("mix",),
    after="a common mistake: padding on both sides of a dilated convolution ('same' padding)",
    prove=lambda: future(
        loss_of_a_convolution, loss_of_each_label(lambda m, x, y: m(x, y)), lengths=(5, 8), double=True
    ),
)
def loss_of_a_convolution() -> dict[str, Any]:
    """Tokens and targets to a scalar loss; there are no logits to look at."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (2, 12))
    return {"target": LossOnlyLM(), "example": (tokens, tokens.roll(-1, 1)), "vocab": VOCAB}


class LightModule(nn.Module):
    def __init__(self, lr: float = 3e-4, dim: int = 16) -> None:
        super().__init__()
        self.lr = lr
        self.emb, self.ff, self.out = nn.Embedding(VOCAB, dim), nn.Linear(dim, dim), nn.Linear(dim, VOCAB)
        self.qkv = nn.Linear(dim, 3 * dim)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=not self.training)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        x = x + self.attend(x)
        return self.out(x + torch.relu(self.ff(x)))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch["tokens"])
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=-100)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class CausalLightModule(LightModule):
    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        past = torch.ones(x.size(1), x.size(1), device=x.device).tril().log().to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=past)


def _step(step: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    return step({"tokens": tokens, "labels": labels}, 0)


def _step_batch() -> dict[str, Tensor]:
    tokens = torch.randint(VOCAB, (2, 13))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


@case(
    leaks=True,
    kinds=("future",),
    modules=("",),
    after="a common mistake: is_causal=not self.training, from a cache that is only used in generation",
    prove=lambda: future(
        training_step_alone, loss_of_each_label(_step), lengths=(5, 8), modes=("train",), double=True
    ),
)
def training_step_alone() -> dict[str, Any]:
    """A module as Lightning has them, given by its training step; causal in eval mode only."""
    torch.manual_seed(0)
    model = LightModule()
    return {"target": model.training_step, "example": (_step_batch(), 0), "vocab": VOCAB}


@case(
    leaks=False,
    after="a common mistake, done right: a training step whose attention has the same mask in both modes",
    prove=lambda: future(
        training_step_with_mask,
        loss_of_each_label(_step),
        lengths=(1, 2, 5, 8, 17),
        modes=("eval", "train"),
        double=True,
        values=1,
        most=4,
    ),
)
def training_step_with_mask() -> dict[str, Any]:
    """A module as Lightning has them, given by its training step; the mask is the logarithm of a triangle."""
    torch.manual_seed(0)
    model = CausalLightModule()
    return {"target": model.training_step, "example": (_step_batch(), 0), "vocab": VOCAB}


class SortedTagger(nn.Module):
    def __init__(self, dim: int = 16, tags: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        self.tags = nn.Linear(dim, tags)

    def forward(self, tokens: Tensor, lengths: Tensor) -> tuple[Categorical, Tensor]:
        ordered, order = lengths.sort(descending=True, stable=True)
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(tokens)[order], ordered.cpu(), batch_first=True)
        h, _ = self.lstm(packed)
        h, _ = nn.utils.rnn.pad_packed_sequence(h, batch_first=True, total_length=tokens.size(1))
        return Categorical(logits=self.tags(h)[order]), lengths


def _three_lengths(model: Any, tokens: Tensor) -> Tensor:
    """Rows of a batch of three, with lengths whose order is not its own inverse."""
    n = tokens.size(1)
    return model(tokens, torch.tensor([n - 2, n, n - 1]))[0].logits


def _other_rows() -> float:
    """The change at the first token of each row when the other rows change."""
    torch.manual_seed(0)
    model, size = rows_put_back_wrongly()["target"].eval(), 0.0
    tokens, other = torch.randint(1, VOCAB, (3, 8)), torch.randint(1, VOCAB, (3, 8))
    for row in range(3):
        changed = other.clone()
        changed[row] = tokens[row]
        moved = _three_lengths(model, changed)[row, 0] - _three_lengths(model, tokens)[row, 0]
        size = max(size, float(moved.detach().abs().max()))
    return size


@case(
    leaks=True,
    kinds=("batch", "padding", "future"),
    modules=("",),
    after="a common mistake: rows sorted by length are put back with the order itself, not with its inverse",
    prove=_other_rows,
)
def rows_put_back_wrongly() -> dict[str, Any]:
    """An LSTM tagger with lengths: right for two rows, and for three in most orders. Returns a tuple."""
    torch.manual_seed(0)
    lengths = torch.tensor([6, 12, 9])
    return {
        "target": SortedTagger(),
        "example": {"tokens": torch.randint(1, VOCAB, (3, 12)), "lengths": lengths},
    }
