"""Charts are complete .svg files with round ticks, a curve or bar for each number, and all of it inside."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from keepleft.plots.charts import bar_chart, line_chart, log_ticks, nice_ticks

SVG = "{http://www.w3.org/2000/svg}"


def read(path):
    return ElementTree.fromstring(path.read_text("utf-8"))


def test_a_curve_for_each_series_and_no_two_alike(tmp_path):
    points = [(n, 10 / (n + 1)) for n in range(20)]
    root = read(
        line_chart(
            tmp_path / "a.svg",
            {"one": points, "two & <three>": points[:7]},
            title="a < b",
            x_label="step",
            y_label="loss",
            captions=[("English", "Hello " * 99), ("", ""), ("French", "Bonjour")],
        )
    )
    curves = root.findall(f"{SVG}polyline")
    assert [len(curve.get("points").split()) for curve in curves] == [20, 7]
    assert (
        len({curve.get("stroke") for curve in curves})
        == len({curve.get("stroke-dasharray") for curve in curves})
        == 2
    )
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"a < b", "step", "loss", "one", "two & <three>", "English", "French", "Bonjour"} <= set(texts)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("log", [False, True])
def test_everything_lies_inside(tmp_path, log):
    root = read(
        line_chart(
            tmp_path / "a.svg",
            {"one": [(3, 0.02), (977, 31.0), (41, 1.0)]},
            title="t",
            x_label="x",
            y_label="y",
            log_y=log,
        )
    )
    width, height = float(root.get("width")), float(root.get("height"))
    for pair in root.find(f"{SVG}polyline").get("points").split():
        x, y = map(float, pair.split(","))
        assert 0 < x < width
        assert 0 < y < height
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x", 1)) < width
        assert 0 < float(text.get("y", 1)) < height


def test_higher_is_higher_and_equal_factors_are_equally_far_on_a_logarithmic_axis(tmp_path):
    root = read(
        line_chart(
            tmp_path / "a.svg",
            {"one": [(0, 1), (1, 10), (2, 100)]},
            title="t",
            x_label="x",
            y_label="y",
            log_y=True,
        )
    )
    one, ten, hundred = (
        float(pair.split(",")[1]) for pair in root.find(f"{SVG}polyline").get("points").split()
    )
    assert one > ten > hundred
    assert math.isclose(one - ten, ten - hundred, abs_tol=0.2)


def test_a_point_without_a_place_is_left_out(tmp_path):
    points = [(0, 1.0), (1, math.nan), (2, 0.0), (3, math.inf), (4, 0.5)]
    for log, remaining in ((False, 3), (True, 2)):
        root = read(
            line_chart(tmp_path / "a.svg", {"one": points}, title="t", x_label="x", y_label="y", log_y=log)
        )
        assert len(root.find(f"{SVG}polyline").get("points").split()) == remaining
    with pytest.raises(ValueError, match="no point to draw"):
        line_chart(tmp_path / "a.svg", {"one": points[1:2]}, title="t", x_label="x", y_label="y")


def test_a_bar_for_each_value_as_high_as_it_is(tmp_path):
    root = read(
        bar_chart(
            tmp_path / "b.svg",
            {"one": [1, 2, 3], "two": [2, 4, 6]},
            ["a", "b", "c"],
            title="t",
            x_label="x",
            y_label="y",
        )
    )
    heights = {
        bar.find(f"{SVG}title").text: float(bar.get("height"))
        for bar in root.findall(f"{SVG}rect")
        if bar.find(f"{SVG}title") is not None
    }
    assert len(heights) == 6
    assert math.isclose(heights["two, c: 6"], 3 * heights["two, a: 2"], abs_tol=0.3)
    assert math.isclose(heights["one, b: 2"], heights["two, a: 2"], abs_tol=0.1)
    fills = {bar.get("fill") for bar in root.findall(f"{SVG}rect") if bar.find(f"{SVG}title") is not None}
    hatched = {f"url(#{pattern.get('id')})" for pattern in root.iter(f"{SVG}pattern")}
    assert len(fills) == 2
    assert len(fills & hatched) == 1


def test_a_bar_is_labelled_in_plain_digits_below_the_end_of_its_axis(tmp_path):
    path = bar_chart(tmp_path / "b.svg", {"one": [99_323]}, ["a"], title="t", x_label="x", y_label="y")
    labels = {text.text: float(text.get("y", "0")) for text in read(path).findall(f"{SVG}text")}
    assert labels["99,300"] > labels["120,000"]
    assert not any("e+" in label for label in labels)


def test_what_cannot_be_drawn_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="give one for each group"):
        bar_chart(tmp_path / "b.svg", {"one": [1, 2]}, ["a"], title="t", x_label="x", y_label="y")
    with pytest.raises(ValueError, match="above 0"):
        bar_chart(tmp_path / "b.svg", {"one": [0.0]}, ["a"], title="t", x_label="x", y_label="y", log_y=True)
    with pytest.raises(ValueError, match=r"no \.svg"):
        line_chart(tmp_path / "b.png", {"one": [(0, 1)]}, title="t", x_label="x", y_label="y")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (0, 400), (3, 977), (-5, 5), (0.021, 0.022), (7, 7), (0, 0), (-3, -3), (1e-9, 2e-9)],
)
def test_ticks_are_round_and_reach_around(low, high):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low + 1e-12
    assert ticks[-1] >= high - 1e-12
    assert 2 <= len(ticks) <= 9
    spacing = ticks[1] - ticks[0]
    assert round(spacing / 10 ** math.floor(math.log10(spacing) + 1e-9), 6) in (1, 2, 5)


@pytest.mark.parametrize(
    ("low", "high"), [(1, 10), (0.02, 7), (1, 1), (3, 4), (1e-12, 1), (0.9, 1100), (1e-30, 1e30), (100, 1000)]
)
def test_logarithmic_ticks_are_round_and_reach_around(low, high):
    ticks = log_ticks(low, high)
    assert ticks[0] <= low * 1.000001
    assert ticks[-1] >= high * 0.999999
    assert 2 <= len(ticks) <= 10
