"""UTF-8 on stdin, stdout and stderr, as in every file that keepleft reads and writes.

On Windows a pipe has the code page of the system, which lacks the squares of a mask and most languages.
"""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper


def use_utf8() -> None:
    """Read and write UTF-8 where a stream has another encoding that the user has not asked for."""
    if "PYTHONIOENCODING" in os.environ:
        return
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(encoding="utf-8", errors=stream.errors)
