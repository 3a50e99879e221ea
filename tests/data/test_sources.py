"""What was written is read back exactly, in little memory; errors name the file and the line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import pickle
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepleft.data import text_file
from keepleft.data.columnar import hub_name
from keepleft.data.sources import (
    count_records,
    documents,
    lines,
    open_source,
    open_table,
    parallel_text,
    running_text,
)

PAIR = ("src", "tgt")

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
line = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), max_size=20)
cell = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\t"), max_size=20)
ends = st.sampled_from(["\n", "\r\n"])


def rows(part):
    """At least one row, with something to read in it, that is not a header."""
    return st.lists(st.tuples(part.map(lambda text: "x" + text), part), min_size=1, max_size=9)


def write(path: Path, text: str | bytes, *, packed: bool = False, mark: bool = False) -> Path:
    """A file, gzipped if `packed`, with a byte order mark if `mark`."""
    data = text if isinstance(text, bytes) else text.encode()
    data = b"\xef\xbb\xbf" + data if mark else data
    path.write_bytes(gzip.compress(data) if packed else data)
    return path


def write_files(folder: Path, **files: str | bytes) -> Path:
    """Files by name; an underscore stands for a dot."""
    for name, text in files.items():
        write(folder / name.replace("_", "."), text)
    return folder


# reading back ---------------------------------------------------------------------------------


@given(pairs=rows(line), end=ends, last=st.booleans(), packed=st.booleans(), mark=st.booleans())
def test_aligned_lines_read_back(tmp_path, pairs, end, last, packed, mark):
    paths, pairs = [], [("first", "first"), *pairs]  # a file must hold some text
    for side, name in enumerate(PAIR):
        text = end.join(pair[side] for pair in pairs) + (end if last or not pairs[-1][side] else "")
        paths.append(write(tmp_path / name, text, packed=packed, mark=mark))
    source = parallel_text(*paths)
    assert list(source) == pairs == list(source)
    assert list(lines(paths[0])) == [(a,) for a, _ in pairs]
    assert count_records(source) == len(pairs)


@given(
    pairs=rows(cell),
    end=ends,
    packed=st.booleans(),
    mark=st.booleans(),
    header=st.booleans(),
    swapped=st.booleans(),
)
def test_tabs_read_back(tmp_path, pairs, end, packed, mark, header, swapped):
    table_rows = [("Source", "TARGET")] * header + pairs
    if swapped:
        table_rows = [(b, a) for a, b in table_rows]
    path = write(
        tmp_path / "d.tsv", "".join("\t".join(row) + end for row in table_rows), packed=packed, mark=mark
    )
    columns = None if header or not swapped else (1, 0)
    source = open_table(path, columns, PAIR)
    assert list(source) == pairs
    for n in range(len(pairs)):
        assert source.location(n) == f"{path} line {n + 1 + header}"


def csv_line(cells: tuple, end: str) -> str:
    """A row of CSV. Python 3.11 quotes a lone carriage return only if the line terminator holds one."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\r\n").writerow(cells)
    return file.getvalue().removesuffix("\r\n") + end


@given(pairs=rows(any_text), end=ends, packed=st.booleans(), mark=st.booleans(), header=st.booleans())
def test_commas_read_back(tmp_path, pairs, end, packed, mark, header):
    table = [("id", "summary", "text")] * header + [(n, b, a) for n, (a, b) in enumerate(pairs)]
    content = "".join(csv_line(cells, end) for cells in table)
    path = write(tmp_path / "d.csv", content, packed=packed, mark=mark)
    assert list(open_source(path, PAIR, None if header else (2, 1))) == pairs
    starts = [int(open_source(path, PAIR, (2, 1)).location(n).rsplit(" ", 1)[1]) for n in range(len(pairs))]
    assert all(a < b for a, b in pairwise(starts))


