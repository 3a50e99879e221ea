"""The first calls of an audit: can this model be audited at all, and what do they show about it?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from keepleft.attention.masks import full
from keepleft.auditing import rounding
from keepleft.auditing.call_forms import BatchCall, LossCall
from keepleft.auditing.checks.between_calls import check_between_calls
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.interventions import OpCounter
from keepleft.auditing.introspect import role_of, signature
from keepleft.auditing.model_adapter import CallError, ModelAdapter, PaddingArgument, UnauditableError
from keepleft.auditing.outputs import Selector, selector
from keepleft.auditing.probe_inputs import TokenSampler
from keepleft.auditing.session import AuditSession

ISOLATED_LENGTH = 7  # of a model that is called once for each position


def smoke_test(session: AuditSession) -> None:
    """Raise UnauditableError unless the model runs, deterministically and without changing its weights, and
    gives a finite output for each position that depends on its input.
    """
    adapter = session.adapter
    path = CodePath()
    with adapter.on_path(path):
        try:
            _find_call(session, path)
            _detect_vocabulary(adapter, path)
            _detect_flat_order(adapter, path)
        except CallError as error:
            shape = tuple(adapter.make_inputs(2).tokens.shape)
            raise UnauditableError(
                f"{adapter.name} does not run on {adapter.main_argument} of shape {shape}: {error}"
                f"{_hint(adapter, error)}"
            ) from error
        _compare_shapes(session)
        inputs = adapter.make_inputs(2)
        other_inputs = adapter.make_inputs(2, seed=1)
        versions = _weight_versions(adapter)
        output = adapter.run(inputs, path)
        if _weight_versions(adapter) != versions:
            raise UnauditableError(
                f"{adapter.name} changes its own weights when it is called: nothing can be compared; keep "
                "forward free of that"
            )
        finite = output.isfinite().flatten(2).any(2)
        if not finite.any():
            raise UnauditableError(
                f"{adapter.name} gives nothing but NaN or infinity: its weights or its input are broken"
            )
        if not finite.all() and "nan" not in session.checks:
            first_nan = int((~finite).nonzero()[0, 1])
            raise UnauditableError(
                f"{adapter.name} gives NaN at position {first_nan}: let the nan check look at it"
            )
        other_output = adapter.run(other_inputs, path)
        repeated_output = adapter.run(inputs, path)
        change = float(rounding.max_change(output, repeated_output).max()) / rounding.scale(output)
        if change > 1e-3 and not _restarts(session, path):
            raise UnauditableError(
                f"{adapter.name} gives another output for the same input ({change:.2g} of the largest): it "
                "keeps state between calls or draws random numbers of its own; reset it in forward, or wrap "
                "it so that each call begins anew"
            )
        if adapter.keeps_state or adapter.mutates_buffers:
            check_between_calls(session, path)
        if _is_random(adapter, inputs, train=False):
            raise UnauditableError(
                f"{adapter.name} draws random numbers in eval mode: nothing can be compared; draw them in "
                "train mode only"
            )
        if change and not adapter.keeps_state:
            session.note(
                f"the same input gives outputs {change:.2g} of the largest apart: kernels are not "
                "deterministic"
            )
        if not float(rounding.max_change(output, other_output).max()):
            raise UnauditableError(
                f"{adapter.name} gives the same output whatever it is given: nothing can be seen of what it "
                "reads"
            )
        if adapter.padding_argument is not None and adapter.padding_argument.name == "mask":
            _detect_mask_polarity(adapter, adapter.padding_argument, path)


def _hint(adapter: ModelAdapter, error: CallError) -> str:
    """What may help where the first call fails."""
    if isinstance(error.__cause__, IndexError) and isinstance(adapter.sampler, TokenSampler):
        return f"; {len(adapter.sampler.pool)} token ids were tried: say how many it has with vocab="
    if isinstance(adapter.entry_point, BatchCall):
        given = ", ".join(adapter.entry_point.leaves)
        taken = ", ".join(signature(adapter.entry_point.function).names)
        return f"; one batch was made of the example's {given}, since it takes {taken}"
    if not adapter.example_arguments:
        return "; give an example of what it takes"
    return ""


def _compare_shapes(session: AuditSession) -> None:
    """Note masks, positions and segments of the example that are not those of its tokens: others are made."""
    adapter = session.adapter
    example = {name: value for name, value in adapter.example_arguments.items() if isinstance(value, Tensor)}
    token_shapes = {
        name: tuple(example[name].shape[:2])
        for name in (adapter.main_argument, adapter.source_argument)
        if name in example
    }
    for name, value in example.items():
        if (
            token_shapes
            and role_of(name) in ("keep", "drop", "positions", "segments")
            and value.dim() == 2
            and tuple(value.shape) not in token_shapes.values()
        ):
            shapes = ", ".join(f"{token} {shape}" for token, shape in token_shapes.items())
            session.note(
                f"the example's {name} {tuple(value.shape)} does not fit its {shapes}: others were made"
            )


def _restarts(session: AuditSession, path: CodePath) -> bool:
    """Does the model give the same output again once the attributes of its modules are restored? Then they
    are from now on.
    """
    adapter = session.adapter
    if adapter.module is None:
        return False
    adapter.keeps_state = True
    with adapter.on_path(path):
        inputs = adapter.make_inputs(2)
        outputs = [adapter.run(inputs, path) for _ in range(2)]
    adapter.keeps_state = torch.equal(torch.nan_to_num(outputs[0]), torch.nan_to_num(outputs[1]))
    if adapter.keeps_state:
        adapter.state_snapshot = adapter.snapshot_state()
        session.note("it keeps state between calls: it was restored after each")
    return adapter.keeps_state


def _find_call(session: AuditSession, path: CodePath) -> None:
    """Find arguments that the model runs on, and leave them with the adapter.

    Of two sequences under names that say nothing, either may be the source. Some models take the example's
    length only, and some give every position's logits only when they are given targets.
    """
    adapter = session.adapter
    first_argument = adapter.main_argument
    if _makes_decoder_input_of_labels(session, path):
        return
    for candidate in adapter.other_sequences():
        for main_argument, source_argument in ((first_argument, candidate), (candidate, first_argument)):
            try:
                adapter.set_inputs(main_argument, source_argument)
                adapter.run(adapter.make_inputs(2), path)
                return
            except (CallError, UnauditableError, ValueError):
                adapter.set_inputs(first_argument, None)
    try:
        adapter.run(adapter.make_inputs(2), path)
    except CallError:
        target_argument = adapter.signature.argument_for("target")
        if target_argument is not None and adapter.source_argument is None:
            adapter.set_inputs(target_argument, first_argument)
            if _runs(adapter, adapter.make_inputs(2), path):
                return
            adapter.set_inputs(first_argument, None)
        example = adapter.example_arguments.get(adapter.main_argument)
        example_length = 0 if example is None else example.shape[adapter.time_axis]
        if example_length < 2 or example_length == adapter.length:
            raise
        adapter.length = example_length
        adapter.run(adapter.make_inputs(2), path)
        session.note(f"it takes the example's length, {adapter.length}, but not every other")
    except UnauditableError:
        if not (_audit_loss(session, path) or _audit_pooled_output(session, path)):
            raise


def _audit_loss(session: AuditSession, path: CodePath) -> bool:
    """Find scores for each position in a model that returns none: where targets are given, in what its loss
    is computed from, or in the losses of positions, one by one. Returns whether that works.
    """
    adapter = session.adapter
    inputs = adapter.make_inputs(2)
    if adapter.signature.argument_for("targets") is not None:
        adapter.needs_targets = True
        if _runs(adapter, inputs, path):
            return True
    adapter.audit_loss_inputs()
    if _runs(adapter, inputs, path):
        session.note("it returns a loss: what that is computed from was audited")
        return True
    adapter.audit_output()
    if not adapter.audit_isolated_losses():
        return False
    adapter.length = min(adapter.length, ISOLATED_LENGTH)
    if _runs(adapter, adapter.make_inputs(2), path):
        session.budget = replace(session.budget, exhaustive=False)
        session.note("it returns a loss: that of each position, with all other labels ignored, was audited")
        return True
    adapter.audit_output()
    return False


def _audit_pooled_output(session: AuditSession, path: CodePath) -> bool:
    """One vector for each text, which may read all of it, but no padding and no other text."""
    adapter = session.adapter
    entry_point = adapter.entry_point
    adapter.audit_pooled_output()
    if not _runs(adapter, adapter.make_inputs(2), path):
        adapter.entry_point = entry_point
        return False
    if not session.claims_nothing:
        session.mark_unchecked(
            "future", "it gives one vector for each text, which reads all of it; claim=kl.full says so"
        )
        session.claim = full
    return True


def _runs(adapter: ModelAdapter, inputs: Inputs, path: CodePath) -> bool:
    try:
        adapter.run(inputs, path)
    except (CallError, UnauditableError):
        return False
    return True


def _makes_decoder_input_of_labels(session: AuditSession, path: CodePath) -> bool:
    """Does the model take a source and labels, and give scores for the labels, however many there are?"""
    adapter = session.adapter
    names = (adapter.signature.argument_for("labels"), adapter.signature.argument_for("targets"))
    name = next((name for name in names if name is not None), None)
    if (
        name is None
        or name == adapter.main_argument
        or adapter.source_argument is not None
        or adapter.signature.argument_for("target") is not None
        or not isinstance(adapter.sampler, TokenSampler)
        or session.claims_nothing
    ):
        return False
    length = adapter.length + 4
    inputs = adapter.make_inputs(2)
    labels = adapter.sampler.sample(2, length, 9)
    entry_point: Callable[..., Any]
    for entry_point in (adapter.entry_point, LossCall(adapter.entry_point, name, adapter.time_axis)):
        try:
            with torch.no_grad():
                out = adapter.invoke(entry_point, adapter.arguments(inputs.but(labels=labels), path))
        except CallError:
            return False
        if selector(out, 2, length) is not None:
            break  # else they may be what a loss is computed from
    if selector(out, 2, length) is None or selector(out, 2, adapter.length) is not None:
        return False
    adapter.entry_point = entry_point
    adapter.audit_labels_as_decoder_input(name)
    session.note(f"its decoder reads {name}, shifted to the right")
    return True


def _detect_vocabulary(adapter: ModelAdapter, path: CodePath) -> None:
    """Where the number of token ids was guessed from the tables of a model: in which of them does it look the
    tokens up? Another table (of positions, say) may be smaller.
    """
    if not adapter.guesses_vocab or adapter.module is None or not isinstance(adapter.sampler, TokenSampler):
        return
    inputs = adapter.make_inputs(2)
    tokens = inputs.tokens.flatten().to(adapter.device)
    sizes: list[int] = []

    def record(table: nn.Module, args: tuple[Any, ...]) -> None:
        ids = args[0] if args else None
        if isinstance(ids, Tensor) and ids.numel() == tokens.numel() and torch.equal(ids.flatten(), tokens):
            sizes.append(cast(nn.Embedding, table).num_embeddings)

    tables = [table for table in adapter.module.modules() if isinstance(table, nn.Embedding)]
    hooks = [table.register_forward_pre_hook(record) for table in tables]
    try:
        adapter.run(inputs, path)
    finally:
        for hook in hooks:
            hook.remove()
    guessed_size = len(adapter.sampler.pool)
    # a smaller table may be looked up by what is made of the tokens, the same for the few ids that were tried
    for size in sorted({size for size in sizes if size > guessed_size}, reverse=True):
        adapter.use_vocab(size)
        if _runs(adapter, adapter.make_inputs(2), path):
            return
        adapter.use_vocab(guessed_size)


def _detect_flat_order(adapter: ModelAdapter, path: CodePath) -> None:
    """Where rows and positions share an axis: are the positions of a row side by side, or the rows of
    a position? The order that keeps a change of one row within that row is right.
    """
    by_rows = adapter.selector
    if by_rows is None or not by_rows.flat:
        return
    inputs = adapter.make_inputs(2)
    changed = inputs.but(tokens=inputs.tokens.clone())
    changed.tokens[1] = adapter.sampler.resample(inputs.tokens, 3)[1]
    by_time = replace(by_rows, batch_axis=1, time_axis=0)

    def moves_other_row(selector: Selector) -> bool:
        adapter.selector = selector
        return bool(rounding.max_change(adapter.run(inputs, path), adapter.run(changed, path))[0].any())

    adapter.selector = by_time if moves_other_row(by_rows) and not moves_other_row(by_time) else by_rows


def _detect_mask_polarity(adapter: ModelAdapter, padding_argument: PaddingArgument, path: CodePath) -> None:
    """Does True in an argument called `mask` stand for a real token, or for padding? The value that changes
    nothing marks no padding.
    """
    inputs = adapter.make_inputs(2)

    def run_with_mask(value: bool) -> Tensor | None:
        mask = torch.full((2, adapter.length), value)
        return _run_or_none(adapter, inputs.but(extra={padding_argument.name: mask}), path)

    without_mask = _run_or_none(adapter, inputs, path)
    all_true = run_with_mask(True)
    all_false = run_with_mask(False)
    if all_true is None and all_false is None:
        adapter.padding_argument = None  # it is not a mask of tokens
    elif _equal(without_mask, all_false) and not _equal(without_mask, all_true):
        adapter.padding_argument = PaddingArgument(padding_argument.name, "drop")


def _run_or_none(adapter: ModelAdapter, inputs: Inputs, path: CodePath) -> Tensor | None:
    try:
        return adapter.run(inputs, path)
    except CallError:
        return None


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)


def inspect_behaviour(session: AuditSession) -> None:
    """Record what a few more calls show: layers, quantization, randomness in training."""
    adapter = session.adapter
    module = adapter.module
    path = CodePath()
    inputs = adapter.make_inputs(2)
    with adapter.on_path(path), OpCounter() as op_counter:
        adapter.run(inputs, path)
    if session.layers is None and op_counter.num_attentions:
        session.layers = max(op_counter.num_attentions, adapter.facts.layers or 0)
    elif session.layers is None:
        session.layers = adapter.facts.layers or 1
    if module is None:
        return
    session.quantized = any("quantized" in type(submodule).__module__ for submodule in module.modules())
    if session.quantized:
        session.note(
            "the model is quantised, and one scale may serve all tokens: changes up to 0.2 of the largest "
            "output are taken for rounding"
        )
    if session.is_large and not session.budget.exhaustive:
        session.note("it is large, so the quick budget tries less, and in the model's own precision only")
    adapter.has_functional_dropout = _is_random(adapter, inputs, train=True)
    # once more, now that on_path switches functional dropout off as well
    adapter.random_in_training = adapter.has_functional_dropout and _is_random(adapter, inputs, train=True)
    if adapter.random_in_training:
        session.note(
            "in training it draws random numbers besides dropout: only calls of the same shape are compared "
            "there"
        )


def _weight_versions(adapter: ModelAdapter) -> list[int]:
    """In-place changes are counted by a tensor's version; inference tensors have none."""
    if adapter.module is None:
        return []
    return [p._version for p in adapter.module.parameters() if not p.is_inference()]


def _is_random(adapter: ModelAdapter, inputs: Inputs, *, train: bool) -> bool:
    """Does the output depend on the random seed?"""
    path = CodePath(train=train)
    outputs = []
    try:
        for seed in (0, 1):
            adapter.seed = seed
            with adapter.on_path(path):
                outputs.append(adapter.run(inputs, path))
    except CallError:
        return False
    finally:
        adapter.seed = 0
    return not torch.equal(torch.nan_to_num(outputs[0]), torch.nan_to_num(outputs[1]))
