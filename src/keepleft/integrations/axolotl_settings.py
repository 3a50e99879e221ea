"""The settings of the audit in a configuration of Axolotl, which joins them with its own."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class AuditSettings(BaseModel):
    """What an Axolotl configuration may say about the audit; what is left out has the callback's default."""

    keepleft_claim: str | None = None
    keepleft_budget: Literal["quick", "standard", "full"] | None = None
    keepleft_on_unchecked: Literal["warn", "raise"] | None = None
    keepleft_check_batches: bool | None = None
