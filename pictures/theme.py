"""Light and dark versions of a picture: every colour of the light one has a counterpart in the dark one."""

from __future__ import annotations

import re

from keepleft import svg
from keepleft.attention.mask_plot import HIDDEN_COLOUR
from keepleft.plots.charts import COLOURS

RED = "#c62828"
GREEN = "#1b7a3d"
PANEL = "#f6f8fa"  # the inside of a terminal or a card

DARK_COLOURS = {
    svg.INK: "#e6edf3",
    svg.DIM: "#9ba7b4",
    svg.FAINT: "#3d4650",
    svg.PAPER: "#0d1117",
    svg.BLUE: "#6cb0ff",
    HIDDEN_COLOUR: "#1c232b",
    RED: "#ff8a7a",
    GREEN: "#7bd389",
    PANEL: "#161b22",
    **dict(zip(COLOURS[1:], ("#ff9a62", "#7bd389", "#cf9bf2", "#e3c04f", "#b5bdc6"), strict=True)),
}


def darken(picture: str) -> str:
    """The same SVG on a dark page. Raises ValueError for a colour that has no counterpart."""

    def replace(match: re.Match[str]) -> str:
        if match[0] not in DARK_COLOURS:
            raise ValueError(
                f"the colour {match[0]} has no counterpart for dark pages: add one to DARK_COLOURS in "
                "pictures/theme.py"
            )
        return DARK_COLOURS[match[0]]

    return re.sub(r"(?<!&)#[0-9a-f]{6}\b", replace, picture)


def describe(picture: str, description: str) -> str:
    """The SVG with a <desc> behind its title, for screen readers, and round corners."""
    end = picture.index("</title>") + len("</title>")
    picture = f"{picture[:end]}\n<desc>{svg.escape_xml(description)}</desc>{picture[end:]}"
    return re.sub(
        r'(<rect width="[\d.]+" height="[\d.]+") (fill="#ffffff"/>)', r'\1 rx="8" \2', picture, count=1
    )
