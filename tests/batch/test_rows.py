"""Rows of files: however they are cut, each comes once, in order."""

from __future__ import annotations

import gzip
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch.jobs import make_texts, write_rows
from keepleft.batch import rows, storage
from keepleft.batch.job import MAX_PART_ROWS, MAX_PARTS, MIN_PART_ROWS, Job, part_rows
from keepleft.batch.rows import RowReader, count_rows
from keepleft.batch.tasks import TaskSpec

NAMES = ("a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz", "a.parquet")
SPEC = TaskSpec(task="generate", model="m")


@pytest.mark.parametrize("name", NAMES)
@given(ranges=st.lists(st.tuples(st.integers(0, 29), st.integers(0, 30)), max_size=6))
def test_any_range_of_rows_can_be_read(name, ranges, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / name
    texts = make_texts(30)
    if not path.exists():
        write_rows(path, texts, first_id=5)
    assert count_rows(str(path)) == 30
    reader = RowReader()
    for start, count in ranges:
        count = min(count, 30 - start)
        found = reader.read(str(path), start, count)
        assert [row.text for row in found] == texts[start : start + count]
        if ".txt" not in name:
            assert [row.id for row in found] == [f"row-{5 + n}" for n in range(start, start + count)]


@given(counts=st.lists(st.integers(0, 2000), max_size=8))
def test_parts_have_every_row_once_and_in_order(counts):
    files = tuple((f"{n}.txt", count) for n, count in enumerate(counts))
    job = Job(SPEC, files, "out")
    found = [
        (piece.path, row)
        for part in job.parts
        for piece in part.slices
        for row in range(piece.start, piece.start + piece.num_rows)
    ]
    assert found == [(path, row) for path, count in files for row in range(count)]
    first_rows = [part.first_row for part in job.parts]
    assert first_rows == [n * part_rows(sum(counts)) for n in range(len(first_rows))]
    assert [part.number for part in job.parts] == list(range(len(job.parts)))
    assert sorted(part.name for part in job.parts) == [part.name for part in job.parts]


@given(num_rows=st.integers(0, 10**9))
def test_there_are_neither_too_many_parts_nor_too_large_ones(num_rows):
    size = part_rows(num_rows)
    assert size >= MIN_PART_ROWS
    assert size <= MAX_PART_ROWS or -(-num_rows // size) <= MAX_PARTS


@pytest.mark.parametrize("ending", [b"", b"\n"])
@pytest.mark.parametrize("block", [1, 3, 1 << 20])
def test_lines_are_those_of_the_file(tmp_path, monkeypatch, ending, block):
    monkeypatch.setattr(rows, "BLOCK_BYTES", block)
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\n\ntwo \xc3\xa9\x0bstill two" + ending)
    assert count_rows(str(path)) == 3
    assert [row.text for row in RowReader().read(str(path), 0, 3)] == ["one", "", "two é\x0bstill two"]


def test_a_bad_row_says_what_is_wrong_with_it(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "a", "id": 3}\n{"text\n[1]\n{"id": "x"}\n{"text": 7}\n\n{"text": "b", "id": [1]}\n'
    )
    found = RowReader().read(str(path), 0, 7)
    assert [row.id for row in found] == [3, None, None, "x", None, None, None]
    assert [row.error is None for row in found] == [True, False, False, False, False, False, True]
    assert "is not JSON" in found[1].error
    assert "no object" in found[2].error
    assert found[3].error == "the field 'text' is missing: name it with --field"
    assert "is int, no text" in found[4].error
    path.write_bytes(b'{"text": "\\ud800", "id": "\\udfff"}\n')
    assert RowReader().read(str(path), 0, 1) == [rows.Row(None, "?", "the text is not Unicode")]
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\nb\xff\n")
    assert "is not UTF-8" in RowReader().read(str(path), 0, 2)[1].error


def test_another_field_may_have_the_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "key": "k", "text": "no"}\n')
    assert RowReader("prompt", "key").read(str(path), 0, 1) == [rows.Row("k", "a")]
    parquet = write_rows(tmp_path / "a.parquet", ["a"])
    with pytest.raises(ValueError, match=r"no column 'prompt', but text, other: name one with --field"):
        count_rows(str(parquet), "prompt")


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\ntwo\n" * 1000)[:-20])
    with pytest.raises(ValueError, match=r"a\.txt\.gz cannot be unpacked"):
        count_rows(str(tmp_path / "a.txt.gz"))
    (tmp_path / "b.txt.gz").write_bytes(b"plain")
    with pytest.raises(ValueError, match=r"b\.txt\.gz cannot be unpacked"):
        count_rows(str(tmp_path / "b.txt.gz"))
    (tmp_path / "a.parquet").write_bytes(b"plain")
    with pytest.raises(ValueError, match=r"a\.parquet is no Parquet file"):
        count_rows(str(tmp_path / "a.parquet"))
    with pytest.raises(ValueError, match=r"a\.csv is no file of rows: there are \.txt"):
        count_rows(str(tmp_path / "a.csv"))
    (tmp_path / "c.txt").write_bytes(b"one\ntwo\n")
    reader = RowReader()
    with pytest.raises(ValueError, match="only 2 rows now: it was changed while the job ran"):
        reader.read(str(tmp_path / "c.txt"), 1, 2)
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ValueError, match="FIFO"):
        count_rows(str(tmp_path / "pipe.txt"))


