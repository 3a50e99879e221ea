"""Messages over a pipe or socket: each with its length in front."""

from __future__ import annotations

from typing import IO

LENGTH_BYTES = 8
MAX_FRAME_BYTES = 64 << 20


def write_frame(file: IO[bytes], payload: bytes) -> None:
    file.write(len(payload).to_bytes(LENGTH_BYTES, "big"))
    file.write(payload)
    file.flush()


def read_frame(file: IO[bytes]) -> bytes | None:
    """The next message; None at the end, or for one that is cut off or too large."""
    length = int.from_bytes(header := file.read(LENGTH_BYTES), "big")
    if len(header) < LENGTH_BYTES or length > MAX_FRAME_BYTES:
        return None
    payload = file.read(length)
    return payload if len(payload) == length else None
