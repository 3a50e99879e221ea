"""Chat with a decoder that has a chat template: one answer, or a conversation that keeps its KV cache."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from keepleft.data.chat_template import ChatTemplate, PlainMessage, template_source
from keepleft.decoding.batch import DecodeBatch, encode_prefixes
from keepleft.decoding.detokenizer import IncrementalDetokenizer
from keepleft.decoding.dispatch import make_strategy
from keepleft.decoding.generate import generate, resolve_options
from keepleft.decoding.generation_config import GenerationConfig
from keepleft.decoding.loop import decode
from keepleft.decoding.prefix_reuse import PrefixReuseModel
from keepleft.evaluation.token_logprobs import default_window
from keepleft.models.transformer import CausalModel, Model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_ANSWER_TOKENS = 1024  # of an answer where no limit is given
FinishReason = Literal["stop", "length", "interrupted"]


def model_chat_template(model: Model, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template of a decoder; None where it has none."""
    source = template_source(model.notes)
    if source is None or model.design.kind != "decoder":
        return None
    return ChatTemplate(source, tokenizer, model.notes)


def chat(
    model: Model,
    tokenizer: Tokenizer,
    messages: str | Sequence[Mapping[str, str]],
    *,
    system: str | None = None,
    draft_model: Model | None = None,
    options: GenerationConfig | None = None,
    **overrides: Any,
) -> str:
    """The answer of a model to a message, or to a conversation: [{"role": "user", "content": …}, …].

    `system` is the first message, of the role system. Options are those of kl.generate. Raises ValueError for
    a model without a chat template.
    """
    template = require_chat_template(model, tokenizer)
    assert isinstance(model, CausalModel)
    options = with_answer_limit(resolve_options(model, options, overrides))
    prompt = template.encode(conversation(messages, system))
    (answer,) = generate(model, tokenizer, [prompt], draft_model=draft_model, options=options)
    return answer


def conversation(messages: str | Sequence[Mapping[str, str]], system: str | None) -> list[PlainMessage]:
    """Messages in order, with the system's first. Raises ValueError for what is no message."""
    out: list[PlainMessage] = [] if system is None else [{"role": "system", "content": system}]
    if isinstance(messages, str):
        return [*out, {"role": "user", "content": messages}]
    for n, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(field), str) for field in ("role", "content")
        ):
            raise ValueError(f'message {n} is {str(message)[:80]!r}: it must be {{"role": …, "content": …}}')
        if message["role"] == "system" and system is not None:
            raise ValueError("system was given, and the messages have one of their own: leave one out")
        out.append(dict(message))
    return out


