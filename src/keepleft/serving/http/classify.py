"""POST /v1/classify"""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from keepleft.serving.http.answered import Labels, documented
from keepleft.serving.http.asked import ClassifyRequest
from keepleft.serving.http.events import while_there
from keepleft.serving.http.recorded import Record
from keepleft.serving.http.rows import rows_of
from keepleft.serving.http.service import Service


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/classify", tags=["keepleft"], summary="The label of each text", **documented(Labels))
    async def classify(request: Request, body: ClassifyRequest) -> Response:
        service.named(body.model)
        service.can("classify")
        return await while_there(request, service.limits, _answer(service, body, request.state.record))

    return router


async def _answer(service: Service, body: ClassifyRequest, record: Record) -> Response:
    rows = await service.apart(partial(rows_of, service, body.input))
    record.read += sum(map(len, rows))
    names, data = service.judge.labels, []
    for n, chances in enumerate(await service.chances.ask(rows)):
        values = [round(value, 6) for value in chances.tolist()]
        data.append({"index": n, "label": names[int(chances.argmax())], "probabilities": dict(zip(names, values, strict=True))})
    return JSONResponse({"object": "list", "model": service.name, "data": data,
                         "usage": {"prompt_tokens": record.read, "total_tokens": record.read}})
