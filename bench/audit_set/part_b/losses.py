"""Labels and losses: shifts, ignored labels, means, chunks, auxiliary heads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..case import case
from .layers import Block, RMSNorm, tril
from .proofs import future, next_token, ready, relative, some_labels, tokens


class Backbone(nn.Module):
    """A small decoder with rotary positions."""

    def __init__(self, vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, dim)
        self.layers, self.norm = nn.ModuleList(Block(dim) for _ in range(2)), RMSNorm(dim)

    def forward(self, input_ids: Tensor) -> Tensor:
        time, x = input_ids.shape[1], self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, tril(time), positions=torch.arange(time))
        return self.norm(x)


class ForCausalLM(nn.Module):
    """Logits, and a loss where there are labels."""

    def __init__(self, vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.model, self.lm_head = Backbone(vocab_size, dim), nn.Linear(dim, vocab_size, bias=False)

    def loss_function(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-100)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        logits = self.lm_head(self.model(input_ids))
        loss = None if labels is None else self.loss_function(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


TEXT = tokens(3, 9, 40)
LABELS = some_labels(TEXT)


def against_definition(build: Any) -> float:
    """The loss of labels that the model shifts itself, with and without ignored ones."""
    model = ready(build)
    sizes = [relative(model(TEXT, labels=y).loss, next_token(model(TEXT).logits, y)) for y in (TEXT, LABELS)]
    return max(*sizes, 0.0 if max(sizes) > 1e-9 else future(model))


@case(
    leaks=True,
    kinds=("labels",),
    modules=("", "lm_head"),
    after="after lucidrains/perceiver-ar-pytorch #10 (labels that nobody shifts: the model learns to copy)",
    prove=lambda: against_definition(labels_as_they_are),
)
def labels_as_they_are() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": ForCausalLM()}


class GPT(nn.Module):
    """A GPT that takes idx and targets."""

    def __init__(self, vocab_size: int = 50, n_embd: int = 16) -> None:
        super().__init__()
        self.transformer = Backbone(vocab_size, n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits, loss = self.lm_head(self.transformer(idx)), None
        if targets is not None:
            shift_logits, shift_targets = logits[:, :-1, :], targets[:, 1:]
            loss = F.cross_entropy(shift_logits.flatten(0, 1), shift_targets.flatten())
        return logits, loss


def against_targets(build: Any, ignore: int = -100) -> float:
    """The loss of targets that the caller has shifted."""
    model, sizes, whole = ready(build), [], tokens(3, 9, 41)
    for targets in (whole, whole.masked_fill(LABELS == -100, ignore)):
        logits, loss = model(TEXT, targets)
        sizes.append(relative(loss, next_token(logits, targets, ahead=0, ignore=ignore)))
    return max(sizes)


@case(
    leaks=True,
    kinds=("labels",),
    modules=("", "lm_head"),
    after="a common mistake: targets shifted by the loader and once more by the model",
    prove=lambda: against_targets(targets_shifted_again),
)
def targets_shifted_again() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": GPT()}


class MeanOverAll(ForCausalLM):
    """A loss for each token, averaged."""

    def loss_function(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        return losses.mean()


@case(
    leaks=True,
    kinds=("labels",),
    modules=("", "lm_head"),
    after="a common mistake: ignored labels cost nothing but count in the mean",
    prove=lambda: against_definition(mean_over_all_labels),
)
def mean_over_all_labels() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": MeanOverAll()}


class SmoothedLM(nn.Module):
    """A criterion in the style of fairseq inside the model: label smoothing over the vocabulary."""

    def __init__(self, vocab: int = 50, dim: int = 16, epsilon: float = 0.1) -> None:
        super().__init__()
        self.decoder, self.output_projection = Backbone(vocab, dim), nn.Linear(dim, vocab)
        self.epsilon = epsilon

    def forward(self, prev_output_tokens: Tensor, target: Tensor | None = None) -> Any:
        logits = self.output_projection(self.decoder(prev_output_tokens))
        if target is None:
            return logits
        lprobs, ignored = logits.log_softmax(-1), target == -100
        nll = -lprobs.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(ignored, 0.0)
        smooth = -lprobs.mean(-1)
        count = (~ignored).sum().clamp(min=1)
        return logits, ((1 - self.epsilon) * nll.sum() + self.epsilon * smooth.sum()) / count


def prove_smoothing() -> float:
    """Smoothing by definition, over labels that are not ignored."""
    model = ready(smoothing_over_ignored)
    targets = some_labels(tokens(3, 9, 42))
    logits, loss = model(TEXT, targets)
    kept = targets != -100
    expected = F.cross_entropy(logits[kept], targets[kept], label_smoothing=0.1)
    return relative(loss, expected)


@case(
    leaks=True,
    kinds=("labels",),
    modules=("", "output_projection"),
    after="after pytorch/pytorch #73205 (label smoothing counts ignored samples)",
    prove=prove_smoothing,
)
def smoothing_over_ignored() -> dict[str, Any]:
    torch.manual_seed(0)
    text = torch.randint(0, 50, (2, 9))
    example = {"prev_output_tokens": text[:, :-1], "target": text[:, 1:]}
    return {"target": SmoothedLM(), "example": example}


class AccumulatingLM(ForCausalLM):
    """Takes the number of labels in all micro-batches of a step."""

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, num_items_in_batch: int | None = None
    ) -> SimpleNamespace:
        output = super().forward(input_ids)
        if labels is not None:
            output.loss = self.scaled(output.logits[:, :-1], labels[:, 1:], num_items_in_batch)
        return output

    def scaled(self, logits: Tensor, labels: Tensor, items: int | None) -> Tensor:
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss if items is None else loss / (items / labels.numel())


class SummingLM(AccumulatingLM):
    """The same, with a sum."""

    def scaled(self, logits: Tensor, labels: Tensor, items: int | None) -> Tensor:
        reduction = "mean" if items is None else "sum"
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
        return loss if items is None else loss / items


def micro_batches(build: Any) -> float:
    """Each row as a micro-batch against all at once, and against the definition."""
    model, items = ready(build), int((LABELS[:, 1:] != -100).sum())
    expected = next_token(model(TEXT).logits, LABELS)
    rows = [model(x[None], y[None], items).loss.item() for x, y in zip(TEXT, LABELS, strict=True)]
    return max(relative(sum(rows), expected), relative(model(TEXT, labels=LABELS).loss, expected))


@case(
    leaks=True,
    kinds=("labels",),
    modules=("", "lm_head"),
    after="after huggingface/transformers #34191 (micro-batches weighted by tokens, ignored labels too)",
    prove=lambda: micro_batches(micro_batch_means),
)
def micro_batch_means() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": AccumulatingLM()}


@case(
    leaks=False,
    after="a sum over the micro-batch divided by the labels of the step",
    prove=lambda: max(micro_batches(micro_batch_sums), against_definition(micro_batch_sums)),
)
def micro_batch_sums() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": SummingLM()}


class ChunkedLossLM(nn.Module):
    """Gives the loss only; logits exist for a chunk of positions at a time."""

    def __init__(self, vocab: int = 50, dim: int = 16, chunk: int = 4) -> None:
        super().__init__()
        self.body, self.head, self.chunk = Backbone(vocab, dim), nn.Linear(dim, vocab), chunk

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden, total, count = self.body(tokens), 0.0, 0
        for h, y in zip(hidden.split(self.chunk, dim=1), labels.split(self.chunk, dim=1), strict=True):
            logits, goals = self.head(h[:, :-1]).flatten(0, 1), y[:, 1:].flatten()
            total = total + F.cross_entropy(logits, goals, reduction="sum")
            count = count + (goals != -100).sum()
        return total / count.clamp(min=1)


class FlatChunkedLossLM(ChunkedLossLM):
    """The same; rows are shifted first and cut as one long row, each chunk computed again in the backward."""

    def piece(self, h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(h), y, reduction="sum")

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden, goals = self.body(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        parts = zip(hidden.split(self.chunk), goals.split(self.chunk), strict=True)
        total = sum(checkpoint(self.piece, h, y, use_reentrant=False) for h, y in parts)
        return total / (goals != -100).sum().clamp(min=1)


def against_scalar(build: Any) -> float:
    """The loss of a model that gives nothing else."""
    model = ready(build)
    logits = model.head(model.body(TEXT))
    return max(relative(model(TEXT, y), next_token(logits, y)) for y in (TEXT, LABELS))


@case(
    leaks=True,
    kinds=("labels",),
    modules=("", "head"),
    after="a common mistake: labels shifted inside each chunk, the pair across a border is lost",
    prove=lambda: against_scalar(borders_of_chunks),
)
def borders_of_chunks() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": ChunkedLossLM()}


@case(
    leaks=False,
    after="a loss in chunks that cross the rows, computed again in the backward pass",
    prove=lambda: against_scalar(chunks_across_rows),
)
def chunks_across_rows() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": FlatChunkedLossLM()}


class MultiTokenLM(ForCausalLM):
    """A second head that looks one token further."""

    def __init__(self, vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__(vocab_size, dim)
        self.mtp = nn.ModuleList([nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, vocab_size))])

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        hidden = self.model(input_ids)
        logits, loss = self.lm_head(hidden), None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            for depth, head in enumerate(self.mtp, start=1):
                further = head(hidden[:, :-depth])
                loss = loss + 0.3 * F.cross_entropy(further.flatten(0, 1), labels[:, depth:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


def prove_multi_token() -> float:
    """The first head one token ahead, the second two."""
    model = ready(second_head_too_near)
    hidden = model.model(TEXT)
    expected = next_token(model.lm_head(hidden), TEXT) + 0.3 * next_token(model.mtp[0](hidden), TEXT, ahead=2)
    return relative(model(TEXT, labels=TEXT).loss, expected)


@case(
    leaks=True,
    kinds=("labels",),
    modules=("", "mtp", "mtp.0", "mtp.0.2"),
    after="after radixark/miles #2215 (the targets of multi-token prediction are off by one)",
    prove=prove_multi_token,
)
def second_head_too_near() -> dict[str, Any]:
    torch.manual_seed(0)
    model = MultiTokenLM()
    for head in model.mtp:
        nn.init.normal_(head[2].weight, std=1.0)  # as sure of itself as after training
    return {"target": model}


class PaddedLabelsLM(ForCausalLM):
    """Labels are padded on the right and shifted, so that logits need no slice."""

    def loss_function(self, logits: Tensor, labels: Tensor) -> Tensor:
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
        kept = shifted.ne(-100)
        picked = logits.flatten(0, 1)[kept].log_softmax(-1).gather(1, shifted[kept, None])
        return -picked.sum() / kept.sum()


@case(
    leaks=False,
    after="labels padded with -100 and shifted, logits not sliced; the likelihood picked by hand",
    prove=lambda: against_definition(labels_padded_then_shifted),
)
def labels_padded_then_shifted() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": PaddedLabelsLM()}


class ZLossLM(ForCausalLM):
    """Cross-entropy and a small penalty on the log of the normalizer."""

    def loss_function(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        kept = labels != -100
        log_z = logits.logsumexp(-1)
        nll = log_z - logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
        return ((nll + 1e-3 * log_z.square()) * kept).sum() / kept.sum().clamp(min=1)


def prove_z_loss() -> float:
    """Cross-entropy by definition plus the penalty at the same positions."""
    model = ready(z_loss)
    logits = model(TEXT).logits
    kept = LABELS[:, 1:] != -100
    penalty = 1e-3 * logits[:, :-1][kept].logsumexp(-1).square().mean()
    return relative(model(TEXT, labels=LABELS).loss, next_token(logits, LABELS) + penalty)


@case(leaks=False, after="PaLM's z-loss, at positions that are not ignored only", prove=prove_z_loss)
def z_loss() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": ZLossLM()}


class NanoGPT(GPT):
    """Ignores -1, and gives the last logits only where there are no targets."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.transformer(idx)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)


def prove_minus_one() -> float:
    """The loss, the future, and the last logits."""
    model = ready(ignores_minus_one)
    last = relative((model(TEXT)[0][:, 0] - model(TEXT, TEXT)[0][:, -1]).abs().max() + 1.0, 1.0)
    return max(against_targets(ignores_minus_one, ignore=-1), future(lambda text: model(text, text)), last)


@case(
    leaks=False,
    after="nanoGPT: targets shifted by the caller, -1 is ignored, only the last logits without targets",
    prove=prove_minus_one,
)
def ignores_minus_one() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": NanoGPT()}