@given(
    pairs=rows(any_text),
    packed=st.booleans(),
    mark=st.booleans(),
    ascii_only=st.booleans(),
    listed=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_json_reads_back(tmp_path, pairs, packed, mark, ascii_only, indent, listed):
    objects = [{"n": n, "Text": a, "summary": b} for n, (a, b) in enumerate(pairs)]
    if listed:
        path, text = tmp_path / "d.json", json.dumps(objects, ensure_ascii=ascii_only, indent=indent)
    else:
        path = tmp_path / "d.jsonl"
        text = "".join(json.dumps(o, ensure_ascii=ascii_only) + "\n" for o in objects)
    write(path, text, packed=packed, mark=mark)
    assert list(open_source(path, PAIR)) == pairs
    assert list(open_table(path, ("n", "Text"), ("label", "text"))) == [
        (str(n), a) for n, (a, _) in enumerate(pairs)
    ]


@given(text=any_text.map(lambda text: "x" + text), times=st.integers(1, 40_000))
def test_running_text_is_the_file_exactly(tmp_path, text, times):
    text = text * min(times, 300_000 // len(text) + 1)
    source = running_text(write(tmp_path / "t", text))
    pieces = [piece for (piece,) in source]
    assert "".join(pieces) == text
    assert max(len(piece.encode()) for piece in pieces) <= 1 << 17


def test_documents_stand_between_blank_lines(tmp_path):
    path = write(tmp_path / "t.txt", "\n\none\ntwo\n \t\n\nthree\r\n  four\n\n")
    source = documents(path)
    assert list(source) == [("one\ntwo",), ("three\n  four",)]
    assert [source.location(n) for n in (0, 1)] == [f"{path} line 3", f"{path} line 7"]
    marked = documents(write(tmp_path / "m.txt", "one\n\ntwo\n<end>\nthree\n<end>\n"), separator="<end>")
    assert list(marked) == [("one\n\ntwo",), ("three",)]


def test_a_long_json_list_is_read_piece_by_piece(tmp_path):
    objects = [{"text": f"{'long ' * (n % 7) * 9000}{n}"} for n in range(50)]
    assert list(open_source(write(tmp_path / "d.json", json.dumps(objects)), ("text",))) == [
        (o["text"],) for o in objects
    ]


def test_only_line_feeds_end_lines_and_nulls_are_characters(tmp_path):
    path = write(tmp_path / "t", "a\x00b\x0bc\u2028d\x85e\rf\n\n")
    assert list(lines(path)) == [("a\x00b\x0bc\u2028d\x85e\rf",), ("",)]


def test_files_follow_one_another_whatever_their_kind(tmp_path):
    write_files(
        tmp_path,
        a_tsv="a\tb\n",
        c_jsonl='{"src": "c", "tgt": "d"}\n\n{"src": "e", "tgt": "f"}\n',
        g_csv="src,tgt\n\ng,h\n",
    )
    paths = [tmp_path / "a.tsv", tmp_path / "c.jsonl", tmp_path / "g.csv"]
    source = open_source(paths, PAIR)
    assert list(source) == [("a", "b"), ("c", "d"), ("e", "f"), ("g", "h")] == list(source)
    locations = ["a.tsv line 1", "c.jsonl line 1", "c.jsonl line 3", "g.csv line 3"]
    assert [source.location(n) for n in range(4)] == [str(tmp_path / location) for location in locations]
    assert source.size == sum(path.stat().st_size for path in paths)
    assert (source.name, source.fields) == ("a.tsv and 2 more", PAIR)


def test_aligned_lists_go_file_by_file(tmp_path):
    write_files(tmp_path, a_en="1\n2\n", b_en="3\n", a_fr="un\ndeux\n", b_fr="trois\n")
    source = parallel_text([tmp_path / "a.en", tmp_path / "b.en"], [tmp_path / "a.fr", tmp_path / "b.fr"])
    assert list(source) == [("1", "un"), ("2", "deux"), ("3", "trois")]
    assert source.location(2) == f"{tmp_path / 'b.en'} line 1 and {tmp_path / 'b.fr'} line 1"
    with pytest.raises(ValueError, match="2 source files, but 1 target files"):
        parallel_text([tmp_path / "a.en", tmp_path / "b.en"], [tmp_path / "a.fr"])


def test_blank_lines_of_a_pair_are_kept(tmp_path):
    write_files(tmp_path, a_en="1\n\n3\n", a_fr="\n\ntrois")
    source = parallel_text(tmp_path / "a.en", tmp_path / "a.fr")
    assert list(source) == [("1", ""), ("", ""), ("3", "trois")]
    assert source.name == "a.en + a.fr"


@pytest.mark.parametrize(
    ("first", "fields", "columns", "expected"),
    [
        ("sentence\tlabel", ("text", "label"), None, ("c0", "c1")),
        ("id\tClass\tText", ("text", "label"), None, ("c2", "c1")),
        ("en\tfr", PAIR, None, ("c0", "c1")),
        ("text\tsummary", PAIR, None, ("c0", "c1")),
        ("summary\ttext", PAIR, None, ("c1", "c0")),
        ("target\tsource", PAIR, None, ("c1", "c0")),
        ("src\ttgt", PAIR, (0, 1), ("c0", "c1")),
        ("Deutsch\tEnglisch", PAIR, ("Englisch", "deutsch"), ("c1", "c0")),
        ("text\tsummary\ttitle", ("text",), ("title",), ("c2",)),
        ("a\tb\tc", PAIR, ("c", 0), ("c2", "c0")),
    ],
)
def test_a_header_is_understood(tmp_path, first, fields, columns, expected):
    write_files(tmp_path, d_tsv=f"{first}\nc0\tc1\tc2\n", d_csv=f"{first}\nc0\tc1\tc2\n".replace("\t", ","))
    assert list(open_table(tmp_path / "d.tsv", columns, fields)) == [expected]
    assert list(open_table(tmp_path / "d.csv", columns, fields)) == [expected]


def test_without_a_header_the_first_columns_are_taken(tmp_path):
    write_files(tmp_path, d_tsv='"good"\t1\textra\n\nbad "quote\t0\n')
    assert list(open_source(tmp_path / "d.tsv", ("text", "label"))) == [('"good"', "1"), ('bad "quote', "0")]


def test_plain_text_is_lines_or_where_more_is_asked_for_tabs(tmp_path):
    write_files(tmp_path, d_txt="a\tb\n\nc\td\n")
    assert list(open_source(tmp_path / "d.txt", ("text",))) == [("a\tb",), ("",), ("c\td",)]
    assert list(open_source(tmp_path / "d.txt", PAIR)) == [("a", "b"), ("c", "d")]
    assert list(open_source(tmp_path / "d.txt", ("text",), (1,))) == [("b",), ("d",)]


def test_json_values_become_strings_and_rows_within_rows_are_named_with_a_dot(tmp_path):
    write_files(
        tmp_path,
        d_jsonl='{"text": "a", "label": 3}\n{"label": true, "text": "b"}\n{"text": "c", "label": 0.5}\n',
        t_jsonl='{"translation": {"en": "a", "fr": "b"}}\n{"translation": {"fr": "d", "en": "c"}}\n',
    )
    assert list(open_source(tmp_path / "d.jsonl", ("text", "label"))) == [
        ("a", "3"),
        ("b", "true"),
        ("c", "0.5"),
    ]
    assert list(open_table(tmp_path / "t.jsonl", ("translation.en", "translation.fr"), PAIR)) == [
        ("a", "b"),
        ("c", "d"),
    ]


@pytest.mark.parametrize("stand_in", ["bytes", "text", "gzip"])
def test_stdin_is_kept_for_more_than_one_pass(monkeypatch, stand_in):
    data = b"a\tb\nc\td\n"
    raw = io.BytesIO(gzip.compress(data) if stand_in == "gzip" else data)
    monkeypatch.setattr(
        sys, "stdin", io.StringIO(data.decode()) if stand_in == "text" else SimpleNamespace(buffer=raw)
    )
    source = open_source("-", PAIR)
    assert list(source) == [("a", "b"), ("c", "d")] == list(source)
    assert (source.name, source.size, source.location(1)) == ("stdin", None, "stdin line 2")
    path = source.file.path
    assert path.exists()
    del source
    assert not path.exists()


@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="no /dev/fd here")
def test_the_pipe_of_a_shell_is_kept_too():
    reading_end, writing_end = os.pipe()
    os.write(writing_end, b"a\nb\n")
    os.close(writing_end)
    source = lines(f"/dev/fd/{reading_end}")
    os.close(reading_end)
    assert list(source) == [("a",), ("b",)] == list(source)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_named_pipe_or_a_device_is_refused_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    for path, kind in ((tmp_path / "pipe.txt", "a FIFO"), (Path("/dev/zero"), "a character device")):
        with pytest.raises(ValueError, match=f"{path} is {kind}.*give a regular file, or - "):
            lines(path)
    source = lines(write_files(tmp_path, t_txt="a\n") / "t.txt")
    (tmp_path / "t.txt").unlink()
    os.mkfifo(tmp_path / "t.txt")  # after it was looked at
    with pytest.raises(ValueError, match=r"t.txt is a FIFO"):
        list(source)


def test_a_name_in_gz_without_gzip_in_it_is_an_error(tmp_path):
    (tmp_path / "a.tsv.gz").write_text("a\tb\n")
    with pytest.raises(ValueError, match=r"a.tsv.gz ends in .gz, but is not gzip: take .gz from its name"):
        list(open_source(tmp_path / "a.tsv.gz", ("src", "tgt")))


@pytest.mark.parametrize(
    ("name", "content", "columns"),
    [
        ("d.csv", "text,label,text\na,b,c\n", None),
        ("d.tsv", "text\tlabel\ttext\na\tb\tc\n", None),
        ("d.csv", "text,label,text\na,b,c\n", ["text", "label"]),
    ],
)
def test_two_columns_of_one_name_are_an_error_unless_they_are_numbered(name, content, columns, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=r"line 1 has 2 columns called 'text'.* \(they are 0 and 2\)"):
        list(open_source(tmp_path / name, ("text", "label"), columns))
    assert list(open_source(tmp_path / name, ("text", "label"), [2, 1]))[-1] == ("c", "b")
    (tmp_path / name).write_text(content.replace("text", "note").replace("note", "text", 1) * 2)
    assert list(open_source(tmp_path / name, ("text", "label"), columns))  # others may share one


def test_a_file_full_of_zeros_is_refused_where_they_begin(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n" + bytes(1000))
    for source in (lines(tmp_path / "a.txt"), running_text(tmp_path / "a.txt")):
        with pytest.raises(ValueError, match=r"a.txt line 3 holds a run of NUL bytes at offset 8"):
            list(source)
    (tmp_path / "b.txt").write_bytes(b"one\0two\n")  # a stray one is a character
    assert list(lines(tmp_path / "b.txt")) == [("one\0two",)]


def test_a_line_that_never_ends_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(text_file, "MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "' + "x" * (5 << 20))
    with pytest.raises(ValueError, match=r"a.jsonl line 2 is longer than 1 MiB: put each text on a line"):
        list(open_source(tmp_path / "a.jsonl", ("text",)))
    assert sum(len(text) for (text,) in running_text(tmp_path / "a.jsonl")) > 5 << 20  # that needs no lines


def test_two_passes_at_once_do_not_disturb_each_other(tmp_path):
    source = lines(write_files(tmp_path, t_txt="a\nb\n") / "t.txt")
    assert list(zip(source, source, strict=True)) == [(("a",), ("a",)), (("b",), ("b",))]


def test_a_source_can_be_sent_to_another_process(tmp_path):
    write_files(tmp_path, a_txt="a\tb\n", d_csv="a,b\n")
    text, commas = tmp_path / "a.txt", tmp_path / "d.csv"
    for source in (
        lines(text),
        documents(text),
        running_text(text),
        parallel_text(text, text),
        open_source([text, commas], PAIR),
    ):
        assert list(pickle.loads(pickle.dumps(source))) == list(source)


# memory ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["lines", "documents", "whole", "aligned", "tsv", "csv", "json", "one line", "gzip"]
)
def test_fifty_megabytes_pass_through_less_than_five(tmp_path, kind):
    path = tmp_path / {"csv": "t.csv", "json": "t.json"}.get(kind, "t")
    half = "Half a line of some length. " * 12
    text = {
        "csv": f"{half},{half}\n",
        "json": f'{{"src": "{half}", "tgt": "{half}", "n": [1, 2]}},',
        "one line": half + "é",
        "documents": f"{half}\n{half}\n\n",
    }.get(kind, f"{half}\t{half}\n")
    block = (text * (1_000_000 // len(text.encode()))).encode()
    with gzip.open(path, "wb", compresslevel=1) if kind == "gzip" else open(path, "wb") as file:
        file.write(b"[" * (kind == "json"))
        for _ in range(50):
            file.write(block)
        file.write(b'{"src": "", "tgt": ""}]' * (kind == "json"))
    source = {
        "documents": lambda: documents(path),
        "whole": lambda: running_text(path),
        "one line": lambda: running_text(path),
        "aligned": lambda: parallel_text(path, path),
        "lines": lambda: lines(path),
        "gzip": lambda: lines(path),
    }.get(kind, lambda: open_table(path, None, PAIR))()
    tracemalloc.start()
    count = count_records(source)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count > 100
    assert peak < 5_000_000


# errors ---------------------------------------------------------------------------------------


def error_message(source, error_type=ValueError) -> str:
    """What reading the source raises."""
    with pytest.raises(error_type) as error:
        list(source)
    return str(error.value)


def test_unequal_files_are_counted_to_the_end(tmp_path):
    write_files(tmp_path, a_en="x\n" * 70_000, a_fr="x\n" * 50_017)
    for order in (("a.en", "a.fr"), ("a.fr", "a.en")):
        with pytest.raises(ValueError, match="as many") as error:
            count_records(parallel_text(*(tmp_path / name for name in order)))
        message = str(error.value)
        assert "a.en has 70,000" in message
        assert "a.fr has 50,017" in message
        assert "without a partner is" in message
        assert "a.en line 50018" in message


def test_pairs_are_given_until_one_side_ends(tmp_path):
    write_files(tmp_path, a_en="1\n2\n3\n", a_fr="un\ndeux\n")
    pairs = iter(parallel_text(tmp_path / "a.en", tmp_path / "a.fr"))
    assert [next(pairs), next(pairs)] == [("1", "un"), ("2", "deux")]
    with pytest.raises(ValueError, match="line 3"):
        next(pairs)


@pytest.mark.parametrize("text", ["", "\n", " \n\t\n\r\n", "\ufeff"])
@pytest.mark.parametrize("name", ["t.txt", "t.tsv", "t.csv", "t.jsonl", "t.json", "t.gz"])
def test_a_file_without_text_is_refused(tmp_path, text, name):
    path = write(tmp_path / name, text, packed=name == "t.gz")
    assert f"{path} holds no text" in error_message(open_source(path, ("text",)))
    assert f"{path} holds no text" in error_message(running_text(path))
    assert f"{path} holds no text" in error_message(documents(path))
    assert f"{path} holds no text" in error_message(parallel_text(path, path))


@pytest.mark.parametrize("name", ["t.tsv", "t.csv"])
def test_a_header_alone_is_no_text(tmp_path, name):
    path = write(tmp_path / name, "text\n")
    assert f"{path} holds no text: it has no rows" in error_message(open_source(path, ("text",)))
    write(tmp_path / "t.json", " [ ]\n")
    assert "holds no text" in error_message(open_source(tmp_path / "t.json", ("text",)))


@pytest.mark.parametrize("packed", [False, True])
def test_another_encoding_is_reported_with_line_and_offset(tmp_path, packed):
    good = "déjà vu\n" * 20_000
    path = write(tmp_path / "t.txt", good.encode() + "café\n".encode("latin1"), packed=packed)
    for source in (lines(path), running_text(path), documents(path), open_table(path, None, PAIR[:1])):
        message = error_message(source)
        assert f"{path} line 20001 is not UTF-8" in message
        assert f"byte 0xe9 at offset {len(good.encode()) + 3:,}" in message
        assert "iconv -f latin1 -t utf8" in message
        assert ("zcat" in message) is packed


def test_a_character_cut_off_at_the_end_is_reported(tmp_path):
    source = lines(write(tmp_path / "t", b"abc\nd\xc3"))
    assert "line 2 is not UTF-8: byte 0xc3 at offset 5 (unexpected end of data)" in error_message(source)


def test_utf16_and_packed_files_are_called_by_their_name(tmp_path):
    assert "iconv -f utf16" in error_message(lines(write(tmp_path / "t", "text".encode("utf-16"))))
    assert "is a zstd file" in error_message(lines(write(tmp_path / "z", b"\x28\xb5\x2f\xfd\x00\xff")))


@pytest.mark.parametrize(
    "spoil", [lambda data: data[:-20], lambda data: data[:40] + b"\xff" * 20 + data[60:]]
)
def test_broken_gzip_is_reported(tmp_path, spoil):
    path = tmp_path / "t.gz"
    path.write_bytes(spoil(gzip.compress(os.urandom(500).hex().encode())))
    assert f"{path} is broken gzip" in error_message(lines(path))


def test_a_missing_file_is_named_and_a_close_one_suggested(tmp_path):
    write_files(tmp_path, train_en="x", other_fr_gz="x")
    with pytest.raises(FileNotFoundError, match=r"no file .*trian\.en: did you mean .*train\.en\?"):
        lines(tmp_path / "trian.en")
    with pytest.raises(FileNotFoundError, match=r"did you mean .*other\.fr\.gz\?"):
        open_source(tmp_path / "other.fr", ("text",))
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        running_text(tmp_path / "no" / "t.txt")
    with pytest.raises(FileNotFoundError, match=r"no file \S*zzz: check its name, or the folder"):
        parallel_text(tmp_path / "train.en", tmp_path / "zzz")


def test_a_directory_is_no_file(tmp_path):
    write_files(tmp_path, train_en="x")
    with pytest.raises(
        IsADirectoryError, match=r"is a directory: name the files in it \(it holds train\.en\)"
    ):
        open_source(tmp_path, ("text",))


def test_too_few_columns_are_reported_with_the_line(tmp_path):
    write_files(
        tmp_path, d_tsv="a\tb\nc\n", d_csv='a,b\n"x\ny",z\nc\n', e_txt="only one\n", f_tsv="a\tb\nc\td\n"
    )
    few = "has 1 column, column 2 is wanted"
    assert f"d.tsv line 2 {few} (tabs stand between columns): 'c'" in error_message(
        open_source(tmp_path / "d.tsv", PAIR)
    )
    assert f"d.csv line 4 {few} (commas stand between columns): 'c'" in error_message(
        open_source(tmp_path / "d.csv", PAIR)
    )
    assert "e.txt line 1 has 1 column" in error_message(open_source(tmp_path / "e.txt", PAIR))
    assert "f.tsv line 1 has 2 columns, column 6 is wanted" in error_message(
        open_source(tmp_path / "f.tsv", PAIR, (0, 5))
    )


def test_a_missing_column_is_reported(tmp_path):
    write_files(tmp_path, d_tsv="a\tb\nc\td\n", d_jsonl='{"a": "x"}\n')
    assert "d.tsv line 1 has no column 'z': there are 'a', 'b'" in error_message(
        open_table(tmp_path / "d.tsv", ("a", "z"), PAIR)
    )
    assert "d.jsonl line 1 has no column 'z': there are 'a'" in error_message(
        open_table(tmp_path / "d.jsonl", ("z",), ("text",))
    )
    assert "no column for each of src, tgt: there are 'a'" in error_message(
        open_table(tmp_path / "d.jsonl", None, PAIR)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('a,b\n"c,d\ne,f\n', "line 2 is not CSV: unexpected end of data"),
        ('a,b\n"c"d,e\n', "line 2 is not CSV: ',' expected after '\"'"),
        ("a,b\nc,d\re\n", "line 2 is not CSV: new-line character seen in unquoted field"),
        ("a,b\n" + "c" * 17_000_000 + ",d\n", "line 2 is not CSV: field larger than field limit"),
    ],
)
def test_bad_quoting_is_reported_with_the_line(tmp_path, text, message):
    assert message in error_message(open_source(write(tmp_path / "d.csv", text), PAIR))


def test_a_long_cell_is_no_error(tmp_path):
    assert list(open_source(write(tmp_path / "d.csv", "c" * 1_000_000 + ",d\n"), PAIR)) == [
        ("c" * 1_000_000, "d")
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "b"', "line 3 is not JSON (Expecting ',' delimiter"),
        ("[" * 100_000, "line 3 is not JSON ("),
        ('["b"]', 'line 3 is JSON, but not an object such as {"text": "…"}'),
        ('{"texts": "b", "n": 1}', "line 3 has no 'text': there are 'texts', 'n'"),
        ('{"text": null}', "line 3: 'text' is null, not text"),
        ('{"text": ["b"]}', "line 3: 'text' is a list, not text"),
        ('{"text": "\\ud83d"}', "line 3 holds half a character (a lone \\ud83d)"),
    ],
)
def test_a_bad_json_row_is_reported_with_the_line(tmp_path, line, message):
    assert message in error_message(
        open_source(write(tmp_path / "d.jsonl", f'{{"text": "a"}}\n\n{line}\n'), ("text",))
    )
    if line != "[" * 100_000:
        assert message in error_message(
            open_source(write(tmp_path / "d.json", f'[{{"text": "a"}},\n\n{line}]\n'), ("text",))
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"text": "a"}', "ends in the middle of its JSON list"),
        ('[{"text": "a"}\n{"text": "b"}]', "line 2 is not JSON: ',' is expected"),
        ('[{"text": "a"},\n{"text": b}]', "line 2 is not JSON (Expecting value"),
    ],
)
def test_a_bad_json_list_is_reported_with_the_line(tmp_path, text, message):
    assert message in error_message(open_source(write(tmp_path / "d.json", text), ("text",)))


