"""A model as the audit sees it: words in, one output per position out, whatever it is and however it is
called.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from keepleft.attention.mask_plot import mask_table
from keepleft.attention.masks import Mask
from keepleft.auditing import isolation, outputs, probe_inputs
from keepleft.auditing.argument_roles import Signature, role_of, signature
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.introspect import ModelFacts, introspect

CANDIDATE_LENGTHS = (13, 11, 17, 19, 23, 29, 31, 37)


class CallError(Exception):
    """A call did not work; the message says how."""


class UnauditableError(Exception):
    """Nothing can be audited; the message says why, and what to do."""


@dataclass(frozen=True)
class Inputs:
    """What a model is given, before it is put into the arguments that this model has."""

    tokens: Tensor  # (B, T) or (B, T, D)
    source: Tensor | None = None  # (B, S) what it looks back at
    keep_mask: Tensor | None = None  # (B, T) True: a real token
    source_keep_mask: Tensor | None = None  # (B, S)
    positions: Tensor | None = None  # (B, T)
    segments: Tensor | None = None  # (B, T) 0: padding
    labels: Tensor | None = None  # (B, T)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> Inputs:
        return replace(self, **changes)

    def select_rows(self, rows: Any) -> Inputs:
        """Some of its rows, or all in another order: their words and their source."""
        return self.but(tokens=self.tokens[rows], source=None if self.source is None else self.source[rows])


@dataclass(frozen=True)
class PaddingArgument:
    """How a model is told which tokens are real."""

    name: str
    form: str  # keep, drop, lengths or segments

    def encode(self, keep_mask: Tensor, as_bool: bool = False) -> Tensor:
        if self.form == "keep":
            return keep_mask if as_bool else keep_mask.long()
        if self.form == "drop":
            return ~keep_mask
        return keep_mask.sum(1) if self.form == "lengths" else keep_mask.long()


class ModelAdapter:
    """One target, what its arguments mean, and where its output stands."""

    def __init__(
        self,
        target: Callable[..., Any],
        example: Tensor | Mapping[str, Any] | None,
        *,
        vocab_size: int | None = None,
        time_axis: int = 1,
        timeout_seconds: float | None = 60.0,
        claim: Mask,
    ) -> None:
        if not callable(target):
            raise TypeError(
                f"{type(target).__name__} cannot be audited: give a torch.nn.Module or a function of tokens"
            )
        self.target = target
        self.timeout_seconds = timeout_seconds
        self.time_axis = time_axis
        self.claim = claim
        self.module = unwrap(target) if isinstance(target, nn.Module) else None
        self.is_wrapped = self.module is not target and self.module is not None
        parameters = list(self.module.parameters()) if self.module is not None else []
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters):
            raise ValueError(
                f"{type(self.module).__name__} has weights that are not there yet (nn.Lazy…): call it once first"
            )
        self.num_parameters = sum(p.numel() for p in parameters)
        self.parameter_dims = frozenset(n for p in parameters for n in p.shape)
        self.facts: ModelFacts = introspect(target, self.module)
        self.entry_point: Callable[..., Any] = (
            target if self.module is None else self.facts.entry_point or self.module
        )
        self.signature: Signature = signature(self.entry_point)
        self.name = (
            type(self.module).__name__
            if self.module is not None
            else getattr(target, "__name__", "a function")
        )
        self.device = (
            next((p.device for p in self.module.parameters()), torch.device("cpu"))
            if self.module is not None
            else _device_of(example)
        )
        self.num_calls = 0
        self.mutates_inputs = False
        self.has_functional_dropout = self.random_in_training = (
            False  # does training drop things beyond attributes; does it draw in spite of that?
        )
        self.seed = 0
        self.buffer_snapshot: isolation.BufferSnapshot = []  # as they were when a path was entered
        self.mutates_buffers = False  # does a call change buffers?
        self.constant_arguments: dict[str, Any] = {}  # arguments that never change
        self.extra_tensors: dict[str, Tensor] = {}  # further tensors of the example, fitted to each call
        self.length, self.source_length = self._choose_lengths()
        self._assign_arguments(example, vocab_size)
        self.padding_argument, self.source_padding_argument = self._find_padding_arguments()
        self.positions_argument = self.signature.argument_for("positions")
        self.segments_argument = self.signature.argument_for("segments")
        self.selector: outputs.Selector | None = None

    # -- what the arguments are

    def _choose_lengths(self) -> tuple[int, int]:
        """Two lengths that are no width of the model, so that a time axis can be told by its size."""
        candidates = [n for n in CANDIDATE_LENGTHS if n not in self.parameter_dims] or list(CANDIDATE_LENGTHS)
        return candidates[0], candidates[1] if len(candidates) > 1 else candidates[0] + 1

    def _assign_arguments(self, example: Tensor | Mapping[str, Any] | None, vocab_size: int | None) -> None:
        signature, facts = self.signature, self.facts
        if not signature.names:
            raise ValueError(f"{self.name} takes nothing by name: wrap it in a function of tokens")
        if isinstance(example, Tensor):
            example = {signature.names[0]: example}
        if example is not None and not (
            isinstance(example, Mapping) and any(isinstance(v, Tensor) for v in example.values())
        ):
            raise TypeError(
                f"the example is a {type(example).__name__}: give a tensor of ids (B, T) or features (B, T, D), or "
                "a dict of forward arguments with such tensors"
            )
        example_arguments: dict[str, Any] = dict(example) if example is not None else {}

        def find_argument(role: str, *, always: bool = False) -> str | None:
            name = signature.argument_for(role)
            return (
                name
                if name is not None and (always or name in example_arguments or name in signature.required)
                else None
            )

        target_argument = find_argument("target", always=facts.is_encoder_decoder and facts.is_huggingface)
        source_argument = find_argument("source", always=facts.is_keepleft)
        main_argument = next(
            (name for name in example_arguments if role_of(name) == "tokens" and name in signature.names),
            None,
        )
        if main_argument is None and target_argument is None:
            main_argument = (
                signature.argument_for("tokens")
                if source_argument
                else next(iter(example_arguments), None) or (signature.names[0] if signature.names else None)
            )
        if target_argument is not None:
            self.main_argument = target_argument
            self.source_argument = source_argument or main_argument or signature.argument_for("tokens")
        elif source_argument is not None and main_argument is not None and main_argument != source_argument:
            self.main_argument = main_argument
            self.source_argument = source_argument
        else:
            self.main_argument = main_argument or source_argument or signature.names[0]
            self.source_argument = None
        excluded_tokens = set(facts.excluded_tokens)
        self.sampler = self._make_sampler(
            example_arguments.get(self.main_argument), vocab_size, excluded_tokens
        )
        self.source_sampler = None
        if self.source_argument is not None:
            self.source_sampler = self._make_sampler(
                example_arguments.get(self.source_argument),
                facts.source_vocab_size or vocab_size,
                excluded_tokens,
            )
            if isinstance(
                self.source_sampler, probe_inputs.FeatureSampler
            ):  # spectra and images have a size of their own
                self.source_length = example_arguments[self.source_argument].shape[self.time_axis]
        for name, value in example_arguments.items():
            if name in (self.main_argument, self.source_argument):
                continue
            role = role_of(name)
            if role in (
                "keep",
                "drop",
                "target_keep",
                "target_drop",
                "source_keep",
                "source_drop",
                "lengths",
                "positions",
                "segments",
                "source_segments",
                "labels",
                "targets",
                "cache",
            ):
                continue  # made anew for each call
            if isinstance(value, Tensor) and value.dim() > 0:
                self.extra_tensors[name] = value
            else:
                self.constant_arguments[name] = value
        self.example_arguments = example_arguments
        self.positions_reset = any(
            role_of(name) == "positions"
            and isinstance(value, Tensor)
            and value.dim() == 2
            and bool((value[:, 1:] <= value[:, :-1]).any())
            for name, value in example_arguments.items()
        )

    def _make_sampler(
        self, example: Any, vocab_size: int | None, excluded_tokens: set[int]
    ) -> probe_inputs.InputSampler:
        if isinstance(example, Tensor):
            if example.dim() < 2 or not example.numel() or example.is_complex():
                raise ValueError(
                    f"the example is {str(example.dtype)[6:]} of shape {tuple(example.shape)}: give ids (B, T) or "
                    "features (B, T, D), with something in them"
                )
            if example.is_floating_point():
                return probe_inputs.sampler_like(
                    example if self.time_axis == 1 else example.transpose(0, 1), excluded_tokens, None
                )
            num_ids = vocab_size or self.facts.vocab_size or self._embedding_size(int(example.max()) + 1)
            return probe_inputs.sampler_like(example, excluded_tokens, num_ids, self.facts.special_tokens)
        num_ids = vocab_size or self.facts.vocab_size or self._embedding_size(0)
        if not num_ids:
            raise ValueError(
                f"what {self.name} takes is not known: give an example, a tensor of ids (B, T) or features "
                "(B, T, D), or a dict of forward arguments"
            )
        return probe_inputs.sampler_like(
            torch.zeros(1, 1, dtype=torch.long), excluded_tokens, num_ids, self.facts.special_tokens
        )

    def _embedding_size(self, min_size: int) -> int | None:
        """How many ids there are: as many as the smallest table of embeddings has that can hold the
        example's.
        """
        sizes = (
            sorted(
                submodule.num_embeddings
                for submodule in self.module.modules()
                if isinstance(submodule, nn.Embedding) and submodule.num_embeddings >= min_size
            )
            if self.module is not None
            else []
        )
        if not sizes:
            return min_size or None
        return max(min_size, sizes[0]) if min_size else sizes[0]

    def _find_padding_arguments(self) -> tuple[PaddingArgument | None, PaddingArgument | None]:
        signature = self.signature
        if self.facts.is_keepleft:
            return PaddingArgument("segments", "segments"), PaddingArgument(
                "source_segments", "segments"
            ) if self.source_argument else None

        def find_argument(*roles: tuple[str, str]) -> PaddingArgument | None:
            return next(
                (
                    PaddingArgument(name, form)
                    for role, form in roles
                    if (name := signature.argument_for(role)) is not None
                ),
                None,
            )

        if self.source_argument is None:
            return find_argument(
                ("keep", "keep"), ("drop", "drop"), ("either", "keep"), ("lengths", "lengths")
            ), None
        return (
            find_argument(("target_keep", "keep"), ("target_drop", "drop")),
            find_argument(
                ("source_keep", "keep"),
                ("source_drop", "drop"),
                ("keep", "keep"),
                ("drop", "drop"),
                ("either", "keep"),
            ),
        )

    def other_sequences(self) -> list[str]:
        """Further sequences of the example under names that say nothing: one of them may be what is looked
        back at.
        """
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
        ]

    def set_inputs(self, main_argument: str, source_argument: str | None) -> None:
        """Take another argument for the audited sequence, and another for what it looks back at."""
        self.main_argument = main_argument
        self.source_argument = source_argument
        excluded_tokens = set(self.facts.excluded_tokens)
        self.sampler = self._make_sampler(self.example_arguments[main_argument], None, excluded_tokens)
        self.source_sampler = (
            None
            if source_argument is None
            else self._make_sampler(self.example_arguments[source_argument], None, excluded_tokens)
        )
        unassigned = {
            name: value
            for name, value in self.example_arguments.items()
            if name not in (main_argument, source_argument) and role_of(name) is None
        }
        self.extra_tensors = {
            name: value for name, value in unassigned.items() if isinstance(value, Tensor) and value.dim() > 0
        }
        self.selector = None
        self.padding_argument, self.source_padding_argument = self._find_padding_arguments()

    # -- calls

    def make_inputs(self, batch: int, length: int | None = None, seed: int = 0) -> Inputs:
        """Fresh words, and a source where there is one."""
        length = self.length if length is None else length
        source = (
            None
            if self.source_sampler is None
            else self.source_sampler.sample(batch, self.source_length, seed + 17)
        )
        return Inputs(self.sampler.sample(batch, length, seed), source)

    def arguments(self, inputs: Inputs, path: CodePath) -> dict[str, Any]:
        """By name."""
        batch, length = inputs.tokens.shape[:2]
        out: dict[str, Any] = dict(self.constant_arguments)
        for name, value in self.extra_tensors.items():
            tensor = self._fit_to_batch(value, batch, length)
            out[name] = (
                tensor.to(path.dtype) if path.dtype is not None and tensor.is_floating_point() else tensor
            )
        tokens = inputs.tokens
        if tokens.is_floating_point() and path.dtype is not None:
            tokens = tokens.to(path.dtype)
        out[self.main_argument] = tokens if self.time_axis == 1 else tokens.transpose(0, 1)
        if self.source_argument is not None and inputs.source is not None:
            source = inputs.source
            if source.is_floating_point() and path.dtype is not None:
                source = source.to(path.dtype)
            out[self.source_argument] = source if self.time_axis == 1 else source.transpose(0, 1)
        keep_mask = inputs.keep_mask
        is_required = (
            self.padding_argument is not None and self.padding_argument.name in self.signature.required
        )
        if keep_mask is None and (path.mask in ("ones", "boolean") or is_required):
            keep_mask = torch.ones(batch, length, dtype=torch.bool)
        if (
            self.padding_argument is not None
            and keep_mask is not None
            and not (self.padding_argument.form == "segments" and inputs.segments is not None)
        ):
            out[self.padding_argument.name] = (
                self._additive_mask(keep_mask, path)
                if path.mask == "square"
                else self.padding_argument.encode(keep_mask, path.mask == "boolean")
            )
        elif self.padding_argument is not None and path.mask == "square":
            out[self.padding_argument.name] = self._additive_mask(
                torch.ones(batch, length, dtype=torch.bool), path
            )
        if (
            self.source_padding_argument is not None
            and inputs.source is not None
            and (
                inputs.source_keep_mask is not None
                or self.source_padding_argument.name in self.signature.required
            )
        ):
            source_keep_mask = inputs.source_keep_mask
            out[self.source_padding_argument.name] = self.source_padding_argument.encode(
                torch.ones(inputs.source.shape[:2], dtype=torch.bool)
                if source_keep_mask is None
                else source_keep_mask
            )
        for argument, ids in (
            (self.positions_argument, inputs.positions),
            (self.segments_argument, inputs.segments),
        ):
            if argument is not None and ids is not None:
                out[argument] = ids
            elif argument is not None and argument in self.signature.required:
                default_positions = torch.arange(length).expand(batch, length)
                out[argument] = (
                    default_positions
                    if argument == self.positions_argument
                    else torch.ones_like(default_positions)
                )
        for role in ("labels", "targets"):
            argument = self.signature.argument_for(role)
            is_required = argument in self.signature.required or (role == "targets" and self.needs_targets)
            if argument is not None and (inputs.labels is not None or is_required):
                out[argument] = (
                    torch.zeros(batch, length, dtype=torch.long) if inputs.labels is None else inputs.labels
                )
        out |= dict(path.extra_arguments)
        out |= dict(inputs.extra)
        return out

    needs_targets = False  # every position's scores come only when targets are given

    def _additive_mask(self, keep_mask: Tensor, path: CodePath) -> Tensor:
        """(B, 1, T, T), added to the scores."""
        length = keep_mask.shape[1]
        visible = mask_table(self.claim, length) & keep_mask[:, None, :] | torch.eye(length, dtype=torch.bool)
        dtype = path.dtype or self.dtype
        return torch.zeros(keep_mask.shape[0], 1, length, length, dtype=dtype).masked_fill(
            ~visible[:, None], torch.finfo(dtype).min
        )

    @property
    def dtype(self) -> torch.dtype:
        """That the model computes in."""
        parameter_dtype = (
            next((p.dtype for p in self.module.parameters() if p.is_floating_point()), None)
            if self.module is not None
            else None
        )
        return parameter_dtype or (
            self.sampler.dtype if isinstance(self.sampler, probe_inputs.FeatureSampler) else torch.float32
        )

    def _fit_to_batch(self, value: Tensor, batch: int, length: int) -> Tensor:
        """A further tensor of the example with as many rows, and as long where it was as long as the words."""
        example_shape = (
            self.example_arguments[self.main_argument].shape
            if self.main_argument in self.example_arguments
            else (0, 0)
        )
        example_rows, example_length = (
            (example_shape[0], example_shape[1])
            if self.time_axis == 1
            else (example_shape[1], example_shape[0])
        )
        for axis in range(value.dim()):
            if (
                axis == 0
                and value.shape[0] == example_rows
                and (example_rows != example_length or value.dim() > 1)
            ):
                # alike in every row
                value = value.index_select(0, torch.zeros(batch, dtype=torch.long, device=value.device))
            elif value.shape[axis] == example_length and length != example_length:
                if (
                    length > example_length
                    and value.dim() >= 2
                    and value.shape[-1] == value.shape[-2] == example_length
                ):
                    raise CallError(
                        f"the example fixes the length {example_length}: a longer one cannot be made from it"
                    )
                value = value.index_select(axis, torch.arange(length, device=value.device) % example_length)
        return value

    def run_raw(self, inputs: Inputs, path: CodePath) -> Any:
        """The whole output."""
        return self.invoke(self.target if path.wrapped else self.entry_point, self.arguments(inputs, path))

    def invoke(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        *args: Any,
        hooks: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    ) -> Any:
        """Call something with copies of what it is given (touched where asked for), in time, with the same
        chance each time.
        """
        kwargs = {name: self.to_device(value) for name, value in arguments.items()}
        for name, hook in (hooks or {}).items():
            kwargs[name] = (
                hook(kwargs[name])
                if self.time_axis == 1
                else hook(kwargs[name].transpose(0, 1)).transpose(0, 1)
            )
        positional_names = (
            self.signature.positional_only if function in (self.target, self.entry_point) else ()
        )
        positional = [kwargs.pop(name) for name in positional_names if name in kwargs]
        snapshots = {
            name: (value, value.clone()) for name, value in kwargs.items() if isinstance(value, Tensor)
        }
        snapshots |= {
            str(n): (value, value.clone()) for n, value in enumerate(positional) if isinstance(value, Tensor)
        }
        self.num_calls += 1
        random.seed(self.seed)
        np.random.seed(self.seed)
        # torch.manual_seed would note down a whole stack each time
        torch.default_generator.manual_seed(self.seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed_all(self.seed)
        try:
            bounds_check = isolation.BoundsCheck() if self.device.type == "cuda" else nullcontext()
            with isolation.time_limit(self.timeout_seconds), warnings.catch_warnings(), bounds_check:
                warnings.simplefilter("ignore")
                out = function(*positional, *args, **kwargs)
        except isolation.CallTimeoutError as error:
            raise UnauditableError(
                f"{self.name} hangs: {error}; give a smaller model, or more time with limit="
            ) from error
        except (KeyboardInterrupt, MemoryError, CallError):
            raise
        except BaseException as error:  # sys.exit in a model is the model's affair
            raise CallError(_summarize_error(error)) from error
        finally:
            self.mutates_buffers = isolation.restore_buffers(self.buffer_snapshot) or self.mutates_buffers
        if any(
            value.shape != snapshot.shape or not torch.equal(value, snapshot)
            for value, snapshot in snapshots.values()
            if not value.is_floating_point() or not value.isnan().any()
        ):
            self.mutates_inputs = True
        return out

    def to_device(self, value: Any) -> Any:
        return value.detach().clone().to(self.device) if isinstance(value, Tensor) else value

    def run(self, inputs: Inputs, path: CodePath) -> Tensor:
        """(B, T, …) the audited output, without gradients."""
        with torch.no_grad():
            return self.select_output(self.run_raw(inputs, path), *inputs.tokens.shape[:2]).detach()

    def select_output(self, out: Any, batch: int, length: int) -> Tensor:
        """The audited part of an output."""
        if self.selector is None:
            self.selector = outputs.selector(out, batch, length)
            if self.selector is None:
                raise UnauditableError(self._no_time_axis_message(out, batch, length))
        tensor: Tensor | None = None
        with suppress(KeyError, IndexError, AttributeError, TypeError):
            tensor = self.selector(out)
        if tensor is None or tensor.shape[:2] != (
            batch,
            length,
        ):  # a loss or a cache beside it may have changed its place
            new_selector = outputs.selector(out, batch, length)
            if new_selector is None:
                raise CallError("no output for each position comes out on this path")
            tensor = new_selector(out)
        return tensor

    def _no_time_axis_message(self, out: Any, batch: int, length: int) -> str:
        shapes = [tuple(tensor.shape) for _, tensor in outputs.float_tensors(out)]
        return (
            f"{self.name} has no output for each position: {batch} rows of {length} give "
            f"{', '.join(map(str, shapes)) or type(out).__name__}; wrap it so that it returns (B, T, …)"
        )

    @contextmanager
    def on_path(self, path: CodePath) -> Iterator[None]:
        """On a code path: modes, implementation, flags and weights as it says."""
        with ExitStack() as stack:
            if self.module is not None:
                stack.enter_context(isolation.preserve_modes(self.module))
                try:
                    stack.enter_context(
                        isolation.train_mode(
                            self.module, path.train, patch_functional=self.has_functional_dropout
                        )
                    )
                except Exception as error:
                    mode = "train" if path.train else "eval"
                    raise CallError(
                        f"it cannot be put into {mode} mode: {_summarize_error(error)}"
                    ) from error
                if path.flag is not None:
                    stack.enter_context(isolation.with_flag(self.module, *path.flag))
                if path.implementation is not None:
                    stack.enter_context(with_implementation(self.module, path.implementation))
                if path.dtype is not None and path.dtype != self.dtype:
                    stack.enter_context(isolation.cast_weights(self.module, path.dtype))
                if path.dtype == torch.float64:
                    stack.enter_context(eager_experts(self.module))
                if path.autocast:
                    stack.enter_context(torch.autocast(self.device.type, torch.bfloat16))
                # innermost: what a call adds goes before weights come back
                stack.enter_context(isolation.preserve_state(self.module))
                previous_snapshot = self.buffer_snapshot
                self.buffer_snapshot = isolation.snapshot_buffers(self.module)
                stack.callback(setattr, self, "buffer_snapshot", previous_snapshot)
            yield


@contextmanager
def eager_experts(module: nn.Module) -> Iterator[None]:
    """Grouped products of experts know no float64: one expert after the other does."""
    with _preserve_config_attribute(module, "_experts_implementation") as configs:
        for config in configs:
            config._experts_implementation = "eager"
        yield


@contextmanager
def with_implementation(module: Any, name: str) -> Iterator[None]:
    """Another implementation of attention, for a while."""
    if hasattr(module, "_can_set_attn_implementation") and not module._can_set_attn_implementation():
        raise CallError(f"this model cannot be set to {name} attention once it is built")
    with _preserve_config_attribute(module, "_attn_implementation"):
        try:
            module.set_attn_implementation(name)
        except Exception as error:
            raise CallError(f"{name} attention cannot be set: {_summarize_error(error)}") from error
        yield


@contextmanager
def _preserve_config_attribute(module: nn.Module, attribute: str) -> Iterator[list[Any]]:
    """The configurations of a model that make a choice; afterwards each has chosen as before."""
    configs = {
        id(config): config
        for submodule in module.modules()
        if (config := getattr(submodule, "config", None)) is not None and hasattr(config, attribute)
    }
    originals = [(config, getattr(config, attribute)) for config in configs.values()]
    try:
        yield list(configs.values())
    finally:
        for config, value in originals:
            setattr(config, attribute, value)


def unwrap(target: nn.Module) -> nn.Module:
    """Without torch.compile's or a parallel wrapper around it."""
    while True:
        inner = getattr(target, "_orig_mod", None)
        if inner is None and type(target).__name__ in (
            "DistributedDataParallel",
            "DataParallel",
            "FullyShardedDataParallel",
        ):
            inner = target.module
        if not isinstance(inner, nn.Module):
            return target
        target = inner


def _device_of(example: Any) -> torch.device:
    values = (
        [example]
        if isinstance(example, Tensor)
        else list(example.values())
        if isinstance(example, Mapping)
        else []
    )
    return next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))


def _summarize_error(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = " ".join(lines[:2])[:240]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
