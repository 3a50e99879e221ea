"""The process of the program keepleft, and of python -m keepleft."""

from __future__ import annotations

import gc
import sys

from keepleft.cli import main

# Importing PyTorch makes half a million objects and no garbage: with Python's 700 a collection looks at them
# again and again (0.1 s)
GC_THRESHOLD = 50_000


def run() -> int:
    """Run one command as a process of its own, and return its exit code."""
    gc.set_threshold(GC_THRESHOLD)
    try:
        return main()
    finally:
        gc.freeze()  # the collections at exit would look at all of PyTorch's objects once more (0.4 s)


if __name__ == "__main__":
    sys.exit(run())
