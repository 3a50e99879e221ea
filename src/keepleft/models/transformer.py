"""The three model classes: Encoder, Decoder, EncoderDecoder. (tokens, positions, segments) in, logits out.

Positions and segments are (B, T) integers. Segments number the sequences of a row: 0 is padding, and tokens
attend only within their segment. Positions count from 0 in each segment unless given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from keepleft.attention.cross_memory import Memory
from keepleft.attention.grid import Grid
from keepleft.attention.kv_cache import Cache
from keepleft.models.design import Design
from keepleft.models.embedding import Embed, check_like, check_tokens, embedding_table
from keepleft.models.heads import last_real, make_head
from keepleft.models.stack import LayerStack, positions_from_segments
from keepleft.models.state import DecoderState, make_caches


class Model(nn.Module):
    """What all three share: the design, the token table, the head, and the notes saved with the weights."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design = design
        # config.json fields that are not part of the design: special tokens, labels
        self.notes: dict[str, Any] = {}
        self.compiled = False  # decode steps are to be compiled (inference/prepack.py)
        self.token = embedding_table(design.vocab, design.dim)
        self.head = make_head(design)

    def layout(
        self,
        name: str,
        tokens: Tensor,
        positions: Tensor | None,
        segments: Tensor | None,
        vocab: int | None = None,
    ) -> tuple[Tensor, Grid]:
        """Checks the inputs; the positions of these tokens, (B or 1, T), and their self-attention grid."""
        self.check_inputs(name, tokens, positions, segments, vocab)
        positions = self.resolve_positions(tokens, positions, segments)
        length = tokens.shape[1]
        if positions is None:
            return torch.arange(length, device=tokens.device)[None], Grid(length, length)
        return positions, Grid(length, length, 0, positions, positions, segments, segments)

    def check_inputs(
        self,
        name: str,
        tokens: Tensor,
        positions: Tensor | None,
        segments: Tensor | None,
        vocab: int | None = None,
    ) -> None:
        """ValueError for tokens, positions or segments of a wrong shape, type or range."""
        if not torch.compiler.is_compiling():
            if tokens.device.type == "cpu":
                check_tokens(name, tokens, vocab or self.design.vocab)
            check_like("positions", positions, name, tokens)
            check_like("segments", segments, name, tokens)

    def resolve_positions(
        self, tokens: Tensor, positions: Tensor | None, segments: Tensor | None, start: int = 0
    ) -> Tensor | None:
        """Positions where they must be a tensor, None where they are start, start + 1, …"""
        if positions is None and segments is not None:
            positions = positions_from_segments(segments)
        if not torch.compiler.is_compiling():
            self.check_positions(tokens, positions, start)
        return positions

    def check_positions(self, tokens: Tensor, positions: Tensor | None, start: int) -> None:
        """ValueError for a position beyond the end of a learned table."""
        max_positions = self.design.max_positions
        if max_positions is None:
            return
        if positions is None:
            last_position = start + tokens.shape[1] - 1
        elif positions.device.type == "cpu":
            last_position = int(positions.max())
        else:
            return
        if last_position >= max_positions:
            raise ValueError(
                f"position {last_position} is beyond the {max_positions} that this model has learned: "
                "shorten the text"
            )


