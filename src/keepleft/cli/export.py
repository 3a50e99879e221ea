"""keepleft export"""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import asdict
from pathlib import Path

from keepleft.cli.paths import model_path
from keepleft.runs.export import ExportFormat, GGUFDtype, Quantization


def export(
    model: str,
    to: ExportFormat | None = None,
    out: str | None = None,
    quantization: Quantization | None = None,
    dtype: GGUFDtype | None = None,
    text: str | None = None,
    revision: str | None = None,
    force: bool = False,
    no_verify: bool = False,
    json: bool = False,
) -> int:
    """Export a model for CTranslate2, ONNX Runtime, transformers or llama.cpp.

    That program's output is then compared with keepleft's.

    Args:
        model: a folder, a GGUF file, an installed model, or a name on the Hugging Face hub
        to: ctranslate2, onnx, hf (for transformers), int8 (for keepleft, a quarter of the size) or gguf (for
            llama.cpp) (required). A file for onnx and gguf, a folder for the others; onnx, hf and int8 are
            for all models, ctranslate2 for encoder-decoders and decoders, gguf for the LLaMA family
        out: the folder or file to write (required)
        quantization: data type of ctranslate2's weights: int8, int16 or float16 (default: float32)
        dtype: data type of gguf's weights: f32, f16, bf16 or q8_0 (default: f16)
        text: a text to compare on, besides random tokens
        revision: the branch, tag or commit of a model on the hub; MODEL@REVISION does the same
        force: replace an existing file or folder
        no_verify: write only, without comparing the output
        json: print the results of the checks as JSON
    """
    from keepleft.runs.export import export as export_model

    if to is None or out is None:
        raise ValueError("say what to write and where: keepleft export MODEL --to gguf --out model.gguf")
    checks = []
    if sys.stderr.isatty():
        print(f"writing {out} …", file=sys.stderr)
    for check in export_model(
        model_path(model, revision),
        to,
        Path(out),
        quantization=quantization,
        dtype=dtype,
        text=text,
        force=force,
        check=not no_verify,
    ):
        checks.append(check)
        if not json:
            print(f"{_status_text(check.ok):12} {check.what}: {check.found.removeprefix('not checked: ')}")
    if json:
        json_format.dump(
            {"out": out, "to": to, "checks": [asdict(check) for check in checks]},
            sys.stdout,
            indent=2,
            ensure_ascii=False,
        )
        print()
    else:
        print(f"{'written':12} {out} ({_total_bytes(Path(out)):,} bytes)")
    return 1 if any(check.ok is False for check in checks) else 0


def _status_text(ok: bool | None) -> str:
    return "not checked" if ok is None else "fine" if ok else "DIFFERENT"


def _total_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")))
