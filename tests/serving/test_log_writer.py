"""A log that nobody reads does not stop the server, and says what it has lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

import keepleft as kl
from keepleft.serving.http.log_writer import LogWriter, write_to_descriptor
from serving.tiny_services import decoder

PATIENCE = 60.0  # seconds, on a busy machine
PIPE_BYTES = 4096


class Reader:
    """A file that takes lines while `reads` is set, or is gone."""

    def __init__(self):
        self.reads = threading.Event()
        self.has_tried = threading.Event()
        self.is_gone = False
        self.lines = []

    def write(self, line):
        self.has_tried.set()
        assert self.reads.wait(PATIENCE)
        if self.is_gone:
            raise BrokenPipeError
        self.lines.append(line)


def make_writer(reader, max_lines):
    return LogWriter(reader.write, "{} dropped".format, max_lines=max_lines)


def test_lines_that_nobody_reads_are_dropped_and_counted():
    reader = Reader()
    writer = make_writer(reader, max_lines=3)
    writer.write("0")
    assert reader.has_tried.wait(PATIENCE)
    for n in range(1, 11):
        writer.write(str(n))
    reader.reads.set()
    writer.close(PATIENCE)
    assert reader.lines == ["0", "7 dropped", "1", "2", "3"]


def test_a_reader_that_is_gone_ends_nothing():
    reader = Reader()
    reader.reads.set()
    reader.is_gone = True
    writer = make_writer(reader, max_lines=9)
    writer.write("0")
    writer.write("1")
    while writer.num_dropped < 2:
        time.sleep(0.01)
    reader.is_gone = False
    writer.write("2")
    writer.close(PATIENCE)
    assert reader.lines == ["2", "2 dropped"]


def test_closing_does_not_wait_for_a_reader_without_end():
    reader = Reader()
    writer = make_writer(reader, max_lines=1)
    writer.write("0")
    assert reader.has_tried.wait(PATIENCE)
    writer.write("1")
    writer.close(0.05)
    assert reader.lines == []
    reader.reads.set()


def test_a_line_longer_than_the_pipe_is_written_in_pieces():
    ours, theirs = os.pipe()
    line = "é" * 100_000 + "\n"
    thread = threading.Thread(target=write_to_descriptor, args=(theirs, line))
    thread.start()
    with os.fdopen(ours, encoding="utf-8") as file:
        assert file.readline() == line
    thread.join(PATIENCE)
    os.close(theirs)


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a pipe is set on Linux")
def test_a_server_whose_log_nobody_reads_goes_on_and_ends(tmp_path):
    import fcntl

    kl.save(*decoder()[:2], tmp_path / "model")
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    process = subprocess.Popen(
        [sys.executable, "-m", "keepleft", "serve", tmp_path / "model", "--port", "0"],
        stderr=theirs,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    os.close(theirs)
    try:
        text = b""
        while b"/v1\n" not in text:
            piece = os.read(ours, PIPE_BYTES)
            assert piece, text
            text += piece
        address = text.decode().split()[-1].removesuffix("/v1")
        with httpx.Client(base_url=address, timeout=PATIENCE) as http_client:
            for _ in range(3 * PIPE_BYTES // 100):  # a line has more than 100 bytes
                assert http_client.get("/v1/models").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE)
        os.close(ours)
