"""The notebook tour runs from top to bottom and prints what it says it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_every_cell_of_the_tour_runs_and_gives_the_outputs_that_are_saved_in_it():
    ran = subprocess.run(
        [sys.executable, ROOT / "pictures" / "tour.py", "--check"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_tour_is_a_notebook_that_any_jupyter_opens():
    notebook = json.loads((ROOT / "docs" / "tour.ipynb").read_text("utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(ids) == len(set(ids))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert "0x" not in json.dumps([cell["outputs"] for cell in code]), "an output has an address in it"
