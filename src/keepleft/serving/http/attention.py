"""POST /v1/attention"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from keepleft.decoding.generate import encoded
from keepleft.decoding.options import of_model, start_of
from keepleft.models.watch import watch
from keepleft.nn.attention import Attention
from keepleft.runs.spelled import in_turn
from keepleft.serving.http.answered import Maps, documented
from keepleft.serving.http.asked import AttentionRequest
from keepleft.serving.http.errors import RefusedError, too_long
from keepleft.serving.http.events import while_there
from keepleft.serving.http.recorded import Record
from keepleft.serving.http.service import Service
from keepleft.serving.http.settling import readable


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/attention", tags=["keepleft"], summary="What each token of a text looks at", **documented(Maps))
    async def attention(request: Request, body: AttentionRequest) -> Response:
        service.named(body.model)
        return await while_there(request, service.limits, _answer(service, body, request.state.record))

    return router


async def _answer(service: Service, body: AttentionRequest, record: Record) -> Response:
    tokens, source = await service.apart(partial(_rows, service, body))
    record.read += len(tokens) + len(source or [])
    names = _names(service, body, len(tokens), len(source or []))
    maps = await service.errand(partial(_looked, service.model, tokens, source, list(names), body.heads))
    spell = lambda: (in_turn(service.tokenizer, tokens), None if source is None else in_turn(service.voice.reading, source))
    read, sourced = await service.apart(spell)
    return JSONResponse({
        "object": "attention", "model": service.name, "tokens": read, "source": sourced, "maps": maps,
        "heads": {name: body.heads or list(range(heads)) for name, heads in names.items()},
        "usage": {"prompt_tokens": record.read, "total_tokens": record.read}})


def _rows(service: Service, body: AttentionRequest) -> tuple[list[int], list[int] | None]:
    """The text and, of a pair, its source; a pair's text begins with its start."""
    options = of_model(service.model.notes)
    readable(body.input, service.limits)
    if not service.pair:
        if body.source is not None:
            raise RefusedError(400, "source was given, and this model reads none: leave it out", param="source")
        tokens, source = encoded(service.model, service.tokenizer, [_short(service, body.input)], options)[0], None
    else:
        if body.source is None:
            raise RefusedError(400, "this model reads a source: give it too", param="source")
        tokens = [start_of(options), *service.tokenizer.encode(body.input, add_special_tokens=False).ids]
        read = _short(service, readable(body.source, service.limits))
        source = encoded(service.model, service.voice.reading, [read], options)[0]
    if longer := [len(row) for row in (tokens, source) if row is not None and len(row) > service.reach]:
        raise too_long(longer[0], service.reach, "the text")
    return tokens, source


def _short(service: Service, text: str) -> list[int]:
    """Its tokens, if the model can read so many."""
    row = list(service.voice.reading.encode(text).ids)
    if len(row) >= service.reach:
        raise too_long(len(row), service.reach, "the text")
    return row


def _names(service: Service, body: AttentionRequest, text: int, source: int) -> dict[str, int]:
    """The attentions that are meant, with how many heads each has; all of them together must not be too much to tell."""
    there = {name.replace(".layers.", "."): part for name, part in service.model.named_modules() if isinstance(part, Attention)}
    if unknown := [word for word in body.layers if not any(fnmatchcase(name, word) for name in there)]:
        raise RefusedError(400, f"no attention is called {unknown[0]!r}: there are {', '.join(list(there)[:48])}",
                           param="layers")
    chosen = {name: part for name, part in there.items() if any(fnmatchcase(name, word) for word in body.layers)}
    heads = service.model.design.heads
    if body.heads is not None and max(body.heads) >= heads:
        raise RefusedError(400, f"head {max(body.heads)} was asked for, and each attention has {heads}", param="heads")
    cells = 0
    for name in chosen:
        rows = source if name.startswith("encoder") and service.pair else text
        columns = source if name.endswith("cross") else rows
        cells += rows * columns * (heads if body.heads is None else len(body.heads))
    if cells > service.limits.cells:
        raise RefusedError(400, f"{cells:,} numbers were asked for: at most {service.limits.cells:,} are told at once; name "
                                "fewer layers or heads, or give a shorter text", param="layers", code="too_large")
    return dict.fromkeys(chosen, heads)


@torch.no_grad()
def _looked(model: Any, tokens: list[int], source: list[int] | None, names: list[str],
            heads: list[int] | None) -> dict[str, Any]:
    """In the engine's thread."""
    device = next(model.parameters()).device
    rows = [torch.tensor([row], device=device) for row in (source, tokens) if row is not None]
    with watch(model, names, heads=heads) as maps:
        model.states(*rows)
    return {name: [[[round(value, 5) for value in row] for row in head] for head in found[0].float().tolist()]
            for name, found in maps.items()}
