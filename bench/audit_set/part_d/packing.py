"""Packing: blocks, colours, positions, late resets and cumulative lengths of several texts in one row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..case import case
from ..part_b.layers import Block, RMSNorm, tril
from ..part_b.proofs import batch, distance, future, packing, ready, relative, tokens

LAYERS = ("", *(f"layers.{i}{part}" for i in (0, 1) for part in ("", ".attn")))


class PackedDecoder(nn.Module):
    """A decoder over packed texts; what may be seen is decided in `document_mask`."""

    def __init__(self, vocab_size: int = 50, dim: int = 16, positions: int = 128) -> None:
        super().__init__()
        self.embed_tokens, self.wpe = nn.Embedding(vocab_size, dim), nn.Embedding(positions, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm, self.lm_head = RMSNorm(dim), nn.Linear(dim, vocab_size, bias=False)

    def document_mask(self, ids: Tensor) -> Tensor:
        return ids[:, :, None] == ids[:, None, :]

    def positions(self, ids: Tensor) -> Tensor:
        """Positions that restart wherever the id changes."""
        index = torch.arange(ids.shape[1]).expand(ids.shape)
        starts = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)
        return index - torch.where(starts, index, 0).cummax(dim=1).values

    def run(self, input_ids: Tensor, ids: Tensor) -> Tensor:
        mask = (tril(input_ids.shape[1]) & self.document_mask(ids))[:, None]
        x = self.embed_tokens(input_ids) + self.wpe(self.positions(ids))
        for layer in self.layers:
            x = layer(x, mask)
        return self.lm_head(self.norm(x))


class SegmentDecoder(PackedDecoder):
    """Takes segment ids."""

    def forward(self, input_ids: Tensor, segment_ids: Tensor | None = None) -> SimpleNamespace:
        ids = torch.zeros_like(input_ids) if segment_ids is None else segment_ids
        return SimpleNamespace(logits=self.run(input_ids, ids))


class BlockSparseDecoder(SegmentDecoder):
    """Blocks of four: on the diagonal the mask of each pair, elsewhere one bit for each block."""

    def document_mask(self, ids: Tensor, size: int = 4) -> Tensor:
        same, time = super().document_mask(ids), ids.shape[1]
        blocks = -(-time // size)
        room = blocks * size - time
        cells = F.pad(same, (0, room, 0, room)).unflatten(2, (blocks, size)).unflatten(1, (blocks, size))
        some = cells.any(dim=4).any(dim=2)
        spread = some.repeat_interleave(size, dim=1).repeat_interleave(size, dim=2)[:, :time, :time]
        number = torch.arange(time) // size
        return torch.where(number[:, None] == number[None, :], same, spread)


@case(
    leaks=True,
    kinds=("packing",),
    modules=LAYERS,
    after="a common mistake with block masks: a block that is visible in part is taken as visible throughout",
    prove=lambda: packing(ready(partial_blocks_as_full), lengths=(5, 9, 6)),
)
def partial_blocks_as_full() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": BlockSparseDecoder()}


class ColouredDecoder(SegmentDecoder):
    """Texts are told apart by a sign that flips at each boundary."""

    def document_mask(self, ids: Tensor) -> Tensor:
        flips = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0))
        return super().document_mask((1 - 2 * flips.long()).cumprod(dim=1))


@case(
    leaks=True,
    kinds=("packing",),
    modules=LAYERS,
    after="a common mistake: two alternating colours for packed texts, so that the third sees the first",
    prove=lambda: packing(ready(third_text_sees_the_first)),
)
def third_text_sees_the_first() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": ColouredDecoder()}


class RowPositionsDecoder(PackedDecoder):
    """Learned positions over the whole row; only the mask knows of texts."""

    def positions(self, ids: Tensor) -> Tensor:
        return torch.arange(ids.shape[1]).expand(ids.shape)

    def forward(self, tokens: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        return self.run(tokens, torch.zeros_like(tokens) if doc_ids is None else doc_ids)


@case(
    leaks=True,
    kinds=("packing",),
    modules=("wpe", ""),
    after="a common mistake: packed texts are masked, but learned positions count from the row's start",
    prove=lambda: packing(ready(learned_positions_of_the_row)),
)
def learned_positions_of_the_row() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": RowPositionsDecoder()}


class RestartingDecoder(PackedDecoder):
    """The same, with positions that restart, and a loss inside texts."""

    def forward(
        self, input_ids: Tensor, doc_ids: Tensor | None = None, labels: Tensor | None = None
    ) -> SimpleNamespace:
        ids = torch.zeros_like(input_ids) if doc_ids is None else doc_ids
        logits, loss = self.run(input_ids, ids), None
        if labels is not None:
            goals = labels[:, 1:].masked_fill(ids[:, 1:] != ids[:, :-1], -100)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), goals.flatten(), reduction="sum")
            loss = loss / (goals != -100).sum().clamp(min=1)
        return SimpleNamespace(loss=loss, logits=logits)


def prove_restarting() -> float:
    """Packing, the future, other rows, and the loss against that of each text alone."""
    model, lengths = ready(positions_restart_with_texts), (4, 1, 5)
    text = tokens(1, 10, 80)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    total = 0.0
    for part in text.split(lengths, dim=1):
        if part.shape[1] > 1:
            total += model(part, labels=part).loss.item() * (part.shape[1] - 1)
    loss = relative(model(text, ids, text).loss, total / 7)
    return max(loss, packing(model), packing(model, lengths=(1, 1, 9, 2)), future(model), batch(model))


@case(
    leaks=False,
    after="learned positions that restart with each document id, texts of one token included",
    prove=prove_restarting,
)
def positions_restart_with_texts() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": RestartingDecoder()}


class LateResetLayer(nn.Module):
    """A gated recurrence; the state is cleared when a text has begun."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.value, self.gate, self.out = (nn.Linear(dim, dim) for _ in range(3))

    def decay(self, x: Tensor, starts: Tensor) -> Tensor:
        late = F.pad(starts[:, :-1], (1, 0))
        return torch.sigmoid(self.gate(x)).masked_fill(late[..., None], 0.0)

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        value, decay = self.value(x), self.decay(x, starts)
        state, states = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + value[:, t]
            states.append(state)
        return self.out(torch.tanh(torch.stack(states, dim=1)))


