"""The process of one command: what it returns, and how little it does before and after."""

from __future__ import annotations

import gc

import pytest

from keepleft import __main__ as entry


@pytest.fixture
def garbage_collector():
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.usefixtures("garbage_collector")
def test_nothing_is_left_for_the_collections_at_exit(monkeypatch):
    monkeypatch.setattr(entry, "main", lambda: 7)
    assert entry.run() == 7
    assert gc.get_freeze_count() > 0
    assert gc.get_count()[1:] == (0, 0)


@pytest.mark.usefixtures("garbage_collector")
def test_an_error_still_ends_the_process(monkeypatch):
    def main():
        raise SystemExit(3)

    monkeypatch.setattr(entry, "main", main)
    with pytest.raises(SystemExit, match="3"):
        entry.run()
    assert gc.get_freeze_count() > 0
