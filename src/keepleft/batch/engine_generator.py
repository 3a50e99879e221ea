"""A text generator whose completions come from the engine: many texts at once, each as it would be alone."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from keepleft.batch.engine_client import EngineClient
from keepleft.decoding.batch import default_new_tokens, encode_prefixes, encode_prompts
from keepleft.decoding.generate import to_completion
from keepleft.decoding.generation_config import GenerationConfig
from keepleft.decoding.grammar import CompiledGrammar, GrammarCompiler
from keepleft.decoding.hypotheses import FinishedSequence
from keepleft.pipelines.text_generation import GenerationResult, TextGenerator
from keepleft.serving.engine.request import GenerationRequest


class GrammarCache:
    """Compiles the grammar of a job once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.compiled: CompiledGrammar | None = None

    def compile(self, generator: TextGenerator, options: GenerationConfig) -> CompiledGrammar | None:
        if not options.has_grammar:
            return None
        with self.lock:
            if self.compiled is None:
                self.compiled = GrammarCompiler(generator.tokenizer).compile(options)
            return self.compiled


@dataclass(frozen=True)
class EngineTextGenerator(TextGenerator):
    """As TextGenerator, without what the engine does not know: drafts, alternatives, logprobs, alignments.

    A seed that is one number gives each prompt a seed of its own, made of its tokens: what is drawn does not
    depend on the prompts beside it.
    """

    client: EngineClient | None = None
    grammars: GrammarCache = field(default_factory=GrammarCache)

    def generate(
        self, texts: Sequence[str], options: GenerationConfig, *, tag: str | None = None, **details: Any
    ) -> list[list[GenerationResult]]:
        """The completions of each text."""
        assert self.client is not None
        assert not any(details.values())
        options.check()
        prompts = [self.prompt(text, tag) for text in texts]
        rows = encode_prompts(self.model, self.input_tokenizer, prompts, options)
        prefixes = encode_prefixes(self.tokenizer, options, len(rows)) or [[]] * len(rows)
        grammar = self.grammars.compile(self, options)
        requests = [
            GenerationRequest(
                row,
                self._row_options(options, n, row, prefix),
                prefix,
                only_at_end=True,
                compiled_grammar=grammar,
            )
            for n, (row, prefix) in enumerate(zip(rows, prefixes, strict=True))
        ]
        has_room = [bool(request.options.max_new_tokens) for request in requests]
        finished = iter(
            self.client.run([request for request, room in zip(requests, has_room, strict=True) if room])
        )
        return [
            [
                self._result(request, prefix, sequence)
                for sequence in (
                    [event.sequence for event in next(finished)]
                    if room
                    else [FinishedSequence([], 0.0)] * options.num_sequences
                )
            ]
            for request, prefix, room in zip(requests, prefixes, has_room, strict=True)
        ]

    def _row_options(
        self, options: GenerationConfig, n: int, row: list[int], prefix: list[int]
    ) -> GenerationConfig:
        """The options of one prompt: its own seed, and the tokens that it has room for."""
        prompt_length = (1 if self.is_encoder_decoder else len(row)) + len(prefix)
        default = default_new_tokens(self.model.design, options, len(row))
        limit = options.resolve_max_new_tokens(prompt_length, default, self.model.design.max_positions)
        seed = options.seed[n] if isinstance(options.seed, list) else options.seed
        if isinstance(options.seed, int):
            seed = _mix(options.seed, row)
        return replace(options, max_new_tokens=max(0, limit), max_length=None, seed=seed, prefix=None)

    def _result(
        self, request: GenerationRequest, prefix: list[int], sequence: FinishedSequence | None
    ) -> GenerationResult:
        assert sequence is not None
        whole = FinishedSequence([*prefix, *sequence.tokens], sequence.score)
        completion = to_completion(self.tokenizer, list(request.tokens), whole, request.options, len(prefix))
        return GenerationResult(
            completion.text, completion.tokens, completion.score, completion.ended, completion.prompt
        )


def _mix(seed: int, tokens: Sequence[int]) -> int:
    """A seed for this prompt."""
    digest = hashlib.blake2b(repr((seed, list(tokens))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
