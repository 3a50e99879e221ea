"""The badge of a README: the verdict in words, in a colour, and for screen readers."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from keepleft.auditing.badge import COLORS, LABEL_COLOR, badge
from keepleft.auditing.report import AuditReport

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("verdict", ["clean", "leak", "unchecked"])
def test_the_verdict_is_told_in_words(verdict):
    picture = ElementTree.fromstring(badge(verdict))
    assert picture.get("aria-label") == picture.find(f"{SVG}title").text == f"no peeking: {verdict}"
    assert [text.text for text in picture.iter(f"{SVG}text")] == ["no peeking", verdict]
    assert 90 < int(picture.get("width")) < 200


def test_a_report_without_checks_is_not_clean():
    assert AuditReport("Mine", "causal", "quick").badge() == badge("unchecked")


@pytest.mark.parametrize("color", [*COLORS.values(), LABEL_COLOR])
def test_white_letters_can_be_read(color):
    channels = [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    assert 1.05 / (luminance + 0.05) >= 4.5
