"""What kind of model this is, and what there is to see of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keepleft import __version__
from keepleft.models.build import parameters
from keepleft.serving.explorer.attention import kind
from keepleft.serving.explorer.given import Given
from keepleft.serving.explorer.leaks import unfit

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer

TEXT = "The sea is calm, and the ship sails on."
SOURCE = "The sea is calm today."


def about(explorer: Explorer, given: Given) -> dict[str, Any]:
    model = explorer.voice.model
    design = model.design
    stacks = {"encoder.self": design.encoder, "decoder.self": design.decoder,
              "decoder.cross": design.decoder if explorer.voice.pair else None}
    return {"name": explorer.name, "family": "-".join(side for side in ("encoder", "decoder") if getattr(design, side)),
            "parameters": parameters(design), "dim": design.dim, "vocab": design.vocab,
            "longest": design.longest,
            "attentions": [{"name": name, "kind": kind(name), "layers": stack.layers, "heads": design.heads,
                            "mask": "full" if name == "decoder.cross" else ", ".join(map(str, stack.mask))}
                           for name, stack in stacks.items() if stack is not None],
            "views": views(explorer), "example": explorer.example, "version": __version__}


def views(explorer: Explorer) -> list[str]:
    """Those that have something to show."""
    there = {"attention": True, "decoding": explorer.writes, "masks": True, "leaks": unfit(explorer.model) is None,
             "training": explorer.runs.folder is not None or explorer.compared is not None}
    return [name for name, shown in there.items() if shown]


def example(explorer: Explorer) -> dict[str, str]:
    """Something to begin with. Where languages have tags, a source begins with one."""
    if not explorer.voice.pair:
        return {"text": TEXT}
    tags = sorted(word for word in explorer.voice.reading.get_vocab() if word.startswith("<2") and word.endswith(">"))
    return {"text": "", "source": f"{tags[0]} {SOURCE}" if tags else SOURCE}
