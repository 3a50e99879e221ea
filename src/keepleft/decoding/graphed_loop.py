"""The decode loop with each step captured as one CUDA graph and replayed; or, on a CPU, with the model's part
compiled.

The host asks nothing of the device between tokens. Whether all sequences have finished is learnt some steps
later, and what was generated meanwhile is dropped: a finished sequence does not change. Graphs are cached
with the model, by shape and strategy.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from keepleft.attention.cross_memory import Memory
from keepleft.cuda_graph import capture_graph
from keepleft.decoding import fused_select
from keepleft.decoding.beam import Beam
from keepleft.decoding.hypotheses import Hypotheses
from keepleft.decoding.sampling import SamplingStrategy
from keepleft.inference.compile import compile_step
from keepleft.inference.ops_torch import TorchOps
from keepleft.inference.ops_triton import TritonOps
from keepleft.inference.static_runner import StaticKV, StaticRunner, padding_bias, weight_pointers
from keepleft.models.heads import first_real
from keepleft.models.state import DecoderState
from keepleft.models.transformer import CausalModel

QUEUED_STEPS = 16  # steps launched before the first of them is done
MAX_GRAPHS = 4  # cached graphs for each model
MAX_GRAPH_TOKENS = 1 << 14  # longest sequence that static buffers are allocated for
CAPACITY_MULTIPLE = 64  # capacities are multiples of it, so that a graph serves many lengths


@dataclass
class GraphedStep:
    """One captured step: buffers to fill before it is replayed, and to read afterwards."""

    runner: StaticRunner
    strategy: Any  # SamplingStrategy or Beam
    static_kv: StaticKV
    hypotheses: Any  # Hypotheses of a fixed width
    all_done: Tensor  # () have all sequences finished?
    weight_pointers: tuple[int, ...]  # addresses of the weights that it was captured with
    fused: bool = False  # tokens are selected by one kernel
    replay: Any = None
    busy: bool = False  # in use

    def fill(
        self,
        state: DecoderState,
        rows: Tensor | None,
        hypotheses: Hypotheses,
        starts: Tensor | None,
        seeds: Tensor | None,
    ) -> None:
        """Copy prefilled prompts and the hypotheses so far into the buffers."""
        static_kv = self.static_kv
        self.runner.decode_layers.prepare_tables(static_kv.buffer.shape[1])
        static_kv.fill(state, rows)
        static_kv.length = 0  # only the device knows it from here on
        if static_kv.beam_rows is not None:
            static_kv.beam_rows.copy_(
                torch.arange(static_kv.beam_rows.shape[1], device=self.all_done.device).expand_as(
                    static_kv.beam_rows
                )
            )
        if static_kv.starts is not None and starts is not None:
            static_kv.starts.copy_(starts if rows is None else starts[rows])
        if static_kv.memory is not None and state.memory is not None and static_kv.source_bias is not None:
            source_length = state.memory.layers[0][0].shape[2]
            for layer_buffers, layer_kv in zip(static_kv.memory.layers, state.memory.layers, strict=True):
                layer_buffers[0][:, :, :source_length], layer_buffers[1][:, :, :source_length] = layer_kv
            source_bias = padding_bias(state.memory.segments, static_kv.source_bias.dtype)
            static_kv.source_bias.fill_(float("-inf"))
            static_kv.source_bias[:, :source_length] = 0.0 if source_bias is None else source_bias
        _copy_hypotheses(self.hypotheses, hypotheses.pad_to_width(self.hypotheses.tokens.shape[1]))
        if seeds is not None:
            self.strategy.seeds.copy_(seeds)

    def step(self) -> None:
        """Decode and select the next token of every sequence, in place."""
        static_kv = self.static_kv
        if static_kv.beam_rows is not None:
            static_kv.beam_rows.index_copy_(
                0,
                static_kv.position,
                torch.arange(static_kv.beam_rows.shape[1], device=self.all_done.device)[None],
            )
        logits = self.runner.forward(self.hypotheses.tokens[:, -1], static_kv)
        if self.fused:
            fused_select.select_and_append(self.strategy, logits, self.hypotheses, static_kv)
        else:
            next_hypotheses, rows = self.strategy.choose(logits, self.hypotheses)
            if rows is not None and static_kv.beam_rows is not None:
                static_kv.beam_rows.copy_(static_kv.beam_rows.index_select(1, rows))
            _copy_hypotheses(self.hypotheses, next_hypotheses)
        static_kv.position += 1
        torch.all(self.hypotheses.done, 0, out=self.all_done)

    def capture(self) -> None:
        """Capture the step as a CUDA graph."""
        graph, _ = capture_graph(self.step, warmup=2)
        self.replay = graph.replay


_graph_cache: WeakKeyDictionary[Any, OrderedDict[Any, GraphedStep]] = WeakKeyDictionary()


def can_capture(strategy: Any, max_length: int) -> bool:
    """Can steps of this strategy, of sequences of so many tokens, be captured?"""
    return (
        isinstance(strategy, SamplingStrategy | Beam)
        and strategy.stop is None
        and max_length <= MAX_GRAPH_TOKENS
        and all(getattr(processor, "capturable", False) for processor in strategy.processors)
    )


def decode_graphed(
    model: CausalModel,
    prompt: Tensor,
    strategy: SamplingStrategy | Beam,
    *,
    max_new_tokens: list[int],
    prompt_mask: Tensor | None = None,
    **start_kwargs: Any,
) -> Iterator[Hypotheses]:
    """Yield the hypotheses after each new token; each step overwrites what the one before yielded.

    Prompts, (B, T), all end in the last column. Some steps may come after all sequences have finished.
    `start_kwargs` go to model.start().
    """
    hypotheses, rows = strategy.begin(prompt, prompt_mask, torch.tensor(max_new_tokens, device=prompt.device))
    with torch.no_grad():
        segments = None if prompt_mask is None else prompt_mask.long()
        logits, state = model.start(prompt, segments=segments, **start_kwargs)
        row_logits = logits if rows is None else logits[rows]
        hypotheses, parents = strategy.choose(row_logits, hypotheses)  # type: ignore[arg-type]
        rows = parents if rows is None else rows if parents is None else rows[parents]
    yield hypotheses
    if max(max_new_tokens) == 1:
        return
    with torch.no_grad():
        graphed_step = _get_graphed_step(
            model, prompt, strategy, hypotheses, rows, max(max_new_tokens), prompt_mask, state
        )
    graphed_step.busy = True
    try:
        pending_events: deque[Any] = deque()
        finished = torch.zeros((), dtype=torch.bool, pin_memory=prompt.is_cuda)
        for _ in range(1, max(max_new_tokens)):
            with torch.no_grad():
                graphed_step.replay()
            yield graphed_step.hypotheses
            finished.copy_(graphed_step.all_done, non_blocking=True)
            if not prompt.is_cuda:
                if bool(finished):
                    return
                continue
            pending_events.append(torch.cuda.Event())
            pending_events[-1].record()
            if len(pending_events) > QUEUED_STEPS:
                pending_events.popleft().synchronize()  # an earlier step: the device always has work queued
                if bool(finished):
                    return
    finally:
        graphed_step.busy = False


def _get_graphed_step(
    model: CausalModel,
    prompt: Tensor,
    strategy: SamplingStrategy | Beam,
    hypotheses: Hypotheses,
    rows: Tensor | None,
    max_new_tokens: int,
    prompt_mask: Tensor | None,
    state: DecoderState,
) -> GraphedStep:
    """A step for these shapes and this strategy, cached or new, with its buffers filled."""
    # compiling takes longer than capturing
    multiple = CAPACITY_MULTIPLE if prompt.is_cuda else 2 * CAPACITY_MULTIPLE
    capacity = _round_up(prompt.shape[1] + max_new_tokens, multiple)
    source_shape = None
    if state.memory is not None:
        keys = state.memory.layers[0][0]
        source_shape = len(keys), _round_up(keys.shape[2], multiple // 2)
    strategy_fields = tuple(
        getattr(strategy, field.name)
        for field in fields(strategy)
        if field.name not in ("seeds", "processors")
    )
    key = (
        type(strategy),
        strategy_fields,
        tuple(map(id, strategy.processors)),
        strategy.seeds is None,
        len(hypotheses.tokens),
        capacity,
        source_shape,
        prompt_mask is None,
        prompt.device,
    )
    graphs = _graph_cache.setdefault(model, OrderedDict())
    graphed_step = graphs.get(key)
    starts = None if prompt_mask is None else first_real(prompt_mask)
    if graphed_step is None or graphed_step.busy or graphed_step.weight_pointers != weight_pointers(model):
        graphed_step = _build_graphed_step(
            model, strategy, hypotheses, capacity, source_shape, prompt_mask is not None
        )
        if prompt.is_cuda:
            graphed_step.fill(state, rows, hypotheses, starts, strategy.seeds)
            graphed_step.capture()
        else:
            graphed_step.replay = graphed_step.step
        graphs[key] = graphed_step
        while len(graphs) > MAX_GRAPHS:
            graphs.popitem(last=False)
    graphs.move_to_end(key)
    graphed_step.fill(state, rows, hypotheses, starts, strategy.seeds)
    return graphed_step


def _build_graphed_step(
    model: CausalModel,
    strategy: SamplingStrategy | Beam,
    hypotheses: Hypotheses,
    capacity: int,
    source_shape: tuple[int, int] | None,
    has_padding: bool,
) -> GraphedStep:
    """Allocate the buffers and build the step over them."""
    device, rows = hypotheses.tokens.device, len(hypotheses.tokens)
    runner = StaticRunner(model, TritonOps() if device.type == "cuda" else TorchOps(static_shapes=True))
    if model.compiled:
        runner.forward = compile_step(runner.forward)  # type: ignore[method-assign]
    kv_fields: dict[str, Any] = {}
    if source_shape is not None:
        config, table = model.design.attention, model.token.weight
        make_buffer = lambda: table.new_zeros(
            source_shape[0], config.kv_heads, source_shape[1], config.head_dim
        )
        kv_fields = {
            "memory": Memory(
                [(make_buffer(), make_buffer()) for _ in runner.decode_layers.layers],
                None,
                rows // source_shape[0],
            ),
            "source_bias": table.new_zeros(source_shape),
        }
    if isinstance(strategy, Beam):
        kv_fields["beam_rows"] = torch.zeros(capacity, rows, dtype=torch.long, device=device)
    if has_padding:
        kv_fields["starts"] = torch.zeros(rows, dtype=torch.long, device=device)
    own_strategy = (
        strategy if strategy.seeds is None else replace(strategy, seeds=strategy.seeds.to(device, copy=True))
    )
    padded_hypotheses = hypotheses.pad_to_width(capacity)
    tensors: dict[str, Any] = {
        field.name: value.clone(memory_format=torch.contiguous_format)
        for field in fields(padded_hypotheses)
        if isinstance(value := getattr(padded_hypotheses, field.name), Tensor)
    }
    own_hypotheses = replace(padded_hypotheses, **tensors)
    all_done = torch.zeros((), dtype=torch.bool, device=device)
    return GraphedStep(
        runner,
        own_strategy,
        runner.allocate(rows, capacity, **kv_fields),
        own_hypotheses,
        all_done,
        weight_pointers(model),
        fused=device.type == "cuda" and fused_select.is_supported(own_strategy, own_hypotheses),
    )


def _copy_hypotheses(target: Hypotheses, source: Hypotheses) -> None:
    """Copy the tensors of one set of hypotheses over another."""
    for field in fields(target):
        value = getattr(source, field.name)
        if isinstance(value, Tensor) and value is not (buffer := getattr(target, field.name)):
            buffer.copy_(value)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
