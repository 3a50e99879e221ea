"""Model info: what kind of model it is, and which views the page can show of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keepleft import __version__
from keepleft.models.build import count_parameters
from keepleft.pipelines.translator import target_languages
from keepleft.serving.explorer.attention import attention_kind
from keepleft.serving.explorer.audit import not_auditable_reason
from keepleft.serving.explorer.params import Params
from keepleft.serving.explorer.translate import language_names

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer

EXAMPLE_TEXT = "The sea is calm, and the ship sails on."
EXAMPLE_SOURCE = "The sea is calm today."


def model_info(explorer: Explorer, params: Params) -> dict[str, Any]:
    """Family, size and attentions of the model, the page's views, and the example to show first."""
    model = explorer.generator.model
    design = model.design
    stacks = {
        "encoder.self": design.encoder,
        "decoder.self": design.decoder,
        "decoder.cross": design.decoder if explorer.generator.is_encoder_decoder else None,
    }
    return {
        "name": explorer.name,
        "family": "-".join(side for side in ("encoder", "decoder") if getattr(design, side)),
        "parameters": count_parameters(design),
        "dim": design.dim,
        "vocab_size": design.vocab,
        "max_positions": design.max_positions,
        "attentions": [
            {
                "name": name,
                "kind": attention_kind(name),
                "layers": stack.layers,
                "heads": design.stack_attention(stack).heads,
                "mask": "full" if name == "decoder.cross" else ", ".join(map(str, stack.mask)),
            }
            for name, stack in stacks.items()
            if stack is not None
        ],
        "views": available_views(explorer),
        "languages": language_names(explorer),
        "example": explorer.example,
        "version": __version__,
    }


def available_views(explorer: Explorer) -> list[str]:
    """The views that have something to show."""
    availability = {
        "translate": bool(language_names(explorer)),
        "attention": True,
        "decoding": explorer.is_generative,
        "masks": True,
        "leaks": not_auditable_reason(explorer.model) is None,
        "training": explorer.run_folder.folder is not None or explorer.compare_folder is not None,
    }
    return [name for name, is_available in availability.items() if is_available]


def example(explorer: Explorer) -> dict[str, str]:
    """The first text to show. Where the tokenizer has language tags, the source starts with one."""
    if not explorer.generator.is_encoder_decoder:
        return {"text": EXAMPLE_TEXT}
    tags = target_languages(explorer.generator.input_tokenizer)
    tag = next((tag for code, tag in sorted(tags.items()) if code != "en"), None)
    return {"text": "", "source": EXAMPLE_SOURCE if tag is None else f"{tag} {EXAMPLE_SOURCE}"}
