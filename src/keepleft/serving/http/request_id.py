"""The id of a request: that of its X-Request-Id header where it is plain, a new one otherwise.

A client may choose any id, also that of another request. So an id is for people who read logs: nothing is
looked up by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from secrets import token_hex

HEADER = b"x-request-id"
MAX_REQUEST_ID_LENGTH = 128
PLAIN_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,%d}" % MAX_REQUEST_ID_LENGTH)


def make_request_id() -> str:
    return f"req_{token_hex(12)}"


def read_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The id that the headers give; a new one if they give none, several, or one that is not plain."""
    values = [value for name, value in headers if name == HEADER]
    if len(values) == 1 and PLAIN_ID.fullmatch(values[0]):
        return values[0].decode("ascii")
    return make_request_id()
