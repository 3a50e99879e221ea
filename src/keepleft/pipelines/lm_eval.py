"""A decoder as a model of lm-evaluation-harness, so that its tasks can be run on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keepleft.decoding.batch import pad_batch
from keepleft.decoding.generate import completions
from keepleft.decoding.generation_config import GenerationConfig
from keepleft.evaluation.perplexity import token_nll
from keepleft.evaluation.token_logprobs import default_window, require_language_model, target_logprobs
from keepleft.models.transformer import Model
from keepleft.nn.loss import IGNORE_INDEX

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM
    from tokenizers import Tokenizer

# Names that tasks have for max_new_tokens; the first one present counts
MAX_TOKENS_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def lm_eval_model(
    model: Model,
    tokenizer: Tokenizer,
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    max_new_tokens: int = 256,
) -> TemplateLM:
    """An lm_eval.api.model.LM for lm_eval.simple_evaluate(model=…).

    `max_length` is the most tokens the model sees at once, by default the positions it was made for;
    `max_new_tokens` the most it generates where a task does not say. Tokens that the tokenizer puts before a
    text are added, those that it puts behind are not. Raises ValueError if the model is no language model, or
    names neither BOS nor EOS.
    """
    try:
        from lm_eval.api.model import TemplateLM
    except ImportError as error:
        raise ImportError("the evaluation harness needs lm-eval: pip install 'keepleft[harness]'") from error
    language_model = require_language_model(model)
    eos_token_id = language_model.notes.get("eos_token_id")
    eos_token_ids: list[int] = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or [])
    prefix_token_id = language_model.notes.get("bos_token_id")
    if prefix_token_id is None:
        prefix_token_id = eos_token_ids[0] if eos_token_ids else None
    if prefix_token_id is None:
        raise ValueError(
            "the model's notes name neither bos_token_id nor eos_token_id, and an empty context must be "
            "something: set model.notes['eos_token_id']"
        )
    bos_token_id = int(prefix_token_id)
    context_length = default_window(model) if max_length is None else max_length
    prefix_tokens = _prefix_tokens(tokenizer)

    class KeepleftLM(TemplateLM):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._device = next(model.parameters()).device

        @property
        def eot_token_id(self) -> int:
            return eos_token_ids[0] if eos_token_ids else bos_token_id

        @property
        def prefix_token_id(self) -> int:
            return bos_token_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            ids = tokenizer.encode(string, add_special_tokens=False).ids
            if add_special_tokens is False or ids[: len(prefix_tokens)] == prefix_tokens:
                return ids
            return prefix_tokens + ids

        def _loglikelihood_tokens(
            self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
        ) -> list[tuple[float, bool]]:
            continuations = [
                (context or [bos_token_id], continuation) for _, context, continuation in requests
            ]
            return _score_continuations(model, continuations, batch_size, context_length)

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
            # the caller shows progress, if anyone does
            return super().loglikelihood(requests, disable_tqdm=True)

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
            out = []
            for (text,) in (request.args for request in requests):
                ids = self.tok_encode(text, add_special_tokens=False)
                window = len(ids) + 1 if context_length is None else context_length
                nll = token_nll(
                    model,
                    ids,
                    prefix_token_id=bos_token_id,
                    window=window,
                    stride=window,
                    batch_size=batch_size,
                )
                out.append(-float(nll.sum()))
            return out

        def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
            out = [""] * len(requests)
            by_options: dict[str, list[int]] = {}  # requests with the same options are batched
            for n, request in enumerate(requests):
                by_options.setdefault(repr(request.args[1]), []).append(n)
            for indices in by_options.values():
                options, stops = _parse_gen_kwargs(requests[indices[0]].args[1], max_new_tokens)
                prompts = [
                    _truncate_prompt(
                        self.tok_encode(requests[n].args[0]) or [bos_token_id],
                        context_length,
                        options.max_new_tokens or max_new_tokens,
                    )
                    for n in indices
                ]
                results = completions(
                    model,
                    tokenizer,
                    prompts,
                    batch_size=batch_size,
                    options=options,
                    eos_token_id=eos_token_ids or None,
                )
                for n, (completion, *_) in zip(indices, results, strict=True):
                    out[n] = cut_at_stop(completion.text, stops)
            return out

    return KeepleftLM()


def _prefix_tokens(tokenizer: Tokenizer) -> list[int]:
    """The special tokens that a tokenizer puts before every text."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    with_special = tokenizer.encode("a", add_special_tokens=True).ids
    for n in range(len(with_special) - len(plain) + 1):
        if with_special[n : n + len(plain)] == plain:
            return with_special[:n]
    return []


