"""Exporting a model: write it in another program's format, then let that program speak and compare."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from keepleft.disk import atomic

if TYPE_CHECKING:
    from keepleft.runs.parity import Check

Format = Literal["ctranslate2", "onnx", "hf", "gguf"]
Quantization = Literal["int8", "int16", "float16"]
Dtype = Literal["f32", "f16", "bf16", "q8_0"]

FILES = ("onnx", "gguf")  # the others are folders
LEFT_BEHIND = ("config.json", "model.bin")  # what a folder holds that an export may take the place of


def export(place: str, to: Format, out: Path, *, quantization: Quantization | None = None, dtype: Dtype | None = None,
           text: str | None = None, force: bool = False, check: bool = True) -> Iterator[Check]:
    """Write the model at `place` to `out`, then yield what was compared. What was written stays, whatever is found."""
    from keepleft.weights.files import load

    asked(to, quantization, dtype)
    vacant(out, to, place, force=force)
    model, tokenizer = load(place)
    if text is not None and tokenizer is None:
        raise ValueError(f"{place} has no tokenizer, so a --text cannot be read: leave it out")
    with atomic.explained(str(out)):
        out.parent.mkdir(parents=True, exist_ok=True)
        write(model, tokenizer, to, out, quantization=quantization, dtype=dtype)
    if check:
        yield from compared(model, tokenizer, to, out, quantization=quantization, dtype=dtype, text=text)


def write(model: Any, tokenizer: Any, to: Format, out: Path, *, quantization: str | None = None,
          dtype: str | None = None) -> None:
    """The one file or folder of that format."""
    if to == "hf":
        from keepleft.weights.files import save

        with atomic.made(out) as part:
            save(model, tokenizer, part)
    elif to == "onnx":
        from keepleft.weights import to_onnx

        to_onnx.write(model, out)
    elif to == "ctranslate2":
        from keepleft.weights import to_ctranslate2

        to_ctranslate2.write(model, tokenizer, out, quantization=quantization)
    else:
        from keepleft.weights import to_gguf

        to_gguf.write(model, tokenizer, out, dtype=dtype or "f16")


def compared(model: Any, tokenizer: Any, to: Format, out: Path, *, quantization: str | None, dtype: str | None,
             text: str | None) -> Iterator[Check]:
    from keepleft.runs import parity, parity_ctranslate2

    given = None if text is None else tokenizer.encode(text).ids
    if to == "hf":
        yield from parity.hugging_face(model, out, given)
    elif to == "onnx":
        yield from parity.onnx(model, out)
    elif to == "ctranslate2":
        yield from parity_ctranslate2.compared(model, tokenizer, out, quantization, given)
    else:
        yield from parity.gguf(model, tokenizer, out, dtype or "f16", given, text)


def asked(to: Format, quantization: str | None, dtype: str | None) -> None:
    """An option of another format would be passed over in silence: refuse it."""
    if quantization is not None and to != "ctranslate2":
        raise ValueError(f"--quantization {quantization} is CTranslate2's: leave it out for --to {to}")
    if dtype is not None and to != "gguf":
        raise ValueError(f"--dtype {dtype} is GGUF's: leave it out for --to {to}")


def vacant(out: Path, to: Format, place: str, *, force: bool) -> None:
    """Nothing is there, or what is there may go."""
    file = to in FILES
    if to == "gguf" and out.suffix != ".gguf":
        raise ValueError(f"--out is {out}: the name of a GGUF file ends in .gguf")
    if not out.exists():
        return
    if out.is_dir() == file:
        here, there = ("folder", "file") if file else ("file", "folder")
        raise ValueError(f"{out} is a {here}, and --to {to} writes a {there}: give another --out")
    if Path(place).exists() and (Path(place).resolve() == out.resolve() or out.resolve() in Path(place).resolve().parents):
        raise ValueError(f"{out} holds the model itself: give another --out")
    if not force:
        raise FileExistsError(f"{out} is there already: give another --out, or --force to replace it")
    if not file and any(out.iterdir()) and not any((out / name).exists() for name in LEFT_BEHIND):
        raise ValueError(f"{out} is a folder of other things, which --force would take away: give another --out")
