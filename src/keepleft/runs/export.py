"""Export a model to another program's format, and verify that this program computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from keepleft.disk import atomic

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from keepleft.runs.parity import Check
    from keepleft.weights.model_directory import AnyModel

ExportFormat = Literal["ctranslate2", "onnx", "hf", "int8", "gguf"]
Quantization = Literal["int8", "int16", "float16"]
GGUFDtype = Literal["f32", "f16", "bf16", "q8_0"]

FILE_FORMATS = ("onnx", "gguf")  # the other formats are folders
EXPORT_MARKERS = ("config.json", "model.bin")  # a folder with one of these is an export, and may be replaced


def export(
    model_path: str,
    to: ExportFormat,
    out: Path,
    *,
    quantization: Quantization | None = None,
    dtype: GGUFDtype | None = None,
    text: str | None = None,
    force: bool = False,
    check: bool = True,
) -> Iterator[Check]:
    """Export the model at `model_path` to `out`, then yield the checks of `verify` if `check`.

    What was written stays, whatever the checks find. Raises ValueError if options do not fit together, and
    FileExistsError if `out` is there and `force` is not given.
    """
    from keepleft.weights.model_directory import load

    check_options(to, quantization, dtype)
    check_output(out, to, model_path, force=force)
    model, tokenizer = load(model_path)
    if text is not None and tokenizer is None:
        raise ValueError(f"{model_path} has no tokenizer, so a --text cannot be read: leave it out")
    with atomic.explain_os_error(str(out)):
        out.parent.mkdir(parents=True, exist_ok=True)
        write(model, tokenizer, to, out, quantization=quantization, dtype=dtype)
    if check:
        yield from verify(model, tokenizer, to, out, quantization=quantization, dtype=dtype, text=text)


def write(
    model: AnyModel,
    tokenizer: Tokenizer | None,
    to: ExportFormat,
    out: Path,
    *,
    quantization: str | None = None,
    dtype: str | None = None,
) -> None:
    """Write the file or folder of a format."""
    if to in ("hf", "int8"):
        from keepleft.weights.model_directory import save

        with atomic.atomic_folder(out) as partial_folder:
            save(model, tokenizer, partial_folder, int8=to == "int8")
    elif to == "onnx":
        from keepleft.weights import to_onnx

        to_onnx.write(model, out)
    elif to == "ctranslate2":
        from keepleft.weights import to_ctranslate2

        to_ctranslate2.write(model, tokenizer, out, quantization=quantization)
    else:
        from keepleft.weights import to_gguf

        to_gguf.write(model, tokenizer, out, dtype=dtype or "f16")


def verify(
    model: AnyModel,
    tokenizer: Tokenizer | None,
    to: ExportFormat,
    out: Path,
    *,
    quantization: str | None,
    dtype: str | None,
    text: str | None,
) -> Iterator[Check]:
    """Compare what was written with the model. `text` is one more example to compare them on."""
    from keepleft.models.transformer import CausalModel
    from keepleft.runs import parity, parity_ctranslate2

    tokens = None if text is None or tokenizer is None else tokenizer.encode(text).ids
    if to == "hf":
        yield from parity.hugging_face(model, out, tokens)
    elif to == "int8":
        yield from parity.int8_directory(model, out, tokens)
    elif to == "onnx":
        yield from parity.onnx(model, out)
    elif to == "ctranslate2":
        assert isinstance(model, CausalModel)  # writing has refused others
        yield from parity_ctranslate2.compare(model, tokenizer, out, quantization, tokens)
    else:
        yield from parity.gguf(model, tokenizer, out, dtype or "f16", tokens, text)


def check_options(to: ExportFormat, quantization: str | None, dtype: str | None) -> None:
    """Raise ValueError for an option of another format, which would be ignored."""
    if quantization is not None and to != "ctranslate2":
        raise ValueError(f"--quantization {quantization} is CTranslate2's: leave it out for --to {to}")
    if dtype is not None and to != "gguf":
        raise ValueError(f"--dtype {dtype} is GGUF's: leave it out for --to {to}")


def check_output(out: Path, to: ExportFormat, model_path: str, *, force: bool) -> None:
    """Raise ValueError or FileExistsError if `out` must not be written, or replaced."""
    is_file = to in FILE_FORMATS
    if to == "gguf" and out.suffix != ".gguf":
        raise ValueError(f"--out is {out}: the name of a GGUF file ends in .gguf")
    if not out.exists():
        return
    if out.is_dir() == is_file:
        existing_kind, written_kind = ("folder", "file") if is_file else ("file", "folder")
        raise ValueError(
            f"{out} is a {existing_kind}, and --to {to} writes a {written_kind}: give another --out"
        )
    if Path(model_path).exists() and (
        Path(model_path).resolve() == out.resolve() or out.resolve() in Path(model_path).resolve().parents
    ):
        raise ValueError(f"{out} holds the model itself: give another --out")
    if not force:
        raise FileExistsError(f"{out} is there already: give another --out, or --force to replace it")
    if not is_file and any(out.iterdir()) and not any((out / name).exists() for name in EXPORT_MARKERS):
        raise ValueError(
            f"{out} is a folder of other things, which --force would take away: give another --out"
        )
