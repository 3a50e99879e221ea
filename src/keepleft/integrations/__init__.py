"""The audit inside other people's training loops and evaluations. Each name is imported on first use, and its
library with it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "AuditCallback": "trainer_callback",
    "AuditPlugin": "axolotl_plugin",
    "LightningAuditCallback": "lightning_callback",
    "audit_before_evaluation": "lm_eval_gate",
    "audit_before_training": "plain_loop",
    "check_batch": "collator",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605

if TYPE_CHECKING:
    from keepleft.integrations.axolotl_plugin import AuditPlugin
    from keepleft.integrations.collator import check_batch
    from keepleft.integrations.lightning_callback import LightningAuditCallback
    from keepleft.integrations.lm_eval_gate import audit_before_evaluation
    from keepleft.integrations.plain_loop import audit_before_training
    from keepleft.integrations.trainer_callback import AuditCallback


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"keepleft.integrations has no {name!r}: it has {', '.join(__all__)}")
    return getattr(import_module(f"keepleft.integrations.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
