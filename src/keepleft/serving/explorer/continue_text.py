"""Question that continues a text, greedily or by sampling."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from keepleft.decoding.batch import DecodeBatch
from keepleft.decoding.dispatch import decode_steps, make_strategy
from keepleft.decoding.generate import resolve_options
from keepleft.decoding.generation_config import RANGES, GenerationConfig
from keepleft.decoding.hypotheses import FinishedSequence, Hypotheses
from keepleft.decoding.sampling import SamplingStrategy
from keepleft.serving.explorer.params import Params, shorten
from keepleft.serving.explorer.tokens import DisplayTokenizer

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer

MAX_NEW_TOKENS = 64  # of one answer
OPTION_NAMES = (
    "do_sample",
    "seed",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "top_h",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
    "min_new_tokens",
)
SINGLE_SEQUENCE_OPTIONS = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "num_beam_groups": 1,
    "penalty_alpha": 0.0,
}


class CaptureLogprobs:
    """A logits processor that changes nothing and keeps the raw log-probabilities of each step."""

    def __init__(self) -> None:
        self.logprobs: list[Tensor] = []  # (V,)

    def __call__(self, logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        self.logprobs.append(logits[0].log_softmax(-1))
        return logits


@dataclass(frozen=True)
class ContinueStrategy:
    """Wraps a strategy so that the last `num_written` tokens of the prompt count as generated.

    So a text comes out the same whether it is requested at once or piece by piece.
    """

    strategy: SamplingStrategy
    num_written: int

    def begin(
        self, prompt: Tensor, prompt_mask: Tensor | None, max_new_tokens: Tensor
    ) -> tuple[Hypotheses, Tensor | None]:
        hypotheses, rows = self.strategy.begin(prompt, prompt_mask, max_new_tokens + self.num_written)
        return replace(
            hypotheses,
            prompt_width=hypotheses.prompt_width - self.num_written,
            lengths=hypotheses.lengths + self.num_written,
        ), rows

    def choose(self, logits: Tensor, hypotheses: Hypotheses) -> tuple[Hypotheses, Tensor | None]:
        return self.strategy.choose(logits, hypotheses)

    def results(self, hypotheses: Hypotheses) -> list[list[FinishedSequence]]:
        return [
            [replace(sequence, tokens=sequence.tokens[self.num_written :]) for sequence in sequences]
            for sequences in self.strategy.results(hypotheses)
        ]


def continue_text(explorer: Explorer, params: Params) -> dict[str, Any]:
    """The next tokens of a text, with their log-probabilities."""
    display = explorer.require_generative("continue_text")
    prompt_tokens = display.encode_prompt(explorer.input_text(params))
    tokens = explorer.new_tokens(params)
    context = display.start_tokens if explorer.generator.is_encoder_decoder else prompt_tokens
    explorer.check_length([*context, *tokens])
    new_tokens, logprobs = continue_tokens(
        display,
        prompt_tokens,
        tokens,
        parse_options(params.object("options", OPTION_NAMES)),
        params.integer("max_new_tokens", 1, MAX_NEW_TOKENS),
    )
    return {
        "tokens": display.describe(new_tokens, [*context, *tokens]),
        "logprobs": logprobs,
        "finished": bool(new_tokens) and new_tokens[-1] in display.options.eos_ids,
    }


def continue_tokens(
    display: DisplayTokenizer,
    prompt_tokens: list[int],
    tokens: Sequence[int],
    overrides: dict[str, Any],
    max_new_tokens: int,
) -> tuple[list[int], list[float]]:
    """The next tokens, and the raw log-probability of each, before processors."""
    generator = display.generator
    options = resolve_options(
        generator.model, None, {**overrides, **SINGLE_SEQUENCE_OPTIONS, "max_new_tokens": max_new_tokens}
    )
    # the last token of this answer is not the last of the text, so nothing forces an end here
    options = replace(
        options, forced_eos_token_id=None, stop_strings=None, max_time=None, prompt_lookup_num_tokens=None
    )
    batch = DecodeBatch.build(generator.model, [prompt_tokens], options, [list(tokens)])
    if batch.max_new_tokens[0] < 1:
        return [], []
    capture = CaptureLogprobs()
    strategy = make_strategy(
        generator.tokenizer, options, DecodeBatch.build(generator.model, [prompt_tokens], options)
    )
    assert isinstance(strategy, SamplingStrategy)
    continuation = ContinueStrategy(
        replace(strategy, processors=(capture, *strategy.processors)), len(tokens)
    )
    steps = decode_steps(generator.model, batch, continuation, options)  # type: ignore[arg-type]
    final = deque(steps, maxlen=1)[0]
    new_tokens = continuation.results(final)[0][0].tokens
    return new_tokens, [
        float(logprobs[token]) for logprobs, token in zip(capture.logprobs, new_tokens, strict=False)
    ]


def parse_options(params: Params) -> dict[str, Any]:
    """Generation options that the page may set; their ranges are checked by `GenerationConfig`."""
    options: dict[str, Any] = {}
    for name in OPTION_NAMES:
        if name not in params:
            continue
        if name == "do_sample":
            options[name] = params.flag(name)
        elif name == "seed":
            options[name] = params.integer(name, 0, (1 << 53) - 1)
        else:
            value = params.values[name]
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} is {shorten(value)}: it must be {RANGES[name].requirement}")
            options[name] = value
    if options.get("do_sample") and "seed" not in options:
        options["seed"] = int(torch.randint(1 << 53, (), generator=_make_rng()))
    return options


def _make_rng() -> torch.Generator:
    """A generator of its own, so that training in the same process draws the same numbers as without us."""
    rng = torch.Generator()
    rng.seed()
    return rng


assert {*OPTION_NAMES} <= {field.name for field in fields(GenerationConfig)}
