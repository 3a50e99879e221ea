"""What a text is made of, and which attentions there are to look at in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keepleft.serving.explorer import maps
from keepleft.serving.explorer import summary as summaries
from keepleft.serving.explorer.given import Given
from keepleft.serving.explorer.kept import claimed

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer

WRITTEN = 128  # tokens that an encoder-decoder writes where no text is given
SIDES = {"encoder.self": ("source", "source"), "decoder.self": ("text", "text"), "decoder.cross": ("text", "source")}


def attention(explorer: Explorer, given: Given) -> dict[str, Any]:
    words, voice = explorer.words, explorer.voice
    most = explorer.texts.longest
    source: list[int] = []
    cuts: list[str] = []
    if voice.pair:
        source = _cut(words.source(given.text("source")), most, "source", cuts)
        wanted = given.text("text", "")
        text = _cut(words.read(wanted), most, "text", cuts) if wanted else explorer.written(source, WRITTEN)
    else:
        explorer.sourceless(given)
        text = _cut(words.read(given.text("text")), most, "text", cuts)
    read = explorer.texts.read(text, source)
    design, size = voice.model.design, {"text": len(read.text), "source": len(source)}
    sides = dict(SIDES) if voice.pair else dict.fromkeys(SIDES, ("text", "text"))
    return {"key": read.key,
            "tokens": {"text": words.shown(read.text), **({"source": words.source_shown(source)} if voice.pair else {})},
            "attentions": [{"name": name, "kind": kind(name), "layers": len(layers), "heads": design.heads,
                            "rows": size[sides[name][0]], "columns": size[sides[name][1]], "row_side": sides[name][0],
                            "column_side": sides[name][1], "mask": [str(claimed(design, one)) for one in layers.names]}
                           for name, layers in read.attentions.items()],
            "shortened": "; ".join(cuts) or None}


def kind(name: str) -> str:
    """Which of the three attentions."""
    return {"encoder.self": "self", "decoder.self": "masked", "decoder.cross": "cross"}[name]


def _cut(tokens: list[int], most: int, side: str, cuts: list[str]) -> list[int]:
    if len(tokens) > most:
        cuts.append(f"the {side} has {len(tokens):,} tokens, the first {most:,} are shown")
    return tokens[:most]


def overview(explorer: Explorer, given: Given) -> dict[str, Any]:
    return maps.overview(explorer.texts[given.text("key")], given)


def tile(explorer: Explorer, given: Given) -> dict[str, Any]:
    return maps.tile(explorer.texts[given.text("key")], given)


def reads(explorer: Explorer, given: Given) -> dict[str, Any]:
    return maps.reads(explorer.texts[given.text("key")], given)


def summary(explorer: Explorer, given: Given) -> dict[str, Any]:
    return summaries.summary(explorer.texts[given.text("key")], given)
