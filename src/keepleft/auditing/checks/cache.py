"""Cache equivalence: do chunks of any size, read with a KV cache, give what one full pass gives?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from keepleft.auditing import localize, rounding
from keepleft.auditing.cache_adapters import CacheCallables, CacheStepper, find_stepper
from keepleft.auditing.checks.cache_scripts import CachedText, cache_script
from keepleft.auditing.checks.findings import format_size, locate, make_probe, remedy
from keepleft.auditing.checks.padding import make_keep_mask, pad_inputs
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.model_adapter import CallError
from keepleft.auditing.report import Finding
from keepleft.auditing.session import AuditSession


def cache(session: AuditSession, paths: Sequence[CodePath], callables: CacheCallables) -> None:
    adapter = session.adapter
    try:
        with adapter.on_path(paths[0]):
            stepper = find_stepper(adapter, callables)
    except CallError as error:
        session.skip("cache", error)
        return
    if stepper is None:
        session.skip(
            "cache",
            "the model takes no cache (past_key_values, start and step …); give prefill= and step= to check "
            "one",
        )
        return
    if session.has_finding("future"):
        session.mark_unchecked(
            "cache", "one pass itself looks ahead, so step by step must differ: fix that first"
        )
        return
    plain_paths = [
        path for path in paths if not path.train and path.mask == "absent" and not path.extra_arguments
    ]
    for n, path in enumerate(session.within_budget(plain_paths, "cache, further paths")):
        thorough = session.budget.exhaustive and n == 0
        for cache_kind in stepper.cache_kinds[:1] if session.essential else stepper.cache_kinds:
            with session.skip_on_error(f"cache, {cache_kind}, {path.label(2)}"):
                for precision_path in dict.fromkeys([session.in_float64(path), path][: 1 + thorough]):
                    trial = CacheTrial(session, stepper, cache_kind, precision_path, thorough)
                    with adapter.on_path(precision_path):
                        agrees = trial.run()
                    trial.report(callables)
                    if not agrees:
                        break


class _Mismatch(NamedTuple):
    """A finding, its variant, and the row of the batch that shows it."""

    finding: Finding
    row: int
    variant: str = ""


@dataclass(frozen=True)
class CacheTrial:
    """All comparisons with one kind of cache on one path."""

    session: AuditSession
    stepper: CacheStepper
    cache_kind: str
    path: CodePath
    thorough: bool
    texts: list[CachedText] = field(default_factory=list)  # all that were read
    mismatches: list[_Mismatch] = field(default_factory=list)  # at most one

    def report(self, callables: CacheCallables) -> None:
        """Report what was found, with a script: the calls are made again, on the path entered anew."""
        for mismatch in self.mismatches:
            finding = mismatch.finding
            code = cache_script(
                self.session,
                self.path,
                callables,
                self.texts,
                mismatch.row,
                finding.reader or 0,
                finding.size,
            )
            self.session.add_finding(replace(finding, reproduce=code), mismatch.variant)

    def run(self) -> bool:
        """Sequences in several chunkings, longer ones before shorter ones, and then what a cache can do
        besides. Returns False at the first finding.
        """
        length = self.session.adapter.length
        chunkings = [
            [5] + [1] * (length - 5),
            [4, 3, 2, length - 9],
            [1, 2, length - 3],
            [1] * length,
            [length - 3, 1, 2],
            [3, 5, length - 8],
        ]
        if self.session.essential and not self.stepper.single_token:
            chunkings = [[4, 3, 1, length - 8]]
        elif not self.thorough or self.stepper.single_token:
            chunkings = chunkings[: 1 if self.stepper.single_token else 3]
        for n, chunk_sizes in enumerate(chunkings):
            with self.session.skip_on_error(
                f"cache, {self.cache_kind}, {self.path.label(2, length)}, pieces of "
                f"{_format_sizes(chunk_sizes)}"
            ):
                if not self.check_chunks(chunk_sizes, seed=120 + n):
                    return False
        num_lengths = 4 if self.thorough else 0 if self.session.essential else 2
        longer_lengths = [
            n for n in self.session.lengths if length < n < self.session.run_cache.rejected_length
        ][:num_lengths]
        for n in longer_lengths:
            for chunk_sizes in (
                [n - 2, 1, 1],
                [3] + [1] * (n - 3) if n <= 40 else [n // 2, n - n // 2],
                [2, n // 2, n - 2 - n // 2],
            ):
                with self.session.skip_on_error(f"cache, {self.cache_kind}, {self.path.label(2, n)}"):
                    if not self.check_chunks(chunk_sizes, seed=140 + n):
                        return False
        with self.session.skip_on_error(f"cache, {self.cache_kind}, {self.path.label(1, length)}"):
            if not self.session.essential and not self.check_chunks([length - 3, 1, 1, 1], seed=150, batch=1):
                return False
            if not self.check_chunks([2, 1, 1], seed=151, batch=2):  # shorter than the last
                return False
        for name, check in (
            ("positions given", self.check_positions),
            ("padding on the left", self.check_left_padding),
            ("rows in another order", self.check_reorder),
            ("cut back", self.check_crop),
        ):
            with self.session.skip_on_error(f"cache, {self.cache_kind}, {name}"):
                if not check():
                    return False
        return True

    def check_chunks(self, chunk_sizes: list[int], seed: int, batch: int = 2) -> bool:
        """A random sequence in chunks of these sizes."""
        chunk_sizes = [n for n in chunk_sizes if n > 0]
        return self.check_inputs(self.session.adapter.make_inputs(batch, sum(chunk_sizes), seed), chunk_sizes)

    def check_positions(self) -> bool:
        """The same with explicit position ids."""
        adapter = self.session.adapter
        length = adapter.length
        if adapter.positions_argument is None or not self.stepper.accepts_mask_and_positions or length < 6:
            return True
        inputs = adapter.make_inputs(2, seed=170)
        return self.check_inputs(
            inputs.but(positions=torch.arange(length).expand(2, length)), [length - 5, 1, 2, 1, 1]
        )

    def check_left_padding(self) -> bool:
        """Rows of different lengths, padded on the left: padding in the cache stays hidden."""
        adapter = self.session.adapter
        length = adapter.length
        if (
            adapter.padding_argument is None
            or adapter.padding_argument.form not in ("keep", "drop")
            or not self.stepper.accepts_mask_and_positions
            or length < 8
        ):
            return True
        inputs = pad_inputs(
            adapter,
            adapter.make_inputs(2, seed=180),
            make_keep_mask(torch.tensor([length, length - 2]), length, "left"),
            "left",
            False,
        )
        return self.check_inputs(inputs, [length - 5, 1, 1, 1, 2])

    def check_inputs(self, inputs: Inputs, chunk_sizes: list[int]) -> bool:
        """Compare the output of each chunk with the same positions of one full pass."""
        adapter = self.session.adapter
        chunk_sizes = [1] * sum(chunk_sizes) if self.stepper.single_token else chunk_sizes
        full_output = adapter.run(inputs, self.path)
        state = None
        start = 0
        for n, chunk_size in enumerate(chunk_sizes):
            output, state = self.stepper.step(inputs, start, chunk_size, state, self.cache_kind, self.path)
            if not self.chunk_matches(full_output, output, inputs, start, chunk_size, chunk_sizes[: n + 1]):
                self.texts.append(self.chunked_text(inputs, chunk_sizes[: n + 1]))
                return False
            start += chunk_size
        self.texts.append(self.chunked_text(inputs, chunk_sizes))
        return True

    def chunked_text(self, inputs: Inputs, chunk_sizes: list[int]) -> CachedText:
        """A text in pieces of these sizes, to be read again."""

        def decode() -> Tensor:
            state = None
            for n, chunk_size in enumerate(chunk_sizes):
                output, state = self.stepper.step(
                    inputs, sum(chunk_sizes[:n]), chunk_size, state, self.cache_kind, self.path
                )
            return output

        comment = f"in pieces of {_format_sizes(chunk_sizes)}, with {self.cache_kind}"
        return CachedText(inputs, decode, comment, sum(chunk_sizes))

    def chunk_matches(
        self,
        full_output: Tensor,
        output: Tensor,
        inputs: Inputs,
        start: int,
        chunk_size: int,
        chunk_sizes: list[int],
    ) -> bool:
        """Does the output of one chunk agree with the full pass? chunk_sizes: of all chunks so far."""
        session = self.session
        actual = _align_shape(output, full_output, chunk_size)
        span = slice(start + chunk_size - actual.shape[1], start + chunk_size)
        expected = full_output[:, span]
        note = ""
        change = rounding.max_change(expected, actual).cpu()
        scale = rounding.scale(expected)
        if inputs.keep_mask is not None:
            change = torch.where(inputs.keep_mask[:, span], change, 0.0)
            note = ", with padding on the left"
        elif inputs.positions is not None:
            note = ", with positions given"
        path_label = (
            session.record_path(self.path, *inputs.tokens.shape[:2])
            + f", {self.cache_kind}, in pieces of {_format_sizes(chunk_sizes)}{note}"
        )
        limit = rounding.tolerance(session, self.path)
        if not float(change.max()) / scale > limit:
            return True
        dtype = self.path.dtype or session.adapter.dtype
        if dtype not in (torch.float32, torch.float64) and float(change.median()) / scale <= limit:
            return True
        row, n = divmod(int(change.argmax()), change.shape[1])
        reader = span.start + n
        location, line = self.locate_difference(inputs, chunk_sizes, row, reader)
        relative = float(change[row, n]) / scale
        self.mismatches.append(
            _Mismatch(
                Finding(
                    "cache",
                    reader,
                    start,
                    relative,
                    path_label,
                    location.module,
                    f"position {reader}, reached in pieces of {_format_sizes(chunk_sizes)} from a "
                    f"cache{note}, differs from one pass "
                    f"{format_size(relative)}, through {location.module or session.adapter.name}; "
                    f"{remedy('cache', location.module_kind)}.",
                    "comparison",
                    line,
                ),
                row,
            )
        )
        return False

    def locate_difference(
        self, inputs: Inputs, chunk_sizes: list[int], row: int, reader: int
    ) -> tuple[localize.Location, str]:
        """Where the last chunk departs from the full pass."""
        adapter = self.session.adapter
        last_size = chunk_sizes[-1]
        last_start = sum(chunk_sizes) - last_size

        def replay_prefix() -> Any:
            state = None
            for n, chunk_size in enumerate(chunk_sizes[:-1]):
                _, state = self.stepper.step(
                    inputs, sum(chunk_sizes[:n]), chunk_size, state, self.cache_kind, self.path
                )
            return state

        def run_last_chunk(state: Any) -> Any:
            return self.stepper.step(inputs, last_start, last_size, state, self.cache_kind, self.path)

        chunk_probe = localize.Probe(
            run_last_chunk,
            inputs.tokens.shape[0],
            last_size,
            row,
            reader - last_start,
            adapter.parameter_dims,
            replay_prefix,
        )
        return locate(
            self.session,
            make_probe(self.session, self.path, inputs, row, reader),
            chunk_probe,
            rounding.tolerance(self.session, self.path),
            in_own_methods=True,  # positions, masks and pasts go wrong where they are made
        )

    def check_reorder(self) -> bool:
        """Rows in another order, as beam search needs them."""
        adapter = self.session.adapter
        inputs = adapter.make_inputs(2, seed=160)
        prefix_length = adapter.length - 4
        rows = torch.tensor([1, 0])
        reordered = inputs.select_rows(rows)

        def decode() -> Tensor | None:
            _, state = self.stepper.step(inputs, 0, prefix_length, None, self.cache_kind, self.path)
            state = self.stepper.reorder(state, rows)
            if state is None:
                return None
            return self.stepper.step(reordered, prefix_length, 1, state, self.cache_kind, self.path)[0]

        return self.matches_full_pass(
            reordered,
            decode,
            prefix_length,
            "rows in another order",
            "its rows were put into another order, the cache still has them as they were",
            "reorder every tensor that the cache keeps",
        )

    def check_crop(self) -> bool:
        """The cache cropped to half its length, as after rejected draft tokens, and continued with other
        tokens.
        """
        adapter = self.session.adapter
        half = adapter.length // 2
        inputs = adapter.make_inputs(2, seed=190)
        is_draft = (torch.arange(inputs.tokens.shape[1]) >= half)[None]
        draft = inputs.blend(adapter.resample(inputs, 191), is_draft)

        def decode() -> Tensor | None:
            _, state = self.stepper.step(draft, 0, 2 * half, None, self.cache_kind, self.path)
            state = self.stepper.crop(state, half)
            if state is None:
                return None
            return self.stepper.step(inputs, half, 1, state, self.cache_kind, self.path)[0]

        return self.matches_full_pass(
            inputs,
            decode,
            half,
            f"cut back from {2 * half} to {half}",
            f"it was cut back from {2 * half} positions to {half}, the cache still knows of the others",
            "take back every tensor and every count that the cache keeps",
        )

    def matches_full_pass(
        self,
        inputs: Inputs,
        decode: Callable[[], Tensor | None],
        reader: int,
        operation: str,
        fault: str,
        advice: str,
    ) -> bool:
        """Is the step after an operation on the cache the same as in a full pass? If not, report it.

        decode: gives the output of that step; None where there is no method for the operation. fault, advice:
        two parts of the message.
        """
        output = decode()
        if output is None:
            return True
        full_output = self.session.adapter.run(inputs, self.path)
        expected = full_output[:, reader : reader + 1]
        change = rounding.max_change(expected, _align_shape(output, full_output, 1)).cpu()
        relative = float(change.max()) / rounding.scale(full_output)
        path_label = self.session.record_path(self.path, 2, reader + 1) + f", {self.cache_kind}, {operation}"
        if relative <= rounding.tolerance(self.session, self.path):
            return True
        self.texts.append(CachedText(inputs, cast(Callable[[], Tensor], decode), operation, reader + 1))
        self.mismatches.append(
            _Mismatch(
                Finding(
                    "cache",
                    reader,
                    None,
                    relative,
                    path_label,
                    "",
                    f"after {fault}: the next step differs {format_size(relative)}; {advice}.",
                    "comparison",
                ),
                int(change.flatten().argmax()),
                operation.partition(" ")[0],
            )
        )
        return False


def _align_shape(output: Tensor, full_output: Tensor, chunk_size: int) -> Tensor:
    """(B, n, …): the output of a chunk, at all its positions (n = chunk_size) or at the last one (n = 1).

    Raises CallError where it has another shape.
    """
    if output.dim() == full_output.dim() - 1:
        output = output[:, None]
    if (
        output.dim() != full_output.dim()
        or output.shape[0] != full_output.shape[0]
        or output.shape[1] not in (1, chunk_size)
        or output.shape[2:] != full_output.shape[2:]
    ):
        raise CallError(
            f"a step of {chunk_size} tokens gives {tuple(output.shape)}, one pass "
            f"{tuple(full_output.shape)}: they cannot be "
            "compared"
        )
    return output


def _format_sizes(chunk_sizes: list[int]) -> str:
    """5, 1 × 8"""
    out: list[str] = []
    n = 0
    while n < len(chunk_sizes):
        repeats = 1
        while n + repeats < len(chunk_sizes) and chunk_sizes[n + repeats] == chunk_sizes[n]:
            repeats += 1
        out.append(f"{chunk_sizes[n]}" if repeats == 1 else f"{chunk_sizes[n]} × {repeats}")
        n += repeats
    return ", ".join(out)
