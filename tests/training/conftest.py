"""Tiny models train fastest on one thread."""

from __future__ import annotations

import pytest

import lessons


@pytest.fixture(autouse=True)
def few_threads():
    with lessons.one_thread():
        yield
