"""Every picture of the README and the docs but the benchmark charts, drawn from facts.json."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attention_panels import Panel, draw_panels
from audit_card import draw_report
from keepleft import svg
from keepleft.plots.charts import line_chart
from terminal import Exchange, draw_terminal
from theme import darken, describe

Facts = Mapping[str, Any]


def draw_all(facts: Facts) -> dict[str, str]:
    """File name → SVG: NAME-light.svg and NAME-dark.svg of each picture."""
    out = {}
    for name, draw in PICTURES.items():
        out |= both_versions(name, *draw(facts))
    return out


def both_versions(name: str, picture: str, description: str) -> dict[str, str]:
    light = describe(picture, description)
    return {f"{name}-light.svg": light, f"{name}-dark.svg": darken(light)}


def as_picture(title: str, width: float, height: float, elements: Sequence[str]) -> str:
    """The SVG that write_svg would write."""
    return from_file(lambda path: svg.write_svg(path, title, width, height, elements))


def from_file(write: Callable[[Path], object]) -> str:
    """What a function of the program writes into an .svg file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.svg"
        write(path)
        return path.read_text("utf-8")


def _terminal(facts: Facts) -> tuple[str, str]:
    exchanges = [Exchange(**exchange) for exchange in facts["terminal"]]
    commands = "; ".join(exchange.command for exchange in exchanges)
    return (
        draw_terminal(exchanges, title="keepleft at work in a terminal"),
        f"A terminal in which these commands run, one after the other: {commands}. "
        f"The first prints: {exchanges[0].output.strip()}. The audit finds that FalconForCausalLM of "
        "transformers reads the future when attention weights are asked for, and names module and line. "
        "The last draws a mask with a square wherever a position may look.",
    )


def _attentions(facts: Facts) -> tuple[str, str]:
    data = facts["attentions"]
    panels = [
        Panel(
            name,
            panel["meaning"],
            panel["place"],
            *(panel[key] for key in ("queries", "keys", "weights", "visible")),
        )
        for name, panel in data["panels"].items()
    ]
    subtitle = f"{data['sentence']} → {data['translation']}"
    return (
        as_picture("Three attentions in one translation", *draw_panels(panels, subtitle)),
        "Three matrices of attention weights from a trained translator. Self-attention fills the whole "
        "square; masked self-attention only the lower triangle, the rest is hatched; cross-attention has the "
        "words of the translation as rows and those of the source as columns.",
    )


def _alignment(facts: Facts) -> tuple[str, str]:
    data = facts["alignment"]
    return (
        data["svg"],
        f"Cross-attention of a translation, drawn by {data['command']}: a matrix with a row for each word of "
        f"{data['output'].strip()!r} and a column for each word of the source. A dot marks the source word "
        "that a word attends to most.",
    )


def _beam_tree(facts: Facts) -> tuple[str, str]:
    data = facts["beam_tree"]
    return (
        data["svg"],
        f"A beam search as a tree, drawn by {data['command']}: a column for each step, the best translation "
        "along the top in bold, hypotheses that were given up dashed, the finished ones below with scores.",
    )


def _loss(facts: Facts) -> tuple[str, str]:
    data = facts["loss"]
    masked, unmasked = data["masked"], data["unmasked"]
    series = {
        f"with the mask: {masked['exact']:.0%} of new sentences right": masked["curve"],
        f"without it: {unmasked['exact']:.0%}": unmasked["curve"],
    }
    sample, written_unmasked = masked["samples"][0], unmasked["samples"][0]["written"]
    captions = [
        ("source", sample["english"]),
        ("with the mask", sample["written"]),
        ("without it", written_unmasked or "(nothing: it ends the sentence at once)"),
        ("", ""),
        *(
            (name, f"{masked[field]:.0%} of tokens right with the mask, {unmasked[field]:.0%} without it")
            for name, field in (("reference given", "accuracy"), ("future cut off", "honest"))
        ),
    ]
    title = "The lower loss is the broken model: one translator, trained with and without its causal mask"
    return (
        from_file(
            lambda path: line_chart(
                path,
                series,
                title=title,
                x_label="training step",
                y_label="training loss per token",
                log_y=True,
                captions=captions,
            )
        ),
        f"Training loss, from {data['command']}. With the causal mask it falls to "
        f"{masked['curve'][-1][1]:.2f}, without it to {unmasked['curve'][-1][1]:.2f}; but the model without "
        f"it translates {unmasked['exact']:.0%} of new sentences correctly, the one with it "
        f"{masked['exact']:.0%}.",
    )


def _audit(facts: Facts) -> tuple[str, str]:
    report = facts["audit"]
    return _draw_audit(
        report, f"{report['subject']} of transformers {facts['about']['transformers']}, random weights"
    )


def _audit_tutorial(facts: Facts) -> tuple[str, str]:
    report = facts["audit_tutorial"]
    return _draw_audit(report, report["subject"])


def _draw_audit(report: Mapping[str, Any], subject: str) -> tuple[str, str]:
    finding = report["findings"][0]
    return (
        as_picture(f"keepleft audit: {subject}", *draw_report(report)),
        f"The report of an audit. {subject}: {finding['kind']} in {finding['module']}. {finding['message']} "
        "Two matrices show who may influence whom, a lower triangle, and who does, with red crosses above "
        "the diagonal.",
    )


PICTURES: dict[str, Callable[[Facts], tuple[str, str]]] = {
    "terminal": _terminal,
    "attentions": _attentions,
    "alignment": _alignment,
    "beam-tree": _beam_tree,
    "loss": _loss,
    "audit": _audit,
    "audit-tutorial": _audit_tutorial,
}
