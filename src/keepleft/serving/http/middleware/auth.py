"""API keys, compared in constant time.

Programs send `Authorization: Bearer KEY`. A browser cannot: it asks its user for a name and a password (HTTP
Basic), and the key is the password. Since it then sends them with every request by itself, they count for the
page only, and only in requests that the page itself makes.
"""

from __future__ import annotations

import binascii
import hmac
from base64 import b64decode
from collections.abc import Sequence
from hashlib import sha256

from starlette.types import ASGIApp, Receive, Scope, Send

from keepleft.serving.http.errors import APIError

PUBLIC_PATH = "/health"
CHALLENGE = 'Basic realm="keepleft: any name, and the API key as password", charset="UTF-8"'


class APIKeys:
    """The keys a server accepts, as hashes. Without any key, everybody may use it."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        if not all(key.isascii() and key.isprintable() and key.strip() == key and key for key in keys):
            raise ValueError(
                "an API key is empty, or has characters that a header cannot carry: use ASCII letters, "
                "digits and punctuation"
            )
        self.hashes = [sha256(key.encode()).digest() for key in keys]

    def tenant(self, header: bytes | None, *, is_page: bool = False) -> str | None:
        """The tenant of an Authorization header, a hash of its key; None if the key is missing or wrong."""
        if not self.hashes:
            return ""
        scheme, _, credentials = (header or b"").partition(b" ")
        key = credentials.strip()
        accepted_scheme = scheme.lower() == b"bearer"
        if scheme.lower() == b"basic" and is_page:
            key = _password(key)
            accepted_scheme = True
        digest = sha256(key).digest()
        matches = 0
        for known_digest in self.hashes:  # compare all of them, even after a match: constant time
            matches |= hmac.compare_digest(digest, known_digest)
        return digest.hex()[:32] if matches and accepted_scheme else None


def _password(credentials: bytes) -> bytes:
    try:
        return b64decode(credentials, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


class AuthMiddleware:
    """Rejects requests without a valid key, except /health, and notes the tenant of the others."""

    def __init__(self, app: ASGIApp, keys: APIKeys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            is_page = scope["path"] == "/" or scope["path"].startswith("/explore/")
            is_same_origin = headers.get(b"sec-fetch-site", b"none") in (b"none", b"same-origin")
            tenant = self.keys.tenant(headers.get(b"authorization"), is_page=is_page and is_same_origin)
            if tenant is None and scope["path"] != PUBLIC_PATH:
                error = APIError(
                    401,
                    "this server requires an API key: send it as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"www-authenticate": CHALLENGE if is_page else "Bearer", "connection": "close"},
                )
                await error.to_response()(scope, receive, send)
                return
            scope["state"]["tenant"] = tenant or ""
        await self.app(scope, receive, send)
