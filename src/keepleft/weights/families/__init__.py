"""The families that can be read and written. A new one is a preset, a file here, and its name below."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from keepleft.weights.family import Family

FAMILY_MODULES = ("gpt2", "openai_gpt", "gpt_neo", "llama", "t5", "bart", "bert")


@cache
def families() -> dict[str, Family]:
    """Every family by the name that its configurations carry."""
    out = {}
    for module_name in FAMILY_MODULES:
        module = import_module(f"{__name__}.{module_name}")
        for family in getattr(module, "FAMILIES", None) or (module.FAMILY,):
            out[family.name] = family
    return out
