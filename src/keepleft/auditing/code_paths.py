"""What an audit tries: the code paths of a model, lengths, and how much of both a budget allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from keepleft.attention.masks import window_size
from keepleft.auditing.introspect import EXCLUDED_ARGUMENTS, EXTRA_ARGUMENTS, implementation_flags
from keepleft.auditing.isolation import has_dropout
from keepleft.auditing.probe_inputs import TokenSampler

if TYPE_CHECKING:
    from keepleft.auditing.session import AuditSession

HALF_DTYPES = (torch.float16, torch.bfloat16)
MAX_WINDOW_LENGTH = 600  # positions: a window that reaches further through all layers is not checked
MAX_LENGTH_COST = {"quick": 80_000, "standard": 400_000}  # of all lengths together
MAX_FLAGS = 6  # implementation flags, and boolean arguments, that get a path of their own
_MASK_LABELS = {
    "absent": "no mask",
    "ones": "a mask of ones",
    "boolean": "a boolean mask of ones",
    "square": "a 4-D mask",
}


@dataclass(frozen=True)
class CodePath:
    """Everything that a caller can choose besides the inputs."""

    train: bool = False
    dropout: bool = False  # left on, with the same random numbers in each call
    labels: bool = False  # given
    embeddings: bool = False  # given in place of tokens
    left_out: str = ""  # an optional argument of the example
    compiling: bool = False  # as code sees it under torch.compile
    implementation: str | None = None  # of attention, where the model offers several
    flag: tuple[str, Any] | None = None  # an attribute that chooses between implementations
    extra_arguments: tuple[tuple[str, Any], ...] = ()  # arguments such as output_attentions=True
    mask: str = "absent"  # absent, ones, boolean or square
    batch: int = 2
    dtype: torch.dtype | None = None  # None: the model's own
    autocast: bool = False  # to bfloat16
    output: str = ""  # another output than the main one
    wrapped: bool = False  # through the torch.compile or distributed wrapper

    def but(self, **changes: Any) -> CodePath:
        return replace(self, **changes)

    @property
    def is_usual(self) -> bool:
        """Whether nothing but mode, implementation, autocast and what else comes out is not that of a plain
        call.
        """
        return self == CodePath(
            self.train,
            implementation=self.implementation,
            flag=self.flag,
            extra_arguments=self.extra_arguments,
            autocast=self.autocast,
        )

    def label(self, batch: int | None = None, length: int | None = None) -> str:
        """The path as a report names it."""
        parts = ["train" if self.train else "eval"]
        if self.dropout:
            parts[0] += " with dropout"
        if self.compiling:
            parts.append("as under torch.compile")
        if self.labels:
            parts.append("labels given")
        if self.embeddings:
            parts.append("embeddings given")
        if self.left_out:
            parts.append(f"without {self.left_out}")
        if self.wrapped:
            parts.append("as wrapped")
        if self.autocast:
            parts.append("autocast to bfloat16")
        if self.implementation:
            parts.append(f"{self.implementation} attention")
        if self.flag:
            parts.append(f"{self.flag[0]}={self.flag[1]}")
        parts += [f"{name}={value}" for name, value in self.extra_arguments]
        parts.append(_MASK_LABELS.get(self.mask, self.mask))
        parts.append(f"batch {self.batch if batch is None else batch}")
        if length is not None:
            parts.append(f"length {length}")
        if self.output:
            parts.append(f"output {self.output}")
        if self.dtype is not None:
            parts.append(str(self.dtype).removeprefix("torch."))
        return ", ".join(parts)


@dataclass(frozen=True)
class Budget:
    """How much an audit tries."""

    name: str
    seconds: float | None  # after which nothing new is begun; None: no limit
    max_lengths: int  # how many further lengths
    max_length: int
    every_length: int  # up to which every length is tried, of a small model
    num_seeds: int
    exhaustive: bool  # every code path, or those that matter most
    large_seconds: float | None = None  # the same for a large model
    essential: bool = False  # a first round over a large model: the plain paths, and what shows most

    def of_round(self, budget: Budget) -> Budget:
        """The coverage of another budget, within the name and the time of this one."""
        return replace(budget, name=self.name, seconds=self.seconds, large_seconds=self.large_seconds)


BUDGETS = {
    "quick": Budget("quick", 28.0, 64, 140, 40, 1, exhaustive=False, large_seconds=9.0),
    "standard": Budget("standard", 50.0, 120, 192, 72, 2, exhaustive=True, large_seconds=44.0),
    "full": Budget("full", None, 400, 1200, 140, 4, exhaustive=True),
}
ESSENTIAL = Budget("essential", None, 4, 64, 0, 1, exhaustive=False, essential=True)
POWERS_OF_TWO = (64, 128, 256)
MAX_PARAMETERS_FOR_EVERY_LENGTH = 2e6


# -- code paths --------------------------------------------------------------------------------


def code_paths(session: AuditSession) -> Iterator[CodePath]:
    """The code paths that this model offers, the plainest first."""
    adapter = session.adapter
    exhaustive = session.budget.exhaustive
    plain_path = CodePath()
    yield plain_path
    if adapter.module is not None:
        yield plain_path.but(train=True)
    alternatives = _implementation_paths(session)
    yield from alternatives
    if exhaustive:
        yield from (path.but(train=True) for path in alternatives)
    yield from _input_paths(session)
    yield from _argument_paths(session, alternatives)
    yield from _mask_paths(session, alternatives)
    yield from (plain_path.but(batch=n) for n in ((1, 3) if exhaustive else (3,)))
    if exhaustive:
        yield plain_path.but(train=True, batch=1)
        if adapter.padding_argument is not None:
            yield plain_path.but(mask="ones", batch=1)
    if adapter.is_wrapped:
        yield plain_path.but(wrapped=True)
    yield from _dtype_paths(session)


def _implementation_paths(session: AuditSession) -> list[CodePath]:
    """Other implementations of attention: those that transformers offers, and flags of modules."""
    module = session.adapter.module
    if module is None:
        return []
    is_full = session.budget.name == "full"
    paths: list[CodePath] = []
    if (
        session.adapter.facts.is_huggingface
        and getattr(module, "_can_set_attn_implementation", lambda: False)()
    ):
        current = getattr(module.config, "_attn_implementation", None)
        for name in ("eager", "sdpa", *(("flex_attention",) if is_full else ())):
            if name != current:
                paths.append(CodePath(implementation=name))
        if getattr(module, "_supports_flash_attn", False):
            session.skip("flash_attention_2 attention", "it needs a GPU and its package")
        if getattr(module, "_supports_flex_attn", False) and not is_full:
            session.skip("flex_attention attention", "it compiles for minutes on a CPU; budget='full' does")
    return paths + [CodePath(flag=flag) for flag in implementation_flags(module)[:MAX_FLAGS]]


def _input_paths(session: AuditSession) -> Iterator[CodePath]:
    """Dropout left on, labels or embeddings given, an option of the example left out, and what code does when
    torch.compile is at work.
    """
    adapter = session.adapter
    signature = adapter.signature
    if adapter.module is not None:
        if adapter.has_functional_dropout or has_dropout(adapter.module):
            yield CodePath(train=True, dropout=True)
        yield CodePath(compiling=True)
    takes_tokens = isinstance(adapter.sampler, TokenSampler)
    label_arguments = {*signature.arguments_for("labels"), *signature.arguments_for("targets")}
    if takes_tokens and label_arguments - set(signature.required) and not adapter.needs_targets:
        yield CodePath(labels=True)
        if session.budget.exhaustive:
            yield CodePath(train=True, labels=True)
    if (
        takes_tokens
        and signature.argument_for("embeddings") is not None
        and adapter.embedding_table is not None
        and adapter.source_argument is None  # whose embeddings they would be
        and adapter.main_argument in signature.defaults
    ):
        yield CodePath(embeddings=True)
    for name in (*adapter.extra_tensors, *adapter.constant_arguments):
        if name in signature.defaults:
            yield CodePath(left_out=name)


def _argument_paths(session: AuditSession, alternatives: list[CodePath]) -> Iterator[CodePath]:
    """Boolean arguments that ask for attention weights, for further outputs, or for a cache."""
    adapter = session.adapter
    exhaustive = session.budget.exhaustive
    signature = adapter.signature
    weights_argument = signature.argument_for("weights") or (
        "output_attentions" if adapter.facts.is_huggingface else None
    )
    if weights_argument is not None:
        value = not (signature.defaults.get(weights_argument) or False)
        has_eager = any(path.implementation == "eager" for path in alternatives)
        path = CodePath(
            implementation="eager" if has_eager else None, extra_arguments=((weights_argument, value),)
        )
        yield path
        if exhaustive:
            yield path.but(train=True)
    names = [
        name
        for name, default in signature.defaults.items()
        if isinstance(default, bool)
        and name != weights_argument
        and EXTRA_ARGUMENTS.search(name)
        and not EXCLUDED_ARGUMENTS.search(name)
    ]
    for name in names[:MAX_FLAGS]:
        yield CodePath(extra_arguments=((name, not signature.defaults[name]),))
    use_cache_argument = signature.argument_for("use_cache")
    if use_cache_argument is not None and exhaustive:
        for use_cache in (True, False):
            yield CodePath(extra_arguments=((use_cache_argument, use_cache),))


def _mask_paths(session: AuditSession, alternatives: list[CodePath]) -> Iterator[CodePath]:
    """A padding mask, given though nothing is padded: of ones, boolean, or 4-D."""
    adapter = session.adapter
    exhaustive = session.budget.exhaustive
    if adapter.padding_argument is None:
        return
    yield CodePath(mask="ones")
    if not exhaustive:
        return
    yield from (path.but(mask="ones") for path in alternatives)
    yield CodePath(mask="ones", train=True)
    if adapter.padding_argument.form == "keep":
        yield CodePath(mask="boolean")
    if adapter.facts.is_huggingface:
        yield from (path.but(mask="square") for path in (CodePath(), *alternatives))


def _dtype_paths(session: AuditSession) -> Iterator[CodePath]:
    """Other precisions than the model's own."""
    adapter = session.adapter
    exhaustive = session.budget.exhaustive
    if adapter.module is None or session.quantized or not (exhaustive or adapter.num_parameters < 1e7):
        return
    for dtype in (torch.bfloat16, torch.float32, torch.float64)[: 3 if exhaustive else 2]:
        if dtype != adapter.dtype and (dtype != torch.float64 or session.supports_float64):
            yield CodePath(dtype=dtype)
    if adapter.dtype == torch.float32:
        yield CodePath(autocast=True)