class Encoder(Model):
    """A bidirectional encoder (BERT)."""

    def __init__(self, design: Design) -> None:
        super().__init__(design)
        assert design.encoder is not None
        self.embed = Embed(design)
        self.encoder = LayerStack(design, design.encoder, cross=False)

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """(B, T) → the output of the head"""
        return self.head(
            self.hidden_states(tokens, positions=positions, segments=segments, token_types=token_types),
            self.token,
            segments,
        )

    def hidden_states(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """The same before the head: (B, T) → (B, T, dim)"""
        positions, grid = self.layout("tokens", tokens, positions, segments)
        if token_types is not None and not torch.compiler.is_compiling():
            self.check_token_types(token_types, tokens)
        return self.encoder(
            self.embed(self.token, tokens, positions, token_types),
            positions,
            [grid] * len(self.encoder.masks),
        )

    def check_token_types(self, token_types: Tensor, tokens: Tensor) -> None:
        """ValueError unless there is one for each token, and the design has that many."""
        if not self.design.token_types:
            raise ValueError("token_types were given, but this model has none: leave them out")
        check_like("token_types", token_types, "tokens", tokens)
        if token_types.device.type == "cpu" and (high := int(token_types.max())) >= self.design.token_types:
            raise ValueError(
                f"token_types go up to {high}, which is not one of the {self.design.token_types} "
                "that this model has learned"
            )


class CausalModel(Model):
    """What decoders with and without a source share: a full pass, or a prefill and incremental steps."""

    def __init__(self, design: Design) -> None:
        super().__init__(design)
        assert design.decoder is not None
        self.embed = Embed(design)
        self.decoder = LayerStack(design, design.decoder, cross=design.is_encoder_decoder)

    def decoder_hidden_states(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        memory: Memory | None = None,
    ) -> Tensor:
        """(B, T) → (B, T, dim), with the memory of a source where the model has one"""
        positions, grid = self.layout("tokens", tokens, positions, segments)
        self.check_memory(tokens, memory)
        return self.decoder(
            self.embed(self.token, tokens, positions),
            positions,
            [grid] * len(self.decoder.masks),
            memory=memory,
            segments=segments,
        )

    def start(
        self,
        prompt: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        memory: Memory | None = None,
        cache: str | list[Cache] = "dynamic",
        capacity: int | None = None,
    ) -> tuple[Tensor, DecoderState]:
        """Prefill a prompt, (B, T), padded on either side where segments say so.

        Returns the logits of the next token, (B, V), and the state to continue from. `cache` is a kind of
        models/state.py, or a cache for each mask of the decoder.
        """
        check_tokens("prompt", prompt, self.design.vocab)
        self.check_memory(prompt, memory)
        masks = self.decoder.masks
        caches = (
            cache
            if isinstance(cache, list)
            else make_caches(cache, masks, batch=len(prompt), device=prompt.device, capacity=capacity)
        )
        if len(caches) != len(masks):
            raise ValueError(
                f"{len(caches)} caches were given, but the layers cycle through {len(masks)} masks: "
                "give one cache for each"
            )
        state = DecoderState(caches, memory)
        x = self.extend(prompt, state, positions=positions, segments=segments)
        if segments is None:
            return self.head(x[:, -1], self.token), state
        rows = torch.arange(len(x), device=x.device)
        return self.head(x[rows, last_real(segments != 0)], self.token), state

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """(B, n) more tokens → (B, V): the logits of the token after the last of them"""
        return self.head(self.extend(tokens, state)[:, -1], self.token)

    def extend(
        self,
        tokens: Tensor,
        state: DecoderState,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """Append (B, n) tokens to the state → their hidden states (B, n, dim).

        Where it raises, the state is unchanged.
        """
        self.check_inputs("tokens", tokens, positions, segments)
        self.check_memory(tokens, state.memory)
        state.check(tokens)
        positions, segments = state.next_positions(tokens.shape[1], positions, segments)
        start = state.position if isinstance(state.position, int) else 0
        positions = self.resolve_positions(tokens, positions, segments, start)
        grids = [cache.admit(tokens.shape[1], positions, segments) for cache in state.caches]
        state.advance(tokens.shape[1], positions, segments)
        if positions is None:
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
        return self.decoder(
            self.embed(self.token, tokens, positions), positions, grids, state.caches, state.memory, segments
        )

    def check_memory(self, tokens: Tensor, memory: Memory | None) -> None:
        """ValueError unless an encoder-decoder has a memory of as many rows, and any other model has none."""
        if not self.design.is_encoder_decoder:
            if memory is not None:
                raise ValueError("a memory was given, but this model has no cross-attention: leave it out")
        elif memory is None:
            raise ValueError(
                "this model attends to a source, but there is no memory of one: "
                "give memory=model.encode_memory(source)"
            )
        elif memory.rows != tokens.shape[0]:
            raise ValueError(
                f"the memory has {memory.rows} rows, the tokens have {tokens.shape[0]} rows: "
                "they must be the same"
            )


class Decoder(CausalModel):
    """A causal language model (GPT, GPT-2, GPT-3, LLaMA)."""

    def forward(
        self, tokens: Tensor, *, positions: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """(B, T) → (B, T, V): the logits of the next token at each position"""
        return self.head(
            self.hidden_states(tokens, positions=positions, segments=segments), self.token, segments
        )

    def hidden_states(
        self, tokens: Tensor, *, positions: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """The same before the head: (B, T) → (B, T, dim)"""
        return self.decoder_hidden_states(tokens, positions=positions, segments=segments)


class EncoderDecoder(CausalModel):
    """A bidirectional encoder and a causal decoder with cross-attention (the 2017 Transformer, T5, BART)."""

    def __init__(self, design: Design) -> None:
        super().__init__(design)
        assert design.encoder is not None
        self.source_token = (
            None if design.source_vocab is None else embedding_table(design.source_vocab, design.dim)
        )
        self.source_embed = Embed(design)
        self.encoder = LayerStack(design, design.encoder, cross=False)

    def forward(
        self,
        source: Tensor,
        tokens: Tensor,
        *,
        source_segments: Tensor | None = None,
        source_positions: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """(B, S) source and (B, T) target → (B, T, V): the logits of the next token at each position"""
        x = self.hidden_states(
            source,
            tokens,
            source_segments=source_segments,
            source_positions=source_positions,
            segments=segments,
            positions=positions,
        )
        return self.head(x, self.token, segments)

    def hidden_states(
        self,
        source: Tensor,
        tokens: Tensor,
        *,
        source_segments: Tensor | None = None,
        source_positions: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The same before the head: (B, S) and (B, T) → (B, T, dim)"""
        memory = self.encode_memory(source, segments=source_segments, positions=source_positions)
        return self.decoder_hidden_states(tokens, positions=positions, segments=segments, memory=memory)

    def encode(
        self, source: Tensor, *, segments: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """The encoder's output, (B, S) → (B, S, dim)"""
        x, positions, grid = self.embed_source(source, segments=segments, positions=positions)
        return self.encoder(x, positions, [grid] * len(self.encoder.masks))

    def embed_source(
        self, source: Tensor, *, segments: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Grid]:
        """The encoder's input: embeddings (B, S, dim), positions (B or 1, S) and the grid."""
        positions, grid = self.layout("source", source, positions, segments, self.design.source_vocab)
        table = self.token if self.source_token is None else self.source_token
        return self.source_embed(table, source, positions), positions, grid

    def encode_memory(
        self, source: Tensor, *, segments: Tensor | None = None, positions: Tensor | None = None
    ) -> Memory:
        """(B, S) → the cross-attention keys and values of every decoder layer, computed once per source"""
        return self.decoder.cross_memory(
            self.encode(source, segments=segments, positions=positions), segments
        )
