"""JSON responses of any size, without holding up the event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi.responses import Response

from keepleft.serving.engine.request import Tenant
from keepleft.serving.http.json_pieces import encode_json
from keepleft.serving.http.service import Service

CHARACTERS_PER_VALUE = 16  # of a text, which take about as long as a number


async def json_response(
    service: Service, tenant: Tenant, build: Callable[[], dict[str, Any]], *, num_values: int
) -> Response:
    """What `build` returns, as JSON; if it has many values, it is built and encoded in a thread."""
    body = await service.build_response(lambda: encode_json(build()), num_values, tenant)
    return Response(body, media_type="application/json")


def count_text_values(num_characters: int) -> int:
    return num_characters // CHARACTERS_PER_VALUE
