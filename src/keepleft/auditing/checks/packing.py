"""Sequence packing: do sequences that share a row influence each other, and is each the same as alone?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from keepleft.auditing import outputs
from keepleft.auditing.checks.agreement import CallPair, agree
from keepleft.auditing.checks.findings import add_nan_finding
from keepleft.auditing.checks.label_scripts import LossScripts
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.localize import loss_line
from keepleft.auditing.model_adapter import ModelAdapter
from keepleft.auditing.report import Finding
from keepleft.auditing.session import AuditSession, RunCache

# where each sequence of a row begins and ends: 0, and the cumulative lengths
CU_SEQLENS_ARGUMENTS = ("cu_seqlens", "cu_seq_lens", "cu_seqlen", "cumulative_lengths")
MAX_SEQLEN_ARGUMENTS = ("max_seqlen", "max_seq_len_in_batch")
MIN_LENGTH = 4  # positions: fewer do not hold several sequences


@dataclass(frozen=True)
class PackedRow:
    """The sequences of one row: their lengths and segment ids."""

    lengths: tuple[int, ...]
    segment_ids: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.lengths, initial=0))[:-1]

    @property
    def segments(self) -> Tensor:
        return torch.cat(
            [
                torch.full((n,), segment_id)
                for n, segment_id in zip(self.lengths, self.segment_ids, strict=True)
            ]
        )

    @property
    def positions(self) -> Tensor:
        return torch.cat([torch.arange(n) for n in self.lengths])


@dataclass(frozen=True)
class PackingArguments:
    """How a model takes the boundaries between packed sequences."""

    adapter: ModelAdapter
    mode: str  # segments, positions, ends or mask
    name: str = ""  # of the argument, for ends and mask
    with_positions: bool = True  # give position ids as well, where the model takes them

    def pack(self, inputs: Inputs, rows: Sequence[PackedRow]) -> Inputs:
        adapter = self.adapter
        segments = torch.stack([row.segments for row in rows])
        gives_positions = self.mode == "positions" or (
            self.with_positions and adapter.positions_argument is not None and not adapter.facts.is_keepleft
        )
        inputs = inputs.but(
            positions=torch.stack([row.positions for row in rows]) if gives_positions else None
        )
        if self.mode == "segments":
            return inputs.but(segments=segments)
        if self.mode == "mask":
            return inputs.but(extra={self.name: segments})
        if self.mode == "ends":
            cu_seqlens = torch.tensor([0, *accumulate(rows[0].lengths)], dtype=torch.int32)
            max_seqlens = {
                name: max(rows[0].lengths) for name in MAX_SEQLEN_ARGUMENTS if name in adapter.signature.names
            }
            return inputs.but(extra={self.name: cu_seqlens, **max_seqlens})
        return inputs

    def pack_single(self, inputs: Inputs) -> Inputs:
        """Every row as one sequence."""
        return self.pack(inputs, [PackedRow((inputs.tokens.shape[1],), (1,))])


def packing(session: AuditSession, paths: Sequence[CodePath]) -> None:
    adapter = session.adapter
    packing_arguments = _find_packing_arguments(adapter)
    if packing_arguments is None:
        session.skip("packing", "the model takes no segment, document or position ids")
        return
    if adapter.length < MIN_LENGTH:
        session.skip("packing", f"it takes {adapter.length} positions: too few for several texts")
        return
    if packing_arguments.mode == "positions" and not adapter.positions_reset:
        _check_positions_only(session, packing_arguments, paths[0])
        return
    layouts = _layouts(session, packing_arguments)
    for path in session.within_budget(paths, "packing, further paths"):
        for layout, rows in layouts[:1] if session.essential else layouts:
            num_precisions = (
                2 if layout == "three texts" else int(session.budget.exhaustive or path == paths[0])
            )
            with session.skip_on_error(f"packing, {layout}, {path.label(len(rows))}"):
                if not _check_documents(session, path, packing_arguments, rows, num_precisions):
                    break
    if packing_arguments.mode == "segments" and not session.has_finding("packing"):
        with session.skip_on_error("packing, the loss at the border of texts"):
            _check_loss_at_borders(session, paths[0], packing_arguments)
    if (
        packing_arguments.mode == "segments"
        and adapter.positions_argument is not None
        and not adapter.facts.is_keepleft
        and not session.has_finding("packing")
    ):
        _check_without_positions(session, paths[0])


def _check_loss_at_borders(
    session: AuditSession, path: CodePath, packing_arguments: PackingArguments
) -> None:
    """A loss that is told where texts begin must not ask one for the first token of the next."""
    adapter = session.adapter
    name = adapter.signature.argument_for("labels")
    if name is None or adapter.facts.is_huggingface or adapter.facts.is_keepleft or adapter.source_argument:
        return
    row = _layouts(session, packing_arguments)[0][1][0]
    inputs = packing_arguments.pack(adapter.make_inputs(1, seed=95), [row])
    start = row.starts[1]
    losses = []
    scripts = LossScripts(
        session,
        path,
        lambda out, inputs: (
            adapter.select_output(out, *inputs.tokens.shape[:2]),
            outputs.find(out, ("loss", "lm_loss")),
        ),
    )
    with adapter.on_path(path):
        for label in inputs.tokens[0, :2].tolist():
            labels = inputs.tokens.clone()
            labels[0, start] = label
            with torch.no_grad():
                out = adapter.run_raw(inputs.but(labels=labels), path)
            loss = outputs.find(out, ("loss", "lm_loss"))
            if (
                not isinstance(loss, Tensor)
                or loss.numel() != 1
                or inputs.tokens[0, 0] == inputs.tokens[0, 1]
            ):
                return
            losses.append(float(loss))
        code = line = ""
        if losses[0] != losses[1]:
            line = loss_line(lambda: adapter.run_raw(inputs.but(labels=labels), path))
            values = inputs.tokens[0, :2].tolist()
            code = scripts.spread(inputs.but(labels=labels), labels, (0, start), values)
    session.record_path(path, 1, adapter.length)
    if losses[0] == losses[1]:
        return
    session.add_finding(
        Finding(
            "packing",
            start - 1,
            start,
            abs(losses[0] - losses[1]) / max(abs(losses[0]), 1e-12),
            path.label(1, adapter.length),
            "",
            f"the label at position {start}, where a text begins, is judged by position {start - 1}, where "
            "its neighbour ends: the loss crosses the border; give the first label of each text -100.",
            "labels",
            line,
            code,
        ),
        "border",
    )


def _find_packing_arguments(adapter: ModelAdapter) -> PackingArguments | None:
    if adapter.segments_argument is not None:
        return PackingArguments(adapter, "segments", adapter.segments_argument)
    padding_argument = adapter.padding_argument
    if padding_argument is not None and padding_argument.form == "keep":
        example_mask = adapter.example_arguments.get(padding_argument.name)
        if (
            isinstance(example_mask, Tensor)
            and example_mask.dim() == 2
            and not example_mask.is_floating_point()
            and int(example_mask.max()) > 1
        ):
            return PackingArguments(adapter, "mask", padding_argument.name)
    cu_seqlens_name = next((name for name in CU_SEQLENS_ARGUMENTS if name in adapter.signature.names), None)
    if cu_seqlens_name is not None:
        return PackingArguments(adapter, "ends", cu_seqlens_name)
    return PackingArguments(adapter, "positions") if adapter.positions_argument is not None else None


def _layouts(session: AuditSession, packing_arguments: PackingArguments) -> list[tuple[str, list[PackedRow]]]:
    """Rows to pack, by name: three sequences; two rows of many, some of a single token, with large segment
    ids; the segment id 0.
    """
    adapter = session.adapter
    is_keepleft = adapter.facts.is_keepleft
    length = adapter.length
    three_lengths = (
        _fill_lengths((5, 4), length) if length > 10 else _fill_lengths((length // 3, length // 3), length)
    )
    out = [("three texts", [PackedRow(three_lengths, tuple(range(1, len(three_lengths) + 1)))])]
    if session.budget.exhaustive and not is_keepleft and packing_arguments.mode == "segments":
        out.append(("texts out of order", [PackedRow(three_lengths, (2, 1, 3))]))
    many_lengths = _fill_lengths((2, 1, 1, 3, 1, 2), length)
    other_lengths = _fill_lengths((1, 3, 1, 1, 4), length)
    rows = [
        PackedRow(many_lengths, tuple(range(1, len(many_lengths) + 1))),
        PackedRow(other_lengths, (3, 7, 8, 12, 40, 41)[: len(other_lengths)]),
    ]
    if packing_arguments.mode == "ends":
        return [*out, *((f"{len(row.lengths)} texts", [row]) for row in rows)]
    out.append(("many texts in two rows", rows))
    if packing_arguments.mode in ("segments", "mask"):
        zero_last = PackedRow(three_lengths, (*range(1, len(three_lengths)), 0))
        zero_first = PackedRow(_fill_lengths((3, 2), length), (0, 1, 2))
        out.append(
            (
                "a text numbered 0",
                [zero_last] if is_keepleft or packing_arguments.mode == "mask" else [zero_first, zero_last],
            )
        )
    return out


def _fill_lengths(lengths: tuple[int, ...], length: int) -> tuple[int, ...]:
    """As many of these lengths as fit, and one more for the rest."""
    ends = [end for end in accumulate(lengths) if end < length]
    return (*lengths[: len(ends)], length - (ends[-1] if ends else 0))


def _check_positions_only(session: AuditSession, packing_arguments: PackingArguments, path: CodePath) -> None:
    """For models without segment ids, whose positions can still restart with each sequence.

    Some keep sequences apart by that alone, others do not claim to. So no leak is reported, but a note or a
    skipped check.
    """
    use_cache = session.adapter.signature.argument_for("use_cache")
    paths = [path.but(extra_arguments=((use_cache, False),)), path] if use_cache is not None else [path]
    layout, rows = _layouts(session, packing_arguments)[0]
    separated = []
    for cache_path in paths:
        dry_run = _dry_run_session(session)
        with dry_run.skip_on_error(f"packing, {layout}, {cache_path.label(1)}"):
            num_precisions = 1 if session.essential else 2
            separated.append(_check_documents(dry_run, cache_path, packing_arguments, rows, num_precisions))
        for line in dry_run.skipped:
            session.skip(*line.split(": ", 1))
    if separated and separated[0]:
        session.record_path(paths[0], 1, session.adapter.length)
        more_layouts = [] if session.essential else _layouts(session, packing_arguments)[1:]
        for layout, rows in more_layouts:  # texts of one token among them
            with session.skip_on_error(f"packing, {layout}, {paths[0].label(len(rows))}"):
                if not _check_documents(session, paths[0], packing_arguments, rows, 1):
                    return
        if not all(separated):
            session.note(f"positions that begin anew keep packed texts apart only with {use_cache}=False")
    elif separated:
        session.skip(
            "packing",
            "positions that begin anew do not keep texts apart here, and there are no segment ids: give a "
            "4-D mask, or do not pack",
        )


def _check_without_positions(session: AuditSession, path: CodePath) -> None:
    """Note where segment ids alone are not enough, because positions are left to the caller."""
    packing_arguments = PackingArguments(session.adapter, "segments", with_positions=False)
    dry_run = _dry_run_session(session)
    rows = _layouts(session, packing_arguments)[0][1]
    with dry_run.skip_on_error("packing"):
        if not _check_documents(dry_run, path, packing_arguments, rows, 1):
            session.note(
                f"{session.adapter.segments_argument} alone does not keep packed texts as they are alone: "
                f"give {session.adapter.positions_argument} that begin anew with each text as well"
            )


def _dry_run_session(session: AuditSession) -> AuditSession:
    """A session like this one, whose findings are not reported."""
    return AuditSession(
        session.adapter,
        session.claim,
        session.layers,
        session.budget,
        session.checks,
        float64_support=session.float64_support,
        quantized=session.quantized,
        started_at=session.started_at,
        run_cache=RunCache(float64_purity=session.run_cache.float64_purity),
    )


def _check_documents(
    session: AuditSession,
    path: CodePath,
    packing_arguments: PackingArguments,
    rows: Sequence[PackedRow],
    num_precisions: int,
) -> bool:
    """Change each sequence in turn, in all rows at once: no other may change. Then compare each with itself
    alone. Returns False at the first finding.

    num_precisions: 1 to compare in float64 where the model runs in it, 2 to compare in its own dtype too.
    """
    adapter = session.adapter
    inputs = adapter.make_inputs(len(rows), seed=90)
    packed = packing_arguments.pack(inputs, rows)
    with adapter.on_path(path):
        if not _has_no_nan(session, path, packed):
            return False
        zero_is_ordinary = 0 not in sum((row.segment_ids for row in rows), ()) or _zero_is_ordinary(
            session, path, packing_arguments
        )
        if not _documents_are_separate(session, path, packed, rows, zero_is_ordinary):
            return False
    for precision_path in dict.fromkeys([session.in_float64(path), path][:num_precisions]):
        with adapter.on_path(precision_path):
            if not _documents_match_alone(
                session, precision_path, packing_arguments, packed, rows, zero_is_ordinary
            ):
                return False
    return True


def _has_no_nan(session: AuditSession, path: CodePath, packed: Inputs) -> bool:
    """False, and reported, where a packed row gives NaN: a sequence that may attend to nothing does."""
    if "nan" not in session.checks or path.dtype is not None:
        return True
    out = session.cached_run(packed, path)
    if not out.isnan().any():
        return True
    add_nan_finding(session, path, packed, out, "where several texts share a row", "packed texts")
    return False


def _zero_is_ordinary(session: AuditSession, path: CodePath, packing_arguments: PackingArguments) -> bool:
    """Is 0 a segment id like any other, rather than padding?"""
    adapter = session.adapter
    if adapter.facts.is_keepleft or packing_arguments.mode == "mask":
        return False
    inputs = adapter.make_inputs(1, seed=92)
    output_one, output_zero = (
        adapter.run(packing_arguments.pack(inputs, [PackedRow((adapter.length,), (segment_id,))]), path)
        for segment_id in (1, 0)
    )
    return torch.equal(output_one, output_zero)


def _documents_are_separate(
    session: AuditSession, path: CodePath, packed: Inputs, rows: Sequence[PackedRow], zero_is_ordinary: bool
) -> bool:
    """Does no sequence of a row change when another one does?"""
    adapter = session.adapter
    new = adapter.resample(packed, 91)
    document_ids = torch.stack(
        [torch.cat([torch.full((length,), n) for n, length in enumerate(row.lengths)]) for row in rows]
    )
    compared = torch.stack([row.segments for row in rows]) != 0
    if zero_is_ordinary:
        compared = torch.ones_like(compared)
    for changed_document in range(int(document_ids.max()) + 1):
        changed_mask = document_ids == changed_document
        changed_inputs = packed.blend(new, changed_mask)
        for n, row in enumerate(rows):
            columns = (~changed_mask & compared)[n].nonzero()
            if changed_document >= len(row.lengths) or not len(columns):
                continue
            positions = torch.cat([torch.full_like(columns, n), columns], 1)
            source = row.starts[changed_document]

            def describe(row: int, reader: int, module: str, size: str, source: int = source) -> str:
                return (
                    f"a neighbour in the same row moves a text: position {reader} of row {row} moves {size} "
                    f"when the text that begins at position {source} changes, through {module}"
                )

            if not agree(
                session,
                path,
                CallPair("packing", packed, changed_inputs, positions, positions, True, describe, source),
            ):
                return False
    return True


def _documents_match_alone(
    session: AuditSession,
    path: CodePath,
    packing_arguments: PackingArguments,
    packed: Inputs,
    rows: Sequence[PackedRow],
    zero_is_ordinary: bool,
) -> bool:
    """Does each sequence of a packed row give what it gives alone?"""
    for n, row in enumerate(rows):
        for document, (start, length) in enumerate(zip(row.starts, row.lengths, strict=True)):
            if row.segment_ids[document] == 0 and not zero_is_ordinary:
                continue
            single = packing_arguments.pack_single(
                packed.select_rows(slice(n, n + 1))
                .select_positions(slice(start, start + length))
                .but(keep_mask=None, source_keep_mask=None, positions=None, segments=None, extra={})
            )
            positions = torch.stack([torch.zeros(length, dtype=torch.long), torch.arange(length)], 1)

            def describe(row: int, reader: int, module: str, size: str, document: int = document) -> str:
                return (
                    f"text {document + 1} of a packed row is another than alone: position {reader} of row "
                    f"{row} moves {size}, through {module}; nothing of its neighbours leaks, so positions "
                    "are probably not counted anew"
                )

            call_pair = CallPair(
                "packing",
                single,
                packed,
                positions,
                positions + torch.tensor([n, start]),
                False,
                describe,
                start,
                "alone",
            )
            if not agree(session, path, call_pair):
                return False
    return True
