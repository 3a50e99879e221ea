"""A model as the audit sees it: words in, one output per position out, whatever it is and however it is called."""

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

from keepleft.attention.masks import Mask
from keepleft.attention.picture import table
from keepleft.auditing import guard, outputs, words
from keepleft.auditing.facts import Facts, facts
from keepleft.auditing.roles import Signature, role_of, signature
from keepleft.auditing.ways import Way

PRIMES = (13, 11, 17, 19, 23, 29, 31, 37)


class CallError(Exception):
    """A call did not work; the message says how."""


class UnfitError(Exception):
    """Nothing can be audited; the message says why, and what to do."""


@dataclass(frozen=True)
class Call:
    """What a model is given, before it is put into the arguments that this model has."""

    tokens: Tensor                          # (B, T) or (B, T, D)
    source: Tensor | None = None            # (B, S) what it looks back at
    keep: Tensor | None = None              # (B, T) True: a real token
    source_keep: Tensor | None = None       # (B, S)
    positions: Tensor | None = None         # (B, T)
    segments: Tensor | None = None          # (B, T) 0: padding
    labels: Tensor | None = None            # (B, T)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> Call:
        return replace(self, **changes)

    def rows(self, which: Any) -> Call:
        """Some of its rows, or all in another order: their words and their source."""
        return self.but(tokens=self.tokens[which], source=None if self.source is None else self.source[which])


@dataclass(frozen=True)
class Reader:
    """How a model is told which tokens are real."""

    name: str
    form: str  # keep, drop, lengths or segments

    def value(self, keep: Tensor, boolean: bool = False) -> Tensor:
        if self.form == "keep":
            return keep if boolean else keep.long()
        if self.form == "drop":
            return ~keep
        return keep.sum(1) if self.form == "lengths" else keep.long()