# -- what a budget leaves out ------------------------------------------------------------------

CHECKS_OF_ALL_PATHS = frozenset({"future", "batch", "padding"})  # the others have paths of their own


def untried_paths(session: AuditSession) -> tuple[str, ...]:
    """The code paths and lengths of the full budget that this audit did not try, as a report names them."""
    if not CHECKS_OF_ALL_PATHS & set(session.checked):
        return ()
    checks_future = "future" in session.checked
    # a session of its own: what is skipped under the full budget is no part of this report
    full_session = replace(session, budget=BUDGETS["full"], skipped=[], blocked=[], unchecked={})
    tried_paths = session.tried_paths
    paths = list(code_paths(full_session))
    if not checks_future:  # only that check takes each path in every batch size
        tried_paths = {path.but(batch=2) for path in tried_paths}
        paths = [path.but(batch=2) for path in paths]
    out = [path.label() for path in dict.fromkeys(paths) if path not in tried_paths]
    if checks_future:
        max_length = session.run_cache.rejected_length - 1
        lengths = set(lengths_to_try(full_session, every=True)) - session.tried_lengths - {1}
        out += [f"length {length}" for length in sorted(lengths) if length <= max_length]
    return tuple(out)


# -- lengths -----------------------------------------------------------------------------------


def lengths_to_try(session: AuditSession, *, every: bool = False) -> list[int]:
    """Below, at and above every integer in the configuration, and twice as long; the most relevant first.

    every: of a small model, every short length and powers of two as well.
    """
    budget = session.budget
    config_numbers = session.adapter.facts.config_numbers
    window_lengths = lengths_beyond_window(session)
    candidates = dict.fromkeys([*window_lengths, 1, 2])
    for n in config_numbers:
        candidates |= dict.fromkeys(nearby_lengths(n, budget))
    if every and session.takes_every_length:
        candidates |= dict.fromkeys(range(3, budget.every_length + 1))
        powers = (length for n in POWERS_OF_TWO for length in (n, n + 1) if length <= budget.max_length)
        candidates |= dict.fromkeys(powers)
    too_long = sorted(n for n in config_numbers if n >= budget.max_length)
    if too_long and budget.exhaustive:
        numbers = ", ".join(map(str, too_long[:8])) + (" …" if len(too_long) > 8 else "")
        session.skip(
            f"lengths {numbers}", f"sequences of up to {budget.max_length} were tried, by the budget"
        )
    lengths: list[int] = []
    cost = 0.0
    for n in candidates:
        if n == session.adapter.length:
            continue
        if n in window_lengths:
            lengths.append(n)
        elif len(lengths) < budget.max_lengths and (
            budget.seconds is None or cost + _length_cost(session, n) <= MAX_LENGTH_COST[budget.name]
        ):
            lengths.append(n)
            cost += _length_cost(session, n)
    return lengths


