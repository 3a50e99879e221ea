"""Who may ask: API keys, compared without telling by the time it takes how nearly right a wrong one is.

Programs send theirs as `Authorization: Bearer KEY`. A browser cannot; it asks its user for a name and a
password, and the key is the password. Since it then sends both by itself, they count for the page alone and
only where the page itself asks.
"""

from __future__ import annotations

import binascii
import hmac
from base64 import b64decode
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from keepleft.serving.http.errors import APIError

PUBLIC_PATH = "/health"
CHALLENGE = 'Basic realm="keepleft: any name, and the API key as password", charset="UTF-8"'


class APIKeys:
    """None: everybody may ask."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        if not all(key.isascii() and key.isprintable() and key.strip() == key and key for key in keys):
            raise ValueError(
                "an API key is empty, or has characters that no header can carry: use letters, digits and marks"
            )
        self.hashes = [sha256(key.encode()).digest() for key in keys]

    def tenant(self, header: bytes | None, *, is_page: bool = False) -> str | None:
        """Whose request it is, by what stands in its authorization header; None: it has no right to be here."""
        if not self.hashes:
            return ""
        scheme_name, _, credentials = (header or b"").partition(b" ")
        scheme, credentials = scheme_name.lower(), credentials.strip()
        if scheme == b"basic" and is_page:
            scheme, credentials = b"bearer", _password(credentials)
        digest = sha256(credentials).digest()
        matches = 0
        for known_digest in self.hashes:  # all of them, found or not
            matches |= hmac.compare_digest(digest, known_digest)
        return digest.hex()[:32] if matches and scheme == b"bearer" else None


def _password(credentials: bytes) -> bytes:
    try:
        return b64decode(credentials, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


class AuthMiddleware:
    """Every address but one is closed to those who have no key."""

    def __init__(self, app: Any, keys: APIKeys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            is_page = scope["path"] == "/" or scope["path"].startswith("/explore/")
            is_same_origin = headers.get(b"sec-fetch-site", b"none") in (b"none", b"same-origin")
            tenant = self.keys.tenant(headers.get(b"authorization"), is_page=is_page and is_same_origin)
            if tenant is None and scope["path"] != PUBLIC_PATH:
                error = APIError(
                    401,
                    "this server wants an API key: send it as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"www-authenticate": CHALLENGE if is_page else "Bearer", "connection": "close"},
                )
                await error.to_response()(scope, receive, send)
                return
            scope["state"]["tenant"] = tenant or ""
        await self.app(scope, receive, send)