class Subject:
    """One target, what its arguments mean, and where its output stands."""

    def __init__(self, target: Callable[..., Any], example: Tensor | Mapping[str, Any] | None, *, vocab: int | None = None,
                 time: int = 1, limit: float | None = 60.0, claim: Mask) -> None:
        if not callable(target):
            raise TypeError(f"{type(target).__name__} cannot be audited: give a torch.nn.Module or a function of tokens")
        self.target, self.limit, self.time, self.claim = target, limit, time, claim
        self.module = unwrapped(target) if isinstance(target, nn.Module) else None
        self.wrapped = self.module is not target and self.module is not None
        weights = list(self.module.parameters()) if self.module is not None else []
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in weights):
            raise ValueError(f"{type(self.module).__name__} has weights that are not there yet (nn.Lazy…): call it once first")
        self.weights = sum(p.numel() for p in weights)
        self.widths = frozenset(n for p in weights for n in p.shape)
        self.facts: Facts = facts(target, self.module)
        self.entry: Callable[..., Any] = target if self.module is None else self.facts.entry or self.module
        self.sig: Signature = signature(self.entry)
        self.name = type(self.module).__name__ if self.module is not None else getattr(target, "__name__", "a function")
        self.device = next((p.device for p in self.module.parameters()), torch.device("cpu")) if self.module is not None \
            else _device(example)
        self.calls, self.mutated = 0, False
        self.drops = self.random = False        # does training drop things beyond attributes; does it draw in spite of that?
        self.seed = 0
        self.buffers: guard.Kept = []           # as they were when a path was entered
        self.moves = False                      # does a call change buffers?
        self.constant: dict[str, Any] = {}      # arguments that never change
        self.pairing: dict[str, Tensor] = {}    # further tensors of the example, fitted to each call
        self.length, self.source_length = self._lengths()
        self._tell(example, vocab)
        self.reader, self.source_reader = self._readers()
        self.positions = self.sig.role("positions")
        self.segments = self.sig.role("segments")
        self.selector: outputs.Selector | None = None

    # -- what the arguments are

    def _lengths(self) -> tuple[int, int]:
        """Two lengths that are no width of the model, so that a time axis can be told by its size."""
        free = [n for n in PRIMES if n not in self.widths] or list(PRIMES)
        return free[0], free[1] if len(free) > 1 else free[0] + 1

    def _tell(self, example: Tensor | Mapping[str, Any] | None, vocab: int | None) -> None:
        sig, facts = self.sig, self.facts
        if not sig.names:
            raise ValueError(f"{self.name} takes nothing by name: wrap it in a function of tokens")
        if isinstance(example, Tensor):
            example = {sig.names[0]: example}
        if example is not None and not (isinstance(example, Mapping) and any(isinstance(v, Tensor) for v in example.values())):
            raise TypeError(f"the example is a {type(example).__name__}: give a tensor of ids (B, T) or features (B, T, D), or "
                            "a dict of forward arguments with such tensors")
        given: dict[str, Any] = dict(example) if example is not None else {}

        def present(role: str, *, always: bool = False) -> str | None:
            name = sig.role(role)
            return name if name is not None and (always or name in given or name in sig.required) else None

        target = present("target", always=facts.pair and facts.hugging)
        source = present("source", always=facts.ours)
        main = next((name for name in given if role_of(name) == "tokens" and name in sig.names), None)
        if main is None and target is None:
            main = sig.role("tokens") if source else next(iter(given), None) or (sig.names[0] if sig.names else None)
        if target is not None:
            self.main, self.looked = target, source or main or sig.role("tokens")
        elif source is not None and main is not None and main != source:
            self.main, self.looked = main, source
        else:
            self.main, self.looked = main or source or sig.names[0], None
        special = set(facts.special)
        self.words = self._words(given.get(self.main), vocab, special)
        self.source_words = None
        if self.looked is not None:
            self.source_words = self._words(given.get(self.looked), facts.source_vocab or vocab, special)
            if isinstance(self.source_words, words.Features):  # spectra and images have a size of their own
                self.source_length = given[self.looked].shape[self.time]
        for name, value in given.items():
            if name in (self.main, self.looked):
                continue
            role = role_of(name)
            if role in ("keep", "drop", "target_keep", "target_drop", "source_keep", "source_drop", "lengths", "positions",
                        "segments", "source_segments", "labels", "targets", "cache"):
                continue  # made anew for each call
            if isinstance(value, Tensor) and value.dim() > 0:
                self.pairing[name] = value
            else:
                self.constant[name] = value
        self.given = given
        self.resets = any(role_of(name) == "positions" and isinstance(value, Tensor) and value.dim() == 2
                          and bool((value[:, 1:] <= value[:, :-1]).any()) for name, value in given.items())

    def _words(self, example: Any, vocab: int | None, special: set[int]) -> words.Words:
        if isinstance(example, Tensor):
            if example.dim() < 2 or not example.numel() or example.is_complex():
                raise ValueError(f"the example is {str(example.dtype)[6:]} of shape {tuple(example.shape)}: give ids (B, T) or "
                                 "features (B, T, D), with something in them")
            if example.is_floating_point():
                return words.like(example if self.time == 1 else example.transpose(0, 1), special, None)
            known = vocab or self.facts.vocab or self._table(int(example.max()) + 1)
            return words.like(example, special, known, self.facts.marks)
        known = vocab or self.facts.vocab or self._table(0)
        if not known:
            raise ValueError(f"what {self.name} takes is not known: give an example, a tensor of ids (B, T) or features "
                             "(B, T, D), or a dict of forward arguments")
        return words.like(torch.zeros(1, 1, dtype=torch.long), special, known, self.facts.marks)

    def _table(self, least: int) -> int | None:
        """How many ids there are: as many as the smallest table of embeddings has that can hold the example's."""
        sizes = sorted(part.num_embeddings for part in self.module.modules() if isinstance(part, nn.Embedding)
                       and part.num_embeddings >= least) if self.module is not None else []
        if not sizes:
            return least or None
        return max(least, sizes[0]) if least else sizes[0]

    def _readers(self) -> tuple[Reader | None, Reader | None]:
        sig = self.sig
        if self.facts.ours:
            return Reader("segments", "segments"), Reader("source_segments", "segments") if self.looked else None

        def first(*roles: tuple[str, str]) -> Reader | None:
            return next((Reader(name, form) for role, form in roles if (name := sig.role(role)) is not None), None)

        if self.looked is None:
            return first(("keep", "keep"), ("drop", "drop"), ("either", "keep"), ("lengths", "lengths")), None
        return (first(("target_keep", "keep"), ("target_drop", "drop")),
                first(("source_keep", "keep"), ("source_drop", "drop"), ("keep", "keep"), ("drop", "drop"), ("either", "keep")))

    def rivals(self) -> list[str]:
        """Further sequences of the example under names that say nothing: one of them may be what is looked back at."""
        given = self.given.get(self.main)
        if self.looked is not None or given is None or self.facts.ours or self.facts.hugging:
            return []
        return [name for name, value in self.pairing.items() if value.dim() >= 2 and value.shape[0] == given.shape[0]
                and value.dtype != torch.bool and value.shape[-1] != value.shape[-2]]

    def look(self, main: str, looked: str | None) -> None:
        """Take another argument for the audited sequence, and another for what it looks back at."""
        self.main, self.looked = main, looked
        special = set(self.facts.special)
        self.words = self._words(self.given[main], None, special)
        self.source_words = None if looked is None else self._words(self.given[looked], None, special)
        free = {name: value for name, value in self.given.items() if name not in (main, looked) and role_of(name) is None}
        self.pairing = {name: value for name, value in free.items() if isinstance(value, Tensor) and value.dim() > 0}
        self.selector = None
        self.reader, self.source_reader = self._readers()

    # -- calls

    def call(self, batch: int, length: int | None = None, seed: int = 0) -> Call:
        """Fresh words, and a source where there is one."""
        length = self.length if length is None else length
        source = None if self.source_words is None else self.source_words.draw(batch, self.source_length, seed + 17)
        return Call(self.words.draw(batch, length, seed), source)

    def arguments(self, call: Call, way: Way) -> dict[str, Any]:
        """By name."""
        batch, length = call.tokens.shape[:2]
        out: dict[str, Any] = dict(self.constant)
        for name, value in self.pairing.items():
            fitted = self._fitted(value, batch, length)
            out[name] = fitted.to(way.dtype) if way.dtype is not None and fitted.is_floating_point() else fitted
        tokens = call.tokens
        if tokens.is_floating_point() and way.dtype is not None:
            tokens = tokens.to(way.dtype)
        out[self.main] = tokens if self.time == 1 else tokens.transpose(0, 1)
        if self.looked is not None and call.source is not None:
            source = call.source
            if source.is_floating_point() and way.dtype is not None:
                source = source.to(way.dtype)
            out[self.looked] = source if self.time == 1 else source.transpose(0, 1)
        keep = call.keep
        needed = self.reader is not None and self.reader.name in self.sig.required
        if keep is None and (way.mask in ("ones", "boolean") or needed):
            keep = torch.ones(batch, length, dtype=torch.bool)
        if self.reader is not None and keep is not None and not (self.reader.form == "segments" and call.segments is not None):
            out[self.reader.name] = self._square(keep, way) if way.mask == "square" else \
                self.reader.value(keep, way.mask == "boolean")
        elif self.reader is not None and way.mask == "square":
            out[self.reader.name] = self._square(torch.ones(batch, length, dtype=torch.bool), way)
        if self.source_reader is not None and call.source is not None and (
                call.source_keep is not None or self.source_reader.name in self.sig.required):
            seen = call.source_keep
            out[self.source_reader.name] = self.source_reader.value(
                torch.ones(call.source.shape[:2], dtype=torch.bool) if seen is None else seen)
        for told, ids in ((self.positions, call.positions), (self.segments, call.segments)):
            if told is not None and ids is not None:
                out[told] = ids
            elif told is not None and told in self.sig.required:
                whole = torch.arange(length).expand(batch, length)
                out[told] = whole if told == self.positions else torch.ones_like(whole)
        for role in ("labels", "targets"):
            told = self.sig.role(role)
            needed = told in self.sig.required or (role == "targets" and self.last_only)
            if told is not None and (call.labels is not None or needed):
                out[told] = torch.zeros(batch, length, dtype=torch.long) if call.labels is None else call.labels
        out |= dict(way.asked)
        out |= dict(call.extra)
        return out

    last_only = False  # every position's scores come only when targets are given

    def _square(self, keep: Tensor, way: Way) -> Tensor:
        """(B, 1, T, T), added to the scores."""
        length = keep.shape[1]
        seen = table(self.claim, length) & keep[:, None, :] | torch.eye(length, dtype=torch.bool)
        kind = way.dtype or self.dtype
        return torch.zeros(keep.shape[0], 1, length, length, dtype=kind).masked_fill(~seen[:, None], torch.finfo(kind).min)

    @property
    def dtype(self) -> torch.dtype:
        """That the model computes in."""
        found = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), None) if self.module is not None \
            else None
        return found or (self.words.dtype if isinstance(self.words, words.Features) else torch.float32)

    def _fitted(self, value: Tensor, batch: int, length: int) -> Tensor:
        """A further tensor of the example with as many rows, and as long where it was as long as the words."""
        first = self.given[self.main].shape if self.main in self.given else (0, 0)
        rows, long = (first[0], first[1]) if self.time == 1 else (first[1], first[0])
        for axis in range(value.dim()):
            if axis == 0 and value.shape[0] == rows and (rows != long or value.dim() > 1):
                value = value.index_select(0, torch.zeros(batch, dtype=torch.long, device=value.device))  # alike in every row
            elif value.shape[axis] == long and length != long:
                if length > long and value.dim() >= 2 and value.shape[-1] == value.shape[-2] == long:
                    raise CallError(f"the example fixes the length {long}: a longer one cannot be made from it")
                value = value.index_select(axis, torch.arange(length, device=value.device) % long)
        return value

    def raw(self, call: Call, way: Way) -> Any:
        """The whole output."""
        return self.invoke(self.target if way.wrapped else self.entry, self.arguments(call, way))

    def invoke(self, called: Callable[..., Any], given: Mapping[str, Any], *rest: Any,
               touch: Mapping[str, Callable[[Tensor], Tensor]] | None = None) -> Any:
        """Call something with copies of what it is given (touched where asked for), in time, with the same chance each time."""
        copies = {name: self.placed(value) for name, value in given.items()}
        for name, change in (touch or {}).items():
            copies[name] = change(copies[name]) if self.time == 1 else change(copies[name].transpose(0, 1)).transpose(0, 1)
        placed = self.sig.only_positional if called in (self.target, self.entry) else ()
        first = [copies.pop(name) for name in placed if name in copies]
        held = {name: (value, value.clone()) for name, value in copies.items() if isinstance(value, Tensor)}
        held |= {str(n): (value, value.clone()) for n, value in enumerate(first) if isinstance(value, Tensor)}
        self.calls += 1
        random.seed(self.seed)
        np.random.seed(self.seed)
        torch.default_generator.manual_seed(self.seed)  # torch.manual_seed would note down a whole stack each time
        if self.device.type == "cuda":
            torch.cuda.manual_seed_all(self.seed)
        try:
            within = guard.Within() if self.device.type == "cuda" else nullcontext()
            with guard.limited(self.limit), warnings.catch_warnings(), within:
                warnings.simplefilter("ignore")
                out = called(*first, *rest, **copies)
        except guard.HungError as error:
            raise UnfitError(f"{self.name} hangs: {error}; give a smaller model, or more time with limit=") from error
        except (KeyboardInterrupt, MemoryError, CallError):
            raise
        except BaseException as error:  # sys.exit in a model is the model's affair
            raise CallError(_short(error)) from error
        finally:
            self.moves = guard.returned(self.buffers) or self.moves
        if any(value.shape != was.shape or not torch.equal(value, was) for value, was in held.values()
               if not value.is_floating_point() or not value.isnan().any()):
            self.mutated = True
        return out

    def placed(self, value: Any) -> Any:
        return value.detach().clone().to(self.device) if isinstance(value, Tensor) else value

    def run(self, call: Call, way: Way) -> Tensor:
        """(B, T, …) the audited output, without gradients."""
        with torch.no_grad():
            return self.chosen(self.raw(call, way), *call.tokens.shape[:2]).detach()

    def chosen(self, out: Any, batch: int, length: int) -> Tensor:
        """The audited part of an output."""
        if self.selector is None:
            self.selector = outputs.selector(out, batch, length)
            if self.selector is None:
                raise UnfitError(self._timeless(out, batch, length))
        found: Tensor | None = None
        with suppress(KeyError, IndexError, AttributeError, TypeError):
            found = self.selector(out)
        if found is None or found.shape[:2] != (batch, length):  # a loss or a cache beside it may have changed its place
            anew = outputs.selector(out, batch, length)
            if anew is None:
                raise CallError("no output for each position comes out on this path")
            found = anew(out)
        return found

    def _timeless(self, out: Any, batch: int, length: int) -> str:
        shapes = [tuple(tensor.shape) for _, tensor in outputs.parts(out)]
        return (f"{self.name} has no output for each position: {batch} rows of {length} give "
                f"{', '.join(map(str, shapes)) or type(out).__name__}; wrap it so that it returns (B, T, …)")

    @contextmanager
    def on(self, way: Way) -> Iterator[None]:
        """On a code path: modes, implementation, flags and weights as it says."""
        with ExitStack() as stack:
            if self.module is not None:
                stack.enter_context(guard.modes(self.module))
                try:
                    stack.enter_context(guard.training(self.module, way.train, deep=self.drops))
                except Exception as error:
                    mode = "train" if way.train else "eval"
                    raise CallError(f"it cannot be put into {mode} mode: {_short(error)}") from error
                if way.flag is not None:
                    stack.enter_context(guard.flagged(self.module, *way.flag))
                if way.implementation is not None:
                    stack.enter_context(implemented(self.module, way.implementation))
                if way.dtype is not None and way.dtype != self.dtype:
                    stack.enter_context(guard.cast(self.module, way.dtype))
                if way.dtype == torch.float64:
                    stack.enter_context(plain_experts(self.module))
                if way.autocast:
                    stack.enter_context(torch.autocast(self.device.type, torch.bfloat16))
                stack.enter_context(guard.kept(self.module))  # innermost: what a call adds goes before weights come back
                before, self.buffers = self.buffers, guard.buffers(self.module)
                stack.callback(setattr, self, "buffers", before)
            yield


