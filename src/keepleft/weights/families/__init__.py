"""The families that can be read and written.

A new one is a preset, a file beside this one, and a name below.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from keepleft.weights.family import Family

FAMILY_MODULES = ("gpt2", "openai_gpt", "gpt_neo", "llama", "t5", "bart", "bert")


@cache
def families() -> dict[str, Family]:
    """Every family by the name that its configurations carry."""
    modules = [import_module(f"{__name__}.{name}") for name in FAMILY_MODULES]
    all_families = [
        family for module in modules for family in getattr(module, "FAMILIES", None) or (module.FAMILY,)
    ]
    return {family.name: family for family in all_families}
