"""The HTML report is one self-contained page: findings, what was not checked, and the influence map."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from keepleft.auditing.html_report import html_page
from keepleft.auditing.report import AuditReport, Finding

T = 5
NASTY = "</pre><script>alert('\"')</script>\0&amp;"
CAUSAL = tuple(tuple(k <= q for k in range(T)) for q in range(T))
MOVES = tuple(tuple(0.25 if k <= q else 0.0 for k in range(T)) for q in range(T))
PEEKS = tuple(
    tuple(0.2 if (q, k) == (1, 3) else size for k, size in enumerate(row)) for q, row in enumerate(MOVES)
)
CLEAN = AuditReport(
    "Mine",
    "causal",
    "quick",
    checked=("future",),
    paths=("eval, batch 2", "train, batch 2"),
    claimed=CAUSAL,
    measured=MOVES,
    notes=("weights were woken",),
    skipped=("padding: it takes no mask",),
    about={"torch": "2.13"},
    seconds=2.5,
    calls=31,
)
FOUND = Finding(
    "future",
    1,
    3,
    0.2,
    "eval, batch 2",
    "blocks.1.attn",
    "position 1 reads position 3; mend it.",
    probe="substitution",
    line="my.py:7",
    reproduce="model(a)[0, 1] - model(b)[0, 1]",
    also=("train, batch 2",),
)
LEAK = replace(CLEAN, findings=(FOUND,), measured=PEEKS)
NOTHING = replace(
    CLEAN,
    checked=(),
    blocked=("the audit: it crashes",),
    skipped=("the audit: it crashes",),
    claimed=(),
    measured=(),
)


class Read(HTMLParser):
    """The parsed page: elements, which must close in order, and text."""

    EMPTY = {"meta", "rect", "circle", "path"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.seen: list[tuple[str, dict]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def marks(self, kind: str) -> int:
        return sum(attributes.get("class") == kind for _, attributes in self.seen)


def test_it_says_the_verdict_and_every_finding():
    text = html_page(LEAK)
    found = Read(text)
    assert "leak: Mine" in found.texts["title"][0]
    for told in (
        FOUND.message,
        FOUND.path,
        FOUND.module,
        FOUND.line,
        FOUND.reproduce,
        "weights were woken",
        "padding: it takes no mask",
        "torch 2.13",
        "1 further code path ",
        "2 code paths taken",
    ):
        assert told in text
    assert found.texts["pre"] == [FOUND.reproduce]
    assert sum(tag == "details" for tag, _ in found.seen) == 2


def test_it_says_what_the_budget_left_out():
    paths = tuple(f"train, flag={n}, batch 2" for n in range(5))
    few, many = (
        replace(CLEAN, not_tried=not_tried) for not_tried in (paths[:2], (*paths, "length 9", "length 65"))
    )
    assert "<h2>Not tried</h2>" not in html_page(CLEAN)
    assert f"<p>{paths[0]}; {paths[1]} (budget full tries them)</p>" in html_page(few)
    assert "all 2" not in html_page(few)
    found = Read(html_page(many))
    assert "all 7" in found.texts["summary"]
    assert found.texts["li"].count(paths[4]) == 1
    assert many.text().splitlines()[-1] == (
        f"not tried: {'; '.join(paths[:3])}; 2 more code paths; lengths 9, 65 (budget full tries them)"
    )


def test_cells_that_move_against_the_claim_have_a_colour_and_a_shape_of_their_own():
    found = Read(html_page(LEAK))
    assert found.marks("cross") == found.marks("bad") == 2  # one in the legend
    titles = found.texts["title"]
    assert "position 1 is moved by position 3, by 0.2, which the claim does not allow" in titles
    assert "position 3 is moved by position 1, by 0.25" in titles
    assert "position 0 is not moved by position 4" in titles
    assert "position 0 must not be moved by position 4" in titles
    assert Read(html_page(CLEAN)).marks("cross") == 1


def test_what_was_taken_for_rounding_is_not_shown_as_a_leak():
    found = Read(html_page(replace(CLEAN, measured=PEEKS)))
    assert found.marks("cross") == 0
    assert found.marks("noise") == 2
    assert "taken for rounding" in html_page(replace(CLEAN, measured=PEEKS))


def test_what_nobody_checked_is_not_taken_for_rounding():
    text = html_page(replace(CLEAN, measured=PEEKS, checked=("batch",)))
    assert Read(text).marks("cross") == 2
    assert "was not made" in text


def test_a_leak_on_another_path_is_not_looked_for_in_the_picture():
    assert "does not show on that path" in html_page(replace(LEAK, measured=MOVES))


def test_a_number_that_became_nan_is_said_in_words():
    wild = tuple(tuple(float("inf") if size else 0.0 for size in row) for row in PEEKS)
    assert "position 1 is moved by position 3, from a number to NaN or back" in html_page(
        replace(LEAK, measured=wild)
    )


def test_without_a_verdict_it_says_why_and_shows_no_picture():
    text = html_page(NOTHING)
    assert "<b>? unchecked</b>" in text
    assert "the audit: it crashes <b>Without this there is no verdict.</b>" in text
    assert "There is no picture" in text
    Read(text)


def test_many_positions_share_squares_and_the_worst_is_shown():
    long = 200
    claimed = tuple(tuple(k <= q for k in range(long)) for q in range(long))
    measured = tuple(
        tuple(1e-3 if k <= q else 3e-6 if (q, k) == (101, 102) else 0.0 for k in range(long))
        for q in range(long)
    )
    text = html_page(replace(LEAK, claimed=claimed, measured=measured))
    assert "stands for 5 × 5 pairs" in text
    assert "position 101 is moved by position 102, by 3e-06, which the claim does not allow" in text
    assert len(text) < 1_500_000
    assert Read(text).marks("cross") == 2


@pytest.mark.parametrize(
    "report",
    [
        replace(
            CLEAN,
            subject=NASTY,
            claim=NASTY,
            budget=NASTY,
            notes=(NASTY,),
            skipped=(NASTY,),
            paths=(NASTY,),
            about={NASTY: NASTY},
        ),
        replace(
            LEAK, findings=(Finding(NASTY, 0, 1, 1.0, NASTY, NASTY, NASTY, NASTY, NASTY, NASTY, (NASTY,)),)
        ),
        replace(NOTHING, blocked=(NASTY,), skipped=(f"future: {NASTY}", NASTY)),
    ],
)
def test_everything_is_escaped_and_nothing_is_fetched(report):
    found = Read(html_page(report))
    assert "\0" not in html_page(report)
    assert not {tag for tag, _ in found.seen} & {"script", "link", "img", "iframe", "object", "a"}
    assert not any(
        name in ("src", "href", "onload", "onclick") or "url(" in str(value)
        for _, given in found.seen
        for name, value in given.items()
    )


def test_a_report_gives_its_own():
    assert CLEAN.html() == html_page(CLEAN)
