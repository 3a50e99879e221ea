"""Tiny models train fastest on one thread."""

from __future__ import annotations

import pytest

import tiny_training as tiny


@pytest.fixture(autouse=True)
def few_threads():
    with tiny.one_thread():
        yield