def nearby_lengths(n: int, budget: Budget) -> list[int]:
    """Where a model that has this number among its own may change its ways."""
    lengths = (n + 1, min(2 * n + 1, max(budget.max_length, n + 2)), n, n - 1, n + 2)
    return [length for length in lengths if 1 <= length <= budget.max_length]


def lengths_beyond_window(session: AuditSession) -> list[int]:
    """A window shows only in sequences that are longer than it reaches through all layers."""
    window = window_size(session.claim)
    if window is None:
        return []
    min_length = (window - 1) * (session.layers or 1) + 2
    if min_length > MAX_WINDOW_LENGTH:
        session.mark_unchecked(
            "future",
            f"the window reaches {min_length - 1:,} positions through {session.layers} layers, and sequences "
            f"of up to {MAX_WINDOW_LENGTH} are tried: audit a smaller window",
        )
        return []
    return [min_length, min_length + 3] if min_length > session.adapter.length - 2 else []


def _length_cost(session: AuditSession, length: int) -> float:
    """Pairs of positions: of a small model every position is tried at each length. Of a large one a few are,
    and what counts is how many weights a position is multiplied with. A model that gives a loss alone is
    called once for each position besides.
    """
    if session.adapter.is_called_by_position:
        return float(length**3)
    weights = max(session.adapter.num_parameters / 2e6, 1.0)
    return 3 * length * weights if session.is_large else length * length * weights
