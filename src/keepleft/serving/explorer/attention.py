"""What a text is made of, and which attentions there are to look at in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keepleft.plots.cross_attention import alignment_weights
from keepleft.serving.explorer import attention_tiles, head_stats, wire
from keepleft.serving.explorer.attention_store import claimed_mask
from keepleft.serving.explorer.params import Params

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer

MAX_GREEDY_TOKENS = 128  # tokens that an encoder-decoder writes where no text is given
SIDES = {
    "encoder.self": ("source", "source"),
    "decoder.self": ("text", "text"),
    "decoder.cross": ("text", "source"),
}


def attention(explorer: Explorer, params: Params) -> dict[str, Any]:
    display, generator = explorer.display_tokenizer, explorer.generator
    max_tokens = explorer.text_cache.max_tokens
    source_tokens: list[int] = []
    notes: list[str] = []
    if generator.is_encoder_decoder:
        source_tokens = _truncate(display.encode_source(params.text("source")), max_tokens, "source", notes)
        requested_text = params.text("text", "")
        tokens = (
            _truncate(display.encode_text(requested_text), max_tokens, "text", notes)
            if requested_text
            else explorer.greedy_target(source_tokens, MAX_GREEDY_TOKENS)
        )
    else:
        explorer.reject_source(params)
        tokens = _truncate(display.encode_text(params.text("text")), max_tokens, "text", notes)
    read_text = explorer.text_cache.read(tokens, source_tokens)
    design, lengths = generator.model.design, {"text": len(read_text.tokens), "source": len(source_tokens)}
    sides = dict(SIDES) if generator.is_encoder_decoder else dict.fromkeys(SIDES, ("text", "text"))
    return {
        "key": read_text.key,
        "tokens": {
            "text": display.describe(read_text.tokens),
            **({"source": display.describe_source(source_tokens)} if generator.is_encoder_decoder else {}),
        },
        "attentions": [
            {
                "name": name,
                "kind": attention_kind(name),
                "layers": len(layers),
                "heads": design.stack_attention(getattr(design, name.split(".")[0])).heads,
                "rows": lengths[sides[name][0]],
                "columns": lengths[sides[name][1]],
                "row_side": sides[name][0],
                "column_side": sides[name][1],
                "mask": [str(claimed_mask(design, layer_name)) for layer_name in layers.names],
            }
            for name, layers in read_text.attentions.items()
        ],
        "shortened": "; ".join(notes) or None,
    }


def attention_kind(name: str) -> str:
    """Which of the three attentions."""
    return {"encoder.self": "self", "decoder.self": "masked", "decoder.cross": "cross"}[name]


def _truncate(tokens: list[int], max_tokens: int, side: str, notes: list[str]) -> list[int]:
    if len(tokens) > max_tokens:
        notes.append(f"the {side} has {len(tokens):,} tokens, the first {max_tokens:,} are shown")
    return tokens[:max_tokens]


def overview(explorer: Explorer, params: Params) -> dict[str, Any]:
    return attention_tiles.overview(explorer.text_cache[params.text("key")], params)


def tile(explorer: Explorer, params: Params) -> dict[str, Any]:
    return attention_tiles.tile(explorer.text_cache[params.text("key")], params)


def token_attention(explorer: Explorer, params: Params) -> dict[str, Any]:
    return attention_tiles.token_row(explorer.text_cache[params.text("key")], params)


def summary(explorer: Explorer, params: Params) -> dict[str, Any]:
    return head_stats.head_stats(explorer.text_cache[params.text("key")], params)


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
