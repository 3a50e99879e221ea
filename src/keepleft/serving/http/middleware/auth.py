"""API keys, compared in constant time; each key is a tenant, with a weight and perhaps the operator's rights.

Programs send `Authorization: Bearer KEY`. A browser cannot: it asks its user for a name and a password (HTTP
Basic), and the key is the password. Since it then sends them with every request by itself, they count for the
page only, and only in requests that the page itself makes.
"""

from __future__ import annotations

import binascii
import hmac
import re
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from keepleft.serving.http.errors import APIError

PUBLIC_PATHS = frozenset({"/health", "/health/ready", "/health/live"})  # a probe has no key
# environment variables that have keys
API_KEY_VARIABLE = "KEEPLEFT_API_KEY"
OPERATOR_KEY_VARIABLE = "KEEPLEFT_OPERATOR_KEY"
CHALLENGE = 'Basic realm="keepleft: any name, and the API key as password", charset="UTF-8"'


TENANT_LABEL_LENGTH = 8  # characters of the hash of a key without a name
MAX_NAME_LENGTH = 32


@dataclass(frozen=True)
class APIKey:
    """`weight`: its share of the server beside other keys; `operator`: it may see what all others do; `name`:
    what logs, metrics and the page call it.
    """

    secret: str
    weight: float = 1.0
    operator: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        if (
            not self.secret
            or not self.secret.isascii()
            or not self.secret.isprintable()
            or " " in self.secret
        ):
            raise ValueError(
                "an API key is empty, or has characters that a header cannot carry: use ASCII letters, "
                "digits and punctuation"
            )
        if not 0 < self.weight < inf:
            raise ValueError(f"the weight of an API key is {self.weight:g}: it must be above 0, and finite")
        if not re.fullmatch(rf"[\w.-]{{0,{MAX_NAME_LENGTH}}}", self.name, re.ASCII):
            raise ValueError(
                f"the name of an API key is {self.name[:40]!r}: use at most {MAX_NAME_LENGTH} letters, "
                "digits, dots, hyphens and underscores"
            )

    @property
    def digest(self) -> bytes:
        return sha256(self.secret.encode()).digest()

    @property
    def tenant(self) -> str:
        return tenant_name(self.digest)


def tenant_name(digest: bytes) -> str:
    return digest.hex()[:32]


def read_key_file(path: str) -> list[APIKey]:
    """The keys of a file, one on each line, perhaps with `name=team-a`, `weight=2` or `operator` behind it.

    Raises ValueError for a file without keys and for what else stands behind one; the key is not repeated.
    """
    keys: list[APIKey] = []
    for number, line in enumerate(Path(path).read_text("utf-8").splitlines(), 1):
        secret, *attributes = line.split()[: 1 if line.lstrip().startswith("#") else None] or [""]
        if not secret or secret.startswith("#"):
            continue
        try:
            key = APIKey(secret, **_parse_attributes(attributes))
            check_distinct(keys, key)
        except ValueError as error:
            raise ValueError(f"line {number} of {path}: {error}") from None
        keys.append(key)
    if not keys:
        raise ValueError(f"{path} holds no API key: write one on each line")
    return keys


def collect_keys(key: str | None, file: str | None, operator_key: str | None) -> list[APIKey]:
    """The keys of a server: one for all, those of a file, and the operator's. Raises ValueError."""
    keys = [APIKey(key)] if key else []
    if file is not None:
        keys += read_key_file(file)
        for key_of_file in keys[1:] if key else ():
            check_distinct(keys[:1], key_of_file)
    if operator_key:
        if not keys:
            raise ValueError("there is an operator key and no other: give --api-key or --api-key-file too")
        operator = APIKey(operator_key, operator=True, name="operator")
        check_distinct(keys, operator)
        keys.append(operator)
    return keys


def _parse_attributes(attributes: list[str]) -> dict[str, Any]:
    """What stands behind a key in the key file."""
    values: dict[str, Any] = {}
    for attribute in attributes:
        name, _, value = attribute.partition("=")
        if name == "weight" and value.replace(".", "", 1).isdigit():
            values["weight"] = float(value)
        elif name == "name" and value:
            values["name"] = value
        elif attribute == "operator":
            values["operator"] = True
        else:
            raise ValueError(
                f"{attribute[:20]!r} stands behind the key: name=NAME, weight=NUMBER (such as 2 or 0.5) and "
                "operator are known"
            )
    return values


def check_distinct(keys: Sequence[APIKey], key: APIKey) -> None:
    """Raise ValueError if one of the keys has the same secret or name."""
    if any(other.secret == key.secret for other in keys):
        raise ValueError("this API key was given before: give each once")
    if key.name and any(other.name == key.name for other in keys):
        raise ValueError(f"the name {key.name!r} was given to another API key before: give each its own")


class APIKeys:
    """The keys a server accepts, as hashes. Without any key, everybody may use it, and is the operator."""

    def __init__(self, keys: Sequence[str | APIKey] = ()) -> None:
        known = [APIKey(key) if isinstance(key, str) else key for key in keys]
        self.hashes = [key.digest for key in known]
        self.weights = {key.tenant: key.weight for key in known}
        self.operators = frozenset(key.tenant for key in known if key.operator)
        self.names = {key.tenant: key.name for key in known if key.name}

    def is_operator(self, tenant: str) -> bool:
        return tenant in self.operators or not self.hashes

    def label(self, tenant: str) -> str:
        """What logs, metrics and the page call a tenant: the name of its key, or the start of its hash."""
        return self.names.get(tenant) or tenant[:TENANT_LABEL_LENGTH]

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
        return tenant_name(digest) if matches and accepted_scheme else None


def _password(credentials: bytes) -> bytes:
    try:
        return b64decode(credentials, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def is_same_origin(sec_fetch_site: str | None) -> bool:
    """By the header Sec-Fetch-Site: the server's own page asks, its user does, or a program (None)."""
    return sec_fetch_site in (None, "none", "same-origin")


class AuthMiddleware:
    """Rejects requests without a valid key, except for PUBLIC_PATHS, and notes the tenant of the others."""

    def __init__(self, app: ASGIApp, keys: APIKeys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            num_credentials = sum(name == b"authorization" for name, _ in scope["headers"])
            if num_credentials > 1:
                error = APIError(
                    400,
                    f"the header Authorization was sent {num_credentials} times: send it once",
                    code="duplicate_authorization",
                    headers={"connection": "close"},
                )
                await error.to_response()(scope, receive, send)
                return
            is_page = scope["path"] == "/" or scope["path"].startswith("/explore/")
            is_own_request = is_same_origin(headers.get(b"sec-fetch-site", b"none").decode("latin-1"))
            tenant = self.keys.tenant(headers.get(b"authorization"), is_page=is_page and is_own_request)
            if tenant is None and scope["path"] not in PUBLIC_PATHS:
                reason = (
                    "this API key is not known here" if num_credentials else "this server requires an API key"
                )
                error = APIError(
                    401,
                    f"{reason}: send a valid one as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"www-authenticate": CHALLENGE if is_page else "Bearer", "connection": "close"},
                )
                await error.to_response()(scope, receive, send)
                return
            scope["state"]["tenant"] = tenant or ""
        await self.app(scope, receive, send)
