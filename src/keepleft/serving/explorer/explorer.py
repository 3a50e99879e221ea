"""The explorer: dispatches questions about one model, one at a time.

No HTTP here: a server, a notebook and a static file are three transports for the same questions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from keepleft.auditing.report import json_safe
from keepleft.models.build import share_weights
from keepleft.models.design import LMHead
from keepleft.models.transformer import Decoder, EncoderDecoder, Model
from keepleft.pipelines.text_generation import GenerativeModel, TextGenerator
from keepleft.serving.explorer import (
    attention,
    audit,
    beam_tree,
    continue_text,
    masks,
    model_info,
    next_token,
    run_log,
    translate,
    unmasked,
)
from keepleft.serving.explorer.audit import BackgroundAudit
from keepleft.serving.explorer.params import MAX_TOKENS, Params, shorten, suggestion
from keepleft.serving.explorer.run_log import RunFolder
from keepleft.serving.explorer.text_cache import TextCache
from keepleft.serving.explorer.tokens import DisplayTokenizer, describe_tokens, vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Answer = dict[str, Any]


class Question(NamedTuple):
    """A kind of question: who answers it, and the names of its fields, separated by spaces."""

    handler: Callable[[Explorer, Params], Answer]
    fields: str = ""


class Explorer:
    """Answers questions about one model.

    `runs` is a folder of run directories, `compare` the output folder of `keepleft compare`; either may be
    missing. `example` is the text, and the source, to show first. `pivot` is the language that a model
    translates to and from, where it knows no pair without it. The model may keep training: its weights are
    shared, not copied.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        source_tokenizer: Tokenizer | None = None,
        *,
        name: str = "",
        runs: str | Path | None = None,
        compare: str | Path | None = None,
        example: Mapping[str, str] | None = None,
        pivot: str | None = None,
    ) -> None:
        if tokenizer is None:
            raise ValueError("there is no tokenizer: give the one that the model was trained with")
        self.model = model
        self.name = name
        self.pivot = pivot
        self.compare_folder = compare
        self.lock = threading.Lock()
        self.last_tenant = ""
        # the model may be in use elsewhere at this moment: what is watched or changed here is a twin of it
        twin = cast(GenerativeModel, share_weights(model).eval())  # an encoder is never asked to generate
        self.generator = TextGenerator(twin, tokenizer, source_tokenizer)
        self.display_tokenizer = DisplayTokenizer(self.generator)
        self.text_cache = TextCache(self.generator.model)
        self.audit = BackgroundAudit(model)
        self.run_folder = RunFolder(runs)
        self.example = model_info.example(self) if example is None else dict(example)

    def ask(self, question: str, params: Mapping[str, Any] | None = None, tenant: str = "") -> Answer:
        """The answer as JSON data; a ValueError says what is wrong with the question, and the remedy.

        `tenant`: who asks, where several do; nobody sees what is kept for another.
        """
        if not isinstance(question, str) or question not in QUESTIONS:
            raise ValueError(
                f"there is no question {shorten(question)}: {suggestion(question, list(QUESTIONS))}"
            )
        entry = QUESTIONS[question]
        values = {} if params is None else params
        with self.lock, torch.no_grad():
            self._forget_prefixes_of_others(tenant)
            return json_safe(entry.handler(self, Params(question, values, entry.fields.split(), tenant)))

    def _forget_prefixes_of_others(self, tenant: str) -> None:
        """The time of an answer would tell whether another tenant has asked about the same text."""
        if tenant != self.last_tenant:
            self.__dict__.pop("scorer", None)
            self.__dict__.pop("unmasked_scorer", None)
        self.last_tenant = tenant

    # -- shared by several questions

    @property
    def is_generative(self) -> bool:
        """True for a model with a language-modelling head over a decoder."""
        return self.generator.model.design.decoder is not None and isinstance(
            self.generator.model.design.head, LMHead
        )

    def require_generative(self, question: str) -> DisplayTokenizer:
        """The tokenizer; ValueError for a model that does not generate."""
        if not self.is_generative:
            raise ValueError(
                f"{question} is for models that write, and this one only reads: ask for its attention"
            )
        return self.display_tokenizer

    def input_text(self, params: Params) -> str:
        """The text to continue, or the source of an encoder-decoder."""
        if self.generator.is_encoder_decoder:
            params.text("text", "")
            return params.text("source")
        self.reject_source(params)
        return params.text("text")

    def reject_source(self, params: Params) -> None:
        if "source" in params:
            raise ValueError(
                f"source is {shorten(params.values['source'])}, and this model reads none: leave it out"
            )

    def new_tokens(self, params: Params) -> list[int]:
        """Tokens generated so far."""
        return params.integers("tokens", self.generator.model.design.vocab, MAX_TOKENS, [])

    def check_length(self, tokens: list[int]) -> None:
        max_tokens = min(MAX_TOKENS, self.generator.model.design.max_positions or MAX_TOKENS)
        if len(tokens) > max_tokens:
            raise ValueError(
                f"the text has {len(tokens):,} tokens with what was written, and at most {max_tokens:,} fit: "
                "shorten it"
            )

    def greedy_target(self, source_tokens: list[int], limit: int) -> list[int]:
        """What an encoder-decoder generates greedily, without the EOS token, which is never an input."""
        start_tokens = self.display_tokenizer.start_tokens
        eos_ids = self.display_tokenizer.options.eos_ids
        target: list[int] = []
        max_tokens = min(limit, self.text_cache.max_tokens - len(start_tokens))
        while len(target) < max_tokens and not (target and target[-1] in eos_ids):
            chunk, _ = continue_text.continue_tokens(
                self.display_tokenizer,
                source_tokens,
                target,
                {"do_sample": False},
                min(continue_text.MAX_NEW_TOKENS, max_tokens - len(target)),
            )
            if not chunk:
                break
            target += chunk
        return [*start_tokens, *(target[:-1] if target and target[-1] in eos_ids else target)]

    @property
    def generative_model(self) -> Decoder | EncoderDecoder:
        """The model that generates, which is one and no ensemble here."""
        return cast(Decoder | EncoderDecoder, self.generator.model)

    @cached_property
    def scorer(self) -> next_token.IncrementalScorer:
        return next_token.IncrementalScorer(self.generative_model)

    @cached_property
    def unmasked_model(self) -> Decoder | EncoderDecoder:
        """The model without its causal mask."""
        return unmasked.without_causal_mask(self.generative_model)

    @cached_property
    def unmasked_scorer(self) -> next_token.IncrementalScorer:
        return next_token.IncrementalScorer(self.unmasked_model)


