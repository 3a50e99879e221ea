"""Who may ask: API keys, compared without telling by the time it takes how nearly right a wrong one is.

Programs send theirs as `Authorization: Bearer KEY`. A browser cannot; it asks its user for a name and a password, and the key
is the password. Since it then sends both by itself, they count for the page alone and only where the page itself asks.
"""

from __future__ import annotations

import binascii
import hmac
from base64 import b64decode
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from keepleft.serving.http.errors import RefusedError

OPEN = "/health"
CHALLENGE = 'Basic realm="keepleft: any name, and the API key as password", charset="UTF-8"'


class Keys:
    """None: everybody may ask."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        if not all(key.isascii() and key.isprintable() and key.strip() == key and key for key in keys):
            raise ValueError("an API key is empty, or has characters that no header can carry: use letters, digits and marks")
        self.hashes = [sha256(key.encode()).digest() for key in keys]

    def tenant(self, header: bytes | None, *, page: bool = False) -> str | None:
        """Whose request it is, by what stands in its authorization header; None: it has no right to be here."""
        if not self.hashes:
            return ""
        word, _, given = (header or b"").partition(b" ")
        how, given = word.lower(), given.strip()
        if how == b"basic" and page:
            how, given = b"bearer", _password(given)
        mine = sha256(given).digest()
        right = 0
        for other in self.hashes:  # all of them, found or not
            right |= hmac.compare_digest(mine, other)
        return mine.hex()[:32] if right and how == b"bearer" else None


def _password(given: bytes) -> bytes:
    try:
        return b64decode(given, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


class Locked:
    """Every address but one is closed to those who have no key."""

    def __init__(self, app: Any, keys: Keys) -> None:
        self.app, self.keys = app, keys

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers, page = dict(scope["headers"]), scope["path"] == "/" or scope["path"].startswith("/explore/")
            near = headers.get(b"sec-fetch-site", b"none") in (b"none", b"same-origin")
            tenant = self.keys.tenant(headers.get(b"authorization"), page=page and near)
            if tenant is None and scope["path"] != OPEN:
                refused = RefusedError(401, "this server wants an API key: send it as 'Authorization: Bearer KEY'",
                                       code="invalid_api_key",
                                       headers={"www-authenticate": CHALLENGE if page else "Bearer", "connection": "close"})
                await refused.answer()(scope, receive, send)
                return
            scope["state"]["tenant"] = tenant or ""
        await self.app(scope, receive, send)