@pytest.mark.parametrize(
    ("columns", "fields", "message"),
    [
        (("a",), PAIR, "not one for each of the fields src, tgt"),
        ("ab", PAIR, "not one for each"),
        ((-1, 0), PAIR, "column -1 is neither"),
        ((True, 0), PAIR, "column True is neither"),
        (None, (), "no fields are asked for"),
    ],
)
def test_columns_that_make_no_sense_are_refused_at_once(tmp_path, columns, fields, message):
    with pytest.raises(ValueError, match=message):
        open_source(tmp_path / "d.tsv", fields, columns)


def test_no_files_and_stdin_twice_are_refused():
    with pytest.raises(ValueError, match="list of files is empty"):
        lines([])
    with pytest.raises(ValueError, match="stdin cannot be both"):
        parallel_text("-", "-")


# Parquet and datasets -------------------------------------------------------------------------


def test_a_hub_name_is_taken_apart():
    assert hub_name("hf:imdb") == ("imdb", None, "train")
    assert hub_name("hf:imdb:test") == ("imdb", None, "test")
    assert hub_name("hf:glue:sst2") == ("glue", "sst2", "train")
    assert hub_name("hf:someone/set:sst2:validation") == ("someone/set", "sst2", "validation")
    assert hub_name("hf:imdb:train[:10%]") == ("imdb", None, "train[:10%]")
    assert hub_name("hf:wmt14:fr-en:train[5:10]") == ("wmt14", "fr-en", "train[5:10]")
    assert hub_name("hf:set::odd") == ("set", None, "odd")
    for wrong in ("hf:", "hf:a:b:c:d"):
        with pytest.raises(ValueError, match="is not hf:NAME"):
            open_source(wrong, ("text",))