QUESTIONS: dict[str, Question] = {
    "model_info": Question(model_info.model_info),
    "attention": Question(attention.attention, "text source"),
    "overview": Question(attention.overview, "key name layer head size"),
    "tile": Question(attention.tile, "key name layer head row column size"),
    "token_attention": Question(attention.token_attention, "key name layer head token incoming"),
    "head_stats": Question(attention.layer_head_stats, "key name layer"),
    "next_token": Question(next_token.next_token, "text source tokens unmasked"),
    "token_texts": Question(describe_tokens, "ids context"),
    "vocabulary": Question(vocabulary),
    "continue_text": Question(continue_text.continue_text, "text source tokens options max_new_tokens"),
    "beam": Question(
        beam_tree.beam_tree, "text source num_beams max_new_tokens length_penalty early_stopping"
    ),
    "translate": Question(translate.translate, "text to"),
    "alignment": Question(attention.alignment, "source tokens layer head"),
    "mask": Question(masks.mask, "expression length padding packing"),
    "audit": Question(audit.audit_status, "budget action wait client"),
    "unmasked": Question(unmasked.compare_unmasked, "text source"),
    "runs": Question(run_log.list_runs),
    "run": Question(run_log.run_metrics, "name from_line"),
    "compare": Question(run_log.compare),
}
