"""Prompts as a batch that is ready to decode: encode, prefix, pad, and limit how many tokens each may add."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from keepleft.decoding.generation_config import GenerationConfig, decoder_start_token
from keepleft.decoding.processor_table import PromptContext
from keepleft.disk.encode_text import encode_text
from keepleft.models.design import Design
from keepleft.models.ensemble import Ensemble
from keepleft.models.transformer import CausalModel, EncoderDecoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_STATIC_TOKENS = 1 << 22  # tokens that a static KV cache is allocated for at most
DEFAULT_NEW_TOKENS = 128  # tokens that a decoder adds where no limit is given
DEFAULT_LENGTH_FACTOR = 2.0  # tokens that an encoder-decoder writes for each of the source, likewise
EXTRA_NEW_TOKENS = 10  # and these
Prompt = str | Sequence[int]


def default_new_tokens(design: Design, options: GenerationConfig, num_tokens: int) -> int:
    """How many tokens are generated where no limit is given, for a prompt or a source of so many tokens."""
    if not design.is_encoder_decoder:
        return DEFAULT_NEW_TOKENS
    factor = DEFAULT_LENGTH_FACTOR if options.max_length_factor is None else options.max_length_factor
    return int(factor * num_tokens) + EXTRA_NEW_TOKENS


@dataclass(frozen=True)
class DecodeBatch:
    """Padded prompts, sources and limits: what a decode loop starts from."""

    prompt: Tensor  # (B, T)
    segments: Tensor | None  # (B, T) where prompts differ in length
    max_new_tokens: list[int]  # of each prompt
    source: Tensor | None = None
    source_segments: Tensor | None = None

    @classmethod
    def build(
        cls,
        model: CausalModel,
        token_rows: list[list[int]],
        options: GenerationConfig,
        prefixes: list[list[int]] | None = None,
    ) -> DecodeBatch:
        device = next(model.parameters()).device
        max_positions = model.design.max_positions
        if not model.design.is_encoder_decoder:
            prompts = [[*row, *(prefixes[n] if prefixes else [])] for n, row in enumerate(token_rows)]
            return cls(
                *pad_batch(prompts, device),
                [
                    options.resolve_max_new_tokens(
                        len(row), default_new_tokens(model.design, options, len(row)), max_positions
                    )
                    for row in prompts
                ],
            )
        source, source_segments = pad_batch(token_rows, device, left=False)
        start_token = decoder_start_token(options)
        decoder_prompts = [[start_token, *(prefixes[n] if prefixes else [])] for n in range(len(token_rows))]
        max_new_tokens = [
            options.resolve_max_new_tokens(
                len(decoder_prompt), default_new_tokens(model.design, options, len(row)), max_positions
            )
            for decoder_prompt, row in zip(decoder_prompts, token_rows, strict=True)
        ]
        return cls(*pad_batch(decoder_prompts, device), max_new_tokens, source, source_segments)

    def start_kwargs(self, model: CausalModel, options: GenerationConfig) -> dict[str, Any]:
        """Keyword arguments of model.start() besides the prompt: the KV cache and the encoded source."""
        cache_kind = options.cache_implementation or "dynamic"
        out: dict[str, Any] = {"cache": cache_kind}
        if cache_kind == "static":
            capacity = out["capacity"] = self.max_length
            if capacity > MAX_STATIC_TOKENS:
                raise ValueError(
                    f"a static cache for {capacity:,} tokens is too large: give fewer max_new_tokens, or "
                    "another "
                    "cache_implementation"
                )
        if self.source is not None:
            assert isinstance(model, EncoderDecoder | Ensemble)
            with torch.no_grad():
                out["memory"] = model.encode_memory(self.source, segments=self.source_segments)
        return out

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence, prompt included."""
        return self.prompt.shape[1] + max(self.max_new_tokens)

    def prompt_context(self) -> PromptContext:
        source_mask = None if self.source_segments is None else self.source_segments != 0
        return PromptContext(self.prompt.shape[1], self.source, source_mask)


def encode_prompts(
    model: CausalModel, tokenizer: Tokenizer | None, prompts: Sequence[Prompt], options: GenerationConfig
) -> list[list[int]]:
    """Prompts as tokens. An empty prompt becomes the begin-of-sequence token, if the model has one."""
    out = []
    for n, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            row = [int(token) for token in prompt]
        elif tokenizer is None:
            raise ValueError("the model has no tokenizer: give prompts as lists of tokens")
        else:
            row = encode_text(tokenizer, prompt)
        if not row:
            if options.bos_token_id is None or model.design.is_encoder_decoder:
                raise ValueError(
                    f"prompt {n} is empty, and the model has no token that a text begins with: give it some "
                    "text"
                )
            row = [options.bos_token_id]
        vocab = model.design.source_vocab or model.design.vocab
        if out_of_range := [token for token in row if not 0 <= token < vocab]:
            raise ValueError(
                f"prompt {n} holds token {out_of_range[0]}, and the model knows {vocab}: is it the model's "
                "own tokenizer?"
            )
        max_positions = model.design.max_positions
        if max_positions is not None and len(row) > max_positions - (not model.design.is_encoder_decoder):
            raise ValueError(
                f"prompt {n} has {len(row)} tokens, and the model reaches {max_positions}: shorten it"
            )
        out.append(row)
    return out


def encode_prefixes(
    tokenizer: Tokenizer | None, options: GenerationConfig, num_prompts: int
) -> list[list[int]] | None:
    """The tokens that each completion must begin with; None without a prefix."""
    if options.prefix is None:
        return None
    if tokenizer is None:
        raise ValueError("prefix is text, and the model has no tokenizer: give the tokens with the prompt")
    prefixes = [options.prefix] * num_prompts if isinstance(options.prefix, str) else list(options.prefix)
    if len(prefixes) != num_prompts:
        raise ValueError(
            f"{len(prefixes)} prefixes were given for {num_prompts} prompts: give one, or one for each"
        )
    return [encode_text(tokenizer, text, add_special_tokens=False) for text in prefixes]


def pad_batch(
    token_rows: Sequence[Sequence[int]], device: torch.device, *, left: bool = True
) -> tuple[Tensor, Tensor | None]:
    """(B, T) tokens and segments, or None for segments where all rows have the same length."""
    width = max(map(len, token_rows), default=0)
    if all(len(row) == width for row in token_rows):
        return torch.tensor([list(row) for row in token_rows], dtype=torch.long, device=device), None
    padding = lambda row, value: [value] * (width - len(row))
    tokens = [padding(row, 0) + list(row) if left else list(row) + padding(row, 0) for row in token_rows]
    segments = [
        padding(row, 0) + [1] * len(row) if left else [1] * len(row) + padding(row, 0) for row in token_rows
    ]
    return torch.tensor(tokens, device=device), torch.tensor(segments, device=device)


def warn_no_room(
    model: CausalModel,
    token_rows: list[list[int]],
    options: GenerationConfig,
    prefixes: list[list[int]] | None,
) -> None:
    """Warn once where a prompt leaves no room below max_length: its completion would be silently empty."""
    is_encoder_decoder = model.design.is_encoder_decoder
    lengths = [
        (1 if is_encoder_decoder else len(row)) + (len(prefixes[n]) if prefixes else 0)
        for n, row in enumerate(token_rows)
    ]
    if note := options.no_room_message(max(lengths, default=0)):
        warnings.warn(note, stacklevel=3)
