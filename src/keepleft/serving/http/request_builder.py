"""From request bodies to engine requests: generation fields over the defaults of the model directory; texts
and tokens as rows within the limits; the tenant and the usage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from secrets import randbits
from typing import Any

from keepleft.decoding.batch import default_new_tokens, encode_prompts
from keepleft.decoding.generation_config import GenerationConfig, as_list, from_model_directory
from keepleft.decoding.grammar import CompiledGrammar, grammar_from_options
from keepleft.models.transformer import Model
from keepleft.serving.engine.request import GenerationRequest, Tenant
from keepleft.serving.http.errors import APIError, too_long
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.middleware.request_log import RequestRecord
from keepleft.serving.http.schemas.generation import PASS_THROUGH_FIELDS, GenerationFields
from keepleft.serving.http.schemas.requests import PromptField
from keepleft.serving.http.service import Service

Prompt = str | list[int]
TOKEN_FIELDS = (  # fields that name tokens
    "suppress_tokens",
    "begin_suppress_tokens",
    "shortlist",
    "eos_token_id",
    "forced_eos_token_id",
    "forced_bos_token_id",
    "bad_words_ids",
    "sequence_bias",
    "logit_bias",
)
ROW_FIELDS = ("bad_words_ids", "sequence_bias")  # fields whose entries are rows of tokens


@dataclass(frozen=True)
class PromptFields:
    """The fields of a request that give its prompts and the number of choices: what errors name."""

    prompts: str = "prompt"
    choices: str = "n"
    max_prompts: int | None = None  # None: that of the limits

    def prompt_name(self, n: int) -> str:
        """What an error calls prompt n."""
        return "the prompt" if self.prompts == "prompt" else f"text {n} of {self.prompts}"


COMPLETION_FIELDS = PromptFields()


@dataclass(frozen=True)
class RequestPlan:
    """One engine request for each prompt, and how their sequences become choices."""

    requests: list[GenerationRequest]
    num_choices: int  # choices for each prompt
    num_sequences: int  # sequences generated for each prompt; the best become choices
    seed: int | None  # None: nothing is sampled
    stop_strings: list[str]
    max_in_flight: int | None = None  # requests in the engine at a time; None: all

    @property
    def repeats_sequence(self) -> bool:
        """The one greedy sequence stands for every choice."""
        return self.num_sequences < self.num_choices


async def prepare_plan(
    service: Service, tenant: Tenant, build: Callable[[], RequestPlan], texts: Sequence[str]
) -> RequestPlan:
    """Build a plan in a thread, where `texts` are encoded, and compile its grammar, once for all prompts.

    Raises APIError.
    """
    plan = await service.in_thread(build, tenant, texts)
    options = plan.requests[0].options
    if not options.has_grammar:
        return plan
    compiled_grammar = await service.grammars.run(tenant, partial(_compile_grammar, service, options))
    requests = [replace(request, compiled_grammar=compiled_grammar) for request in plan.requests]
    return replace(plan, requests=requests)


def resolve_options(model: Model, fields: GenerationFields, *, sample_by_default: bool) -> GenerationConfig:
    """The generation options of a request: its fields, over the generation_config.json of the model
    directory.

    `sample_by_default`: sample at temperature 1 unless the request says otherwise, as OpenAI does, whatever
    the directory says about do_sample.
    """
    overrides: dict[str, Any] = {name: getattr(fields, name) for name in PASS_THROUGH_FIELDS}
    defaults = from_model_directory(model.notes)
    sampling_values = [
        fields.temperature,
        fields.top_p,
        fields.top_k,
        fields.min_p,
        fields.typical_p,
        fields.top_h,
    ]
    if fields.logit_bias:
        overrides["logit_bias"] = {int(token): value for token, value in fields.logit_bias.items()}
    if overrides["sequence_bias"] is not None:
        overrides["sequence_bias"] = [[list(tokens), value] for tokens, value in overrides["sequence_bias"]]
    if sample_by_default or fields.temperature is not None or fields.top_p is not None:
        if overrides["num_beams"] is None and any(value is not None for value in sampling_values):
            overrides["num_beams"] = 1  # the request asks for sampling: beams of the directory do not count
        if overrides["do_sample"] is None:
            num_beams = overrides["num_beams"] or defaults.beam_count
            overrides["do_sample"] = fields.temperature != 0 and num_beams == 1 and not fields.penalty_alpha
    if fields.temperature == 0 and overrides["do_sample"]:
        raise APIError(
            400,
            "temperature is 0, which is greedy, and do_sample is true: give one of them",
            param="temperature",
        )
    return defaults.but(**overrides, temperature=fields.temperature or None, top_p=fields.top_p)


def build_requests(
    service: Service,
    fields: GenerationFields,
    prompts: Sequence[Prompt],
    options: GenerationConfig,
    *,
    max_tokens: int | None,
    stop: str | list[str] | None,
    tenant: Tenant,
    num_choices: int = 1,
    best_of: int | None = None,
    logprobs: int | None = None,
    echo: bool = False,
    prompt_fields: PromptFields = COMPLETION_FIELDS,
) -> RequestPlan:
    """One engine request for each prompt, checked against the limits. Raises APIError.

    `echo`: the response repeats the prompts, with their logprobs if there are any.
    Slow, since it tokenizes: call it through `prepare_plan`.
    """
    stop_strings = check_fields(
        service,
        fields,
        options,
        stop=stop,
        num_prompts=len(prompts),
        num_choices=num_choices,
        best_of=best_of,
        logprobs=logprobs,
        prompt_fields=prompt_fields,
    )
    num_sequences = num_choices if best_of is None else best_of
    options, seed = _apply_num_sequences(options, fields, num_sequences, stop_strings, service.limits)
    rows = _encode_prompts(service, prompts, options, prompt_fields)
    (prefix,) = (
        [[]] if fields.prefix is None else service.encoder.encode([fields.prefix], add_special_tokens=False)
    )
    requests = []
    for n, row in enumerate(rows):
        prompt_length = (1 if service.is_encoder_decoder else len(row)) + len(prefix)
        if prompt_length > service.max_model_len:
            raise _too_long(service, prompt_length, n, prompt_fields)
        request_options = _fit_max_tokens(service, options, row, prompt_length, max_tokens)
        request_options.check()
        request_options = replace(request_options, seed=None if seed is None else _wrap_int64(seed + n))
        requests.append(GenerationRequest(row, request_options, prefix, tenant, logprobs))
    plan = RequestPlan(requests, num_choices, options.num_sequences, seed, stop_strings)
    if logprobs is not None:
        _check_reported_logprobs(plan, logprobs, service.limits, echo=echo)
    return plan


def _check_reported_logprobs(plan: RequestPlan, logprobs: int, limits: Limits, *, echo: bool) -> None:
    num_tokens = sum(
        (request.options.max_new_tokens or 0) + (len(request.tokens) if echo else 0)
        for request in plan.requests
    )
    num_logprobs = max(plan.num_choices, plan.num_sequences) * num_tokens * (1 + logprobs)
    if num_logprobs > limits.reported_logprobs:
        raise APIError(
            400,
            f"the response may have {num_logprobs:,} logprobs, for every choice and every token with its "
            f"top logprobs: at most {limits.reported_logprobs:,} are allowed; ask for fewer choices, tokens "
            f"({'max_tokens, echo' if echo else 'max_tokens'}) or logprobs",
            param="logprobs",
            code="too_large",
        )


def check_fields(
    service: Service,
    fields: GenerationFields,
    options: GenerationConfig,
    *,
    stop: str | list[str] | None,
    num_prompts: int = 1,
    num_choices: int = 1,
    best_of: int | None = None,
    logprobs: int | None = None,
    prompt_fields: PromptFields = COMPLETION_FIELDS,
) -> list[str]:
    """Check a request against the limits, all but its texts, and return its stop strings. Raises APIError."""
    limits = service.limits
    stop = stop if stop is not None else fields.stop_strings
    stop_strings = [stop] if isinstance(stop, str) else options.stop_list if stop is None else list(stop)
    _check_generation_fields(fields, options, stop_strings, limits, service.model.design.vocab)
    max_prompts = limits.prompts if prompt_fields.max_prompts is None else prompt_fields.max_prompts
    check_limit(num_prompts, max_prompts, prompt_fields.prompts)
    check_limit(logprobs, limits.logprobs, "logprobs")
    check_limit(num_choices, limits.n, prompt_fields.choices)
    check_limit(best_of, limits.n, "best_of")
    num_sequences = num_choices if best_of is None else best_of
    if num_sequences < num_choices:
        raise APIError(
            400,
            f"best_of is {num_sequences} and n is {num_choices}: the first must not be smaller",
            param="best_of",
        )
    # where a route takes more prompts than others, each may have one choice
    max_choices = max(limits.choices, prompt_fields.max_prompts or 0)
    check_limit(num_sequences * num_prompts, max_choices, prompt_fields.choices)
    return stop_strings


def _apply_num_sequences(
    options: GenerationConfig,
    fields: GenerationFields,
    num_sequences: int,
    stop_strings: list[str],
    limits: Limits,
) -> tuple[GenerationConfig, int | None]:
    """Options that generate this many sequences per prompt, and the seed; None if nothing is sampled."""
    if not options.do_sample and options.beam_count == 1:
        num_sequences = 1
    elif options.beam_count > 1:
        options = replace(options, num_beams=max(options.beam_count, num_sequences))
    check_limit(options.beam_count, limits.beams, "num_beams")
    options = replace(
        options,
        stop_strings=stop_strings or None,
        num_return_sequences=num_sequences,
        prefix=None,
        max_time=None if options.max_time is None else min(options.max_time, limits.seconds),
    )
    if not options.do_sample:
        return options, None
    return options, randbits(48) if fields.seed is None else fields.seed


def _fit_max_tokens(
    service: Service, options: GenerationConfig, row: list[int], prompt_length: int, max_tokens: int | None
) -> GenerationConfig:
    """Options whose max_new_tokens fits into max_model_len and the limits."""
    default_tokens = default_new_tokens(service.model.design, options, len(row))
    requested_tokens = (
        options.resolve_max_new_tokens(prompt_length, default_tokens, None)
        if max_tokens is None
        else max_tokens
    )
    max_new_tokens = max(
        0, min(requested_tokens, service.max_model_len - prompt_length, service.limits.new_tokens)
    )
    if options.min_new_tokens is not None and options.min_new_tokens > max_new_tokens:
        raise APIError(
            400,
            f"min_new_tokens is {options.min_new_tokens}, and at most {max_new_tokens} can be generated: "
            "give less",
            param="min_new_tokens",
        )
    return replace(options, max_new_tokens=max_new_tokens, max_length=None)


def _compile_grammar(service: Service, options: GenerationConfig) -> CompiledGrammar:
    """Compile a grammar in the sandbox, and if that was quick enough here. Raises APIError.

    Slow: call it in a thread. The engine must not wait for it.
    """
    try:
        grammar_spec = grammar_from_options(options)
    except ImportError as error:
        raise APIError(400, str(error), code="grammar_unavailable") from error
    if not options.eos_ids:
        raise APIError(
            400,
            "structured output must be able to end, and the model directory names no end-of-sequence token: "
            "give eos_token_id",
            param="eos_token_id",
        )
    with service.grammar_sandboxes.borrow() as sandbox:
        sandbox.check_grammar(grammar_spec, service.limits.grammar_seconds)
    return service.grammar_compiler.compile(options)


def check_limit(value: int | None, maximum: int, name: str) -> None:
    """Raise APIError if a field is above its limit."""
    if value is not None and value > maximum:
        raise APIError(400, f"{name} is {value}: this server allows at most {maximum}", param=name)


def _encode_prompts(
    service: Service, prompts: Sequence[Prompt], options: GenerationConfig, prompt_fields: PromptFields
) -> list[list[int]]:
    for n, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            check_text(prompt, service.limits)
        elif len(prompt) > service.max_model_len:
            raise _too_long(service, len(prompt), n, prompt_fields)
    rows = _encode_texts(service, prompts)
    for n, row in enumerate(rows):
        if len(row) > service.max_model_len:
            raise _too_long(service, len(row), n, prompt_fields)
    return encode_prompts(service.generator.model, None, rows, options)


def _too_long(service: Service, length: int, n: int, prompt_fields: PromptFields) -> APIError:
    return too_long(length, service.max_model_len, prompt_fields.prompt_name(n), param=prompt_fields.prompts)


def _encode_texts(service: Service, prompts: Sequence[Prompt]) -> list[list[int]]:
    """The tokens of each prompt, those of all texts in one call."""
    encoded = iter(service.input_encoder.encode(texts_in(prompts)))
    return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]


def texts_in(prompts: Sequence[Prompt | None]) -> list[str]:
    """The prompts that are texts: not tokens, nor None."""
    return [prompt for prompt in prompts if isinstance(prompt, str)]


def check_text(text: str, limits: Limits) -> str:
    """The text. Raises APIError if it is too long."""
    if len(text) > limits.characters:
        raise APIError(
            400,
            f"a text has {len(text):,} characters: at most {limits.characters:,} are allowed",
            code="context_length_exceeded",
        )
    return text


def _check_generation_fields(
    fields: GenerationFields, options: GenerationConfig, stop_strings: list[str], limits: Limits, vocab: int
) -> None:
    """Raise APIError for fields above their limit and for tokens outside the vocabulary."""
    check_limit(fields.num_beams, limits.beams, "num_beams")
    check_limit(len(stop_strings), limits.stop_strings, "stop")
    for stop_string in stop_strings:
        if not stop_string or len(stop_string) > limits.stop_characters:
            raise APIError(
                400,
                f"a stop string has {len(stop_string)} characters: it must have 1 to "
                f"{limits.stop_characters}",
                param="stop",
            )
    for name in TOKEN_FIELDS:
        if getattr(fields, name) is None:
            continue
        if name in ROW_FIELDS:
            check_limit(len(getattr(fields, name)), limits.tokens, name)
        tokens = _flatten_tokens(name, getattr(options, name))
        check_limit(len(tokens), limits.tokens, name)
        if unknown := [token for token in tokens if not 0 <= token < vocab]:
            message = f"{name} holds token {unknown[0]}, and the vocabulary has {vocab}"
            raise APIError(400, message, param=name)
    check_text(fields.prefix or "", limits)
    for name in ("regex", "grammar", "json_schema"):
        constraint = getattr(fields, name)
        if constraint is None:
            continue
        size = len(constraint if isinstance(constraint, str) else json.dumps(constraint))
        if size > limits.grammar:
            message = f"{name} has {size:,} characters: at most {limits.grammar:,} are allowed"
            raise APIError(400, message, param=name)


def _flatten_tokens(name: str, value: Any) -> list[int]:
    """All tokens that an option names."""
    if value is None:
        return []
    if name == "logit_bias":
        return list(value)
    if name == "bad_words_ids":
        return [token for row in value for token in row]
    if name == "sequence_bias":
        rows = value.keys() if isinstance(value, dict) else [row for row, _ in value]
        return [token for row in rows for token in row]
    return as_list(value)


def _wrap_int64(seed: int) -> int:
    """The seed modulo 2^64, as a signed integer."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def as_texts(value: str | Sequence[str], limits: Limits, name: str = "input") -> list[str]:
    """One text or several, as a list. Raises APIError for none, too many or too long ones."""
    texts = [value] if isinstance(value, str) else list(value)
    if not texts:
        raise APIError(400, f"{name} is an empty list: give at least one text", param=name)
    if len(texts) > limits.inputs:
        raise APIError(
            400, f"{name} has {len(texts)} texts: this server allows at most {limits.inputs}", param=name
        )
    return [check_text(text, limits) for text in texts]


