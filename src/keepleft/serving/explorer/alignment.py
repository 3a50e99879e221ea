"""How each written token looks at the source: cross-attention, of one head or the mean of some."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keepleft.runs.alignment import aligned
from keepleft.serving.explorer import wire
from keepleft.serving.explorer.given import Given

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer


def alignment(explorer: Explorer, given: Given) -> dict[str, Any]:
    words, model = explorer.words, explorer.voice.model
    if not explorer.voice.pair:
        raise ValueError("alignment is of source and text, and this model reads no source: ask an encoder-decoder")
    row, tokens = words.prompt(given.text("source")), explorer.tokens(given)
    layers, heads = model.design.decoder.layers, model.design.heads
    layer, head = given.or_word("layer", layers, ["mean"]), given.or_word("head", heads, ["mean"])
    whole = [*words.begun, *tokens]
    explorer.reachable(whole)
    weights = aligned(model, row, whole, layers=[layer] if isinstance(layer, int) else range(layers),
                      heads=[head] if isinstance(head, int) else None)
    return {"source": words.source_shown(row), "written": words.shown(tokens, words.begun),
            "weights_u8": wire.shades(weights), "rows": len(tokens), "columns": len(row)}
