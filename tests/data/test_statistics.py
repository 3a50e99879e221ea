"""The statistics are those of a slow count, and what deserves a warning gets one."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from statistics import median_low

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepleft.data import statistics as data_statistics
from keepleft.data.sources import RecordSource, lines, open_source, parallel_text, running_text
from keepleft.data.statistics import profile, script, script_shares

PAIR = ("src", "tgt")


@dataclass(frozen=True)
class ListSource(RecordSource):
    """Records from a list."""

    records: list[tuple[str, ...]]
    fields: tuple[str, ...] = PAIR
    name: str = "a list"
    size: int | None = None

    def __iter__(self):
        return iter(self.records)

    def location(self, n):
        return f"record {n}"


text = st.one_of(
    st.text(max_size=12), st.lists(st.sampled_from(["a", "sea", "é", "море"]), max_size=60).map(" ".join)
)


@given(records=st.lists(st.tuples(text, text), min_size=1, max_size=60), max_words=st.integers(0, 40))
def test_the_numbers_are_those_of_a_slow_count(records, max_words):
    report = profile(ListSource(records), max_words=max_words)
    for side, field in enumerate(report.fields):
        texts = [record[side] for record in records]
        for lengths, numbers in (
            (field.characters, [len(t) for t in texts]),
            (field.words, [len(t.split()) for t in texts]),
        ):
            assert (lengths.median, lengths.max, lengths.total) == (
                median_low(numbers),
                max(numbers),
                sum(numbers),
            )
            assert (
                sum(n <= lengths.p95 for n in numbers)
                >= 0.95 * len(numbers)
                > sum(n < lengths.p95 for n in numbers)
            )
        assert (field.count, field.empty) == (len(texts), sum(not t.strip() for t in texts))
        letters = Counter(script(c) for t in texts for c in t if c.isalpha())
        assert field.scripts == pytest.approx({name: n / letters.total() for name, n in letters.items()})
    words = [(len(a.split()), len(b.split())) for a, b in records]
    assert report.count == report.compared == len(records)
    assert report.duplicates == len(records) - len(set(records))
    assert report.half_empty == sum((not a) != (not b) for a, b in words)
    assert report.identical == sum(a == b and bool(a.strip()) for a, b in records)
    assert report.length_mismatches == sum(
        min(pair) > 0 and max(pair) > 10 and max(pair) > 3 * min(pair) for pair in words
    )
    assert report.overlong == sum(max(pair) > max_words for pair in words)
    assert json.loads(json.dumps(report.record()))["count"] == len(records)
    assert all(isinstance(line, str) and "\n" not in line for line in report.lines()[:1])


def test_scripts_are_called_by_their_names():
    names = """Latin Latin Latin Latin Other Cyrillic Devanagari Greek Greek Han Hiragana Katakana Katakana
        Latin Hangul Hebrew Arabic Thai Latin Latin"""
    assert [script(c) for c in "aéſÅʰвहΩµ海ひカｶＡ가עعกªÅ"] == names.split()
    assert script_shares(Counter("sea 12 海!")) == {"Latin": 0.75, "Han": 0.25}
    assert script_shares(Counter("12 !")) == {}


def test_scripts_of_much_text_are_estimated_fairly(monkeypatch):
    monkeypatch.setattr(data_statistics, "EXACT_SCRIPT_CHARACTERS", 1000)
    report = profile(ListSource([("sea",) if n % 4 else ("море",) for n in range(16_001)], ("text",)))
    assert report.sampled
    assert "from one record in 16" in "\n".join(report.lines())
    even = profile(ListSource([("sea" if n < 8000 else "мор",) for n in range(16_000)], ("text",)))
    assert even.fields[0].scripts == pytest.approx({"Latin": 0.5, "Cyrillic": 0.5}, abs=0.02)


def test_duplicates_are_counted_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(data_statistics, "MAX_HASHED_RECORDS", 50)
    report = profile(ListSource([("same",)] * 1000, ("text",)))
    assert report.compared < report.count == 1000
    assert report.duplicates == report.compared - 1
    assert any("among the first" in warning and "only" in warning for warning in report.warnings)
    assert any("later ones were not compared" in line for line in report.lines())


def test_labels_are_counted_and_rare_ones_reported():
    report = profile(
        ListSource([("a", "good")] * 20 + [("b", "bad")] * 10 + [("c d e f", "odd")] * 2, ("text", "label")),
        max_words=3,
    )
    assert report.labels == {"good": 20, "bad": 10, "odd": 2}
    assert "labels: 'odd' has only 2 examples" in report.warnings
    assert report.overlong == 2
    assert report.identical is report.length_mismatches is report.half_empty is None
    assert "  labels: good 20, bad 10, odd 2" in report.lines()


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["x"] * 9, "all are 'x', so there is nothing to learn"),
        ([str(n) for n in range(300)], "300 different ones: is this the column of labels?"),
        (["a"] * 9 + ["b", "c", "c"], "2 have fewer than 5 examples, 'b' only 1"),
    ],
)
def test_labels_that_look_wrong_are_reported(labels, expected):
    report = profile(ListSource([(f"text {n}", label) for n, label in enumerate(labels)], ("text", "label")))
    assert any(expected in warning for warning in report.warnings)
    assert len(report.labels) <= 50
    assert report.num_labels == len(set(labels))


def test_warnings_name_the_share_and_the_number():
    records = [(f"a {n}", f"b {n}") for n in range(94)]
    records += [("", "x"), ("y", " "), ("", "z"), ("s", "s"), ("s", "s"), ("s\ufffd", "t")]
    report = profile(ListSource(records), max_words=1)
    assert report.warnings == (
        "3 % of the pairs are empty on one side (3)",
        "src holds 1 replacement character (U+FFFD): it was once read in a wrong encoding",
        "2 % of the pairs are the same on both sides (2)",
        "94 % of the records are longer than 1 word (94)",
    )
    assert profile(ListSource(records[:50])).warnings == ()
    assert profile(ListSource([("a",), ("",), ("a",)], ("text",))).warnings == (
        "33 % of the records have an empty text (1)",
        "33 % of the records repeat an earlier one (1)",
    )


def test_a_sample_is_the_first_records():
    source = ListSource([(str(n),) for n in range(100)], ("text",))
    part, everything = profile(source, sample=7), profile(source, sample=100)
    assert (part.count, part.complete, part.fields[0].characters.total) == (7, False, 7)
    assert "the first 7 records" in part.lines()[0]
    assert (everything.count, everything.complete) == (100, True)


def test_files_are_profiled(tmp_path):
    (tmp_path / "a.en").write_text("the sea\nis calm\n" * 5000)
    (tmp_path / "a.fr").write_text("la mer\nest calme\n" * 5000)
    report = profile(parallel_text(tmp_path / "a.en", tmp_path / "a.fr"))
    assert (report.name, report.count, report.duplicates) == ("a.en + a.fr", 10_000, 9_998)
    assert report.lines()[0] == "a.en + a.fr: 10,000 records, 165.0 kB on disk"
    text = (tmp_path / "a.en").read_text()
    assert profile(running_text(tmp_path / "a.en")).fields[0].characters.total == len(text)
    assert profile(lines(tmp_path / "a.en")).fields[0].words.total == len(text.split())
    (tmp_path / "d.tsv").write_text("x\n")
    with pytest.raises(ValueError, match=r"d\.tsv line 1"):
        profile(open_source(tmp_path / "d.tsv", PAIR))
