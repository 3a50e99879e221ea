"""Builds the explorer's page into the package; if that fails, the package is built without the page."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PageHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        bundle = _load_bundle(Path(self.root))
        try:
            bundle.build(dev=version == "editable")
        except bundle.BuildError as reason:
            if not bundle.PAGE_FOLDER.is_dir():
                self.app.display_warning(f"The explorer's page is left out: {reason}")
            else:
                self.app.display_warning(f"The explorer's page may be older than its sources: {reason}")


def _load_bundle(root: Path) -> ModuleType:
    """The module web/bundle.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("keepleft_web_bundle", root / "web" / "bundle.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
