"""Fingerprint of a file: size and SHA-256, of all of it or, where it is large, of blocks spread over it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from keepleft.disk.regular_file import open_regular_file

BLOCK_BYTES = 1 << 16
MAX_BLOCKS = 1 << 10  # a file of up to 64 MiB is read completely


def fingerprint(path: Path) -> str:
    """The size in bytes and a SHA-256, as "SIZE:HEX".

    Of a file beyond MAX_BLOCKS blocks, only so many are read, the first and the last among them, at equal
    distances: within a second however large it is. An edit that leaves the size as it was and lies between
    them goes unnoticed. Raises OSError if the file cannot be read, ValueError if it is not a regular file.
    """
    digest = hashlib.sha256()
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        num_blocks = -(-size // BLOCK_BYTES)
        num_read = min(num_blocks, MAX_BLOCKS)
        for n in range(num_read):
            file.seek(n * (num_blocks - 1) // max(1, num_read - 1) * BLOCK_BYTES)
            digest.update(file.read(BLOCK_BYTES))
    return f"{size}:{digest.hexdigest()}"
