"""POST /v1/translate"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from keepleft.pipelines.translator import Translator, require_language, with_candidates
from keepleft.serving.engine.request import Tenant
from keepleft.serving.explorer.translate import plain_note
from keepleft.serving.http.errors import APIError
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

BLANK_CHOICE = FinishedChoice(finish_reason="stop")  # of a text without a word


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
    translator = _translator(service, body)
    if translator is None and body.tag is None:
        _require_language(service, texts)
    note = None if translator is None else translator.language_note(texts)
    warnings = [] if note is None else [plain_note(note)]
    seed: int | None = None

    async def generate(sources: list[str], num_candidates: int = 1) -> list[list[FinishedChoice]]:
        nonlocal seed
        build_plan = partial(_build_plan, service, body, translator, sources, num_candidates, tenant)
        plan = await prepare_plan(service, tenant, build_plan, texts_in([*sources, body.prefix]))
        seed = plan.seed
        stream = GenerationStream(service, plan, record, only_at_end=True)
        stream.start()
        return await stream.choices()

    if translator is None:
        # what is blank stays blank: a model would make something up for it
        filled = [n for n, text in enumerate(texts) if text.strip()]
        choices = dict(zip(filled, await generate([texts[n] for n in filled]) if filled else [], strict=True))
        translations = [choices.get(n) or [BLANK_CHOICE] for n in range(len(texts))]
    else:
        rounds = translator.rounds(texts, _join_choices, whole=(body.num_return_sequences or 1) > 1)
        try:
            sources, num_candidates = next(rounds)
            while True:
                sources, num_candidates = rounds.send(await generate(sources, num_candidates))
        except StopIteration as end:
            translations = end.value

    def build() -> dict[str, Any]:
        data = []
        for n, row in enumerate(translations):
            n_best = list(map(_hypothesis, row))
            data.append({**n_best[0], "index": n, "n_best": n_best})
        return {
            "object": "list",
            "model": service.name,
            "seed": seed,
            "data": data,
            "warnings": warnings,
            "usage": usage(record),
        }

    num_characters = sum(len(choice.text) for row in translations for choice in row)
    return await json_response(service, tenant, build, num_values=count_text_values(num_characters))


def _translator(service: Service, body: TranslateRequest) -> Translator | None:
    """The translator into the language that the request names, if any. Raises APIError for an unknown one."""
    if body.to is None:
        return None
    if body.tag is not None:
        raise APIError(
            400, f"to is {body.to!r} and tag {body.tag!r}: they say the same, so give one", param="to"
        )
    try:
        return Translator(service.generator, body.to, pivot=service.pivot)
    except ValueError as error:
        raise APIError(400, str(error).replace("--to", "to"), param="to") from error


def _require_language(service: Service, texts: list[str]) -> None:
    """Raise APIError if the model has language tags, and a text starts with none of them."""
    try:
        require_language(service.input_encoder.tokenizer, texts)
    except ValueError as error:
        message = re.sub(r"--to (\w+)", r'"to": "\1"', str(error))
        raise APIError(400, message, param="to") from error


def _join_choices(parts: Sequence[FinishedChoice | str]) -> FinishedChoice:
    """One choice from those of the sentences and what stands between them."""
    choices = [part for part in parts if isinstance(part, FinishedChoice)]
    return FinishedChoice(
        text="".join(part if isinstance(part, str) else part.text for part in parts),
        finish_reason=next((c.finish_reason for c in choices if c.finish_reason != "stop"), "stop"),
        score=sum(choice.score for choice in choices),
        length=sum(choice.length for choice in choices),
    )


def _build_plan(
    service: Service,
    body: TranslateRequest,
    translator: Translator | None,
    texts: list[str],
    num_candidates: int,
    tenant: Tenant,
) -> RequestPlan:
    tag = body.tag if translator is None else translator.generator.tag
    options = resolve_options(service.model, body, sample_by_default=False)
    options = with_candidates(options, num_candidates)
    num_choices = max(body.num_return_sequences or 1, options.num_sequences)
    if num_choices > options.beam_count and not options.do_sample:
        options = options.but(num_beams=num_choices)  # one beam for each translation
    plan = build_requests(
        service,
        body,
        texts if tag is None else _tagged_prompts(service, texts, tag),
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
