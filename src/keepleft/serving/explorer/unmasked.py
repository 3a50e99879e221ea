"""The model without its causal mask: its losses and its attention, next to those with the mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from keepleft.attention.masks import And, Mask, causal, full
from keepleft.models.build import share_weights
from keepleft.models.transformer import CausalModel, Decoder, EncoderDecoder
from keepleft.serving.explorer import wire
from keepleft.serving.explorer.attention_store import store_attentions
from keepleft.serving.explorer.params import Params

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer

CausalModelT = TypeVar("CausalModelT", bound=CausalModel)
MAX_UNMASKED_TOKENS = 256
ROWS_PER_CHUNK = 64  # whose logits are held at a time
SIMILAR_LOSS_RATIO = 0.9  # two losses with a smaller ratio count as different


def drop_causal(mask: Mask) -> Mask:
    """A mask without its causal part; `full` where it has no separable one."""
    if isinstance(mask, And):
        remaining = [part for part in mask.parts if part != causal]
        if len(remaining) < len(mask.parts):
            combined: Mask = full
            for part in remaining:
                combined = combined & part
            return combined
    return full


def without_causal_mask(model: CausalModelT) -> CausalModelT:
    """A copy that shares weights and whose decoder attends both ways; its design still claims the mask."""
    unmasked_model = share_weights(model).eval()
    unmasked_model.decoder.masks = tuple(drop_causal(mask) for mask in unmasked_model.decoder.masks)
    return unmasked_model


def compare_unmasked(explorer: Explorer, params: Params) -> dict[str, Any]:
    """Loss of each token and mean self-attention map, with and without the causal mask."""
    display, generator = explorer.require_generative("unmasked"), explorer.generator
    source_tokens = display.encode_prompt(params.text("source")) if generator.is_encoder_decoder else []
    if not generator.is_encoder_decoder:
        explorer.reject_source(params)
    inputs, labels = _teacher_forcing(explorer, params.text("text", ""), source_tokens)
    masked_losses, masked_map = _losses_and_map(explorer.generative_model, source_tokens, inputs, labels)
    unmasked_losses, unmasked_map = _losses_and_map(explorer.unmasked_model, source_tokens, inputs, labels)
    return {
        "tokens": display.describe([*inputs[:1], *labels]),
        "masked_loss_f32": wire.f32(masked_losses),
        "unmasked_loss_f32": wire.f32(unmasked_losses),
        "maps": {
            "rows": len(inputs),
            "columns": len(inputs),
            "masked_u8": wire.sqrt_u8(masked_map),
            "unmasked_u8": wire.sqrt_u8(unmasked_map),
        },
        "note": _verdict(float(masked_losses.mean()), float(unmasked_losses.mean())),
    }


def _teacher_forcing(explorer: Explorer, text: str, source_tokens: list[int]) -> tuple[list[int], list[int]]:
    """Inputs and labels as in training: each token is predicted from those before it."""
    display, options = explorer.display_tokenizer, explorer.display_tokenizer.options
    if explorer.generator.is_encoder_decoder:
        target = (
            display.encode_text(text) if text else explorer.greedy_target(source_tokens, MAX_UNMASKED_TOKENS)
        )
        sequence = [*target, *options.eos_ids[:1]]
    else:
        sequence = display.encode_text(text)
        if options.bos_or_eos is not None and sequence[0] != options.bos_or_eos:
            sequence = [options.bos_or_eos, *sequence]
    sequence = sequence[: min(MAX_UNMASKED_TOKENS, explorer.text_cache.max_tokens) + 1]
    if len(sequence) < 2:
        raise ValueError("the text has a single token, and there is nothing to foresee: give more text")
    return sequence[:-1], sequence[1:]


def _losses_and_map(
    model: Decoder | EncoderDecoder, source_tokens: list[int], inputs: list[int], labels: list[int]
) -> tuple[Tensor, Tensor]:
    """(T,) loss of each token, and (T, T) mean of the decoder's self-attention maps."""
    device = next(model.parameters()).device
    model_inputs = [torch.tensor([side], device=device) for side in (source_tokens, inputs) if side]
    hidden_states: list[Tensor] = []
    stored = store_attentions(model, lambda: hidden_states.append(model.hidden_states(*model_inputs)[0]))
    targets = torch.tensor(labels, device=device)
    losses = [
        F.cross_entropy(
            model.head(hidden_states[0][n : n + ROWS_PER_CHUNK], model.token).float(),
            targets[n : n + ROWS_PER_CHUNK],
            reduction="none",
        )
        for n in range(0, len(labels), ROWS_PER_CHUNK)
    ]
    rows = torch.arange(len(inputs))
    maps = [
        layer.weights(range(layer.heads), rows).mean(0)
        for name, layer in stored.items()
        if name.startswith("decoder") and name.endswith("self")
    ]
    return torch.cat(losses), torch.stack(maps).mean(0)


def _verdict(masked_loss: float, unmasked_loss: float) -> str:
    sentence = f"A token costs {masked_loss:.2f} nats with the mask and {unmasked_loss:.2f} without it: "
    if unmasked_loss < SIMILAR_LOSS_RATIO * masked_loss:
        return sentence + (
            "seeing the future gives the answer away, and at generation time there is no future to see."
        )
    if masked_loss < SIMILAR_LOSS_RATIO * unmasked_loss:
        return sentence + "the model has learned to attend to the past, and the future only misleads it."
    return sentence + "on this text the two are much the same."
