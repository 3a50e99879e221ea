"""A loaded model that generates: texts and options in, completions out."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from keepleft.data.chat_template import ChatTemplate
from keepleft.data.fast_encode import encoder
from keepleft.data.ragged import Ragged
from keepleft.data.token_text import token_texts
from keepleft.data.tokenizer import special_tokens
from keepleft.decoding.batch import DecodeBatch, encode_prefixes, encode_prompts, warn_no_room
from keepleft.decoding.beam import Beam
from keepleft.decoding.dispatch import decode_steps, make_strategy
from keepleft.decoding.generate import (
    Completion,
    completions,
    generate,
    resolve_options,
    stream,
    to_completion,
)
from keepleft.decoding.generation_config import (
    GenerationConfig,
    decoder_start_token,
    from_model_directory,
    unsupported_fields,
)
from keepleft.decoding.hypotheses import FinishedSequence, Hypotheses, LogitsProcessor
from keepleft.decoding.sampling import SamplingStrategy
from keepleft.decoding.score import ScoredToken, score_tokens
from keepleft.disk.encode_text import encode_text
from keepleft.models.ensemble import Ensemble, EnsembleAverage, ensemble
from keepleft.models.transformer import Decoder, Encoder, EncoderDecoder, Model
from keepleft.pipelines.chat import conversation, require_chat_template, with_answer_limit
from keepleft.pipelines.loading import LoadedModel, load_for_inference, split_ensemble

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GenerativeModel = Decoder | EncoderDecoder | Ensemble

BATCH_SIZE = 128  # sources that generate_targets takes at a time


@dataclass(frozen=True)
class GenerationResult(Completion):
    """A completion with its log-probabilities and its alignment, where they were requested."""

    logprobs: list[dict[str, Any]] | None = None
    alignment: str | None = None  # Pharaoh pairs, such as "0-0 1-2"


@dataclass(frozen=True)
class TextGenerator:
    """A model and its tokenizers; `draft_model` proposes tokens for speculative decoding.

    `tag`, such as <2fr>, goes before each text unless another is given. With a `chat_template`, each text is
    a message to answer, after the message `system` if there is one.
    """

    model: GenerativeModel
    tokenizer: Tokenizer
    source_tokenizer: Tokenizer | None = None
    draft_model: GenerativeModel | None = None
    tag: str | None = None
    chat_template: ChatTemplate | None = None
    system: str | None = None

    @property
    def input_tokenizer(self) -> Tokenizer:
        """The tokenizer of prompts, or of the sources of an encoder-decoder."""
        return self.source_tokenizer or self.tokenizer

    @property
    def is_encoder_decoder(self) -> bool:
        return self.model.design.is_encoder_decoder

    @property
    def keeps_blank_texts(self) -> bool:
        """Whether there is nothing to generate for a blank text: no source, and no message."""
        return self.is_encoder_decoder or self.chat_template is not None

    def resolve(self, options: GenerationConfig) -> GenerationConfig:
        """The options, completed by the model directory's own."""
        options = resolve_options(self.model, options, {})
        return options if self.chat_template is None else with_answer_limit(options)

    def has_limit(self, options: GenerationConfig) -> bool:
        """Whether the length has a limit: of the user, of the model directory, or that of a source."""
        resolved = resolve_options(self.model, options, {})
        limits = (resolved.max_new_tokens, resolved.max_length)
        return self.is_encoder_decoder or any(limit is not None for limit in limits)

    def with_chat_template(self, system: str | None = None) -> TextGenerator:
        """The same for chat messages. Raises ValueError for a model without a chat template."""
        return replace(self, chat_template=require_chat_template(self.model, self.tokenizer), system=system)

    def prompt(self, text: str, tag: str | None) -> str | list[int]:
        """The text, or its tokens where a tag (such as <2fr>) precedes it, or as a chat message.

        Raises ValueError for an unknown tag.
        """
        if self.chat_template is not None:
            return self.chat_template.encode(conversation(text, self.system))
        tag = tag or self.tag
        return text if tag is None else [self.tag_token(tag), *encode_text(self.input_tokenizer, text)]

    def tag_token(self, tag: str) -> int:
        """Raises ValueError for an unknown tag."""
        special_ids = {
            token.content: token_id
            for token_id, token in self.input_tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        if tag not in special_ids:  # a word of the vocabulary is no tag
            language_tags = [name for name in special_ids if name.startswith("<2") and name.endswith(">")]
            raise ValueError(
                f"the model has no tag {tag!r}: "
                + (f"there are {', '.join(sorted(language_tags))}" if language_tags else "leave it out")
            )
        return special_ids[tag]

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
        """The completions of each text.

        `alternatives` asks for a completion from each of so many likeliest first tokens, `logprobs` for the
        log-probability of each token and of so many likeliest ones in its place, `alignments` for the source
        token that each token of an encoder-decoder attended to most.
        """
        prompts = [self.prompt(text, tag) for text in texts]
        if alternatives:
            results = [
                self._alternatives(prompt, select_options(options, [n]), alternatives)
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

    def stream(
        self,
        text: str,
        options: GenerationConfig,
        *,
        tag: str | None = None,
        on_token: Callable[[int], object] = lambda token: None,
    ) -> Iterator[str]:
        """The completion of one text, piece by piece. `on_token` is called with each token."""
        return stream(
            self.model,
            self.tokenizer,
            self.prompt(text, tag),
            source_tokenizer=self.source_tokenizer,
            draft_model=self.draft_model,
            options=options,
            on_token=on_token,
        )

    def plot(self, path: Path, text: str, options: GenerationConfig, *, tag: str | None = None) -> Path:
        """Draw how one text is completed, into an .svg file; see `plots.generation`."""
        from keepleft.plots.generation import plot_generation

        self._require_single_model("plot")
        (prompt_tokens,) = encode_prompts(self.model, self.input_tokenizer, [self.prompt(text, tag)], options)
        return plot_generation(
            path,
            self.model,
            self.tokenizer,
            prompt_tokens,
            options,
            title=text,
            prefix=self._prefix(options),
            source_tokenizer=self.source_tokenizer,
            draft_model=self.draft_model,
        )

    def _decoder_start(self, options: GenerationConfig) -> list[int]:
        """The token that the target of an encoder-decoder begins with; nothing for a decoder."""
        return [decoder_start_token(options)] if self.is_encoder_decoder else []

    def _prefix(self, options: GenerationConfig) -> list[int]:
        """The tokens that the completion has to begin with, from options for one text."""
        return (encode_prefixes(self.tokenizer, options, 1) or [[]])[0]

    def _alternatives(
        self, prompt: str | list[int], options: GenerationConfig, count: int
    ) -> list[Completion]:
        """A completion from each of the `count` likeliest first tokens, scored by its log-probability."""
        if options.has_grammar or options.num_sequences > 1:
            raise ValueError(
                "alternatives are texts that begin differently: leave grammars and num_return_sequences out"
            )
        (prompt_tokens,) = encode_prompts(self.model, self.input_tokenizer, [prompt], options)
        prefix = self._prefix(options)
        warn_no_room(self.model, [prompt_tokens], options, [prefix])
        batch = DecodeBatch.build(self.model, [prompt_tokens], options, [prefix])
        if batch.max_new_tokens[0] < 1:
            empty = FinishedSequence(prefix, 0.0)
            return [to_completion(self.tokenizer, prompt_tokens, empty, options, len(prefix))]

        def strategy_with(
            strategy_options: GenerationConfig, processor: LogitsProcessor
        ) -> SamplingStrategy | Beam:
            strategy = make_strategy(self.tokenizer, strategy_options, batch)
            return replace(strategy, processors=(*strategy.processors, processor))

        capture = LogitsCaptureProcessor()
        single_options = replace(options, num_beams=1)
        next(decode_steps(self.model, batch, strategy_with(single_options, capture), single_options))
        out = []
        for token in capture.top_tokens(count):
            strategy = strategy_with(options, ForcedFirstTokenProcessor(token))
            last_state = deque(decode_steps(self.model, batch, strategy, options), maxlen=1)[0]
            tokens = [*prefix, *strategy.results(last_state)[0][0].tokens]  # type: ignore[arg-type]
            scored_tokens = score_tokens(
                self.model,
                self._decoder_start(options) or prompt_tokens,
                tokens,
                source=prompt_tokens if self.is_encoder_decoder else None,
            )
            score = sum(scored_token.logprob for scored_token in scored_tokens[len(prefix) :])
            finished = FinishedSequence(tokens, score)
            out.append(to_completion(self.tokenizer, prompt_tokens, finished, options, len(prefix)))
        return out

    def _to_result(
        self, completion: Completion, options: GenerationConfig, logprobs: int | None, alignments: bool
    ) -> GenerationResult:
        result = GenerationResult(
            completion.text, completion.tokens, completion.score, completion.ended, completion.prompt
        )
        context = self._decoder_start(options) if self.is_encoder_decoder else completion.prompt
        if logprobs is not None:
            scored_tokens = score_tokens(
                self.model,
                context,
                completion.tokens,
                source=completion.prompt if self.is_encoder_decoder else None,
                top_logprobs=logprobs,
            )
            result = replace(
                result, logprobs=self._readable_logprobs([*context, *completion.tokens], scored_tokens)
            )
        if alignments:
            from keepleft.plots.cross_attention import alignment_weights, pharaoh_pairs

            self._require_single_model("alignments")
            if not self.is_encoder_decoder:
                raise ValueError(
                    "an alignment is of source and target, and this model has no source: leave --alignments "
                    "out"
                )
            weights = alignment_weights(self.model, completion.prompt, [*context, *completion.tokens])
            result = replace(result, alignment=" ".join(f"{i}-{j}" for i, j in pharaoh_pairs(weights)))
        return result

    def _require_single_model(self, option: str) -> None:
        if isinstance(self.model, Ensemble):
            raise ValueError(
                f"--{option} shows the attention of one model, and there are {len(self.model.models)}: name "
                "one of them"
            )

    def _readable_logprobs(
        self, sequence: list[int], scored_tokens: Sequence[ScoredToken]
    ) -> list[dict[str, Any]]:
        """The log-probabilities of the last tokens of a sequence, by what each adds to the text before it."""
        start = len(sequence) - len(scored_tokens)
        out = []
        for n, scored in enumerate(scored_tokens, start):
            top_tokens = [token for token, _ in scored.top_logprobs]
            text, *top_texts = token_texts(self.tokenizer, sequence[:n], [scored.token, *top_tokens])
            top: dict[str, float] = {}
            for top_text, (token, value) in zip(top_texts, scored.top_logprobs, strict=True):
                # several tokens may read the same
                top[f"{top_text} #{token}" if top_text in top else top_text] = round(value, 6)
            out.append({"token": text, "logprob": round(scored.logprob, 6), "top": top})
        return out


class LogitsCaptureProcessor:
    """A logits processor that changes nothing and keeps the logits of the first step."""

    logits: Tensor | None = None

    def __call__(self, logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        self.logits = logits if self.logits is None else self.logits
        return logits

    def top_tokens(self, count: int) -> list[int]:
        """The `count` likeliest tokens of the first row; fewer where fewer are allowed."""
        assert self.logits is not None
        top = self.logits[0].topk(min(count, self.logits.shape[-1]))
        return [
            token
            for token, logit in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            if logit > -math.inf
        ]


@dataclass(frozen=True)
class ForcedFirstTokenProcessor:
    """A logits processor that allows only one token at the first step."""

    token: int

    def __call__(self, logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        if hypotheses.new_width:
            return logits
        out = torch.full_like(logits, -math.inf)
        out[:, self.token] = logits[:, self.token]
        return out


def select_options(options: GenerationConfig, indices: Sequence[int]) -> GenerationConfig:
    """The options of some of the texts, where seed or prefix is a list with one for each text."""
    selected: dict[str, Any] = {}
    for name in ("seed", "prefix"):
        values = getattr(options, name)
        if not isinstance(values, list):
            continue
        if max(indices, default=-1) >= len(values):
            raise ValueError(
                f"{name} has {len(values)} values, and there are more texts: give one, or one for each"
            )
        selected[name] = [values[n] for n in indices]
    return replace(options, **selected)


def load_generator(
    model_path: str,
    *,
    dtype: str | None = None,
    device: str | None = None,
    draft_path: str | None = None,
    ensemble_average: EnsembleAverage = "probabilities",
) -> TextGenerator:
    """Load a model directory for generation, or several, MODEL1,MODEL2, as an ensemble.

    Raises ValueError for an encoder, and for models of an ensemble whose tokens differ.
    """
    paths = split_ensemble(model_path)
    loaded = [load_for_inference(path, dtype=dtype, device=device) for path in paths]
    for path, member in zip(paths, loaded, strict=True):
        if isinstance(member.model, Encoder):
            raise ValueError(
                f"{path} is an encoder and writes no text: `keepleft classify`, `fill` or `score` may be "
                "meant"
            )
        _check_tokens_agree(path, member, paths[0], loaded[0])
    model: GenerativeModel
    if len(loaded) == 1:
        model = cast(GenerativeModel, loaded[0].model)
    else:
        model = ensemble([member.model for member in loaded], average=ensemble_average)
    for name in unsupported_fields(model.notes):
        warnings.warn(f"generation_config.json asks for {name}, which is not done here", stacklevel=2)
    draft_model = None
    if draft_path is not None:
        draft_model = load_for_inference(draft_path, dtype=dtype, device=device).model
    return TextGenerator(
        model, loaded[0].tokenizer, loaded[0].source_tokenizer, cast(GenerativeModel | None, draft_model)
    )


def _check_tokens_agree(path: str, member: LoadedModel, first_path: str, first: LoadedModel) -> None:
    """Raise ValueError, naming a difference, unless two models read and write the same tokens."""
    for what, tokenizer, first_tokenizer in (
        ("", member.tokenizer, first.tokenizer),
        ("source ", member.source_tokenizer or member.tokenizer, first.source_tokenizer or first.tokenizer),
    ):
        vocab, first_vocab = tokenizer.get_vocab(), first_tokenizer.get_vocab()
        different = sorted(
            (token for token in {*vocab, *first_vocab} if vocab.get(token) != first_vocab.get(token)),
            key=lambda token: min(vocab.get(token, math.inf), first_vocab.get(token, math.inf)),
        )
        if different:
            token = different[0]
            ids = [
                f"{name} has it as {ids[token]}" if token in ids else f"{name} does not have it"
                for name, ids in ((path, vocab), (first_path, first_vocab))
            ]
            raise ValueError(
                f"the models of an ensemble need the same tokens, and {len(different)} {what}tokens differ, "
                f"such as {token!r}: {' and '.join(ids)}"
            )
    start_tokens = [
        from_model_directory(loaded.model.notes).decoder_start_token_id for loaded in (member, first)
    ]
    if None not in start_tokens and start_tokens[0] != start_tokens[1]:
        raise ValueError(
            f"{path} begins a text with token {start_tokens[0]} and {first_path} with {start_tokens[1]}: the "
            "models of an ensemble must begin it with the same"
        )


# Targets of an encoder-decoder in memory: in training it has no model directory yet ------------


def generate_targets(
    model: Model,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    source_tokenizer: Tokenizer | None = None,
    tag: str | None = None,
    **options: Any,
) -> list[str]:
    """The target of each source text; `tag` goes before each source, options are those of `generate`."""
    dtype = np.dtype(np.int64)
    source_tokenizer = source_tokenizer or tokenizer
    (eos_id,) = special_tokens(source_tokenizer).require("end")
    prefix = []
    if tag is not None:
        tag_id = source_tokenizer.token_to_id(tag)
        if tag_id is None:
            raise ValueError(f"the source tokenizer has no tag {tag!r}: leave it out")
        prefix.append(tag_id)
    encode = encoder(source_tokenizer, dtype, prefix=prefix, suffix=[eos_id])
    rows = [np.frombuffer(row, dtype).tolist() for row in encode(texts)]
    return _generate_rows(model, tokenizer, rows, options)


def generate_from_ids(model: Model, tokenizer: Tokenizer, sources: Ragged, **options: Any) -> list[str]:
    """The target of each source that is encoded already, with its special tokens."""
    return _generate_rows(model, tokenizer, sources.to_lists(), options)


def _generate_rows(
    model: Model, tokenizer: Tokenizer, rows: Sequence[Sequence[int]], options: dict[str, Any]
) -> list[str]:
    start, end = special_tokens(tokenizer).require("start", "end")
    return generate(
        model,
        tokenizer,
        [list(map(int, row)) for row in rows],
        decoder_start_token_id=start,
        eos_token_id=end,
        batch_size=BATCH_SIZE,
        **options,
    )
