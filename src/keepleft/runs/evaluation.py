"""How good a model is on texts with known answers, alone or beside another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from keepleft.data import sources
from keepleft.decoding.options import Options, of_model
from keepleft.evaluate.compare import bootstrap, mcnemar
from keepleft.models.design import Classes
from keepleft.runs.judging import judge
from keepleft.runs.using import voice

Task = Literal["translate", "summarize", "classify", "lm"]


@dataclass(frozen=True)
class Judged:
    """Numbers with their names, how they were computed, and the verdict beside another system."""

    task: Task
    count: int
    measures: dict[str, float]
    signatures: dict[str, str] = field(default_factory=dict)
    verdicts: list[str] = field(default_factory=list)


def evaluate(place: str, data: Sequence[str], *, task: Task | None = None, against: str | None = None,
             options: Options | None = None, dtype: str = "float32", device: str | None = None, tag: str | None = None,
             most: int | None = None, watch: Callable[[int, int], None] = lambda done, total: None) -> Judged:
    """`data`: a table of source and target or of text and label, two aligned files, or a text. `against`: another model, or a
    file of what another system wrote, a line each. int8 is told beside float32."""
    kind = task or _task(place)
    if kind == "lm":
        if most is not None:
            raise ValueError("most counts texts, and a language model is measured on running text: cut the file instead")
        return _foreseen(place, data, against, dtype, device)
    if kind == "classify":
        return _labelled(place, data, against, dtype, device, most)
    rows = [(str(a), str(b)) for a, b in _pairs(data)][:most]
    if not rows:
        raise ValueError(f"{', '.join(data)} holds no text: there is nothing to evaluate on")
    texts, references = ([row[n] for row in rows] for n in (0, 1))
    write = lambda where, how: _written(where, texts, options or Options(), how, device, tag, watch)
    written = write(place, dtype)
    others = {"float32": write(place, "float32")} if dtype == "int8" else {}
    if against is not None:
        read = lambda: Path(against).read_text("utf-8").removesuffix("\n").split("\n")
        others[against] = read() if Path(against).is_file() else write(against, dtype)
        if len(others[against]) != len(texts):
            raise ValueError(f"{against} has {len(others[against])} lines, and there are {len(texts)} texts: they must be as "
                             "many")
    return (_summaries if kind == "summarize" else _translations)(kind, written, references, others, place)


def _translations(kind: Task, written: list[str], references: list[str], others: dict[str, list[str]], place: str) -> Judged:
    from keepleft.evaluate.exact import exact
    from keepleft.evaluate.translation import measured, paired

    found = measured(written, references)
    measures = {name: one.score for name, one in found.items()} | {"exact": exact(written, references)}
    verdicts = [f"{name}: {one.sentence}".replace("the first", place).replace("the second", against)
                for against, other in others.items() for name, one in paired(written, other, references).items()]
    return Judged(kind, len(written), measures, {name: one.signature for name, one in found.items()}, verdicts)


def _summaries(kind: Task, written: list[str], references: list[str], others: dict[str, list[str]], place: str) -> Judged:
    from keepleft.evaluate import summary

    own = summary.rouge(written, references)["rougeL"]
    verdicts = [f"rougeL: {bootstrap(own, summary.rouge(other, references)['rougeL'], names=(place, against)).sentence}"
                for against, other in others.items()]
    return Judged(kind, len(written), summary.summary(written, references), {"rouge": summary.signature()}, verdicts)


def _labelled(place: str, data: Sequence[str], against: str | None, dtype: str, device: str | None, most: int | None) -> Judged:
    from keepleft.evaluate.calibration import calibration
    from keepleft.evaluate.labels import labels

    if dtype == "int8":
        raise ValueError("int8 is for models that write: leave --dtype out for a classifier")
    rows = list(sources.open_source(data[0], ("text", "label"), None))[:most]
    texts, true = [str(text) for text, _ in rows], [str(label) for _, label in rows]

    def judged(where: str) -> tuple[list[str], torch.Tensor, list[str]]:
        one = judge(where, dtype=dtype, device=device)
        chances = torch.cat([one.classify(texts[n:n + 32]) for n in range(0, len(texts), 32)])
        return [one.labels[n] for n in chances.argmax(-1).tolist()], chances, one.labels

    said, chances, names = judged(place)
    if odd := sorted(set(true) - set(names)):
        raise ValueError(f"the label {odd[0]!r} is none of the model's: {', '.join(names)}")
    found = labels(said, true, names=names)
    sure = calibration(chances.numpy(), [names.index(label) for label in true])
    verdicts = []
    if against is not None:
        other, _, _ = judged(against)
        verdict = mcnemar([a == b for a, b in zip(said, true, strict=True)], [a == b for a, b in zip(other, true, strict=True)],
                          names=(place, against))
        verdicts = [f"accuracy: {verdict.sentence}"]
    return Judged("classify", len(rows), {"accuracy": found.accuracy, "macro_f1": found.macro_f1,
                                          "calibration_error": sure.error, "brier": sure.brier}, {}, verdicts)


def _foreseen(place: str, data: Sequence[str], against: str | None, dtype: str, device: str | None) -> Judged:
    from keepleft.evaluate.perplexity import perplexity

    texts = ["".join(text for text, in sources.whole(path)) for path in data]

    def measured(where: str, how: str) -> Any:
        one = voice(where, dtype=how, device=device)
        return perplexity(one.model, one.tokenizer, texts, start=of_model(one.model.notes).first)

    found = measured(place, dtype)
    others = {} if against is None else {against: measured(against, dtype)}
    if dtype == "int8":
        others["float32"] = measured(place, "float32")
    verdicts = [f"perplexity {found.perplexity:.4f} beside {there.perplexity:.4f} of {name}" for name, there in others.items()]
    return Judged("lm", found.tokens, {"perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}, {}, verdicts)


def _written(place: str, texts: list[str], options: Options, dtype: str, device: str | None, tag: str | None,
             watch: Callable[[int, int], None]) -> list[str]:
    one = voice(place, dtype=dtype, device=device)
    settled = one.settled(options)
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
    out = [""] * len(texts)
    for first in range(0, len(order), 32):
        some = order[first:first + 32]
        for n, found in zip(some, one.write([texts[n] for n in some], settled, tag=tag), strict=True):
            out[n] = found[0].text
        watch(min(len(order), first + 32), len(order))
    return out


def _pairs(data: Sequence[str]) -> Any:
    if len(data) == 2:
        return sources.aligned(*data)
    return sources.open_source(data[0], ("src", "tgt"), None)


def _task(place: str) -> Task:
    """What a model is for, by what it is made of."""
    from keepleft.weights.files import load

    design = load(place, device="meta")[0].design
    if isinstance(design.head, Classes):
        return "classify"
    if design.decoder is None:
        raise ValueError(f"{place} is an encoder without labels: there is no answer of it to compare")
    return "lm" if design.encoder is None else "translate"
