"""The zoo's page holds all it needs, and nothing in its data becomes markup or code."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
HOSTILE = "</script><img src=x onerror=alert(1)>"
DATA = {
    "releases": [
        {
            "release": f"package-1.0{HOSTILE}",
            "rows": [
                {"name": HOSTILE, "verdict": "leak", "findings": [{"kind": "future", "message": HOSTILE}]}
            ],
        }
    ],
    "confirmed": {},
}


@pytest.fixture
def scoreboard(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import scoreboard

    return scoreboard


def data_of(page: str) -> str:
    return page.partition('<script type="application/json" id="data">')[2].partition("</script>")[0]


def test_no_text_of_the_data_becomes_markup(scoreboard):
    page = scoreboard.page_html(DATA)
    assert "<img" not in page
    assert json.loads(data_of(page)) == DATA


def test_the_page_loads_nothing_and_builds_no_markup_from_text(scoreboard):
    page = scoreboard.page_html(DATA)
    assert "default-src 'none'" in page
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of SVG's elements, which nobody fetches
    assert not re.search(r"\b(src|srcset|action)=|@import|url\(", page.replace(data_of(page), ""))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", page)


def test_moves_are_letters(scoreboard):
    claimed = [[True, False], [True, True]]
    assert scoreboard.moves_picture(claimed, [[1.0, 0.0], [0.0, float("inf")]]) == ["j ", ".~"]
    assert scoreboard.moves_picture(claimed, [[1e-7, 1.0], [0.0, 0.0]]) == ["aJ", ".."]


def test_a_release_imports_nothing_of_another(scoreboard):
    names = [release.name for release in scoreboard.RELEASES]
    assert len(names) == len(set(names))
    folder = Path("releases")
    for release in scoreboard.RELEASES:
        others = {str(folder / name) for name in names} - {str(folder / release.name)}
        assert not others & set(release.import_path(folder))


def test_the_code_of_every_model_makes_a_model(scoreboard):
    for release in scoreboard.RELEASES:
        for name, code in release.models.items():
            names = {
                target.id
                for node in ast.parse(code).body
                if isinstance(node, ast.Assign)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            assert "model" in names, (release.name, name)


def test_the_confirmation_shares_no_code_with_the_audit():
    tree = ast.parse((BENCH / "confirm.py").read_text("utf-8"))
    imported = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not {name for name in imported if name.partition(".")[0] in ("keepleft", "scoreboard")}
