"""POST /v1/translate"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from keepleft.serving.engine.request import Tenant
from keepleft.serving.http.generation_stream import FinishedChoice, GenerationStream
from keepleft.serving.http.json_response import count_text_values, json_response
from keepleft.serving.http.middleware.request_log import RequestRecord
from keepleft.serving.http.request_builder import (
    PromptFields,
    RequestPlan,
    as_texts,
    build_requests,
    check_limit,
    prepare_plan,
    resolve_options,
    tenant_of,
    texts_in,
    usage,
)
from keepleft.serving.http.schemas.requests import TranslateRequest
from keepleft.serving.http.schemas.responses import TranslationResponse, response_docs
from keepleft.serving.http.service import Service
from keepleft.serving.http.sse import until_disconnect
from keepleft.serving.http.validated_route import validated_route

BLANK_HYPOTHESIS = {"text": "", "score": 0.0, "finish_reason": "stop"}  # of a text without a word


def routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=validated_route(service))

    @router.post(
        "/v1/translate",
        tags=["keepleft"],
        summary="Translations of texts",
        **response_docs(TranslationResponse),
    )
    async def translate(request: Request, body: TranslateRequest) -> Response:
        service.check_model(body.model)
        service.require_task("translate")
        return await until_disconnect(
            request, service.limits, _answer(service, body, request.state.record, request.state.tenant)
        )

    return router


async def _answer(service: Service, body: TranslateRequest, record: RequestRecord, key: str) -> Response:
    tenant = tenant_of(service, key, body.user)
    check_limit(body.max_new_tokens, service.limits.new_tokens, "max_new_tokens")
    texts = as_texts(body.input, service.limits)
    # what is blank stays blank: a model would make something up for it
    filled = [n for n, text in enumerate(texts) if text.strip()]
    plan = None
    translations: dict[int, list[FinishedChoice]] = {}
    if filled:
        build_plan = partial(_build_plan, service, body, [texts[n] for n in filled], tenant)
        plan = await prepare_plan(service, tenant, build_plan, texts_in([*texts, body.prefix]))
        stream = GenerationStream(service, plan, record, only_at_end=True)
        stream.start()
        translations = dict(zip(filled, await stream.choices(), strict=True))

    def build() -> dict[str, Any]:
        data = []
        for n in range(len(texts)):
            n_best = list(map(_hypothesis, translations[n])) if n in translations else [BLANK_HYPOTHESIS]
            data.append({**n_best[0], "index": n, "n_best": n_best})
        return {
            "object": "list",
            "model": service.name,
            "seed": None if plan is None else plan.seed,
            "data": data,
            "usage": usage(record),
        }

    num_characters = sum(len(choice.text) for row in translations.values() for choice in row)
    return await json_response(service, tenant, build, num_values=count_text_values(num_characters))


def _build_plan(service: Service, body: TranslateRequest, texts: list[str], tenant: Tenant) -> RequestPlan:
    options = resolve_options(service.model, body, sample_by_default=False)
    num_choices = body.num_return_sequences or options.num_sequences
    if num_choices > options.beam_count and not options.do_sample:
        options = options.but(num_beams=num_choices)  # one beam for each translation
    plan = build_requests(
        service,
        body,
        texts if body.tag is None else _tagged_prompts(service, texts, body.tag),
        options,
        max_tokens=body.max_new_tokens,
        stop=None,
        tenant=tenant,
        num_choices=num_choices,
        prompt_fields=PromptFields("input", "num_return_sequences", service.limits.inputs),
    )
    return replace(plan, max_in_flight=service.limits.prompts)


def _tagged_prompts(service: Service, texts: list[str], tag: str) -> list[list[int]]:
    tag_token = service.generator.tag_token(tag)
    return [[tag_token, *row] for row in service.input_encoder.encode(texts)]


def _hypothesis(choice: FinishedChoice) -> dict[str, Any]:
    return {"text": choice.text, "score": round(choice.score, 6), "finish_reason": choice.finish_reason}