def test_a_missing_library_is_reported_with_its_extra(tmp_path, monkeypatch):
    for name in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    path = write(tmp_path / "d.parquet", b"PAR1")
    assert "keepleft[parquet]" in error_message(open_source(path, ("text",)), ImportError)
    assert "keepleft[datasets]" in error_message(open_source("hf:imdb", ("text",)), ImportError)


class FakeDataset:
    """As much of a `datasets.Dataset` as the source uses."""

    def __init__(self, features, columns):
        self.features = features
        self.columns = columns

    def select_columns(self, names):
        return FakeDataset(self.features, {name: self.columns[name] for name in names})

    def iter(self, batch_size):
        yield self.columns


def test_a_dataset_gives_its_labels_as_text(monkeypatch):
    label_feature = SimpleNamespace(int2str=lambda n: ("bad", "good")[n])
    dataset = FakeDataset(
        {"id": None, "sentence": None, "label": label_feature},
        {"id": [0, 1], "sentence": ["a", "b"], "label": [1, -1]},
    )
    requests = []
    library = SimpleNamespace(load_dataset=lambda *names, split: requests.append((*names, split)) or dataset)
    monkeypatch.setitem(sys.modules, "datasets", library)
    source = open_source("hf:glue:sst2:validation", ("text", "label"))
    assert list(source) == [("a", "good"), ("b", "-1")]
    assert requests == [("glue", "sst2", "validation")]
    assert (source.location(1), source.size) == ("hf:glue:sst2:validation row 2", None)


