"""Scripts of labels findings: the loss for several values of one label, or of two calls that must agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepleft.auditing import outputs
from keepleft.auditing.checks.reproducer import UP_TO_ROUNDING, ScriptWriter, UnwritableError, literal
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.session import AuditSession

# (what a call returned, the inputs of the call) → logits (B, T, V), and the loss
FindLoss = Callable[[Any, Inputs], tuple[Tensor, Any]]


@dataclass(frozen=True)
class LossScripts:
    """Scripts for a model that gives a loss; each is empty where a call cannot be written down."""

    session: AuditSession
    path: CodePath
    find_loss: FindLoss

    def residual(
        self, inputs: Inputs, labels: Tensor, at: tuple[int, int], values: Sequence[int], scores: int
    ) -> str:
        """How much of the loss's change is not explained by the scores (row, position) that must judge a
        label.

        inputs: with `labels` in them, of which the one at (row, position) is replaced by each of the values.
        """
        position = at[1]
        return self._fit_script(
            inputs,
            labels,
            at,
            values,
            scores,
            [
                "rest = (losses - weight * nlls).abs().max() / losses.abs().max()",
                f"print(float(rest)){UP_TO_ROUNDING}: the scores at position {scores} judge the label at "
                f"position {position}",
            ],
        )

    def weight(
        self, inputs: Inputs, labels: Tensor, at: tuple[int, int], values: Sequence[int], scores: int
    ) -> str:
        """By how much the weight of the only label is not 1."""
        line = f"print(float((weight - 1).abs())){UP_TO_ROUNDING}: it is the only label"
        return self._fit_script(inputs, labels, at, values, scores, [line])

    def constant(self, inputs: Inputs, labels: Tensor, at: tuple[int, int], values: Sequence[int]) -> str:
        """1 where the loss is the same whatever a label is."""
        line = "print(int(losses.max() - losses.min() < 1e-9))  # must be 0: the loss depends on the label"
        return self._loop_script(inputs, labels, at, values, lambda writer, out: [line])

    def spread(self, inputs: Inputs, labels: Tensor, at: tuple[int, int], values: Sequence[int]) -> str:
        """By how much a label moves the loss that nothing can predict, or must not."""
        line = f"print(float(losses.max() - losses.min())){UP_TO_ROUNDING}: nothing may judge this label"
        return self._loop_script(inputs, labels, at, values, lambda writer, out: [line])

    def difference(self, first: Inputs, second: Inputs) -> str:
        """Between the losses of two calls."""
        return self.sum_of_parts(first, [second])

    def sum_of_parts(self, whole: Inputs, parts: Sequence[Inputs]) -> str:
        """Between the loss of a batch and the sum of the losses of its parts."""
        try:
            writer = ScriptWriter(self.session, self.path)
            names = ["whole", *(f"part_{n}" for n in range(len(parts)))] if len(parts) > 1 else ["a", "b"]
            lines: list[str] = []
            codes = []
            for name, inputs in zip(names, (whole, *parts), strict=True):
                lines += writer.call(name, writer.arguments(inputs))
                codes.append(self._loss_code(name, self._run(inputs), inputs))
        except UnwritableError:
            return ""
        total = codes[1] if len(parts) == 1 else f"({' + '.join(codes[1:])})"
        return writer.text([*lines, f"print(float(({codes[0]} - {total}).abs())){UP_TO_ROUNDING}"])

    def double_difference(self, calls: Sequence[Inputs]) -> str:
        """Between what one label contributes to the loss in two settings: (a - b) - (c - d)."""
        try:
            writer = ScriptWriter(self.session, self.path)
            lines: list[str] = []
            codes = []
            for name, inputs in zip("abcd", calls, strict=True):
                lines += writer.call(name, writer.arguments(inputs))
                codes.append(self._loss_code(name, self._run(inputs), inputs))
        except UnwritableError:
            return ""
        total = f"({codes[0]} - {codes[1]}) - ({codes[2]} - {codes[3]})"
        return writer.text([*lines, f"print(float(({total}).abs())){UP_TO_ROUNDING}"])

    def output_change(
        self,
        first: Mapping[str, Any],
        second: Mapping[str, Any],
        outs: Sequence[Any],
        values: Sequence[Tensor],
    ) -> str:
        """Between two outputs, at the position that changes most.

        outs: what the calls gave; values: (rows, positions, …) of each.
        """
        change = (values[0] - values[1]).abs().flatten(2).amax(2)
        row, position = divmod(int(change.argmax()), change.shape[1])
        try:
            writer = ScriptWriter(self.session, self.path)
            lines = [*writer.call("first", first), *writer.call("second", second)]
            sizes = (change.shape[0], change.shape[1])
            a, b = (
                writer.position_code(name, out, tensor[row, position], (row, position), sizes)
                for name, out, tensor in zip(("first", "second"), outs, values, strict=True)
            )
        except UnwritableError:
            return ""
        return writer.text([*lines, f"print(float(({a} - {b}).abs().max()))  # must be 0"])

    # -- parts of scripts

    def _fit_script(
        self,
        inputs: Inputs,
        labels: Tensor,
        at: tuple[int, int],
        values: Sequence[int],
        scores: int,
        last_lines: Sequence[str],
    ) -> str:
        def lines(writer: ScriptWriter, out: Any) -> list[str]:
            logits = self.find_loss(out, inputs)[0]
            sizes = (logits.shape[0], logits.shape[1])
            code = writer.position_code("out", out, logits[at[0], scores], (at[0], scores), sizes)
            return [
                f"nlls = -{code}.double().log_softmax(-1)[{list(values)}]",
                "losses, nlls = losses - losses.mean(), nlls - nlls.mean()",
                "weight = (losses @ nlls) / (nlls @ nlls)  # of the label in the loss",
                *last_lines,
            ]

        return self._loop_script(inputs, labels, at, values, lines)

    def _loop_script(
        self,
        inputs: Inputs,
        labels: Tensor,
        at: tuple[int, int],
        values: Sequence[int],
        last_lines: Callable[[ScriptWriter, Any], list[str]],
    ) -> str:
        """The losses for each value of one label, and lines that make a number of them."""
        try:
            writer = ScriptWriter(self.session, self.path)
            arguments = writer.arguments(inputs)
            name = next(key for key, value in arguments.items() if value is labels)
            lines = [
                writer.define(key, value)
                for key, value in arguments.items()
                if isinstance(value, Tensor) and value.dim() and not value.is_floating_point() and key != name
            ]
            writer.known_code = lambda value: name if value is labels else ""
            out = self._run(inputs)
            lines += [
                f"{name} = {_labels_code(labels)}",
                "losses = []",
                f"for value in {list(values)}:",
                f"    {name}[{at[0]}, {at[1]}] = value",
                *(f"    {line}" for line in writer.call("out", arguments)),
                f"    losses.append({self._loss_code('out', out, inputs)})",
                "losses = torch.stack(losses)",
                *last_lines(writer, out),
            ]
        except UnwritableError:
            return ""
        return writer.text(lines)

    def _run(self, inputs: Inputs) -> Any:
        with torch.no_grad():
            return self.session.adapter.run_raw(inputs, self.path)

    def _loss_code(self, name: str, out: Any, inputs: Inputs) -> str:
        """Code for the loss as one number."""
        loss = self.find_loss(out, inputs)[1]
        for key_path, tensor in outputs.float_tensors(out):
            if tensor is loss:
                return f"{name}{outputs.as_code(out, key_path)}.double().sum()"
        raise UnwritableError


def _labels_code(labels: Tensor) -> str:
    if len(labels.unique()) == 1:
        return f"torch.full({tuple(labels.shape)}, {int(labels.flatten()[0])})"
    return literal(labels)
