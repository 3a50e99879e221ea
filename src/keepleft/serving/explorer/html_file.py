"""The page with a snapshot of answers in one HTML file, which needs no server, no network and no Python."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any

from keepleft.disk import atomic

PAGE_FOLDER = Path(__file__).parent / "page"  # as `make page` builds it: one script, one style sheet


def page_file(name: str, folder: Path | None = None) -> str:
    """The text of one of the page's files; FileNotFoundError says how to build it."""
    path = (PAGE_FOLDER if folder is None else folder) / name
    if not path.is_file():
        raise FileNotFoundError(
            f"{name}, a part of the explorer's page, is missing: `make page` builds it, or get Node and "
            "install keepleft again"
        )
    return path.read_text("utf-8").replace("\r\n", "\n")


def write_html(
    path: str | Path,
    snapshot: Iterable[Mapping[str, Any]],
    *,
    title: str = "keepleft explorer",
    folder: Path | None = None,
) -> Path:
    """Write the page with a snapshot from `build_snapshot`; `folder` holds the built page, if not our own."""
    path = Path(path)
    with atomic.explain_os_error(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, html_page(snapshot, title=title, folder=folder))
    return path


def html_page(
    snapshot: Iterable[Mapping[str, Any]], *, title: str = "keepleft explorer", folder: Path | None = None
) -> str:
    """The same as a string. Token texts are data and stay data: every `<` of theirs is escaped."""
    script = re.sub(r"<(?=/script|!--)", r"\\x3c", page_file("explorer.js", folder), flags=re.I)
    style = re.sub(r"<(?=/style)", r"\\3c ", page_file("explorer.css", folder), flags=re.I)
    answers = json.dumps(list(snapshot), ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )
    content_security_policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f'<meta http-equiv="Content-Security-Policy" content="{content_security_policy}">',
            f"<title>{escape(title)}</title>",
            '<link rel="icon" href="data:,">',
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            '<div id="keepleft"></div>',
            "<noscript>This page needs JavaScript, which is disabled.</noscript>",
            f'<script type="application/json" id="keepleft-snapshot">{answers}</script>',
            f'<script type="module">{script}</script>',
            "</body>",
            "</html>\n",
        ]
    )


def _hash(content: str) -> str:
    """The CSP hash of an inline script or style: the browser runs nothing else."""
    return f"sha256-{b64encode(sha256(content.encode()).digest()).decode()}"