def token_rows(service: Service, inputs: PromptField) -> list[list[int]]:
    """Texts or tokens as rows of tokens within max_model_len. Slow for long texts: call it in a thread."""
    prompts = as_prompts(inputs)
    check_limit(len(prompts), service.limits.inputs, "input")
    for prompt in prompts:
        if isinstance(prompt, str):
            check_text(prompt, service.limits)
    vocab = service.model.design.source_vocab or service.model.design.vocab
    rows = _encode_texts(service, prompts)
    for n, row in enumerate(rows):
        if not row:
            raise APIError(400, f"text {n} is empty: give at least one token", param="input")
        if len(row) > service.max_model_len:
            raise too_long(len(row), service.max_model_len, f"text {n}", param="input")
        if unknown := [token for token in row if not 0 <= token < vocab]:
            message = f"text {n} holds token {unknown[0]}, and the vocabulary has {vocab}"
            raise APIError(400, message, param="input")
    return rows


def as_prompts(prompt: PromptField) -> list[Prompt]:
    """One prompt or several, each a text or tokens, as a list. Raises APIError for an empty list."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt or [] in prompt:
        raise APIError(
            400,
            "there is an empty list where a text or tokens should be: give at least one of them",
            param="prompt",
        )
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def tenant_of(service: Service, key: str, user: str | None) -> Tenant:
    """The tenant of a request: a user within an API key."""
    check_limit(len(user or ""), service.limits.user, "user")
    return Tenant(key, user or "")


def usage(record: RequestRecord) -> dict[str, int]:
    return {
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "total_tokens": record.prompt_tokens + record.completion_tokens,
    }


def prompt_usage(record: RequestRecord) -> dict[str, int]:
    """The usage of routes that generate nothing."""
    return {"prompt_tokens": record.prompt_tokens, "total_tokens": record.prompt_tokens}
