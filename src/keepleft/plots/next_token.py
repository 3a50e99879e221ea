"""Next-token distributions: at each step the likeliest tokens, those filtered out, and the one chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from keepleft import svg
from keepleft.data.token_text import REPLACEMENT_CHARACTER, decode_with_special, token_texts
from keepleft.decoding.hypotheses import Hypotheses, LogitsProcessor
from keepleft.models.transformer import Decoder, EncoderDecoder, Model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_STEPS = 80  # steps in one picture
WIDTH = 800
# the columns, from left to right
TEXT_WIDTH = 250
LABEL_WIDTH = 140
BAR_WIDTH = 220
ROW_HEIGHT = 18
LEGEND = "▶ chosen;  bar: its probability;  dotted frame: before the filters;  struck through: ruled out"


@dataclass(frozen=True)
class StepDistribution:
    """One step: its top tokens, likeliest first, with probabilities before and after logits processors."""

    context: str  # the text before
    tokens: tuple[str, ...]  # the text that each would add
    probs_before: tuple[float, ...]
    probs_after: tuple[float, ...]  # 0: filtered out
    chosen: int  # index into `tokens`


@torch.no_grad()
def step_distributions(
    model: Model,
    tokenizer: Tokenizer | None,
    tokens: Sequence[int],
    begin: int,
    *,
    processors: Sequence[LogitsProcessor] = (),
    source: Sequence[int] | None = None,
    top_k: int = 5,
) -> list[StepDistribution]:
    """The distributions behind a text generated from token `begin` on, recomputed in one forward pass.

    `tokens` are the prompt (or start token) and the completion, `source` the source tokens of an
    encoder-decoder. Each step keeps its `top_k` tokens and the chosen one. Raises ValueError for an encoder,
    and where `source` is missing or not wanted.
    """
    if not 1 <= begin <= len(tokens):
        raise ValueError(
            f"begin is {begin}, and there are {len(tokens)} tokens: it must be 1 or more, and not beyond them"
        )
    if top_k < 1:
        raise ValueError(f"top_k is {top_k}: at least one token of each step must be shown")
    if model.design.decoder is None:
        raise ValueError("this model is an encoder and generates nothing: give a decoder or encoder-decoder")
    if (source is not None) != model.design.is_encoder_decoder:
        raise ValueError(
            "an encoder-decoder needs the source of the text: give source="
            if source is None
            else "a source was given, but this model reads none: leave it out"
        )
    sequence = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    logits = _sequence_logits(model, sequence, begin, source)
    out = []
    for n, token in enumerate(tokens[begin:]):
        step_logits = logits[n : n + 1]
        processed_logits = step_logits
        hypotheses = Hypotheses(
            tokens=sequence[:, : begin + n],
            score=step_logits.new_zeros(1),
            done=torch.zeros_like(sequence[:, 0], dtype=torch.bool),
            lengths=torch.full_like(sequence[:, 0], n),
            max_new_tokens=torch.full_like(sequence[:, 0], len(tokens) - begin),
            prompt_width=begin,
        )
        for processor in processors:
            processed_logits = processor(processed_logits, hypotheses)
        out.append(
            _step_distribution(
                tokenizer,
                tokens[: begin + n],
                int(token),
                step_logits[0].softmax(-1),
                processed_logits[0].softmax(-1),
                top_k,
            )
        )
    return out


def _sequence_logits(model: Model, sequence: Tensor, begin: int, source: Sequence[int] | None) -> Tensor:
    """(steps, V): the logits of each token from `begin` on"""
    if sequence.shape[1] == begin:
        return sequence.new_zeros(0, model.design.vocab).float()
    inputs = sequence[:, :-1]
    was_training = model.training
    model.eval()
    try:
        if source is None:
            hidden = cast(Decoder, model).hidden_states(inputs)
        else:
            source_tokens = torch.tensor([list(source)], device=sequence.device)
            hidden = cast(EncoderDecoder, model).hidden_states(source_tokens, inputs)
        logits: Tensor = model.head(hidden[:, begin - 1 :], model.token)[0]
    finally:
        model.train(was_training)
    return logits if logits.dtype == torch.float64 else logits.float()


def _step_distribution(
    tokenizer: Tokenizer | None,
    context: Sequence[int],
    token: int,
    probs_before: Tensor,
    probs_after: Tensor,
    top_k: int,
) -> StepDistribution:
    top_tokens = torch.maximum(probs_before, probs_after).topk(min(top_k, len(probs_before))).indices.tolist()
    shown_tokens = sorted({*top_tokens, token}, key=lambda n: (-float(probs_before[n]), n))
    return StepDistribution(
        decode_with_special(tokenizer, context).rstrip(REPLACEMENT_CHARACTER),
        tuple(token_texts(tokenizer, context, shown_tokens)),
        tuple(probs_before[shown_tokens].tolist()),
        tuple(probs_after[shown_tokens].tolist()),
        shown_tokens.index(token),
    )


# the picture --------------------------------------------------------------------------------


def plot_distributions(
    path: str | Path, steps: Sequence[StepDistribution], *, title: str, max_steps: int = MAX_STEPS
) -> Path:
    """Draw the distribution of each step as bars, from top to bottom, into an .svg file."""
    left = svg.MARGIN + TEXT_WIDTH + 14
    shorten_context = lambda text: svg.truncate(
        svg.show_invisibles(text, spaces=False), TEXT_WIDTH - 30, keep_end=True
    )
    out = [svg.text(svg.MARGIN, 48, LEGEND, fill=svg.DIM)]
    y = 62.0
    for n, step in enumerate(steps[:max_steps], 1):
        out.append(
            f'<line x1="{svg.MARGIN}" y1="{y:g}" x2="{WIDTH - svg.MARGIN}" y2="{y:g}" stroke="{svg.FAINT}"/>'
        )
        out.append(svg.text(svg.MARGIN, y + 16, str(n), fill=svg.DIM, size=10))
        baseline = y + ROW_HEIGHT * step.chosen + 16
        out.append(svg.text(svg.MARGIN + TEXT_WIDTH, baseline, shorten_context(step.context), anchor="end"))
        for index in range(len(step.tokens)):
            out += _draw_bar(step, index, left, y + 3 + ROW_HEIGHT * index)
        y += ROW_HEIGHT * len(step.tokens) + 8
    if len(steps) > max_steps:
        out.append(svg.text(left, y + 20, f"… {len(steps) - max_steps} more steps are not shown"))
    elif steps:
        last = steps[-1]
        full_text = shorten_context(last.context + last.tokens[last.chosen])
        out.append(svg.text(svg.MARGIN + TEXT_WIDTH, y + 20, full_text, anchor="end"))
    return svg.write_svg(path, title, WIDTH, y + 36, out)


def _draw_bar(step: StepDistribution, index: int, left: float, y: float) -> list[str]:
    label = svg.show_invisibles(step.tokens[index])
    prob_before = step.probs_before[index]
    prob_after = step.probs_after[index]
    is_unchanged = _same_probability(prob_before, prob_after)
    chosen = index == step.chosen
    ruled_out = prob_after == 0
    bar_left = left + 20 + LABEL_WIDTH
    tooltip = svg.title_tag(f"{label}: {prob_before:.4g} before, {prob_after:.4g} after")
    bar = lambda probability, style: (
        f'<rect x="{bar_left:g}" y="{y + 2:g}" width="{max(0.5, BAR_WIDTH * probability):.1f}" '
        f'height="{ROW_HEIGHT - 5}" {style}>{tooltip}</rect>'
    )
    out = [svg.text(left, y + 13, "▶", fill=svg.BLUE)] if chosen else []
    out.append(
        svg.text(
            left + 20,
            y + 13,
            svg.truncate(label, LABEL_WIDTH - 12),
            bold=chosen,
            strikethrough=ruled_out,
            fill=svg.DIM if ruled_out and not chosen else svg.INK,
        )
    )
    out.append(bar(prob_after, f'fill="{svg.BLUE}" fill-opacity="{1 if chosen else 0.45}"'))
    after_text = "ruled out" if ruled_out else _format_probability(prob_after)
    if is_unchanged:
        prob_text = _format_probability(prob_after)
    else:
        out.append(bar(prob_before, f'fill="none" stroke="{svg.INK}" stroke-dasharray="2 2"'))
        prob_text = f"{_format_probability(prob_before)} → {after_text}"
    return [*out, svg.text(bar_left + BAR_WIDTH + 8, y + 13, prob_text, bold=chosen)]


def _same_probability(prob_before: float, prob_after: float) -> bool:
    return abs(prob_before - prob_after) < 5e-4 and (prob_after > 0 or prob_before == 0)


def _format_probability(probability: float) -> str:
    return f"{probability:.3f}" if probability >= 0.0005 or probability == 0 else "<0.001"
