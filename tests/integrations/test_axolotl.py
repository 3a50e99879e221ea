"""The plugin of Axolotl, against a stand-in with the interface of its BasePlugin: Axolotl itself is not
installed for the tests.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import keepleft as kl
from integration_models import tiny_llama
from integration_scripts import import_library

pytestmark = pytest.mark.usefixtures("one_thread")

PLUGIN = "keepleft.integrations.axolotl_plugin.AuditPlugin"  # as a configuration names it


class BasePlugin:
    """The hooks that Axolotl calls, as its documentation lists them."""

    def register(self, cfg: Any) -> None: ...

    def get_input_args(self) -> str | None: ...

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        return []

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        return []


@pytest.fixture
def plugin(monkeypatch) -> Any:
    """The plugin, loaded by its dotted name as Axolotl loads it."""
    import_library("transformers")
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["axolotl.integrations.base"].BasePlugin = BasePlugin
    module_name, class_name = PLUGIN.rsplit(".", 1)
    monkeypatch.delitem(sys.modules, module_name, raising=False)
    yield getattr(importlib.import_module(module_name), class_name)()
    sys.modules.pop(module_name, None)


def test_the_callback_stops_a_leaking_model(plugin):
    assert isinstance(plugin, BasePlugin)
    (callback,) = plugin.add_callbacks_pre_trainer(SimpleNamespace(), tiny_llama(False))
    with pytest.raises(kl.LeakError):
        callback.on_train_begin(None, None, None, model=tiny_llama(False))
    callback.on_train_begin(None, None, None, model=tiny_llama(True))
    assert callback.report.ok


def test_the_settings_of_the_configuration_reach_the_callback(plugin):
    settings = {
        "keepleft_claim": "causal & window(3)",
        "keepleft_budget": "full",
        "keepleft_check_batches": False,
    }
    config = SimpleNamespace(**settings, keepleft_on_unchecked=None)
    (callback,) = plugin.add_callbacks_pre_trainer(config, None)
    assert (callback.gate.claim, callback.gate.budget) == ("causal & window(3)", "full")
    assert callback.gate.on_unchecked == "warn"
    assert not callback.check_batches


def test_the_settings_have_a_schema_that_axolotl_can_join_with_its_own(plugin):
    module_name, class_name = plugin.get_input_args().rsplit(".", 1)
    schema = getattr(importlib.import_module(module_name), class_name)
    assert schema(keepleft_budget="quick").keepleft_budget == "quick"
    with pytest.raises(ValueError, match="keepleft_budget"):
        schema(keepleft_budget="fast")


def test_without_axolotl_it_is_an_error_that_says_so():
    if importlib.util.find_spec("axolotl") is not None:
        pytest.skip("axolotl is installed")
    sys.modules.pop("keepleft.integrations.axolotl_plugin", None)
    with pytest.raises(ImportError, match="needs Axolotl: pip install axolotl"):
        importlib.import_module("keepleft.integrations.axolotl_plugin")