def require_chat_template(model: Model, tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template of a model. Raises ValueError where it has none."""
    template = model_chat_template(model, tokenizer)
    if template is None:
        raise ValueError(
            "the model has no chat template: take an instruct model, put a chat_template.jinja into its "
            "directory, or let it continue a text with generate"
        )
    return template


def with_answer_limit(options: GenerationConfig) -> GenerationConfig:
    """The options with a limit for an answer, where they have none."""
    if options.max_new_tokens is None and options.max_length is None:
        return replace(options, max_new_tokens=MAX_ANSWER_TOKENS)
    return options


@dataclass(frozen=True)
class AnswerStats:
    """What an answer took."""

    prompt_tokens: int
    reused_tokens: int  # of the prompt, which were in the KV cache
    new_tokens: int
    dropped_turns: int  # the oldest, which no longer fitted into the context
    finish_reason: FinishReason


class ChatSession:
    """A conversation. The KV cache is kept from turn to turn, and only what is new is prefilled.

    Where the conversation outgrows the context, the model no longer sees the oldest turns; `messages` keeps
    them.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        system: str | None = None,
        options: GenerationConfig | None = None,
        **overrides: Any,
    ) -> None:
        self.template = require_chat_template(model, tokenizer)
        assert isinstance(model, CausalModel)
        self.model = model
        self.tokenizer = tokenizer
        self.system = system
        self.options = resolve_options(model, options, overrides)
        self.messages: list[PlainMessage] = []  # without the system's
        self.visible_from = 0  # the first message that the model still sees
        self.stats: AnswerStats | None = None  # of the last answer
        self.num_answers = 0
        self.cached_model = PrefixReuseModel(model)

    @property
    def context_length(self) -> int | None:
        """Tokens that the model was made to read; None where its design does not say."""
        return default_window(self.model)

    def prompt_tokens(self) -> list[int]:
        """The tokens of what the model sees of the conversation, up to where an answer begins."""
        return self.template.encode(conversation(self.messages[self.visible_from :], self.system))

    def stream(self, text: str) -> Iterator[str]:
        """Send a message, and yield the answer piece by piece.

        Whoever closes the iterator stops the answer; what was written until then belongs to the conversation.
        Where it raises, or was stopped before the first piece, the message is taken back.
        """
        earlier = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        yield from self._stream_answer(earlier)

    def answer(self, text: str) -> str:
        """Send a message; the whole answer."""
        return "".join(self.stream(text))

    def retry(self) -> Iterator[str]:
        """Yield another answer to the last message, piece by piece, in place of the one it got."""
        if not self.messages:
            raise ValueError("there is no message to answer again: write one")
        earlier = list(self.messages)
        self.messages.pop()
        yield from self._stream_answer(earlier)

    def undo(self) -> str | None:
        """Take back the last message and its answer: its text; None where there is none."""
        if not self.messages:
            return None
        text = self.messages[-2]["content"]
        del self.messages[-2:]
        self.visible_from = max(0, min(self.visible_from, len(self.messages) - 2))
        return text

    def reset(self) -> None:
        """Forget the conversation."""
        self.load([])

    def load(self, messages: Sequence[Mapping[str, str]]) -> None:
        """Continue another conversation; a system message at its beginning replaces the present one.

        Raises ValueError unless the messages are of the user and the assistant in turn.
        """
        loaded = conversation(messages, None)
        if loaded and loaded[0]["role"] == "system":
            self.system = loaded.pop(0)["content"]
        for n, message in enumerate(loaded):
            expected = ("user", "assistant")[n % 2]
            if message["role"] != expected:
                raise ValueError(
                    f"message {n} is of the role {message['role']!r}, and {expected!r} comes here: "
                    "user and assistant take turns"
                )
        if len(loaded) % 2:
            raise ValueError("the last message has no answer: leave it out, and send it")
        self.messages = loaded
        self.visible_from = 0

    def _stream_answer(self, earlier: list[PlainMessage]) -> Iterator[str]:
        """Answer the last message. Where nothing comes of it, the messages are the earlier ones again."""
        pieces: list[str] = []
        finish_reason: FinishReason = "interrupted"
        prompt: list[int] = []
        num_new = 0
        visible_from = self.visible_from
        try:
            prompt, options = self._fit_context(self._check_options())
            prefixes = encode_prefixes(self.tokenizer, options, 1)
            batch = DecodeBatch.build(self.model, [prompt], options, prefixes)
            strategy = make_strategy(self.tokenizer, options, batch)
            detokenizer = IncrementalDetokenizer(self.tokenizer, options.stop_list)
            self.num_answers += 1
            if prefixes and (piece := detokenizer.begin(prefixes[0])):
                pieces.append(piece)
                yield piece
            for hypotheses in decode(
                self.cached_model,
                batch.prompt,
                strategy,
                max_new_tokens=batch.max_new_tokens,
                **batch.start_kwargs(self.model, options),
            ):
                num_new += 1
                token = int(hypotheses.tokens[0, -1])
                piece = detokenizer.add(token)
                is_done = bool(hypotheses.done)
                if is_done:
                    is_end = token in options.eos_ids or detokenizer.stopped
                    finish_reason = "stop" if is_end else "length"
                if piece:
                    pieces.append(piece)
                    yield piece
                if is_done:
                    break
            if piece := detokenizer.end():
                pieces.append(piece)
                yield piece
        finally:
            text = "".join(pieces)
            num_dropped = (self.visible_from - visible_from) // 2
            self.stats = AnswerStats(
                len(prompt), self.cached_model.num_reused, num_new, num_dropped, finish_reason
            )
            if text or finish_reason != "interrupted":
                self.messages.append({"role": "assistant", "content": text})
            else:
                self.messages = earlier
                self.visible_from = visible_from

    def _check_options(self) -> GenerationConfig:
        """The options of the next answer. Raises ValueError for what a stream cannot do."""
        options = self.options
        for note in options.check():
            warnings.warn(note, stacklevel=2)
        unsupported = {
            "num_beams": options.beam_count > 1,
            "num_return_sequences": options.num_sequences > 1,
            "penalty_alpha": bool(options.penalty_alpha),
            "prompt_lookup_num_tokens": options.prompt_lookup_num_tokens is not None,
            "cache_implementation": options.cache_implementation == "static",
        }
        if names := [name for name, is_set in unsupported.items() if is_set]:
            raise ValueError(
                f"{names[0]} is {getattr(options, names[0])}, which a chat cannot do: it streams one answer "
                "from a KV cache that grows; leave it out"
            )
        if isinstance(options.seed, list):
            raise ValueError(f"seed is {options.seed}: a chat takes one number")
        if options.seed is not None:  # another one for each answer, so that a retry is not the same again
            options = replace(options, seed=options.seed + self.num_answers)
        return with_answer_limit(options)

    def _fit_context(self, options: GenerationConfig) -> tuple[list[int], GenerationConfig]:
        """The prompt, without the oldest turns where it would not fit; and the room for an answer.

        Then half of the context is made free: each time that the beginning changes, all is prefilled again.
        """
        limit = self.context_length
        prompt = self.prompt_tokens()
        wanted = options.resolve_max_new_tokens(len(prompt), MAX_ANSWER_TOKENS, None)
        if limit is None:
            return prompt, replace(options, max_new_tokens=wanted)
        if len(prompt) + min(wanted, limit // 4) > limit:
            while len(prompt) > limit // 2 and self.visible_from + 2 < len(self.messages):
                self.visible_from += 2
                prompt = self.prompt_tokens()
        if len(prompt) >= limit:
            raise ValueError(
                f"the message makes a prompt of {len(prompt)} tokens, and the model reads {limit}: shorten it"
            )
        return prompt, replace(options, max_new_tokens=min(wanted, limit - len(prompt)))
