"""Who may ask: API keys, compared without telling by the time it takes how nearly right a wrong one is."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from keepleft.serving.http.errors import RefusedError

OPEN = frozenset({"/health", "/", "/explore/", "/explore/explorer.js", "/explore/explorer.css"})  # nothing of the model there


class Keys:
    """None: everybody may ask."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        if not all(key.isascii() and key.isprintable() and key.strip() == key and key for key in keys):
            raise ValueError("an API key is empty, or has characters that no header can carry: use letters, digits and marks")
        self.hashes = [sha256(key.encode()).digest() for key in keys]

    def tenant(self, header: bytes | None) -> str | None:
        """Whose request it is, by what stands in its authorization header; None: it has no right to be here."""
        if not self.hashes:
            return ""
        word, _, given = (header or b"").partition(b" ")
        mine = sha256(given.strip()).digest()
        right = 0
        for other in self.hashes:  # all of them, found or not
            right |= hmac.compare_digest(mine, other)
        return mine.hex()[:32] if right and word.lower() == b"bearer" else None


class Locked:
    """Every address but a few is closed to those who have no key."""

    def __init__(self, app: Any, keys: Keys) -> None:
        self.app, self.keys = app, keys

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            tenant = self.keys.tenant(dict(scope["headers"]).get(b"authorization"))
            if tenant is None and scope["path"] not in OPEN:
                refused = RefusedError(401, "this server wants an API key: send it as 'Authorization: Bearer KEY'",
                                       code="invalid_api_key",
                                       headers={"www-authenticate": "Bearer", "connection": "close"})
                await refused.answer()(scope, receive, send)
                return
            scope["state"]["tenant"] = tenant or ""
        await self.app(scope, receive, send)
