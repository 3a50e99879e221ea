"""POST /v1/translate"""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from keepleft.serving.http.answered import Translations, documented
from keepleft.serving.http.asked import TranslateRequest
from keepleft.serving.http.completions import used, whose
from keepleft.serving.http.events import while_there
from keepleft.serving.http.recorded import Record
from keepleft.serving.http.rows import listed
from keepleft.serving.http.service import Service
from keepleft.serving.http.settling import Order, limited, ordered, settled
from keepleft.serving.http.telling import Telling, Whole


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/translate", tags=["keepleft"], summary="Write a text for a source", **documented(Translations))
    async def translate(request: Request, body: TranslateRequest) -> Response:
        service.named(body.model)
        service.can("translate")
        return await while_there(request, service.limits, _answer(service, body, request.state.record, request.state.tenant))

    return router


async def _answer(service: Service, body: TranslateRequest, record: Record, tenant: str) -> Response:
    limited(body.max_new_tokens, service.limits.new_tokens, "max_new_tokens")
    order = await service.apart(partial(_ordered, service, body, tenant))
    rows = await Telling(service, order, record, whole=True).wholes()
    data = [{**_text(row[0]), "index": n, "n_best": [_text(one) for one in row]} for n, row in enumerate(rows)]
    return JSONResponse({"object": "list", "model": service.name, "seed": order.seed, "data": data, "usage": used(record)})


def _ordered(service: Service, body: TranslateRequest, tenant: str) -> Order:
    texts = listed(body.input, service.limits)
    options = settled(service.model, body, drawn=False)
    copies = body.num_return_sequences or options.copies
    if copies > options.beams and not options.do_sample:
        options = options.but(num_beams=copies)  # so many texts are found by as many beams
    return ordered(service, body, [service.voice.prompt(text, body.tag) for text in texts], options, most=body.max_new_tokens,
                   stop=None, tenant=whose(service, tenant, body.user), copies=copies)


def _text(one: Whole) -> dict[str, Any]:
    return {"text": one.text, "score": round(one.score, 6), "finish_reason": one.why}
