"""The page as it was built: one script and one sheet of styles."""

from __future__ import annotations

from pathlib import Path

PAGE_FOLDER = Path(__file__).parent / "page"


def page_file(name: str, folder: Path | None = None) -> str:
    """One of its files, as text."""
    path = (PAGE_FOLDER if folder is None else folder) / name
    if not path.is_file():
        raise FileNotFoundError(
            f"{name}, a part of the explorer's page, is missing: `make page` builds it, or get Node and "
            "install keepleft again"
        )
    return path.read_text("utf-8").replace("\r\n", "\n")