def test_a_dataset_of_translations_is_named_with_a_dot(monkeypatch):
    dataset = FakeDataset(
        {"translation": SimpleNamespace(languages=("en", "fr"))}, {"translation": [{"en": "a", "fr": "b"}]}
    )
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *names, split: dataset))
    assert list(open_source("hf:wmt14:fr-en", PAIR, ("translation.fr", "translation.en"))) == [("b", "a")]
    assert "there are 'translation', 'translation.en', 'translation.fr'" in error_message(
        open_source("hf:wmt14:fr-en", PAIR)
    )


def test_parquet_reads_back(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"n": n, "text": f"text {n}\n", "summary": "é", "t": {"en": "x"}} for n in range(2500)]
    path = tmp_path / "d.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=700)
    source = open_source(path, PAIR)
    assert list(source) == [(row["text"], row["summary"]) for row in rows] == list(source)
    assert list(open_source(path, PAIR, ("t.en", 0)))[7] == ("x", "7")
    assert source.location(7) == f"{path} row 8"
    assert "no column 'z'" in error_message(open_source(path, ("text",), ("z",)))
    assert "is not a Parquet file" in error_message(
        open_source(write(tmp_path / "e.parquet", b"text"), ("text",))
    )
    parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
    assert "row 2: 'text' is null" in error_message(open_source(path, ("text",)))


def test_a_saved_dataset_reads_back(tmp_path):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"sentence": ["a", "b"], "label": [1, 0]})
    dataset = dataset.cast_column("label", datasets.ClassLabel(names=["bad", "good"]))
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "two")
    for folder in ("one", "two/test"):
        assert list(open_source(tmp_path / folder, ("text", "label"))) == [("a", "good"), ("b", "bad")]
    with pytest.raises(ValueError, match=r"name one of .*test, .*train"):
        open_source(tmp_path / "two", ("text",))
