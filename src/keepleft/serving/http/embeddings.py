"""POST /v1/embeddings"""

from __future__ import annotations

import base64
from functools import partial

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from keepleft.serving.http.answered import Embeddings, documented
from keepleft.serving.http.asked import EmbeddingRequest
from keepleft.serving.http.errors import RefusedError
from keepleft.serving.http.events import while_there
from keepleft.serving.http.recorded import Record
from keepleft.serving.http.rows import rows_of
from keepleft.serving.http.service import Service


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings", tags=["OpenAI"], summary="One vector for each text", **documented(Embeddings))
    async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
        service.named(body.model)
        if body.dimensions is not None:
            raise RefusedError(400, f"the vectors of this model have {service.model.design.dim} numbers, no more and no fewer: "
                                    "leave dimensions out", param="dimensions")
        return await while_there(request, service.limits, _answer(service, body, request.state.record))

    return router


async def _answer(service: Service, body: EmbeddingRequest, record: Record) -> Response:
    rows = await service.apart(partial(rows_of, service, body.input))
    record.read += sum(map(len, rows))
    found = [vector.numpy() for vector in await service.vectors.ask(rows)]
    shaped = _base64 if body.encoding_format == "base64" else _numbers
    data = [{"object": "embedding", "index": n, "embedding": shaped(vector)} for n, vector in enumerate(found)]
    return JSONResponse({"object": "list", "model": service.name, "data": data,
                         "usage": {"prompt_tokens": record.read, "total_tokens": record.read}})


def _numbers(vector: np.ndarray) -> list[float]:
    return [float(f"{value:.8g}") for value in vector.tolist()]


def _base64(vector: np.ndarray) -> str:
    """float32, little-endian."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
