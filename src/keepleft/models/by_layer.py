"""A pass over a text that stops behind every layer: whoever wants to see the first ones does not wait for the others."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from torch import Tensor

from keepleft.attention.grid import Grid
from keepleft.attention.memory import Memory
from keepleft.models.stack import Stack
from keepleft.models.wholes import Encoder, EncoderDecoder, Writer


def by_layer(model: Encoder | Writer, *given: Tensor) -> Iterator[str]:
    """The model over (B, T) tokens, or over a source and tokens: the name of each layer that is done, such as "decoder.3"."""
    memory = None
    if isinstance(model, EncoderDecoder):
        source = given[0]
        positions, grid = model.lay("source", source, None, None, model.design.source_vocab)
        table = model.token if model.source_token is None else model.source_token
        encoded = yield from _through("encoder", model.encoder, model.source_embed(table, source, positions), positions, grid)
        memory = model.decoder.memorise(encoded, None)
    tokens = given[-1]
    positions, grid = model.lay("tokens", tokens, None, None)
    side, stack = ("decoder", model.decoder) if isinstance(model, Writer) else ("encoder", model.encoder)
    yield from _through(side, stack, model.embed(model.token, tokens, positions), positions, grid, memory)


def _through(side: str, stack: Stack, x: Tensor, positions: Tensor, grid: Grid,
             memory: Memory | None = None) -> Generator[str, None, Tensor]:
    layer = stack.ready(x, positions, [grid] * len(stack.masks), memory=memory)
    for n in range(len(stack.layers)):
        x = layer(n, x)
        yield f"{side}.{n}"
    return stack.norm(x)  # type: ignore[no-any-return]
