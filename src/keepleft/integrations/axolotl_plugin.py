"""The audit in Axolotl: `plugins: [keepleft.integrations.axolotl_plugin.AuditPlugin]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from axolotl.integrations.base import BasePlugin
except ImportError as error:
    raise ImportError("the audit's plugin for Axolotl needs Axolotl: pip install axolotl") from error

if TYPE_CHECKING:
    from keepleft.integrations.trainer_callback import AuditCallback

PREFIX = "keepleft_"
SETTINGS = ("claim", "budget", "on_unchecked", "check_batches")


class AuditPlugin(BasePlugin):  # type: ignore[misc]
    """Adds an AuditCallback to the trainer that Axolotl builds.

    Its settings are those of the callback, in the configuration as keepleft_claim, keepleft_budget,
    keepleft_on_unchecked and keepleft_check_batches.
    """

    def get_input_args(self) -> str:
        return "keepleft.integrations.axolotl_settings.AuditSettings"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[AuditCallback]:
        from keepleft.integrations.trainer_callback import AuditCallback

        settings = {name: getattr(cfg, PREFIX + name, None) for name in SETTINGS}
        return [AuditCallback(**{name: value for name, value in settings.items() if value is not None})]
