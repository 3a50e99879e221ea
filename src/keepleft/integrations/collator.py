"""A batch as the collator makes it, checked against the model that is to learn from it: labels, padding,
positions, boundaries of packed texts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keepleft.attention.masks import Mask, causal, mask_table, parse_mask
from keepleft.auditing import isolation, module_state
from keepleft.auditing.introspect import ARGUMENT_NAMES, signature
from keepleft.auditing.report import LeakError
from keepleft.integrations.gate import bare_module, find_sharding, original_forward
from keepleft.nn.loss import IGNORE_INDEX

MIN_LABELS = 4  # with fewer, a coincidence could pass for an order
NO_NAMES = "the batch has no names (input_ids, labels …): it could not be checked; give a dict of tensors"
DEFAULT_ROWS = 4  # of the batch, where the loader does not say
MAX_CLAIM_LENGTH = 16  # of the claim's table, which only says whether every position sees every other
MAX_PROBED_TOKENS = 64  # of the call that tells how a model shifts its labels


@dataclass(frozen=True)
class BatchFinding:
    """One contradiction between a batch and the model that is to be trained on it."""

    rule: str
    row: int
    position: int
    message: str  # one sentence, with a remedy

    def __str__(self) -> str:
        return f"{self.rule}, row {self.row}, position {self.position}: {self.message}"


@dataclass(frozen=True)
class BatchReport:
    """What a batch proves about the collator that made it; notes are what it does not prove."""

    findings: tuple[BatchFinding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.findings

    def text(self) -> str:
        lines = [f"{'no contradiction' if self.ok else 'a contradiction'} between the batch and the model"]
        lines += [f"\n{n}. {finding}" for n, finding in enumerate(self.findings, 1)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def raise_for_findings(self) -> BatchReport:
        """The report itself if it has no findings; raises LeakError otherwise."""
        if self.findings:
            raise LeakError(self.text())
        return self


def check_batch(
    model: Callable[..., Any] | Mask | None,
    batch: Any,
    *,
    claim: Mask | str | None = None,
    pad_id: int | None = None,
    eos_id: int | None = None,
) -> BatchReport:
    """Check a batch of a data loader: are labels shifted once, is padding ignored and hidden, do positions
    begin anew with every packed text, and does no label ask for the first token of the next text?

    model: the model that is trained on it, or only its claim. What is called `labels` is taken to be shifted
    inside the model, unless a call of the model shows otherwise; `targets` by whoever makes the batch. pad_id
    and eos_id: taken from the model's configuration where they are not given. A batch that is no dict is left
    unchecked, which a note says.
    """
    if not isinstance(batch, Mapping):
        return BatchReport(notes=(NO_NAMES,))
    if isinstance(model, Mask):
        model, claim = None, model
    if isinstance(claim, str):
        claim = parse_mask(claim)
    module = bare_module(model) if isinstance(model, nn.Module) else model
    config = getattr(module, "config", None)
    if pad_id is None:
        pad_id = _as_id(getattr(config, "pad_token_id", None))
    if eos_id is None:
        eos_id = _as_id(getattr(config, "eos_token_id", None))
    check = _BatchCheck.of(batch, pad_id, eos_id)
    if check is None:
        return BatchReport(notes=("the batch has no input_ids (B, T): nothing of it could be checked",))
    if isinstance(module, nn.Module) and find_sharding(model, module):
        module = None  # a call of one process would wait for the others
    check.check_mask()
    check.check_positions(module)
    check.check_labels(module, claim if claim is not None else causal)
    return BatchReport(tuple(check.findings), tuple(check.notes))


def check_loader(model: Callable[..., Any], loader: Any, *, claim: Mask | str | None = None) -> BatchReport:
    """Check the batch that the loader's collator makes of its first rows. The loader itself is not iterated,
    so that it yields the same batches afterwards.
    """
    dataset, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    if dataset is None or collate is None or not hasattr(dataset, "__getitem__"):
        return BatchReport(notes=("the rows of the data set have no numbers: no batch was checked",))
    states = random.getstate(), np.random.get_state()
    try:
        num_rows = min(len(dataset), getattr(loader, "batch_size", None) or DEFAULT_ROWS)
        with torch.random.fork_rng(devices=[]):
            batch = collate([dataset[n] for n in range(num_rows)])
    except Exception as error:  # rows that only the loader's sampler knows how to read
        return BatchReport(notes=(f"no batch was checked: {type(error).__name__}: {error}",))
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    if not isinstance(batch, Mapping):
        return BatchReport(notes=(NO_NAMES,))
    return check_batch(model, batch, claim=claim)


def _as_id(value: Any) -> int | None:
    value = value[0] if isinstance(value, list | tuple) and value else value
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _argument(batch: Mapping[str, Any], role: str, shape: tuple[int, ...]) -> tuple[str, Tensor | None]:
    """The value of the batch with this role, and its name."""
    for name in ARGUMENT_NAMES[role].split():
        value = batch.get(name)
        if isinstance(value, list | tuple | np.ndarray):
            value = torch.as_tensor(np.asarray(value))
        if isinstance(value, Tensor) and tuple(value.shape) == shape:
            return name, value.detach().cpu()
    return "", None


@dataclass
class _BatchCheck:
    tokens: Tensor  # (B, T)
    real: Tensor  # (B, T): is it a token of a text, and no padding?
    mask: Tensor | None
    positions: Tensor | None
    segments: Tensor | None
    label_name: str
    labels: Tensor | None
    batch: Mapping[str, Any]
    pad_id: int | None
    eos_id: int | None
    findings: list[BatchFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, batch: Mapping[str, Any], pad_id: int | None, eos_id: int | None) -> _BatchCheck | None:
        tokens = batch.get("input_ids", batch.get("tokens"))
        if tokens is None:
            return None
        tokens = torch.as_tensor(tokens).detach().cpu()
        if tokens.dim() != 2 or tokens.is_floating_point():
            return None
        shape = tuple(tokens.shape)
        mask = batch.get("attention_mask")
        mask = mask.detach().cpu() if isinstance(mask, Tensor) and tuple(mask.shape) == shape else None
        _, segments = _argument(batch, "segments", shape)
        if mask is not None and segments is None and mask.dtype != torch.bool and int(mask.max()) > 1:
            segments = mask.long()  # multipack: the number of the text, 0 at padding
        if segments is None:
            segments = _segments_of_lengths(batch, shape)
        name, labels = _argument(batch, "labels", shape)
        if labels is None:
            name, labels = _argument(batch, "targets", shape)
        real = mask.bool() if mask is not None else _without_padding(tokens, segments, pad_id, eos_id)
        _, positions = _argument(batch, "positions", shape)
        return cls(tokens, real, mask, positions, segments, name, labels, batch, pad_id, eos_id)

    def add(self, rule: str, where: Tensor, message: str) -> None:
        """A finding at the first place where a mask (B, T) is true; nothing where it is true nowhere."""
        for row, position in where.nonzero()[:1].tolist():
            self.findings.append(BatchFinding(rule, row, position, message))

    # -- padding

    def check_mask(self) -> None:
        if self.mask is None or self.pad_id is None or self.pad_id == self.eos_id:
            return
        padding = _edge_runs(self.tokens == self.pad_id)
        visible = self.mask.bool()
        if not padding.any():
            return
        if not torch.equal(visible, ~padding):
            self.real = ~padding
        if torch.equal(visible, padding):
            self.add(
                "mask-inverted",
                padding,
                "attention_mask is 1 at padding and 0 at tokens, the opposite of what models take: invert it",
            )
        elif torch.equal(visible, ~padding.flip(1)) and bool((padding & visible).any()):
            self.add(
                "mask-wrong-side",
                padding & visible,
                "attention_mask hides the other end of the row than the one that is padded: pad both on the "
                "same side",
            )
        else:
            self.add(
                "padding-visible",
                padding & visible,
                f"attention_mask is 1 at padding (token {self.pad_id}): set it to 0 there",
            )

    # -- packing

    @property
    def boundaries(self) -> Tensor:
        """(B, T): is it the first token of a text that is not the first of its row?"""
        starts = torch.zeros_like(self.real)
        both_real = self.real[:, 1:] & self.real[:, :-1]
        if self.segments is not None:
            starts[:, 1:] |= (self.segments[:, 1:] != self.segments[:, :-1]) & both_real
        elif self.positions is not None:
            starts[:, 1:] |= (self.positions[:, 1:] == 0) & both_real
        return starts

    def check_positions(self, module: Any) -> None:
        boundaries = self.boundaries
        if self.positions is not None:
            inside = self.real[:, 1:] & self.real[:, :-1] & ~boundaries[:, 1:]
            if bool(((self.positions[:, 1:] - self.positions[:, :-1] != 1) & inside).any()):
                self.notes.append("position_ids do not grow by 1 inside a text, unless that is intended")
        if self.positions is not None and self.segments is not None:
            first = self.real.long().argmax(1, keepdim=True)
            continued = boundaries & (self.positions != self.positions.gather(1, first))
            message = "position_ids do not begin anew with a new text of the row: count them from its start"
            if isinstance(module, nn.Module) and signature(module).argument_for("segments") is not None:
                if continued.any():  # relative positions are the same either way
                    self.notes.append(f"{message}, unless the model's positions are relative")
            else:
                self.add("positions-not-restarted", continued, message)
        elif self.segments is not None and boundaries.any():
            self.notes.append(
                "the rows hold several texts and no position_ids: the model must count them from the segments"
            )
        if self.segments is None and self.eos_id is not None and not boundaries.any():
            ended = (self.tokens[:, :-1] == self.eos_id) & self.real[:, :-1] & self.real[:, 1:]
            ended &= self.tokens[:, 1:] != self.eos_id
            if ended.any():
                row, position = ended.nonzero()[0].tolist()
                self.notes.append(
                    f"row {row} goes on after an EOS at position {position}, and neither segment ids nor "
                    "position_ids begin anew: if these are packed texts, each reads those before it"
                )

    # -- labels

    def check_labels(self, module: Any, claim: Mask) -> None:
        labels = self.labels
        if labels is None:
            self.notes.append("the batch has no labels of the shape of input_ids: they were not checked")
            return
        counted = labels != IGNORE_INDEX
        self.add(
            "labels-at-padding",
            counted & ~self.real,
            f"the label of padding is not {IGNORE_INDEX}: the loss counts it; set it to {IGNORE_INDEX}",
        )
        if bool(mask_table(claim, MAX_CLAIM_LENGTH).all()) or "decoder_input_ids" in self.batch:
            return  # an encoder, or a decoder with an input of its own: nothing is shifted
        model_shift, is_measured = self._model_shift(module)
        batch_shift = self._batch_shift(counted & self.real)
        if batch_shift is None:
            return
        shift = model_shift + batch_shift
        source = "measured" if is_measured else f"by the name {self.label_name!r}"
        first_counted = counted & (torch.cumsum(counted, 1) == 1)
        if shift == 2:
            self.add(
                "labels-shifted-twice",
                first_counted,
                f"{self.label_name} are the next tokens already, and the model shifts them again ({source}): "
                "position t would learn the token at t + 2; leave them unshifted",
            )
        elif shift == 0:
            self.add(
                "labels-not-shifted",
                first_counted,
                f"{self.label_name} are the tokens themselves, and the model does not shift them ({source}): "
                "position t would learn its own token; shift them by one",
            )
        self._check_boundaries(counted, batch_shift)
        self._check_ends(counted)

    def _batch_shift(self, counted: Tensor) -> int | None:
        """0 where every label is its own token, 1 where it is the next; None where the batch does not say."""
        assert self.labels is not None
        has_next = counted & ~torch.roll(self.boundaries, -1, 1)  # labels across a boundary may be anything
        has_next[:, -1] = False
        is_own = bool((self.labels == self.tokens)[counted].all())
        is_next = bool((self.labels == torch.roll(self.tokens, -1, 1))[has_next].all())
        if int(has_next.sum()) < MIN_LABELS or (is_own and is_next):
            reason = "too few of them count, or all tokens are alike"
        elif not is_own and not is_next:
            reason = "they are neither the tokens nor the next tokens"
        else:
            return 0 if is_own else 1
        self.notes.append(f"whether the labels are shifted cannot be told from this batch: {reason}")
        return None

    def _model_shift(self, module: Any) -> tuple[int, bool]:
        """By how much the model shifts the labels, and whether a call showed it."""
        if isinstance(module, nn.Module):
            measured = measure_label_shift(module, self.tokens, self.label_name)
            if measured is not None:
                return measured, True
        return (1 if self.label_name in ARGUMENT_NAMES["labels"].split() else 0), False

    def _check_boundaries(self, counted: Tensor, batch_shift: int) -> None:
        """No label asks the last token of a text for the first of the next one."""
        assert self.labels is not None
        asked = torch.roll(self.boundaries, -batch_shift, 1) & counted
        asked &= self.labels == torch.roll(self.tokens, -batch_shift, 1)
        self.add(
            "label-crosses-texts",
            asked,
            "the last token of a text has to predict the first one of the next text in the row: set this "
            f"label to {IGNORE_INDEX}",
        )

    def _check_ends(self, counted: Tensor) -> None:
        if self.eos_id is None:
            return
        ends = (self.tokens == self.eos_id) & self.real
        if ends.any() and not (counted & ends).any() and self.pad_id == self.eos_id:
            self.notes.append(
                f"no EOS (token {self.eos_id}, also the padding) has a label that counts: the model would "
                "not learn where a text ends"
            )


def measure_label_shift(module: nn.Module, tokens: Tensor, label_name: str) -> int | None:
    """0 or 1: by how much the model shifts labels, found by calling it with one label at a time; None where
    that does not show.
    """
    forward = signature(module)
    main_argument = next((name for name in ("input_ids", "tokens") if name in forward.names), None)
    if main_argument is None or label_name not in forward.names:
        return None
    parameter = next(module.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    row = tokens[:1, :MAX_PROBED_TOKENS].to(device)
    length = row.shape[1]
    if length < 3 or device.type == "meta":
        return None
    place = length // 2
    labels = torch.full_like(row, IGNORE_INDEX)
    labels[0, place] = row[0, place]
    try:
        with (
            module_state.preserve_state(module),
            isolation.preserve_modes(module),
            original_forward(module),
            torch.no_grad(),
        ):
            module.eval()
            out = module(**{main_argument: row, label_name: labels})
        logits, loss = _logits_and_loss(out)
        if logits is None or loss is None or logits.shape[:2] != row.shape:
            return None
        explained = [
            torch.allclose(
                F.cross_entropy(logits[0, place - shift].float(), row[0, place]), loss.float(), rtol=1e-3
            )
            for shift in (0, 1)
        ]
    except Exception:  # a model may raise anything: then its shift is not known
        return None
    return explained.index(True) if sum(explained) == 1 else None


def _logits_and_loss(out: Any) -> tuple[Tensor | None, Tensor | None]:
    parts = list(out.values()) if isinstance(out, Mapping) else list(out) if isinstance(out, tuple) else []
    tensors = [part for part in islice(parts, 4) if isinstance(part, Tensor)]
    logits = next((part for part in tensors if part.dim() == 3), None)
    return logits, next((part for part in tensors if part.dim() == 0), None)


def _segments_of_lengths(batch: Mapping[str, Any], shape: tuple[int, ...]) -> Tensor | None:
    """Segments of a row from the cumulative lengths of its texts."""
    for name in ("cu_seq_lens_q", "cu_seqlens", "cu_seq_lens"):
        lengths = batch.get(name)
        if isinstance(lengths, Tensor) and lengths.dim() == 1 and shape[0] == 1:
            starts = lengths[1:-1].long().cpu()
            changes = torch.zeros(shape[1], dtype=torch.long)
            changes[starts[starts < shape[1]]] = 1
            return (changes.cumsum(0) + 1)[None]
    return None


def _without_padding(
    tokens: Tensor, segments: Tensor | None, pad_id: int | None, eos_id: int | None
) -> Tensor:
    """(B, T): what is a token of a text, where no mask says it."""
    if segments is not None and _starts_at_one(segments):
        return ~_edge_runs(segments <= 0)
    if segments is not None or pad_id is None or pad_id == eos_id:
        return torch.ones_like(tokens, dtype=torch.bool)
    return ~_edge_runs(tokens == pad_id)


def _starts_at_one(segments: Tensor) -> bool:
    """Is the first text of every row number 1 or more, so that 0 is padding?"""
    return bool((segments[:, 0] > 0).all()) or bool((segments < 0).any())


def _edge_runs(where: Tensor) -> Tensor:
    """(B, T): the true values at the left and right ends of the rows."""
    left = torch.cumprod(where.long(), 1).bool()
    right = torch.cumprod(where.long().flip(1), 1).flip(1).bool()
    return left | right
