"""An SVG picture takes any text, shows what is hard to see, and cuts no text inside a grapheme."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepleft import svg

SVG = "{http://www.w3.org/2000/svg}"
SCRIPTS = st.text(st.sampled_from("aéz Zक्षिमान्त्री।हूँ\u0301\u0302\u200d\u200c👩🏽🚀🇫🇷❤\ufe0f日本한\r\n\t"))


@given(st.text(st.characters(codec=None), max_size=30))
def test_any_text_makes_a_whole_file(tmp_path_factory, string):
    path = tmp_path_factory.mktemp("svg") / "a.svg"
    parts = [svg.text(3, 40, svg.show_invisibles(string)), svg.text(9, 9, string, vertical=True)]
    root = ElementTree.fromstring(svg.write_svg(path, string, 100, 80, parts).read_text("utf-8"))
    assert root.tag == f"{SVG}svg"
    assert len(root.findall(f"{SVG}text")) == 3


@given(SCRIPTS)
def test_letters_stay_whole(string):
    regex = pytest.importorskip("regex")
    pieces = svg.graphemes(string)
    assert "".join(pieces) == string
    ends = {sum(map(len, pieces[:n])) for n in range(len(pieces) + 1)}
    assert ends <= {0, *(match.end() for match in regex.finditer(r"\X", string))}


@given(SCRIPTS, st.integers(20, 200), st.booleans())
def test_what_is_cut_fits_and_is_cut_between_letters(string, max_width, keep_end):
    cut = svg.truncate(string, max_width, keep_end=keep_end)
    if cut == string:
        return
    assert svg.width(cut) <= max_width
    pieces = svg.graphemes(string)
    kept = cut[1:] if keep_end else cut[:-1]
    assert any(
        kept == ("".join(pieces[n:]).lstrip() if keep_end else "".join(pieces[:n]).rstrip())
        for n in range(len(pieces) + 1)
    )


def test_what_is_hard_to_see_is_shown():
    assert svg.show_invisibles(" a\n\tb\u00a0\x00\u202e") == "␣a↵⇥b␣␀\\u202e"
    assert svg.show_invisibles("a b", spaces=False) == "a b"
    assert svg.show_invisibles("ि") == "◌ि"
    assert svg.show_invisibles("समुद्र") == "समुद्र"
    assert svg.graphemes("क्षत्रिय") == ["क्ष", "त्रि", "य"]


def test_a_title_has_room_but_not_any_amount_of_it(tmp_path):
    for title, low, high in (
        ("t", 50, 50),
        ("a title of some length", 150, 300),
        ("a title " * 99, 900, 900),
    ):
        root = ElementTree.fromstring(svg.write_svg(tmp_path / "a.svg", title, 50, 9, []).read_text("utf-8"))
        assert low <= float(root.get("width")) <= high
        assert svg.width(root.find(f"{SVG}text").text) <= float(root.get("width"))
        assert root.find(f"{SVG}title").text == title
        assert root.find(f"{SVG}text").text.endswith("…") == (len(title) > 99)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no \.svg"):
        svg.write_svg(tmp_path / "a.png", "t", 9, 9, [])
    assert not list(tmp_path.iterdir())
