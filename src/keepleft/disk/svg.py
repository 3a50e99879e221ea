"""A sheet to draw on: what all hand-written .svg pictures share. Text of any kind and script comes out as text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from keepleft.disk import atomic

INK, DIM, FAINT, PAPER, BLUE = "#222222", "#6b7580", "#d8dee4", "#ffffff", "#1f5fa8"
LETTER = 6.4  # the width of a letter of 12 pixels, more or less
MARGIN = 16
WIDEST = 900  # that a picture becomes for its title
BOLD = 15  # bold letters of 14 pixels are as wide as these

_ODD = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # what XML cannot hold
_SIGNS = {"\n": "↵", "\t": "⇥", "\r": "␍", "\x7f": "␡"}
_TURNING = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")  # would turn what stands beside it around
_JOINING = frozenset("\u094d\u09cd\u0acd\u0b4d\u0c4d\u0d4d")  # viramas: the next consonant belongs to this one


def sheet(path: str | Path, title: str, wide: float, tall: float, parts: Iterable[str]) -> Path:
    """Write a picture with its title above it, at once or not at all; y below 34 is the title's.

    It becomes wider where the title needs that, up to a point.
    """
    path = Path(path)
    wide = max(wide, min(WIDEST, 2 * MARGIN + width(title, BOLD)))
    if path.suffix != ".svg":
        raise ValueError(f"{path.name!r} is no .svg: these pictures are drawn as .svg")
    shown = short(title, wide - 2 * MARGIN + 1, BOLD)
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {tall:g}" width="{wide:g}" height="{tall:g}" '
            f'font-family="sans-serif" font-size="12" fill="{INK}" role="img" aria-label={quoteattr(_whole(title))}>',
            named(title), f'<rect width="{wide:g}" height="{tall:g}" fill="{PAPER}"/>',
            f'<text x="{MARGIN}" y="25" font-size="14" font-weight="bold">{said(shown)}</text>']
    atomic.text(path, "\n".join([*head, *parts, "</svg>\n"]))
    return path


def text(x: float, y: float, words: str, *, anchor: str = "start", bold: bool = False, fill: str = INK, size: float = 12,
         struck: bool = False, up: bool = False) -> str:
    """Words at a place; `up`: they run upwards from there."""
    style = (f' text-anchor="{anchor}"' if anchor != "start" else "") + (' font-weight="bold"' if bold else "")
    style += (f' fill="{fill}"' if fill != INK else "") + (f' font-size="{size:g}"' if size != 12 else "")
    style += ' text-decoration="line-through"' if struck else ""
    place = f'transform="translate({x:.1f} {y:.1f}) rotate(-90)"' if up else f'x="{x:.1f}" y="{y:.1f}"'
    return f"<text {place}{style}>{said(words)}</text>"


def named(words: str) -> str:
    """What is shown where the pointer rests, and read aloud; inside the thing it names."""
    return f"<title>{said(words)}</title>"


def said(words: str) -> str:
    """Text as XML."""
    return escape(_whole(words))


def visible(words: str, *, spaces: bool = True) -> str:
    """What is hard to see as signs: spaces (if asked for), line breaks, control characters, a vowel sign without its letter."""
    out = []
    for letter in words:
        if letter in _SIGNS:
            out.append(_SIGNS[letter])
        elif letter < " ":
            out.append(chr(0x2400 + ord(letter)))
        elif _TURNING.match(letter) or "\x80" <= letter < "\xa0":
            out.append(f"\\u{ord(letter):04x}")
        elif spaces and letter.isspace():
            out.append("␣")
        else:
            out.append(letter)
    return "".join(["◌", *out] if words and unicodedata.category(words[0])[0] == "M" else out)


def clusters(words: str) -> list[str]:
    """The text in pieces that a reader takes for one letter: vowel signs, accents and joined letters stay together."""
    out: list[str] = []
    for letter in words:
        if out and (_stays(letter) or _holds(out[-1], letter)):
            out[-1] += letter
        else:
            out.append(letter)
    return out


def width(words: str, size: float = 12) -> float:
    """About how wide a text is."""
    return sum(map(_share, words)) * LETTER * size / 12


def short(words: str, room: float, size: float = 12, *, keep_end: bool = False) -> str:
    """As much of the beginning (or the end) as there is room for, cut between letters; … says that there was more."""
    if width(words, size) <= room:
        return words
    left, kept = room - width("…", size), []
    for piece in reversed(clusters(words)) if keep_end else clusters(words):
        left -= width(piece, size)
        if left < 0:
            break
        kept.append(piece)
    return "…" + "".join(reversed(kept)).lstrip() if keep_end else "".join(kept).rstrip() + "…"


def _whole(words: str) -> str:
    return _ODD.sub("\ufffd", words)


def _stays(letter: str) -> bool:
    """Belongs to the letter before it: marks, joiners, the colour of a skin."""
    return unicodedata.category(letter)[0] == "M" or letter in "\u200c\u200d" or "\U0001f3fb" <= letter <= "\U0001f3ff"


def _holds(piece: str, letter: str) -> bool:
    """What ends the piece takes the next letter in: a joiner, a virama before a letter, half of a flag or line break."""
    if piece[-1] in "\r\n":
        return piece + letter == "\r\n"
    flag = "\U0001f1e6" <= piece[-1] <= "\U0001f1ff" and "\U0001f1e6" <= letter <= "\U0001f1ff"
    bare = piece.rstrip("\u200c\u200d")
    return flag or piece.endswith("\u200d") or (bool(bare) and bare[-1] in _JOINING and unicodedata.category(letter) == "Lo")


def _share(letter: str) -> float:
    kind = unicodedata.category(letter)
    if kind in ("Mn", "Me", "Cf"):
        return 0.0
    if unicodedata.east_asian_width(letter) in "WF":
        return 2.0
    return 1.4 if kind == "Lo" else 1.3 if letter in "mwMWQO@%␣⇥↵…◌—" else 1.05