class TimelyResetLayer(LateResetLayer):
    """The same, cleared before the first token is read; the decay in the log domain."""

    def decay(self, x: Tensor, starts: Tensor) -> Tensor:
        log = F.logsigmoid(self.gate(x)).masked_fill(starts[..., None], float("-inf"))
        return log.exp()


class RecurrentDecoder(nn.Module):
    """Two recurrent layers over packed texts."""

    def __init__(self, layer: type[LateResetLayer], vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(layer(dim) for _ in range(2))
        self.norms, self.head = nn.ModuleList(RMSNorm(dim) for _ in range(2)), nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        starts = torch.zeros_like(tokens, dtype=torch.bool)
        if segment_ids is not None:
            starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
        x = self.embed(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x), starts)
        return self.head(x)


@case(
    leaks=True,
    kinds=("packing",),
    modules=("", *(f"layers.{i}{part}" for i in (0, 1) for part in ("", ".gate", ".value"))),
    after="a common mistake: a recurrent state is cleared one token after a packed text has begun",
    prove=lambda: packing(ready(state_cleared_one_token_late)),
)
def state_cleared_one_token_late() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": RecurrentDecoder(LateResetLayer)}


@case(
    leaks=False,
    after="a decay of minus infinity in the log domain where a packed text begins",
    prove=lambda: max(
        packing(ready(log_decay_of_minus_infinity)),
        future(ready(log_decay_of_minus_infinity)),
        batch(ready(log_decay_of_minus_infinity)),
    ),
)
def log_decay_of_minus_infinity() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": RecurrentDecoder(TimelyResetLayer)}


class CumulativeDecoder(PackedDecoder):
    """One row, with cumulative lengths as flash attention takes them."""

    right = False

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        time = input_ids.shape[1]
        ids = torch.zeros_like(input_ids)
        if cu_seqlens is not None:
            ids = torch.searchsorted(cu_seqlens, torch.arange(time), right=self.right).expand(input_ids.shape)
        return self.run(input_ids, ids)


class RightCumulativeDecoder(CumulativeDecoder):
    """The same; a boundary belongs to the text that begins there."""

    right = True


def cumulative(model: Any, text: Tensor, ids: Tensor) -> Tensor:
    """Call with cumulative lengths in the place of segment ids."""
    counts = ids[0].unique_consecutive(return_counts=True)[1]
    return model(text, F.pad(counts.cumsum(0), (1, 0)))


def packed_row() -> dict[str, Tensor]:
    """Three texts in one row."""
    return {"input_ids": torch.randint(1, 50, (1, 14)), "cu_seqlens": torch.tensor([0, 5, 8, 14])}


@case(
    leaks=True,
    kinds=("packing",),
    modules=LAYERS,
    after="a common mistake: searchsorted over cu_seqlens without right=True: first tokens misplaced",
    prove=lambda: packing(
        lambda text, ids: cumulative(ready(boundary_left_of_its_token), text, ids), alone=False
    ),
)
def boundary_left_of_its_token() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": CumulativeDecoder(), "example": packed_row()}


def prove_cumulative() -> float:
    """Packing with texts of one token, too, and the future without any."""
    model = ready(boundary_right_of_its_token)
    sizes = [
        packing(lambda text, ids: cumulative(model, text, ids), lengths=n) for n in ((4, 1, 6), (1, 1, 7, 2))
    ]
    first = tokens(1, 9, 81)
    with torch.no_grad():
        whole = distance(model(first), model(first, torch.tensor([0, 9])))
    return max(*sizes, whole, future(model))


@case(
    leaks=False,
    after="cu_seqlens turned into text numbers by searchsorted with right=True",
    prove=prove_cumulative,
)
def boundary_right_of_its_token() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": RightCumulativeDecoder(), "example": packed_row()}