def test_patterns_stand_for_files_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "[x].txt", "a.csv"):
        (tmp_path / name).touch()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.txt").touch()
    assert storage.list_files("[ab].txt") == ["a.txt", "b.txt"]
    assert storage.list_files("[x].txt") == ["[x].txt"]
    assert storage.list_files("**/*.txt") == ["[x].txt", "a.txt", "b.txt", "deep/c.txt"]
    assert storage.list_files(f"file://{tmp_path}/a.txt") == [str(tmp_path / "a.txt")]
    with pytest.raises(FileNotFoundError, match=r"there is no file nowhere\.txt"):
        storage.list_files("nowhere.txt")
    with pytest.raises(IsADirectoryError, match="deep is a folder: name files"):
        storage.list_files("deep")


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """s3://bucket is a folder of this machine."""
    fs = pytest.importorskip("pyarrow.fs")
    folder = tmp_path / "bucket"
    folder.mkdir()
    filesystem = fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem())
    monkeypatch.setattr(storage, "_filesystem", lambda uri: (filesystem, uri.removeprefix("s3://bucket/")))
    return folder


def test_an_object_store_has_files_too(bucket):
    (bucket / "texts").mkdir()
    (bucket / "out").mkdir()
    write_rows(bucket / "texts" / "b.jsonl.gz", ["b"])
    write_rows(bucket / "texts" / "a.parquet", ["a"])
    (bucket / "texts" / "more").mkdir()
    write_rows(bucket / "texts" / "more" / "c.txt", ["c"])
    paths = storage.list_files("s3://bucket/texts/*")
    assert paths == ["s3://bucket/texts/a.parquet", "s3://bucket/texts/b.jsonl.gz"]
    assert storage.list_files("s3://bucket/texts/*/*.txt") == ["s3://bucket/texts/more/c.txt"]
    assert [count_rows(path) for path in paths] == [1, 1]
    assert [RowReader().read(path, 0, 1)[0].text for path in paths] == ["a", "b"]
    assert storage.join("s3://bucket/out", "part") == "s3://bucket/out/part"
    storage.make_folder("s3://bucket/out")
    storage.write_file("s3://bucket/out/part", [b"da", b"ta"])
    assert storage.names_in("s3://bucket/out") == ["part"]
    assert storage.names_in("s3://bucket/nothing") == []
    assert storage.read_file("s3://bucket/out/part") == b"data"


def test_a_store_that_pyarrow_does_not_know_is_named():
    pytest.importorskip("pyarrow")
    with pytest.raises(
        ValueError, match=r"ftp://host/a\.txt cannot be opened: .*; give a path, s3://… or gs://…"
    ):
        count_rows("ftp://host/a.txt")
