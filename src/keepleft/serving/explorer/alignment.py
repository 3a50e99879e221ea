"""How each written token looks at the source: cross-attention, of one head or the mean of some."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keepleft.plots.cross_attention import alignment_weights
from keepleft.serving.explorer import wire
from keepleft.serving.explorer.params import Params

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer


def alignment(explorer: Explorer, params: Params) -> dict[str, Any]:
    display, model = explorer.display_tokenizer, explorer.generator.model
    if not explorer.generator.is_encoder_decoder:
        raise ValueError(
            "alignment is of source and text, and this model reads no source: ask an encoder-decoder"
        )
    source_tokens, tokens = display.encode_prompt(params.text("source")), explorer.new_tokens(params)
    layers, heads = model.design.decoder.layers, model.design.heads
    layer = params.integer_or_choice("layer", layers, ["mean"])
    head = params.integer_or_choice("head", heads, ["mean"])
    sequence = [*display.start_tokens, *tokens]
    explorer.check_length(sequence)
    weights = alignment_weights(
        model,
        source_tokens,
        sequence,
        layers=[layer] if isinstance(layer, int) else range(layers),
        heads=[head] if isinstance(head, int) else None,
    )
    return {
        "source": display.describe_source(source_tokens),
        "written": display.describe(tokens, display.start_tokens),
        "weights_u8": wire.sqrt_u8(weights),
        "rows": len(tokens),
        "columns": len(source_tokens),
    }
