"""POST /v1/attention"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from keepleft.data.token_text import token_pieces
from keepleft.decoding.generate import encode_prompts
from keepleft.decoding.generation_config import decoder_start_token, from_model_directory
from keepleft.nn.attention import Attention
from keepleft.serving.engine.request import Tenant
from keepleft.serving.http.errors import APIError, too_long
from keepleft.serving.http.middleware.request_log import RequestRecord
from keepleft.serving.http.request_builder import check_text, prompt_usage, texts_in
from keepleft.serving.http.schemas.requests import AttentionRequest
from keepleft.serving.http.schemas.responses import AttentionResponse, response_docs
from keepleft.serving.http.service import Service
from keepleft.serving.http.sse import until_disconnect
from keepleft.serving.http.validated_route import validated_route


def routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=validated_route(service))

    @router.post(
        "/v1/attention",
        tags=["keepleft"],
        summary="Attention maps of a text",
        **response_docs(AttentionResponse),
    )
    async def attention(request: Request, body: AttentionRequest) -> Response:
        service.check_model(body.model)
        work = _answer(service, body, request.state.record, request.state.tenant)
        return await until_disconnect(request, service.limits, work)

    return router


async def _answer(service: Service, body: AttentionRequest, record: RequestRecord, key: str) -> Response:
    tenant = Tenant(key)
    tokens, source = await service.in_thread(
        partial(_encode_inputs, service, body), tenant, texts_in([body.input, body.source])
    )
    record.prompt_tokens += len(tokens) + len(source or [])
    heads_by_layer = _select_layers(service, body, len(tokens), len(source or []))
    params = {"tokens": tokens, "source": source, "layers": list(heads_by_layer), "heads": body.heads}
    maps = await service.run_beside_engine("attention_maps", params, key)
    pieces, source_pieces = await service.in_thread(partial(_token_texts, service, tokens, source), tenant)
    fields = {
        "object": "attention",
        "model": service.name,
        "tokens": pieces,
        "source": source_pieces,
        "heads": {name: body.heads or list(range(heads)) for name, heads in heads_by_layer.items()},
        "usage": prompt_usage(record),
    }
    # The maps are JSON already: to parse and write them again would hold up the streams of others.
    content = json.dumps(fields).encode().removesuffix(b"}") + b', "maps": ' + maps + b"}"
    return Response(content, media_type="application/json")


def _encode_inputs(service: Service, body: AttentionRequest) -> tuple[list[int], list[int] | None]:
    """The tokens of the text, which an encoder-decoder begins with its start token, and of the source."""
    options = from_model_directory(service.model.notes)
    check_text(body.input, service.limits)
    if not service.is_encoder_decoder:
        if body.source is not None:
            raise APIError(400, "source was given, and this model has none: leave it out", param="source")
        row = _encode_within_limit(service, body.input)
        (tokens,) = encode_prompts(service.generator.model, None, [row], options)
        source = None
    else:
        if body.source is None:
            raise APIError(400, "this model needs a source: give it too", param="source")
        (text_tokens,) = service.encoder.encode([body.input], add_special_tokens=False)
        tokens = [decoder_start_token(options), *text_tokens]
        source_tokens = _encode_within_limit(service, check_text(body.source, service.limits))
        (source,) = encode_prompts(service.generator.model, None, [source_tokens], options)
    if overlong := [
        len(row) for row in (tokens, source) if row is not None and len(row) > service.max_model_len
    ]:
        raise too_long(overlong[0], service.max_model_len, "the text")
    return tokens, source


def _token_texts(
    service: Service, tokens: list[int], source: list[int] | None
) -> tuple[list[str], list[str] | None]:
    pieces = token_pieces(service.tokenizer, tokens)
    return pieces, None if source is None else token_pieces(service.generator.input_tokenizer, source)


def _encode_within_limit(service: Service, text: str) -> list[int]:
    """The tokens of a text. Raises APIError if there are too many for the model."""
    (tokens,) = service.input_encoder.encode([text])
    if len(tokens) >= service.max_model_len:
        raise too_long(len(tokens), service.max_model_len, "the text")
    return tokens


def _select_layers(
    service: Service, body: AttentionRequest, num_tokens: int, num_source_tokens: int
) -> dict[str, int]:
    """The selected attention layers, each with its heads. Raises APIError if the maps are too large."""
    attentions = {
        name.replace(".layers.", "."): module
        for name, module in service.model.named_modules()
        if isinstance(module, Attention)
    }
    if unknown := [
        pattern for pattern in body.layers if not any(fnmatchcase(name, pattern) for name in attentions)
    ]:
        raise APIError(
            400,
            f"no attention layer is called {unknown[0]!r}: there are {', '.join(list(attentions)[:48])}",
            param="layers",
        )
    selected = {
        name: module
        for name, module in attentions.items()
        if any(fnmatchcase(name, pattern) for pattern in body.layers)
    }
    heads_by_layer = {name: module.config.heads for name, module in selected.items()}
    cells = 0
    for name, heads in heads_by_layer.items():
        if body.heads is not None and max(body.heads) >= heads:
            message = f"head {max(body.heads)} was requested, and {name} has {heads}"
            raise APIError(400, message, param="heads")
        rows = num_source_tokens if name.startswith("encoder") and service.is_encoder_decoder else num_tokens
        columns = num_source_tokens if name.endswith("cross") else rows
        cells += rows * columns * (heads if body.heads is None else len(body.heads))
    if cells > service.limits.cells:
        raise APIError(
            400,
            f"the attention maps have {cells:,} numbers: at most {service.limits.cells:,} are allowed; name "
            "fewer layers or heads, or give a shorter text",
            param="layers",
            code="too_large",
        )
    return heads_by_layer
