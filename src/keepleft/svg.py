"""Write SVG pictures: elements, XML escaping, and approximate text widths for any script."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape  # nosec B406 # it writes XML and parses none

from keepleft.disk import atomic

INK = "#222222"
DIM = "#6b7580"
FAINT = "#d8dee4"
PAPER = "#ffffff"
BLUE = "#1f5fa8"
LETTER_WIDTH = 6.4  # approximate width of a letter at 12 pixels
MARGIN = 16
MAX_TITLE_WIDTH = 900  # the width up to which a picture grows for its title
BOLD_SIZE = 15  # bold letters of 14 pixels are as wide as plain ones of this size

_INVALID_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # not allowed in XML
_CONTROL_SYMBOLS = {"\n": "↵", "\t": "⇥", "\r": "␍", "\x7f": "␡"}
_BIDI_CONTROLS = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")  # would reorder the text around them
_VIRAMAS = frozenset("\u094d\u09cd\u0acd\u0b4d\u0c4d\u0d4d")  # join the next consonant to the last


def write_svg(
    path: str | Path, title: str, total_width: float, total_height: float, elements: Iterable[str]
) -> Path:
    """Write a picture atomically, with its title at y below 34.

    The picture grows for its title, up to MAX_TITLE_WIDTH. Raises ValueError for a path that does not end in
    .svg.
    """
    path = Path(path)
    total_width = max(total_width, min(MAX_TITLE_WIDTH, 2 * MARGIN + width(title, BOLD_SIZE)))
    if path.suffix != ".svg":
        raise ValueError(f"{path.name!r} is no .svg: these pictures are drawn as .svg")
    short_title = truncate(title, total_width - 2 * MARGIN + 1, BOLD_SIZE)
    size = f'width="{total_width:g}" height="{total_height:g}"'
    header = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_width:g} {total_height:g}" {size} '
        f'font-family="sans-serif" font-size="12" fill="{INK}" role="img" '
        f'aria-label="{escape_attribute(title)}">',
        title_tag(title),
        f'<rect {size} fill="{PAPER}"/>',
        f'<text x="{MARGIN}" y="25" font-size="14" font-weight="bold">{escape_xml(short_title)}</text>',
    ]
    atomic.write_text(path, "\n".join([*header, *elements, "</svg>\n"]))
    return path


def text(
    x: float,
    y: float,
    content: str,
    *,
    anchor: str = "start",
    bold: bool = False,
    fill: str = INK,
    size: float = 12,
    strikethrough: bool = False,
    vertical: bool = False,
) -> str:
    """A <text> element; `vertical` text runs upwards from (x, y)."""
    style = f' text-anchor="{anchor}"' if anchor != "start" else ""
    style += ' font-weight="bold"' if bold else ""
    style += f' fill="{fill}"' if fill != INK else ""
    style += f' font-size="{size:g}"' if size != 12 else ""
    style += ' text-decoration="line-through"' if strikethrough else ""
    placement = f'x="{x:.1f}" y="{y:.1f}"'
    if vertical:
        placement = f'transform="translate({x:.1f} {y:.1f}) rotate(-90)"'
    return f"<text {placement}{style}>{escape_xml(content)}</text>"


def title_tag(content: str) -> str:
    """A <title> element, to be put inside another: its tooltip, and its name for screen readers."""
    return f"<title>{escape_xml(content)}</title>"


def escape_xml(content: str) -> str:
    """Text escaped for XML; characters that XML does not allow are replaced."""
    return escape(_replace_invalid_xml(content))


def escape_attribute(content: str) -> str:
    """Text inside a double-quoted XML attribute, where a bare line break would be read as a space."""
    entities = {'"': "&quot;", "\n": "&#10;", "\t": "&#9;", "\r": "&#13;"}
    return escape(_replace_invalid_xml(content), entities)


def show_invisibles(string: str, *, spaces: bool = True) -> str:
    """The string with visible symbols for line breaks, control characters and (if `spaces`) white space.

    A combining mark at the beginning gets a dotted circle to stand on.
    """
    out = []
    for character in string:
        if character in _CONTROL_SYMBOLS:
            out.append(_CONTROL_SYMBOLS[character])
        elif character < " ":
            out.append(chr(0x2400 + ord(character)))
        elif _BIDI_CONTROLS.match(character) or "\x80" <= character < "\xa0":
            out.append(f"\\u{ord(character):04x}")
        elif spaces and character.isspace():
            out.append("␣")
        else:
            out.append(character)
    return "".join(["◌", *out] if string and unicodedata.category(string[0])[0] == "M" else out)


def graphemes(string: str) -> list[str]:
    """The string split into user-perceived characters: vowel signs, accents and conjuncts stay together."""
    out: list[str] = []
    for character in string:
        if out and (_extends_grapheme(character) or _joins_next(out[-1], character)):
            out[-1] += character
        else:
            out.append(character)
    return out


def width(string: str, size: float = 12) -> float:
    """The approximate width of a text, in pixels."""
    return sum(map(_relative_width, string)) * LETTER_WIDTH * size / 12


def truncate(string: str, max_width: float, size: float = 12, *, keep_end: bool = False) -> str:
    """As many graphemes of the beginning (or the end) as fit, with … for the rest."""
    if width(string, size) <= max_width:
        return string
    remaining = max_width - width("…", size)
    pieces: list[str] = []
    for piece in reversed(graphemes(string)) if keep_end else graphemes(string):
        remaining -= width(piece, size)
        if remaining < 0:
            break
        pieces.append(piece)
    return "…" + "".join(reversed(pieces)).lstrip() if keep_end else "".join(pieces).rstrip() + "…"


def _replace_invalid_xml(string: str) -> str:
    return _INVALID_XML.sub("\ufffd", string)


def _extends_grapheme(character: str) -> bool:
    """Does it belong to the grapheme before it? Marks, joiners and skin tones do."""
    return (
        unicodedata.category(character)[0] == "M"
        or character in "\u200c\u200d"
        or "\U0001f3fb" <= character <= "\U0001f3ff"
    )


def _joins_next(piece: str, character: str) -> bool:
    """Does the piece take in the character that follows?

    It does after a joiner, after a virama before a letter, between the halves of a flag, and within \\r\\n.
    """
    if piece[-1] in "\r\n":
        return piece + character == "\r\n"
    is_flag = "\U0001f1e6" <= piece[-1] <= "\U0001f1ff" and "\U0001f1e6" <= character <= "\U0001f1ff"
    bare = piece.rstrip("\u200c\u200d")
    return (
        is_flag
        or piece.endswith("\u200d")
        or (bool(bare) and bare[-1] in _VIRAMAS and unicodedata.category(character) == "Lo")
    )


def _relative_width(character: str) -> float:
    category = unicodedata.category(character)
    if category in ("Mn", "Me", "Cf"):
        return 0.0
    if unicodedata.east_asian_width(character) in "WF":
        return 2.0
    if category == "Lo":
        return 1.4
    return 1.3 if character in "mwMWQO@%␣⇥↵…◌—" else 1.05
