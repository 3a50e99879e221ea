"""What a zoo run audits: a package, and how to build each of its models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Library:
    """A package whose models are audited.

    Its functions must be importable by name where processes are spawned instead of forked.
    """

    package: str
    build: Callable[[str], tuple[nn.Module, Any]]  # a tiny model and its example; raises UnbuildableError
    build_code: Callable[[str], str]  # Python that makes `model`, for the scripts of a report

    def describe(self, name: str) -> str:
        return f"{name} ({self.package} {version(self.package)}, random weights)"


def _build_transformers(name: str) -> tuple[nn.Module, Any]:
    # imported here, so that a library can be named without importing torch
    from keepleft.auditing.zoo.tiny_models import tiny_model

    return tiny_model(name)


def _transformers_code(name: str) -> str:
    return f"from keepleft.auditing.zoo.tiny_models import tiny_model\nmodel, _ = tiny_model({name!r})"


TRANSFORMERS = Library("transformers", _build_transformers, _transformers_code)
