"""A model in use: everything that a command needs to write with it."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from keepleft.decoding import grammar
from keepleft.decoding.batch import DecodeBatch, encode_prefixes, encode_prompts, warn_no_room
from keepleft.decoding.dispatch import decode_steps, make_strategy
from keepleft.decoding.generate import Completion, completions, resolve_options, stream, to_completion
from keepleft.decoding.generation_config import GenerationConfig, decoder_start_token, unsupported_fields
from keepleft.decoding.hypotheses import FinishedSequence
from keepleft.decoding.score import score_tokens
from keepleft.pipelines.loading import load_for_inference


@dataclass(frozen=True)
class GenerationResult(Completion):
    """An answer with what was asked for besides."""

    logprobs: list[dict[str, Any]] | None = None
    alignment: str | None = None


class LogitsCaptureProcessor:
    """A transform that changes nothing and keeps what it saw."""

    logits: Any = None

    def __call__(self, logits: Any, hypotheses: Any) -> Any:
        self.logits = logits if self.logits is None else self.logits
        return logits

    def top_tokens(self, count: int) -> list[int]:
        """So many tokens of the first text, fewer where fewer may come."""
        top = self.logits[0].topk(min(count, self.logits.shape[-1]))
        return [
            token
            for token, logit in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            if logit > -math.inf
        ]


@dataclass(frozen=True)
class ForcedFirstTokenProcessor:
    """A transform that lets a text begin with one token alone."""

    token: int

    def __call__(self, logits: Any, hypotheses: Any) -> Any:
        if hypotheses.new_width:
            return logits
        out = torch.full_like(logits, -math.inf)
        out[:, self.token] = logits[:, self.token]
        return out


@dataclass(frozen=True)
class TextGenerator:
    """A model and its tokenizers."""

    model: Any
    tokenizer: Any
    source_tokenizer: Any = None
    draft_model: Any = None

    @property
    def input_tokenizer(self) -> Any:
        """The tokenizer of what is read."""
        return self.source_tokenizer or self.tokenizer

    @property
    def is_encoder_decoder(self) -> bool:
        return self.model.design.is_encoder_decoder

    def resolve(self, options: GenerationConfig) -> GenerationConfig:
        return resolve_options(self.model, options, {})

    def prompt(self, text: str, tag: str | None) -> str | list[int]:
        """A text, or its tokens where a tag goes before it."""
        if tag is None:
            return text
        special_ids = {
            token.content: token_id
            for token_id, token in self.input_tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        if tag not in special_ids:  # an ordinary word is none
            language_tags = [name for name in special_ids if name.startswith("<2") and name.endswith(">")]
            raise ValueError(
                f"the model has no tag {tag!r}: "
                + (f"there are {', '.join(sorted(language_tags))}" if language_tags else "leave it out")
            )
        return [special_ids[tag], *self.input_tokenizer.encode(text).ids]

    def generate(
        self,
        texts: Sequence[str],
        options: GenerationConfig,
        *,
        tag: str | None = None,
        alternatives: int | None = None,
        logprobs: int | None = None,
        alignments: bool = False,
    ) -> list[list[GenerationResult]]:
        """What is written for each text."""
        prompts = [self.prompt(text, tag) for text in texts]
        if alternatives:
            results = [
                self._alternatives(prompt, options_slice(options, n, 1), alternatives)
                for n, prompt in enumerate(prompts)
            ]
        else:
            results = completions(
                self.model,
                self.tokenizer,
                prompts,
                source_tokenizer=self.source_tokenizer,
                draft_model=self.draft_model,
                batch_size=max(1, len(prompts)),
                options=options,
            )
        return [
            [self._to_result(completion, options, logprobs, alignments) for completion in group]
            for group in results
        ]

    def stream(self, text: str, options: GenerationConfig, *, tag: str | None = None) -> Iterator[str]:
        return stream(
            self.model,
            self.tokenizer,
            self.prompt(text, tag),
            source_tokenizer=self.source_tokenizer,
            draft_model=self.draft_model,
            options=options,
        )

    def _decoder_start(self, options: GenerationConfig) -> list[int]:
        """What a text of an encoder-decoder begins with."""
        return [decoder_start_token(options)] if self.is_encoder_decoder else []

    def _prefix(self, options: GenerationConfig) -> list[int]:
        """What the text has to begin with, of options for one text."""
        return (encode_prefixes(self.tokenizer, options, 1) or [[]])[0]

    def _alternatives(
        self, prompt: str | list[int], options: GenerationConfig, count: int
    ) -> list[Completion]:
        """One text for each of the likeliest next tokens, with its log-probability."""
        if grammar.grammar_from_options(options) is not None or options.num_sequences > 1:
            raise ValueError(
                "alternatives are texts that begin differently: leave grammars and num_return_sequences out"
            )
        (row,) = encode_prompts(self.model, self.input_tokenizer, [prompt], options)
        prefix = self._prefix(options)
        warn_no_room(self.model, [row], options, [prefix])
        batch = DecodeBatch.build(self.model, [row], options, [prefix])
        if batch.max_new_tokens[0] < 1:
            return [to_completion(self.tokenizer, row, FinishedSequence(prefix, 0.0), options, len(prefix))]
        single_options = replace(options, num_beams=1)
        run_steps = lambda base_strategy, step_options, processor: decode_steps(
            self.model,
            batch,
            replace(base_strategy, processors=(*base_strategy.processors, processor)),
            step_options,
        )
        next(
            run_steps(
                make_strategy(self.tokenizer, single_options, batch),
                single_options,
                capture := LogitsCaptureProcessor(),
            )
        )
        out = []
        for token in capture.top_tokens(count):
            strategy = make_strategy(self.tokenizer, options, batch)
            last_state = deque(run_steps(strategy, options, ForcedFirstTokenProcessor(token)), maxlen=1)[0]
            tokens = [*prefix, *strategy.results(last_state)[0][0].tokens]  # type: ignore[arg-type]
            token_logprobs = score_tokens(
                self.model,
                self._decoder_start(options) or row,
                tokens,
                source=row if self.is_encoder_decoder else None,
            )
            finished = FinishedSequence(
                tokens, sum(token_logprob.logprob for token_logprob in token_logprobs[len(prefix) :])
            )
            out.append(to_completion(self.tokenizer, row, finished, options, len(prefix)))
        return out

    def _to_result(
        self, completion: Completion, options: GenerationConfig, logprobs: int | None, alignments: bool
    ) -> GenerationResult:
        result = GenerationResult(
            completion.text, completion.tokens, completion.score, completion.ended, completion.prompt
        )
        context = self._decoder_start(options) if self.is_encoder_decoder else completion.prompt
        if logprobs is not None:
            token_logprobs = score_tokens(
                self.model,
                context,
                completion.tokens,
                source=completion.prompt if self.is_encoder_decoder else None,
                top_logprobs=logprobs,
            )
            token_name = self.tokenizer.id_to_token
            result = replace(
                result,
                logprobs=[
                    {
                        "token": token_name(t.token),
                        "logprob": round(t.logprob, 6),
                        "top": {token_name(n): round(value, 6) for n, value in t.top_logprobs},
                    }
                    for t in token_logprobs
                ],
            )
        if alignments:
            from keepleft.plots.cross_attention import alignment_weights, pharaoh_pairs

            if not self.is_encoder_decoder:
                raise ValueError(
                    "an alignment is of source and target, and this model has no source: leave --alignments out"
                )
            weights = alignment_weights(self.model, completion.prompt, [*context, *completion.tokens])
            result = replace(result, alignment=" ".join(f"{i}-{j}" for i, j in pharaoh_pairs(weights)))
        return result

    def plot(self, path: Path, text: str, options: GenerationConfig, *, tag: str | None = None) -> Path:
        """One text drawn while it is written: the tree of beams, the alignment, or the distribution at each
        step.
        """
        from keepleft.data.token_text import token_pieces
        from keepleft.plots.beam_tree import plot_beam_tree
        from keepleft.plots.cross_attention import alignment_weights, plot_alignment
        from keepleft.plots.next_token import plot_distributions, step_distributions

        (row,) = encode_prompts(self.model, self.input_tokenizer, [self.prompt(text, tag)], options)
        prefix = self._prefix(options)
        batch = DecodeBatch.build(self.model, [row], options, [prefix])
        strategy = make_strategy(self.tokenizer, options, batch)
        step_states = list(decode_steps(self.model, batch, strategy, options, self.draft_model))
        if options.beam_count > 1:
            return plot_beam_tree(path, step_states, self.tokenizer, title=text, prefix=prefix)  # type: ignore[arg-type]
        tokens = [*prefix, *strategy.results(step_states[-1])[0][0].tokens]  # type: ignore[arg-type]
        if self.is_encoder_decoder:
            weights = alignment_weights(self.model, row, [*self._decoder_start(options), *tokens])
            return plot_alignment(
                path,
                token_pieces(self.input_tokenizer, row),
                token_pieces(self.tokenizer, tokens),
                weights,
                title=text,
            )
        return plot_distributions(
            path,
            step_distributions(
                self.model,
                self.tokenizer,
                [*row, *tokens],
                len(row) + len(prefix),
                processors=strategy.processors,
            ),
            title=text,
        )


def options_slice(options: GenerationConfig, first: int, count: int) -> GenerationConfig:
    """The options of some of the texts, where there is a seed or a prefix for each."""
    sliced: dict[str, Any] = {
        name: getattr(options, name)[first : first + count]
        for name in ("seed", "prefix")
        if isinstance(getattr(options, name), list)
    }
    if too_short := [name for name, value in sliced.items() if len(value) != count]:
        raise ValueError(
            f"{too_short[0]} has {len(getattr(options, too_short[0]))} values, and there are more texts: give one, or one "
            "for each"
        )
    return replace(options, **sliced)


def load_generator(
    model_path: str, *, dtype: str = "float32", device: str | None = None, draft_path: str | None = None
) -> TextGenerator:
    """A model directory, ready to write."""
    loaded = load_for_inference(model_path, dtype=dtype, device=device)
    if loaded.model.design.decoder is None:
        raise ValueError(
            f"{model_path} is an encoder and writes no text: `keepleft classify`, `fill` or `score` may be meant"
        )
    for name in unsupported_fields(loaded.model.notes):
        warnings.warn(f"generation_config.json asks for {name}, which is not done here", stacklevel=2)
    return TextGenerator(
        *loaded,
        None if draft_path is None else load_for_inference(draft_path, dtype=dtype, device=device).model,
    )
