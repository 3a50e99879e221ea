"""A model as the checks see it: tokens or features in, one output for each position out, whatever its
arguments are called.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from keepleft.attention.masks import Mask, mask_table
from keepleft.auditing import call_forms, isolation, module_state, outputs, probe_inputs
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.introspect import Signature, introspect, role_of, signature, unwrap

LABEL_SEED = 4711  # of labels that are given where nothing depends on them
CANDIDATE_LENGTHS = (13, 11, 17, 19, 23, 29, 31, 37)
# arguments of the example with these roles are made anew for each call
PER_CALL_ROLES = frozenset(
    "keep drop target_keep target_drop source_keep source_drop lengths positions segments source_segments "
    "labels targets cache".split()
)


class CallError(Exception):
    """A call of the model failed; the message says how."""


class UnauditableError(Exception):
    """Nothing can be audited; the message says why, and what to do."""


@dataclass(frozen=True)
class PaddingArgument:
    """The argument that says which tokens are real."""

    name: str
    form: str  # keep, drop, lengths or segments

    def encode(self, keep_mask: Tensor, as_bool: bool = False) -> Tensor:
        """The argument's value for a mask (B, T) that is True at real tokens."""
        if self.form == "keep":
            return keep_mask if as_bool else keep_mask.long()
        if self.form == "drop":
            return ~keep_mask
        return keep_mask.sum(1) if self.form == "lengths" else keep_mask.long()


class CallObserver(Protocol):
    """Is told of every call, before it is made and after."""

    def before_call(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], args: tuple[Any, ...]
    ) -> None: ...

    def after_call(self, out: Any) -> None: ...