@contextmanager
def plain_experts(module: nn.Module) -> Iterator[None]:
    """Grouped products of experts know no float64: one expert after the other does."""
    with _returning(module, "_experts_implementation") as configs:
        for config in configs:
            config._experts_implementation = "eager"
        yield


@contextmanager
def implemented(module: Any, name: str) -> Iterator[None]:
    """Another implementation of attention, for a while."""
    if hasattr(module, "_can_set_attn_implementation") and not module._can_set_attn_implementation():
        raise CallError(f"this model cannot be set to {name} attention once it is built")
    with _returning(module, "_attn_implementation"):
        try:
            module.set_attn_implementation(name)
        except Exception as error:
            raise CallError(f"{name} attention cannot be set: {_short(error)}") from error
        yield


@contextmanager
def _returning(module: nn.Module, choice: str) -> Iterator[list[Any]]:
    """The configurations of a model that make a choice; afterwards each has chosen as before."""
    configs = {id(config): config for part in module.modules()
               if (config := getattr(part, "config", None)) is not None and hasattr(config, choice)}
    before = [(config, getattr(config, choice)) for config in configs.values()]
    try:
        yield list(configs.values())
    finally:
        for config, name in before:
            setattr(config, choice, name)


def unwrapped(target: nn.Module) -> nn.Module:
    """Without torch.compile's or a parallel wrapper around it."""
    while True:
        inner = getattr(target, "_orig_mod", None)
        if inner is None and type(target).__name__ in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
            inner = target.module
        if not isinstance(inner, nn.Module):
            return target
        target = inner


def _device(example: Any) -> torch.device:
    values = [example] if isinstance(example, Tensor) else list(example.values()) if isinstance(example, Mapping) else []
    return next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))


def _short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2])[:240]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
