"""The same model with its causal mask taken away: what it then foresees, and what it then looks at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from keepleft.attention.masks import Both, Mask, causal, full
from keepleft.models.twin import twin
from keepleft.serving.explorer import wire
from keepleft.serving.explorer.given import Given
from keepleft.serving.explorer.kept import keeping

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer

MOST = 256  # tokens
ROWS = 64   # whose scores are held at a time
NEAR = 0.9  # losses that are farther apart than this differ


def without(mask: Mask) -> Mask:
    """A mask with nothing causal about it; where that cannot be told apart, everything is seen."""
    if isinstance(mask, Both):
        left = [part for part in mask.parts if part != causal]
        if len(left) < len(mask.parts):
            out: Mask = full
            for part in left:
                out = out & part
            return out
    return full


def bared(model: Any) -> Any:
    """A twin whose decoder looks both ways. Its design still claims what it claimed."""
    out = twin(model).eval()
    out.decoder.masks = tuple(without(mask) for mask in out.decoder.masks)
    return out


def unmasked(explorer: Explorer, given: Given) -> dict[str, Any]:
    words, voice = explorer.writer("unmasked"), explorer.voice
    source = words.prompt(given.text("source")) if voice.pair else []
    if not voice.pair:
        explorer.sourceless(given)
    shown, asked = _taught(explorer, given.text("text", ""), source)
    with_, before = _seen(voice.model, source, shown, asked)
    without_, after = _seen(explorer.bare, source, shown, asked)
    return {"tokens": words.shown([*shown[:1], *asked]), "with_f32": wire.f32(with_),
            "without_f32": wire.f32(without_),
            "reads": {"rows": len(shown), "columns": len(shown), "before_u8": wire.shades(before),
                      "after_u8": wire.shades(after)},
            "words": _sentence(float(with_.mean()), float(without_.mean()))}


def _taught(explorer: Explorer, text: str, source: list[int]) -> tuple[list[int], list[int]]:
    """What is shown to the model and what is asked of it, as in training: each token from those before it."""
    words, options = explorer.words, explorer.words.options
    if explorer.voice.pair:
        written = words.read(text) if text else explorer.written(source, MOST)
        whole = [*written, *options.end[:1]]
    else:
        whole = words.read(text)
        if options.first is not None and whole[0] != options.first:
            whole = [options.first, *whole]
    whole = whole[:min(MOST, explorer.texts.longest) + 1]
    if len(whole) < 2:
        raise ValueError("the text has a single token, and there is nothing to foresee: give more text")
    return whole[:-1], whole[1:]


def _seen(model: Any, source: list[int], shown: list[int], asked: list[int]) -> tuple[Tensor, Tensor]:
    """(T,) the loss of each token, and (T, T) the mean of all maps of self-attention."""
    device = next(model.parameters()).device
    given = [torch.tensor([side], device=device) for side in (source, shown) if side]
    states: list[Tensor] = []
    found = keeping(model, lambda: states.append(model.states(*given)[0]))
    wanted = torch.tensor(asked, device=device)
    losses = [F.cross_entropy(model.head(states[0][n:n + ROWS], model.token).float(), wanted[n:n + ROWS], reduction="none")
              for n in range(0, len(asked), ROWS)]
    rows = torch.arange(len(shown))
    maps = [layer.weights(range(layer.heads), rows).mean(0) for name, layer in found.items()
            if name.startswith("decoder") and name.endswith("self")]
    return torch.cat(losses), torch.stack(maps).mean(0)


def _sentence(masked: float, bare: float) -> str:
    told = f"A token costs {masked:.2f} nats with the mask and {bare:.2f} without it: "
    if bare < NEAR * masked:
        return told + "what comes later gives the answer away, and that is no skill, for there is nothing later when it writes."
    if masked < NEAR * bare:
        return told + "it learned to look back alone, and what comes later only misleads it."
    return told + "on this text that is much the same."
