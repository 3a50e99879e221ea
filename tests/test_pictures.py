"""The pictures of README and docs are made by pictures/make.py: small, self-contained, described in words."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"
PICTURES = sorted(FOLDER.iterdir())
DRAWINGS = [path for path in PICTURES if path.suffix == ".svg"]
PHOTOGRAPHS = [path for path in PICTURES if path.suffix != ".svg"]  # the explorer, by a browser
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAX_BYTES = 300_000
SVG = "{http://www.w3.org/2000/svg}"


def test_every_picture_is_what_the_script_draws_from_what_the_program_printed():
    ran = subprocess.run(
        [sys.executable, ROOT / "pictures" / "make.py", "--check"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_picture_has_a_light_and_a_dark_version():
    names = {path.name for path in PICTURES}
    assert names
    for name in names:
        stem, dot, ending = name.rpartition(".")
        stem, _, version = stem.rpartition("-")
        assert version in ("light", "dark"), name
        assert {f"{stem}-light{dot}{ending}", f"{stem}-dark{dot}{ending}"} <= names


@pytest.mark.parametrize("path", PHOTOGRAPHS, ids=lambda path: path.name)
def test_a_photograph_is_small_and_a_webp(path):
    picture = path.read_bytes()
    assert 10_000 < len(picture) <= MAX_BYTES
    assert (picture[:4], picture[8:12]) == (b"RIFF", b"WEBP")


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.name)
def test_a_picture_is_small_and_self_contained_and_says_what_it_shows(path):
    picture = path.read_text("utf-8")
    assert len(picture.encode()) <= MAX_BYTES
    root = ElementTree.fromstring(picture)
    assert root.attrib["role"] == "img"
    assert root.find(f"{SVG}title").text.strip()
    assert len(root.find(f"{SVG}desc").text.strip()) > 40
    assert not {element.tag for element in root.iter()} & {
        f"{SVG}{tag}" for tag in ("script", "image", "use", "a")
    }
    assert not [
        name
        for element in root.iter()
        for name in element.attrib
        if name.endswith("href") or name[:2] == "on"
    ]
    assert "http" not in picture.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"@import|url\((?!#)", picture)


def test_the_animation_ends_with_everything_visible_and_stands_still_on_request():
    for version in ("light", "dark"):
        picture = (FOLDER / f"terminal-{version}.svg").read_text("utf-8")
        assert "prefers-reduced-motion:reduce" in picture
        assert re.search(r"@keyframes t0\{0%\{opacity:0\}[\d.]+%,100%\{opacity:1\}\}", picture)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_image_on_a_page_exists_is_made_by_the_script_and_has_an_alternative_text(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    images = re.findall(r"!\[([^\]]*)\]\(([^)#]+)", text)
    images += [(alt, source) for source, alt in re.findall(r'<img src="([^"]+)" alt="([^"]*)"', text)]
    assert text.count("<img ") == len(re.findall(r'<img src="[^"]+" alt="', text)), (
        "an <img> begins with src and alt"
    )
    sources = [source for _, source in images] + re.findall(r'srcset="([^"]+)"', text)
    for source in sources:
        path = (page.parent / source).resolve()
        assert path.exists(), f"{page.name} shows {source}"
        assert path.parent in (FOLDER, ROOT / "docs" / "assets"), f"{source} is not made by pictures/make.py"
    assert all(len(alt) > 10 for alt, _ in images), f"an image on {page.name} has no alternative text"
