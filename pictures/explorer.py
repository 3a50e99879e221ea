"""The picture of the explorer: the page that `keepleft show --html` writes, in a browser, light and dark.

Unlike the other pictures it is a photograph, so it is not drawn again from facts.json.
"""

from __future__ import annotations

import base64
import shutil
from collections.abc import Mapping
from pathlib import Path

from tour import PAGE

NAMES = {version: f"explorer-{version}.webp" for version in ("light", "dark")}
WIDTH, HEIGHT = 1120, 900  # of the window; the three attentions stand side by side
SCALE = 1.5  # pixels of the picture for one of the window
QUALITY = 82


def is_page_built() -> bool:
    return PAGE.exists()


def take_pictures(page: Path) -> Mapping[str, bytes]:
    """File name → WebP of the page, as a light and as a dark browser shows it."""
    from playwright.sync_api import sync_playwright

    pictures = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or None, args=["--no-sandbox"]
        )
        for version, name in NAMES.items():
            context = browser.new_context(
                viewport={"width": WIDTH, "height": HEIGHT},
                device_scale_factor=SCALE,
                color_scheme="dark" if version == "dark" else "light",
                reduced_motion="reduce",
            )
            tab = context.new_page()
            tab.goto(page.resolve().as_uri())
            tab.wait_for_selector("canvas, svg")
            tab.wait_for_timeout(1500)  # until the last matrix is drawn
            session = context.new_cdp_session(tab)
            shot = session.send("Page.captureScreenshot", {"format": "webp", "quality": QUALITY})
            pictures[name] = base64.b64decode(shot["data"])
            context.close()
        browser.close()
    return pictures
