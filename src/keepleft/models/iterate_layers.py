"""A pass over a text that stops behind every layer: whoever wants to see the first ones does not wait for the
others.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from torch import Tensor

from keepleft.attention.cross_memory import Memory
from keepleft.attention.grid import Grid
from keepleft.models.stack import LayerStack
from keepleft.models.transformer import CausalModel, Encoder, EncoderDecoder


def iterate_layers(model: Encoder | CausalModel, *inputs: Tensor) -> Iterator[str]:
    """The model over (B, T) tokens, or over a source and tokens: the name of each layer that is done, such as
    "decoder.3".
    """
    memory = None
    if isinstance(model, EncoderDecoder):
        source = inputs[0]
        positions, grid = model.layout("source", source, None, None, model.design.source_vocab)
        table = model.token if model.source_token is None else model.source_token
        encoder_output = yield from _run_stack(
            "encoder", model.encoder, model.source_embed(table, source, positions), positions, grid
        )
        memory = model.decoder.cross_memory(encoder_output, None)
    tokens = inputs[-1]
    positions, grid = model.layout("tokens", tokens, None, None)
    stack_name, stack = (
        ("decoder", model.decoder) if isinstance(model, CausalModel) else ("encoder", model.encoder)
    )
    yield from _run_stack(
        stack_name, stack, model.embed(model.token, tokens, positions), positions, grid, memory
    )


def _run_stack(
    stack_name: str, stack: LayerStack, x: Tensor, positions: Tensor, grid: Grid, memory: Memory | None = None
) -> Generator[str, None, Tensor]:
    run_layer = stack.layer_runner(x, positions, [grid] * len(stack.masks), memory=memory)
    for n in range(len(stack.layers)):
        x = run_layer(n, x)
        yield f"{stack_name}.{n}"
    return stack.norm(x)  # type: ignore[no-any-return]
