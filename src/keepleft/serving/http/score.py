"""POST /v1/score"""

from __future__ import annotations

from functools import partial
from math import exp
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from keepleft.runs.spelled import in_turn
from keepleft.serving.http.answered import Scores, documented
from keepleft.serving.http.asked import ScoreRequest
from keepleft.serving.http.errors import RefusedError, too_long
from keepleft.serving.http.events import while_there
from keepleft.serving.http.recorded import Record
from keepleft.serving.http.rows import listed
from keepleft.serving.http.service import Service
from keepleft.serving.http.thoughts import bounded


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/score", tags=["keepleft"], summary="How likely texts are", **documented(Scores))
    async def score(request: Request, body: ScoreRequest) -> Response:
        service.named(body.model)
        service.can("score")
        return await while_there(request, service.limits, _answer(service, body, request.state.record))

    return router


async def _answer(service: Service, body: ScoreRequest, record: Record) -> Response:
    pairs = await service.apart(partial(_pairs, service, body, record))
    data = []
    for n, (text, source) in enumerate(pairs):
        thoughts = await service.errand(partial(service.judge.score, text, source))
        data.append({"index": n, **await service.apart(partial(_shaped, service, thoughts))})
    return JSONResponse({"object": "list", "model": service.name, "data": data,
                         "usage": {"prompt_tokens": record.read, "total_tokens": record.read}})


def _pairs(service: Service, body: ScoreRequest, record: Record) -> list[tuple[str, str | None]]:
    """Texts and sources, after a look at how long they are."""
    texts = listed(body.input, service.limits)
    if service.pair and body.source is None:
        raise RefusedError(400, "this model scores a text for its source: give source too, one for each text", param="source")
    if not service.pair and body.source is not None:
        raise RefusedError(400, "source was given, and this model reads none: leave it out", param="source")
    sources: list[Any] = [None] * len(texts) if body.source is None else listed(body.source, service.limits, "source")
    if len(sources) != len(texts):
        raise RefusedError(400, f"there are {len(texts)} texts and {len(sources)} sources: give one for each", param="source")
    for n, (text, source) in enumerate(zip(texts, sources, strict=True)):
        for what, words, tokenizer in ((f"text {n}", text, service.tokenizer), (f"source {n}", source, service.voice.reading)):
            size = 0 if words is None else len(tokenizer.encode(words).ids)
            if words is not None and size == 0:
                raise RefusedError(400, f"{what} is empty: there is nothing to score", param="input")
            if size >= service.reach:  # one more may come before it, or after it
                raise too_long(size, service.reach, what)
            record.read += size
    return list(zip(texts, sources, strict=True))


def _shaped(service: Service, thoughts: list[Any]) -> dict[str, Any]:
    total = sum(thought.logprob for thought in thoughts)
    names = in_turn(service.tokenizer, [thought.token for thought in thoughts])
    return {"logprob": bounded(total), "perplexity": round(exp(min(700.0, -bounded(total) / max(1, len(thoughts)))), 6),
            "tokens": [{"token": name, "logprob": bounded(thought.logprob)}
                       for name, thought in zip(names, thoughts, strict=True)]}
