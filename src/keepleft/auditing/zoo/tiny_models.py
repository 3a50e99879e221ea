"""Tiny random models of the language model classes in the installed transformers: a few layers of each
kind, on CPU, without network access.
"""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from keepleft.auditing.zoo.config_overrides import OVERRIDES
from keepleft.auditing.zoo.inputs import example
from keepleft.auditing.zoo.randomize import randomize_weights
from keepleft.auditing.zoo.shrink import shrink

__all__ = ["UnbuildableError", "classes", "example", "tiny_model"]

CLASS_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
MAX_PARAMETERS = 2_000_000  # of one model
DRAFT_MODEL_REASON = "it drafts for another model and must be given the keys and values of that one"
# class → the field of its configuration that it is built from
SUB_CONFIG_FIELDS = {"CsmDepthDecoderForCausalLM": "depth_decoder_config"}
# class → parts of its configuration that some releases require
REQUIRED_SUB_CONFIGS = {
    "MusicgenForConditionalGeneration": {
        "text_encoder": "T5Config",
        "audio_encoder": "EncodecConfig",
        "decoder": "MusicgenDecoderConfig",
    },
    "MusicgenMelodyForConditionalGeneration": {
        "text_encoder": "T5Config",
        "audio_encoder": "EncodecConfig",
        "decoder": "MusicgenMelodyDecoderConfig",
    },
}
UNSUPPORTED_CLASSES = {
    "ClvpModelForConditionalGeneration": "it compares speech with text: no output for each token",
    "Gemma4AssistantForCausalLM": DRAFT_MODEL_REASON,
    "Gemma4UnifiedAssistantForCausalLM": DRAFT_MODEL_REASON,
    "PI0ForConditionalGeneration": "it moves a robot: what it gives out has no place for each token",
}


class UnbuildableError(ValueError):
    """A class has no tiny version; the message is one line that names it and says why."""

    def __init__(self, name: str, cause: object) -> None:
        reason = str(cause) if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
        super().__init__(f"{name}: {' '.join(reason.split())[:300]}")


def classes() -> list[str]:
    """The names of all transformers classes that generate text, without AutoModel…, which only picks one."""
    return sorted(
        name
        for name in dir(import_module("transformers"))
        if name.endswith(CLASS_SUFFIXES) and not name.startswith("Auto")
    )


def tiny_model(name: str, seed: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny random model of this class, in eval mode, and arguments that its forward was tried with.

    Raises UnbuildableError.
    """
    if name in UNSUPPORTED_CLASSES:
        raise UnbuildableError(name, UNSUPPORTED_CLASSES[name])
    try:
        model_class = getattr(import_module("transformers"), name)
        if model_class.forward is nn.Module.forward:
            raise UnbuildableError(name, "it has no forward of its own")
        config = _tiny_config(model_class)
        if (num_parameters := _num_parameters(model_class, config)) > MAX_PARAMETERS:
            raise UnbuildableError(name, f"its smallest configuration still has {num_parameters:,} weights")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = randomize_weights(model_class(config), seed).eval()
            arguments = example(model, seed=seed)
            with torch.no_grad():
                model(**arguments)
    except UnbuildableError:
        raise
    except Exception as error:  # whatever the class raises, it cannot be audited
        raise UnbuildableError(name, error) from error
    return model, arguments


def _tiny_config(model_class: Any) -> Any:
    library = import_module("transformers")
    sub_configs = {
        name: getattr(library, config_class)()
        for name, config_class in REQUIRED_SUB_CONFIGS.get(model_class.__name__, {}).items()
    }
    full_config = model_class.config_class(**sub_configs)
    config = shrink(
        getattr(full_config, SUB_CONFIG_FIELDS.get(model_class.__name__, ""), full_config), OVERRIDES
    )
    is_causal_lm = not model_class.__name__.endswith(CLASS_SUFFIXES[2]) and not config.is_encoder_decoder
    if is_causal_lm and getattr(config, "is_decoder", None) is False:
        config.is_decoder = True  # BERT and its relatives are bidirectional by default
    return config


def _num_parameters(model_class: Any, config: Any) -> int:
    """How many parameters a model would have, counted on the meta device; 0 where that cannot build it."""
    try:
        with torch.device("meta"):
            return sum(weight.numel() for weight in model_class(copy.deepcopy(config)).parameters())
    except (NotImplementedError, RuntimeError):
        return 0