class ModelAdapter:
    """The audited target, the roles of its arguments, and the place of its output."""

    def __init__(
        self,
        target: Callable[..., Any],
        example: Tensor | Mapping[str, Any] | None,
        *,
        vocab_size: int | None = None,
        time_axis: int = 1,
        timeout_seconds: float | None = 60.0,
        claim: Mask,
        form: call_forms.AuditAdapter | None = None,
    ) -> None:
        if not callable(target):
            raise TypeError(
                f"{type(target).__name__} cannot be audited: give a torch.nn.Module or a function of tokens"
            )
        self.target = target
        self.vocab_size = vocab_size
        self.timeout_seconds = timeout_seconds
        self.time_axis = time_axis
        self.claim = claim
        self.module = unwrap(target) if isinstance(target, nn.Module) else None
        self.is_wrapped = self.module is not None and self.module is not target
        parameters = list(self.module.parameters()) if self.module is not None else []
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters):
            raise ValueError(
                f"{type(self.module).__name__} has uninitialised weights (nn.Lazy…): call it once first"
            )
        self.num_parameters = sum(p.numel() for p in parameters)
        self.parameter_dims = frozenset(n for p in parameters for n in p.shape)
        self.form = form
        self.facts = introspect(target, self.module)
        self.entry_point: Callable[..., Any] = (
            target if self.module is None else self.facts.entry_point or self.module
        )
        if form is not None:
            self.facts = replace(
                self.facts, is_huggingface=False, is_keepleft=False, is_encoder_decoder=False
            )
            self.entry_point = form.bind(target)
        elif not (self.facts.is_huggingface or self.facts.is_keepleft):
            step = call_forms.training_step(self.module, example)
            if step is not None:
                self.entry_point = step
                example = call_forms.batch_of(example)
        self.signature: Signature = signature(self.entry_point)
        if not (self.facts.is_huggingface or self.facts.is_keepleft):
            batch_call, example = call_forms.as_batch_call(self.entry_point, self.signature, example)
            if batch_call is not None:
                self.entry_point = batch_call
                self.signature = batch_call.signature
        if self.module is not None:
            self.name = type(self.module).__name__
            self.device = parameters[0].device if parameters else torch.device("cpu")
        else:
            self.name = getattr(target, "__name__", "a function")
            self.device = _device_of(example)
        self.seed = 0
        self.num_calls = 0
        self.model_seconds = 0.0  # spent in the model, forward and backward
        self.observer: CallObserver | None = None
        self.mutated_arguments: set[str] = set()  # in place
        self.mutates_buffers = False
        self.keeps_state = False  # in attributes, from call to call: they are restored after each
        self.state_snapshot: module_state.StateSnapshot = []  # taken when a path is entered
        # in training: dropout whose rate is no attribute; random numbers even without dropout
        self.has_functional_dropout = False
        self.random_in_training = False
        self.needs_targets = False  # every position's logits come only where targets are given
        self.feeds_labels = False  # its decoder reads the labels, shifted to the right
        self.selector: outputs.Selector | None = None  # found by the first call
        self.length, self.source_length = self._choose_lengths()
        self._assign_arguments(example)
        self.padding_argument, self.source_padding_argument = self._find_padding_arguments()
        self.positions_argument = self._find_positions_argument()
        self.segments_argument = self.signature.argument_for("segments")

    # -- the roles of the arguments

    def _choose_lengths(self) -> tuple[int, int]:
        """Two lengths that no weight has as a dimension, so that the size of an axis shows whether it is
        time.
        """
        candidates = [n for n in CANDIDATE_LENGTHS if n not in self.parameter_dims] or CANDIDATE_LENGTHS
        return candidates[0], candidates[1] if len(candidates) > 1 else candidates[0] + 1

    def _assign_arguments(self, example: Tensor | Mapping[str, Any] | None) -> None:
        """Find the audited sequence and its source among the arguments, and sort out the rest of the
        example.
        """
        if not self.signature.names:
            raise ValueError(f"{self.name} takes nothing by name: wrap it in a function of tokens")
        if isinstance(example, Tensor):
            example = {self.signature.names[0]: example}
        if example is not None and not (
            isinstance(example, Mapping) and any(isinstance(v, Tensor) for v in example.values())
        ):
            raise TypeError(
                f"the example is a {type(example).__name__}: give a tensor of ids (B, T) or features "
                "(B, T, D), or a dict of forward arguments with such tensors"
            )
        self.example_arguments: dict[str, Any] = dict(example or {})
        self._set_sequences(*self._find_sequences())
        if self.source_argument is not None and isinstance(self.source_sampler, probe_inputs.FeatureSampler):
            # spectra and images have a size of their own
            self.source_length = self.example_arguments[self.source_argument].shape[self.time_axis]
        other_arguments = {
            name: value
            for name, value in self.example_arguments.items()
            if name not in (self.main_argument, self.source_argument) and role_of(name) not in PER_CALL_ROLES
        }
        # tensors are fitted to the batch and length of each call; everything else never changes
        self.extra_tensors = {name: value for name, value in other_arguments.items() if _has_axes(value)}
        self.constant_arguments = {
            name: value for name, value in other_arguments.items() if not _has_axes(value)
        }
        self._find_sides()
        self.positions_reset = any(
            role_of(name) == "positions"
            and isinstance(value, Tensor)
            and value.dim() == 2
            and bool((value[:, 1:] <= value[:, :-1]).any())
            for name, value in self.example_arguments.items()
        )

    def _find_sides(self) -> None:
        """Of the further tensors, those with an entry for each position: actions, time features, and codes of
        several codebooks, which have the positions behind the codebooks.
        """
        example = self.example_arguments.get(self.main_argument)
        self.side_axes: dict[str, int] = {}  # of positions
        for name, value in self.extra_tensors.items():
            if example is None or role_of(name) is not None or value.dtype == torch.bool:
                continue
            if (
                value.dim() >= 2
                and value.shape[:2] == example.shape[:2]
                and not value.is_complex()
                and not (value.dim() > 2 and value.shape[-1] == value.shape[-2])
            ):
                self.side_axes[name] = self.time_axis
            elif (
                value.dim() == 3
                and self.time_axis == 1
                and (value.shape[0], value.shape[2]) == tuple(example.shape[:2])
                and not (value.is_floating_point() or value.is_complex())
            ):
                self.side_axes[name] = 2
        self.side_samplers = {
            name: probe_inputs.SideSampler(self._swap_side_axes(name, self.extra_tensors[name]))
            for name, axis in self.side_axes.items()
        }

    def _find_sequences(self) -> tuple[str, str | None]:
        """The argument with the audited sequence, and the one with its source, if there is one."""
        signature = self.signature
        facts = self.facts
        example = self.example_arguments

        def find_argument(role: str, *, always: bool) -> str | None:
            name = signature.argument_for(role)
            return name if always or name in example or name in signature.required else None

        target_argument = find_argument("target", always=facts.is_encoder_decoder and facts.is_huggingface)
        source_argument = find_argument("source", always=facts.is_keepleft)
        main_argument = next(
            (name for name in example if role_of(name) == "tokens" and name in signature.names), None
        )
        if main_argument is None and target_argument is None:
            main_argument = (
                signature.argument_for("tokens")
                if source_argument
                else next(iter(example), None) or signature.names[0]
            )
        if target_argument is not None:
            return target_argument, source_argument or main_argument or signature.argument_for("tokens")
        if source_argument is not None and main_argument is not None and main_argument != source_argument:
            return main_argument, source_argument
        return main_argument or source_argument or signature.names[0], None

    def _set_sequences(self, main_argument: str, source_argument: str | None) -> None:
        self.main_argument = main_argument
        self.source_argument = source_argument
        self.sampler = self._make_sampler(self.example_arguments.get(main_argument), self.vocab_size)
        self.source_sampler = None
        if source_argument is not None:
            self.source_sampler = self._make_sampler(
                self.example_arguments.get(source_argument), self.facts.source_vocab_size or self.vocab_size
            )

    def _make_sampler(self, example: Any, vocab_size: int | None) -> probe_inputs.InputSampler:
        facts = self.facts
        self.guesses_vocab = False
        min_size = 0
        token_shape: tuple[int, ...] = ()
        if isinstance(example, Tensor):
            if example.dim() < 2 or not example.numel() or example.is_complex():
                raise ValueError(
                    f"the example is {str(example.dtype)[6:]} of shape {tuple(example.shape)}: give ids "
                    "(B, T) or features (B, T, D), with something in them"
                )
            if example.is_floating_point():
                return probe_inputs.feature_sampler(self._swap_time_axis(example))
            min_size = int(example.max()) + 1
            token_shape = tuple(example.shape[2:])
        vocab_size = vocab_size or facts.vocab_size or self._embedding_size(min_size)
        self.guesses_vocab = vocab_size is None or not (self.vocab_size or facts.vocab_size)
        if not vocab_size:
            raise ValueError(
                f"what {self.name} takes is not known: give an example, a tensor of ids (B, T) or features "
                "(B, T, D), or a dict of forward arguments"
            )
        return probe_inputs.token_sampler(
            vocab_size, facts.excluded_tokens, facts.special_tokens, token_shape
        )

    def use_vocab(self, vocab_size: int) -> None:
        """The audited sequence has so many token ids: its first calls have shown it."""
        self.vocab_size = vocab_size
        self._set_sequences(self.main_argument, self.source_argument)

    def _embedding_size(self, min_size: int) -> int:
        """The size of the smallest embedding table that holds the example's ids; min_size where there is
        none.
        """
        sizes = [
            submodule.num_embeddings
            for submodule in (self.module.modules() if self.module is not None else ())
            if isinstance(submodule, nn.Embedding) and submodule.num_embeddings >= min_size
        ]
        return min(sizes, default=min_size)

    def _find_positions_argument(self) -> str | None:
        """Of an encoder-decoder of Hugging Face, `position_ids` are those of the source."""
        if self.facts.is_huggingface and self.facts.is_encoder_decoder:
            return "decoder_position_ids" if "decoder_position_ids" in self.signature.names else None
        return self.signature.argument_for("positions")

    def _find_padding_arguments(self) -> tuple[PaddingArgument | None, PaddingArgument | None]:
        """Of the audited sequence, and of its source."""
        if self.facts.is_keepleft:
            source = PaddingArgument("source_segments", "segments") if self.source_argument else None
            return PaddingArgument("segments", "segments"), source

        # a mask of audio says nothing about a text beside it
        masks_audio = "input_values" in self.signature.names and self.main_argument != "input_values"

        def find_argument(**forms: str) -> PaddingArgument | None:
            for role, form in forms.items():
                name = self.signature.argument_for(role)
                if name is not None and not (name == "padding_mask" and masks_audio):
                    return PaddingArgument(name, form)
            return None

        if self.source_argument is None:
            return find_argument(keep="keep", drop="drop", either="keep", lengths="lengths"), None
        return (
            find_argument(target_keep="keep", target_drop="drop"),
            find_argument(source_keep="keep", source_drop="drop", keep="keep", drop="drop", either="keep"),
        )

    def other_sequences(self) -> list[str]:
        """Further sequences of the example under names that say nothing: one of them may be the source."""
        example = self.example_arguments.get(self.main_argument)
        if (
            self.source_argument is not None
            or example is None
            or self.facts.is_keepleft
            or self.facts.is_huggingface
        ):
            return []
        return [
            name
            for name, value in self.extra_tensors.items()
            if value.dim() >= 2
            and value.shape[0] == example.shape[0]
            and value.dtype != torch.bool
            and value.shape[-1] != value.shape[-2]
            and not role_of(name) == role_of(self.main_argument) == "target"
        ]

    def set_inputs(self, main_argument: str, source_argument: str | None) -> None:
        """Take another argument for the audited sequence, and another for its source."""
        self._set_sequences(main_argument, source_argument)
        self.extra_tensors = {
            name: value
            for name, value in self.example_arguments.items()
            if name not in (main_argument, source_argument) and role_of(name) is None and _has_axes(value)
        }
        self._find_sides()
        self.selector = None
        self.padding_argument, self.source_padding_argument = self._find_padding_arguments()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        for p in self.module.parameters() if self.module is not None else ():
            if p.is_floating_point():
                return p.dtype
        return self.sampler.dtype if isinstance(self.sampler, probe_inputs.FeatureSampler) else torch.float32

    # -- inputs and arguments of a call

    def make_inputs(self, batch: int, length: int | None = None, seed: int = 0) -> Inputs:
        """Fresh tokens or features, what is aligned with them, and a source where there is one."""
        length = self.length if length is None else length
        inputs = Inputs(
            self.sampler.sample(batch, length, seed),
            sides={
                name: sampler.sample(batch, length, seed + 29 + n)
                for n, (name, sampler) in enumerate(self.side_samplers.items())
            },
        )
        if self.source_sampler is None:
            return inputs
        return inputs.but(source=self.source_sampler.sample(batch, self.source_length, seed + 17))

    def resample(self, inputs: Inputs, seed: int) -> Inputs:
        """The same with another token at each position, and with something else aligned with it."""
        return inputs.but(
            tokens=self.sampler.resample(inputs.tokens, seed).to(inputs.tokens.dtype),
            sides={
                name: self.side_samplers[name].resample(side, seed + n)
                for n, (name, side) in enumerate(inputs.sides.items())
            },
        )

    def arguments(self, inputs: Inputs, path: CodePath) -> dict[str, Any]:
        """The inputs as arguments of this model, by name."""
        batch, length = inputs.tokens.shape[:2]

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(path.dtype) if path.dtype is not None and tensor.is_floating_point() else tensor

        out = dict(self.constant_arguments)
        for name, value in self.extra_tensors.items():
            side = inputs.sides.get(name)
            fitted = (
                self._fit_to_batch(value, batch, length) if side is None else self._swap_side_axes(name, side)
            )
            out[name] = cast(fitted)
        tokens = self._shift_left(inputs.tokens) if self.feeds_labels else inputs.tokens
        out[self.main_argument] = self._swap_time_axis(cast(tokens))
        if self.source_argument is not None and inputs.source is not None:
            out[self.source_argument] = self._swap_time_axis(cast(inputs.source))
        out |= self._padding_values(inputs, path)
        out |= self._position_values(inputs)
        out |= self._start_values(length)
        out |= self._label_values(inputs, path)
        if path.embeddings:
            out[self.signature.argument_for("embeddings") or ""] = self._embed(out.pop(self.main_argument))
        out.pop(path.left_out, None)
        out |= dict(path.extra_arguments)
        out |= dict(inputs.extra)
        return out

    def _shift_left(self, tokens: Tensor) -> Tensor:
        """The labels that a decoder makes these tokens of; the last one, which it does not read, is fixed."""
        assert isinstance(self.sampler, probe_inputs.TokenSampler)
        last = self.sampler.pool[:1].to(tokens.device).expand(len(tokens), 1)
        return torch.cat([tokens[:, 1:], last], 1)

    def _swap_time_axis(self, tensor: Tensor) -> Tensor:
        """(B, T, …) to the model's own layout, or back."""
        return tensor if self.time_axis == 1 else tensor.transpose(0, 1)

    def _swap_side_axes(self, name: str, tensor: Tensor) -> Tensor:
        """A side (B, T, …) to the layout of that argument, or back."""
        axis = self.side_axes[name]
        return tensor.transpose(1, axis) if axis > 1 else self._swap_time_axis(tensor)

    def _fit_to_batch(self, value: Tensor, batch: int, length: int) -> Tensor:
        """A further tensor of the example with as many rows as the call, and as long where it was as long as
        the example's tokens. Raises CallError where it cannot be made longer.
        """
        example = self.example_arguments.get(self.main_argument)
        example_rows, example_length = (0, 0) if example is None else example.shape[:2]
        if self.time_axis == 0:
            example_rows, example_length = example_length, example_rows
        for axis in range(value.dim()):
            is_batch_axis = axis == 0 and value.shape[0] == example_rows
            if is_batch_axis and (example_rows != example_length or value.dim() > 1):
                # the example's first row for every row of the call
                value = value.index_select(0, torch.zeros(batch, dtype=torch.long, device=value.device))
            elif value.shape[axis] == example_length and length != example_length:
                is_square = value.dim() >= 2 and value.shape[-1] == value.shape[-2] == example_length
                if length > example_length and is_square:
                    raise CallError(
                        f"the example fixes the length {example_length}: a longer one cannot be made from it"
                    )
                value = value.index_select(axis, torch.arange(length, device=value.device) % example_length)
        return value

    def _padding_values(self, inputs: Inputs, path: CodePath) -> dict[str, Any]:
        """Padding masks, in the form that the model takes; of ones where the path or the signature asks for
        one.
        """
        out: dict[str, Any] = {}
        required = self.signature.required
        argument = self.padding_argument
        keep_mask = inputs.keep_mask
        if argument is not None and (argument.form != "segments" or inputs.segments is None):
            if keep_mask is None and (path.mask != "absent" or argument.name in required):
                keep_mask = torch.ones(inputs.tokens.shape[:2], dtype=torch.bool)
            if keep_mask is not None:
                out[argument.name] = (
                    self._additive_mask(keep_mask, path)
                    if path.mask == "square"
                    else argument.encode(keep_mask, path.mask == "boolean")
                )
        argument = self.source_padding_argument
        keep_mask = inputs.source_keep_mask
        if argument is not None and inputs.source is not None:
            if keep_mask is None and argument.name in required:
                keep_mask = torch.ones(inputs.source.shape[:2], dtype=torch.bool)
            if keep_mask is not None:
                out[argument.name] = argument.encode(keep_mask)
        return out

    def _additive_mask(self, keep_mask: Tensor, path: CodePath) -> Tensor:
        """(B, 1, T, T), added to the attention scores."""
        length = keep_mask.shape[1]
        visible = mask_table(self.claim, length) & keep_mask[:, None, :] | torch.eye(length, dtype=torch.bool)
        dtype = path.dtype or self.dtype
        return torch.zeros(keep_mask.shape[0], 1, length, length, dtype=dtype).masked_fill(
            ~visible[:, None], torch.finfo(dtype).min
        )

    def _position_values(self, inputs: Inputs) -> dict[str, Tensor]:
        """Positions and segments, where they are given or required."""
        batch, length = inputs.tokens.shape[:2]
        out: dict[str, Tensor] = {}
        for argument, value, default in (
            (self.positions_argument, inputs.positions, torch.arange(length).expand(batch, length)),
            (self.segments_argument, inputs.segments, torch.ones(batch, length, dtype=torch.long)),
        ):
            if argument is not None and (value is not None or argument in self.signature.required):
                out[argument] = default if value is None else value
        return out

    def _start_values(self, length: int) -> dict[str, Any]:
        """Where the tokens stand, in the form that models with a cache of their own require it."""
        out: dict[str, Any] = {}
        for name in self.signature.required:
            if role_of(name) == "start":
                out[name] = 0
            elif role_of(name) == "slots":
                out[name] = torch.arange(length)
        return out

    def _embed(self, tokens: Tensor) -> Tensor:
        """The vectors that the model looks up for tokens. Raises CallError where its table is not known."""
        table = self.embedding_table
        if table is None:
            raise CallError("the table of its embeddings is not known")
        try:
            with torch.no_grad():
                vectors: Tensor = table(tokens.to(self.device))
        except Exception as error:
            raise CallError(f"its embeddings cannot be looked up: {_summarize_error(error)}") from error
        return vectors

    @property
    def embedding_table(self) -> nn.Module | None:
        if hasattr(self.module, "get_input_embeddings"):
            with suppress(NotImplementedError, AttributeError, TypeError):
                return cast(nn.Module, cast(Any, self.module).get_input_embeddings())
        if self.module is None or not isinstance(self.sampler, probe_inputs.TokenSampler):
            return None
        num_ids = int(self.sampler.pool.max()) + 1
        tables = [table for table in self.module.modules() if isinstance(table, nn.Embedding)]
        large_enough = [table for table in tables if table.num_embeddings >= num_ids]
        return min(large_enough, key=lambda table: table.num_embeddings, default=None)

    def _label_values(self, inputs: Inputs, path: CodePath) -> dict[str, Tensor]:
        """Labels and targets: where the path has them, any; where they are required, zeros."""
        batch, length = inputs.tokens.shape[:2]
        out: dict[str, Tensor] = {}
        for role in ("labels", "targets"):
            argument = self.signature.argument_for(role)
            if argument is None or (argument == self.main_argument and inputs.labels is None):
                continue
            if inputs.labels is not None:
                out[argument] = inputs.labels
            elif path.labels:
                out[argument] = self.sampler.sample(batch, length, LABEL_SEED)
            elif argument in self.signature.required or (role == "targets" and self.needs_targets):
                out[argument] = torch.zeros(inputs.tokens.shape[:2], dtype=torch.long)
        return out

    # -- other forms of calls

    @property
    def num_further_tokens(self) -> int:
        """How many tokens more than a call of the audit has the model gets."""
        return self.entry_point.num_missing if isinstance(self.entry_point, call_forms.LossCall) else 0

    @property
    def is_called_by_position(self) -> bool:
        """Does each call of the audit take as many calls of the model as there are positions?"""
        return isinstance(self.entry_point, call_forms.IsolatedLossCall)

    def audit_loss_inputs(self) -> None:
        """The model returns a loss alone: audit the scores that the loss is computed from."""
        self.entry_point = call_forms.LossCall(self.entry_point, self.main_argument, self.time_axis)

    def audit_output(self) -> None:
        """What the model returns itself, again."""
        assert isinstance(self.entry_point, call_forms.LossCall | call_forms.IsolatedLossCall)
        self.entry_point = self.entry_point.function

    def audit_isolated_losses(self) -> bool:
        """Or else the losses of positions, one by one; False where it takes no labels."""
        label_argument = self.signature.argument_for("labels") or self.signature.argument_for("targets")
        if label_argument is None or not isinstance(self.sampler, probe_inputs.TokenSampler):
            return False
        self.entry_point = call_forms.IsolatedLossCall(
            self.entry_point, self.main_argument, label_argument, int(self.sampler.pool[0])
        )
        return True

    def audit_pooled_output(self) -> None:
        """The model gives one vector for each text: it is audited as if every position had it."""
        self.entry_point = call_forms.PooledCall(self.entry_point, self.main_argument, self.time_axis)

    def audit_labels_as_decoder_input(self, label_argument: str) -> None:
        """The model makes its decoder's input from labels: audit what the decoder reads of them."""
        self.set_inputs(label_argument, self.main_argument)
        self.feeds_labels = True

    # -- calls

    def run(self, inputs: Inputs, path: CodePath) -> Tensor:
        """(B, T, …) the audited output, without gradients."""
        with torch.no_grad():
            return self.select_output(self.run_raw(inputs, path), *inputs.tokens.shape[:2]).detach()

    def run_raw(self, inputs: Inputs, path: CodePath) -> Any:
        """Whatever the model returns."""
        function = self.entry_point
        if path.wrapped:
            function = (
                function.through(self.target) if isinstance(function, call_forms.BatchCall) else self.target
            )
        return self.invoke(function, self.arguments(inputs, path))

    def invoke(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        *args: Any,
        hooks: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    ) -> Any:
        """Call a function with copies of the arguments, within the time limit and with the same random seed
        each time. hooks: applied to arguments (B, T, …), by name.

        Raises CallError where the call fails, UnauditableError where it takes too long.
        """
        kwargs = {name: self.to_device(value) for name, value in arguments.items()}
        for name, hook in (hooks or {}).items():
            kwargs[name] = self._swap_time_axis(hook(self._swap_time_axis(kwargs[name])))
        is_model = function in (self.target, self.entry_point)
        positional_names = self.signature.positional_only if is_model else ()
        positional = [kwargs.pop(name) for name in positional_names if name in kwargs]
        snapshots = [
            (name, value, value.clone())
            for name, value in (*zip(positional_names, positional, strict=False), *kwargs.items())
            if isinstance(value, Tensor)
        ]
        self.num_calls += 1
        if self.observer is not None:
            self.observer.before_call(function, arguments, args)
        self._seed_rngs()
        try:
            bounds_check = isolation.BoundsCheck() if self.device.type == "cuda" else nullcontext()
            with isolation.time_limit(self.timeout_seconds), warnings.catch_warnings(), bounds_check:
                warnings.simplefilter("ignore")
                with self.timed():
                    out = function(*positional, *args, **kwargs)
        except isolation.CallTimeoutError as error:
            raise UnauditableError(
                f"{self.name} hangs: {error}; give a smaller model, or more time with limit="
            ) from error
        except (KeyboardInterrupt, MemoryError, CallError):
            raise
        except BaseException as error:  # a model may even call sys.exit
            raise CallError(_summarize_error(error)) from error
        finally:
            changed = module_state.restore_state(self.state_snapshot)
            self.mutates_buffers |= any(isinstance(saved, module_state.SavedBuffer) for saved in changed)
        self.mutated_arguments |= {
            name
            for name, value, snapshot in snapshots
            if (not value.is_floating_point() or not value.isnan().any())
            and (value.shape != snapshot.shape or not torch.equal(value, snapshot))
        }
        if self.observer is not None:
            self.observer.after_call(out)
        return out

    def call_method(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of a cache with the arguments themselves, so that it may change them."""
        if self.observer is not None:
            self.observer.before_call(method, {}, args)
        out = method(*args)
        if self.observer is not None:
            self.observer.after_call(out)
        return out

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count what runs inside as time spent in the model."""
        started_at = time.perf_counter()
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.model_seconds += time.perf_counter() - started_at

    def _seed_rngs(self) -> None:
        random.seed(self.seed)
        np.random.seed(self.seed)
        # torch.manual_seed would record a stack trace each time
        torch.default_generator.manual_seed(self.seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed_all(self.seed)

    def to_device(self, value: Any) -> Any:
        """A copy of a tensor on the model's device; any other value as it is."""
        return value.detach().clone().to(self.device) if isinstance(value, Tensor) else value

    def select_output(self, out: Any, batch: int, length: int) -> Tensor:
        """(B, T, …) the audited part of an output. Raises UnauditableError where the first output has none,
        CallError where a later one has none.
        """
        if self.selector is None:
            self.selector = outputs.selector(out, batch, length)
            if self.selector is None:
                raise UnauditableError(self._no_time_axis_message(out, batch, length))
        tensor: Tensor | None = None
        with suppress(KeyError, IndexError, AttributeError, TypeError, RuntimeError):
            tensor = self.selector(out, batch, length)
        if tensor is None or tensor.shape[:2] != (batch, length):
            # a loss or a cache beside it may have moved it to another place
            new_selector = outputs.selector(out, batch, length)
            if new_selector is None:
                raise CallError("no output for each position comes out on this path")
            tensor = new_selector(out, batch, length)
        return tensor

    def _no_time_axis_message(self, out: Any, batch: int, length: int) -> str:
        shapes = [tuple(tensor.shape) for _, tensor in outputs.float_tensors(out)]
        return (
            f"{self.name} has no output for each position: {batch} rows of {length} give "
            f"{', '.join(map(str, shapes)) or type(out).__name__}; wrap it so that it returns (B, T, …)"
        )

    def snapshot_state(self) -> module_state.StateSnapshot:
        """What each call begins with again."""
        if self.module is None:
            return []
        buffers = module_state.snapshot_buffers(self.module)
        return [*module_state.snapshot_attributes(self.module), *buffers] if self.keeps_state else buffers

    @contextmanager
    def on_path(self, path: CodePath) -> Iterator[None]:
        """Put the model on a code path: mode, implementation, flag and dtype. Raises CallError where that
        fails.
        """
        module = self.module
        if module is None:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(isolation.preserve_modes(module))
            try:
                stack.enter_context(
                    isolation.train_mode(
                        module, path.train, patch_functional=self.has_functional_dropout, dropout=path.dropout
                    )
                )
            except Exception as error:
                mode = "train" if path.train else "eval"
                raise CallError(f"it cannot be put into {mode} mode: {_summarize_error(error)}") from error
            if path.flag is not None:
                stack.enter_context(isolation.with_flag(module, *path.flag))
            if path.implementation is not None:
                try:
                    stack.enter_context(isolation.with_implementation(module, path.implementation))
                except Exception as error:
                    raise CallError(
                        f"{path.implementation} attention cannot be set: {_summarize_error(error)}"
                    ) from error
            if path.dtype is not None and path.dtype != self.dtype:
                stack.enter_context(isolation.cast_weights(module, path.dtype))
            if path.dtype == torch.float64:
                stack.enter_context(isolation.with_eager_experts(module))
                stack.enter_context(isolation.MasksOfOneDtype())
            if path.compiling:
                stack.enter_context(isolation.as_if_compiled())
            if path.autocast:
                stack.enter_context(torch.autocast(self.device.type, torch.bfloat16))
            # innermost: what a call adds is removed before the weights are restored
            stack.enter_context(module_state.preserve_state(module))
            stack.callback(setattr, self, "state_snapshot", self.state_snapshot)
            self.state_snapshot = self.snapshot_state()
            yield


def perturb_rows(
    adapter: ModelAdapter, base: Inputs, candidates: Sequence[probe_inputs.Perturbation]
) -> Inputs:
    """The inputs with one perturbation in each row, as far as they go."""
    length = base.tokens.shape[1]
    mask = torch.zeros(base.tokens.shape[:2], dtype=torch.bool)
    tokens = base.tokens.clone()
    sides = {name: side.clone() for name, side in base.sides.items()}
    for row, perturbation in enumerate(candidates):
        mask[row] = perturbation.mask
        tokens[row] = probe_inputs.perturb(adapter.sampler, base.tokens[row : row + 1], perturbation)[0]
        for name, side in sides.items():
            side[row] = adapter.side_samplers[name].resample(side[row : row + 1], length + perturbation.seed)[
                0
            ]
    return base.blend(base.but(tokens=tokens, sides=sides), mask)


def _has_axes(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _device_of(example: Any) -> torch.device:
    values = example.values() if isinstance(example, Mapping) else [example]
    return next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))


def _summarize_error(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = " ".join(lines[:2])[:240]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
