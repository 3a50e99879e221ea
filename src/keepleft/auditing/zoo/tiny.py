"""Every language model of the installed transformers, tiny and random: a few layers of each kind, on CPU, with no network."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from keepleft.auditing.zoo.changes import CHANGES
from keepleft.auditing.zoo.inputs import example
from keepleft.auditing.zoo.lively import lively
from keepleft.auditing.zoo.shrink import small

__all__ = ["UnbuildableError", "classes", "example", "tiny"]

ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
MOST = 2_000_000  # weights of one model
DRAFT = "it drafts for another model and must be given the keys and values of that one"
PART = {"CsmDepthDecoderForCausalLM": "depth_decoder_config"}  # made from a part of the configuration that it names
GIVEN = {  # parts of a configuration that some releases want to be told
    "MusicgenForConditionalGeneration": {
        "text_encoder": "T5Config", "audio_encoder": "EncodecConfig", "decoder": "MusicgenDecoderConfig"},
    "MusicgenMelodyForConditionalGeneration": {
        "text_encoder": "T5Config", "audio_encoder": "EncodecConfig", "decoder": "MusicgenMelodyDecoderConfig"},
}
REFUSED = {
    "ClvpModelForConditionalGeneration": "it compares speech with text: what it gives out has no place for each token",
    "Gemma4AssistantForCausalLM": DRAFT,
    "Gemma4UnifiedAssistantForCausalLM": DRAFT,
    "PI0ForConditionalGeneration": "it moves a robot: what it gives out has no place for each token",
}


class UnbuildableError(ValueError):
    """No tiny version of a class: one line that names it and says why."""

    def __init__(self, name: str, why: object) -> None:
        said = str(why) if isinstance(why, str) else f"{type(why).__name__}: {why}"
        super().__init__(f"{name}: {' '.join(said.split())[:300]}")


def classes() -> list[str]:
    """The names of all classes of transformers that write text; AutoModel… only chooses among them."""
    return sorted(name for name in dir(import_module("transformers")) if name.endswith(ENDINGS) and not name.startswith("Auto"))


def tiny(name: str, seed: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny random model of this class, in eval mode, and arguments for its forward, which was tried once with them."""
    if name in REFUSED:
        raise UnbuildableError(name, REFUSED[name])
    try:
        kind = getattr(import_module("transformers"), name)
        if kind.forward is nn.Module.forward:
            raise UnbuildableError(name, "it has no forward of its own")
        config = _config(kind)
        if (count := _count(kind, config)) > MOST:
            raise UnbuildableError(name, f"its smallest configuration still has {count:,} weights")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = lively(kind(config), seed).eval()
            arguments = example(model, seed=seed)
            with torch.no_grad():
                model(**arguments)
    except UnbuildableError:
        raise
    except Exception as error:  # whatever a class may raise: it cannot be audited
        raise UnbuildableError(name, error) from error
    return model, arguments


def _config(kind: Any) -> Any:
    library = import_module("transformers")
    given = {name: getattr(library, part)() for name, part in GIVEN.get(kind.__name__, {}).items()}
    whole = kind.config_class(**given)
    config = small(getattr(whole, PART.get(kind.__name__, ""), whole), CHANGES)
    writes = not kind.__name__.endswith(ENDINGS[2]) and not config.is_encoder_decoder
    if writes and getattr(config, "is_decoder", None) is False:
        config.is_decoder = True  # BERT and its kin read both ways unless they are told to write
    return config


def _count(kind: Any, config: Any) -> int:
    """Weights that a model would have, without making them; 0 where a class needs real ones to be built."""
    try:
        with torch.device("meta"):
            return sum(weight.numel() for weight in kind(copy.deepcopy(config)).parameters())
    except (NotImplementedError, RuntimeError):
        return 0