def _score_continuations(
    model: Model,
    continuations: list[tuple[list[int], list[int]]],
    batch_size: int,
    context_length: int | None,
) -> list[tuple[float, bool]]:
    """The log-probability of each (context, continuation), and whether greedy decoding would generate it.

    A context is cut on its left to fit. Raises ValueError for a continuation longer than `context_length`.
    """
    device = next(model.parameters()).device
    rows: list[tuple[list[int], int]] = []  # context and continuation, and the length of the continuation
    for context, continuation in continuations:
        sequence = context + continuation
        if context_length is not None:
            if len(continuation) > context_length:
                raise ValueError(
                    f"a continuation of {len(continuation)} tokens is more than the {context_length} that "
                    "the model sees at once: leave the task out, or give a larger max_length"
                )
            sequence = sequence[-context_length - 1 :]
        rows.append((sequence, len(continuation)))
    out = [(0.0, True)] * len(rows)
    order = sorted((n for n in range(len(rows)) if rows[n][1]), key=lambda n: -len(rows[n][0]))
    for indices in (order[n : n + batch_size] for n in range(0, len(order), batch_size)):
        tokens, segments = pad_batch([rows[n][0][:-1] for n in indices], device, left=False)
        targets = tokens.new_full(tokens.shape, IGNORE_INDEX)
        for row, n in enumerate(indices):
            sequence, count = rows[n]
            targets[row, len(sequence) - 1 - count : len(sequence) - 1] = tokens.new_tensor(sequence[-count:])
        logprobs, is_greedy = target_logprobs(model, tokens, targets, segments)
        counts = [rows[n][1] for n in indices]
        for n, row_logprobs, row_is_greedy in zip(
            indices, logprobs.double().split(counts), is_greedy.split(counts), strict=True
        ):
            out[n] = float(row_logprobs.sum()), bool(row_is_greedy.all())
    return out


def _parse_gen_kwargs(
    gen_kwargs: dict[str, Any], default_max_tokens: int
) -> tuple[GenerationConfig, list[str]]:
    """The options of a request, and its stop strings."""
    max_token_counts = [gen_kwargs[key] for key in MAX_TOKENS_KEYS if gen_kwargs.get(key) is not None]
    max_new_tokens = int(max_token_counts[0] if max_token_counts else default_max_tokens)
    stops = gen_kwargs.get("until") or []
    stops = [stops] if isinstance(stops, str) else [stop for stop in stops if stop]
    do_sample = bool(gen_kwargs.get("do_sample", float(gen_kwargs.get("temperature") or 0.0) > 0))
    sampling_options = {
        name: gen_kwargs[name]
        for name in ("temperature", "top_p", "top_k", "min_p")
        if do_sample and gen_kwargs.get(name)
    }
    options = GenerationConfig(
        max_new_tokens=max_new_tokens,
        stop_strings=stops or None,
        do_sample=do_sample,
        seed=int(gen_kwargs.get("seed") or 0),
        **sampling_options,
    )
    return options, stops


def _truncate_prompt(prompt: list[int], context_length: int | None, max_new_tokens: int) -> list[int]:
    """The end of a prompt, with room for `max_new_tokens`. Raises ValueError if they leave it none."""
    if context_length is None:
        return prompt
    if max_new_tokens >= context_length:
        raise ValueError(
            f"{max_new_tokens} tokens to write leave no room for a prompt among the {context_length} that "
            "the model sees at once: give fewer, as gen_kwargs='max_gen_toks=…' or max_new_tokens=…"
        )
    return prompt[-(context_length - max_new_tokens) :]


def cut_at_stop(text: str, stops: list[str]) -> str:
    """The text before the first stop string in it."""
    stop_positions = [position for stop in stops if stop and (position := text.find(stop)) >= 0]
    return text[: min(stop_positions, default=len(text))]
