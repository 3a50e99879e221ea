"""Builds the explorer's page into what is installed. Where it cannot be built, everything else is installed all the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PageHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        bundle = _bundle(Path(self.root))
        try:
            bundle.build(tools=version == "editable")
        except bundle.NotBuiltError as reason:
            if not bundle.PAGE.is_dir():
                self.app.display_warning(f"The page of the explorer is left out: {reason}")
            else:
                self.app.display_warning(f"The page of the explorer may be older than its sources: {reason}")


def _bundle(root: Path) -> ModuleType:
    """web/bundle.py, which is no part of any package."""
    spec = importlib.util.spec_from_file_location("keepleft_web_bundle", root / "web" / "bundle.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
