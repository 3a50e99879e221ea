"""keepleft doctor"""

from __future__ import annotations

import json as json_format
import platform
import re
import sys
from importlib import metadata

PACKAGES = (
    "tokenizers",
    "safetensors",
    "fastapi",  # keepleft[serve]
    "llguidance",  # keepleft[grammar]
    "sacrebleu",  # keepleft[metrics]
    "ctranslate2",  # keepleft[export]
    "gguf",
    "huggingface_hub",
    "transformers",
)
NAME_WIDTH = 16  # of the first column
TESTED_TORCH = ((2, 11), (2, 13))  # the oldest and the newest release that keepleft is tested with


def doctor(json: bool = False) -> int:
    """Report what this machine has: versions, devices, and installed models.

    Include its output when you report a problem.

    Args:
        json: print the report as JSON
    """
    import torch

    import keepleft
    from keepleft.cli.paths import installed_weights

    facts: dict[str, object] = {
        "keepleft": keepleft.__version__,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    for name in PACKAGES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = None
    facts["threads"] = torch.get_num_threads()
    facts["devices"] = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] or ["cpu"]
    facts["weights"] = {name: str(path) for name, path in installed_weights().items()}
    facts["notes"] = [note for note in [torch_note(str(torch.__version__))] if note is not None]
    if json:
        json_format.dump(facts, sys.stdout, indent=2)
        print()
    else:
        for name, value in facts.items():
            if value != []:
                print(f"{name:{NAME_WIDTH}} {_as_text(value)}")
    return 0


def torch_note(version: str) -> str | None:
    """What to know about this version of PyTorch, if it is not one that keepleft is tested with."""
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    oldest, newest = (".".join(map(str, release)) for release in TESTED_TORCH)
    if numbers > TESTED_TORCH[1]:
        return f"torch {version} is newer than {newest}, the newest that keepleft is tested with"
    if numbers < TESTED_TORCH[0]:
        return f"torch {version} is too old: keepleft needs {oldest} or newer"
    return None


def _as_text(value: object) -> object:
    if isinstance(value, dict):
        rows = [f"{name}: {path}" for name, path in value.items()]
        return f"\n{'':{NAME_WIDTH}} ".join(rows) or "not installed"
    if isinstance(value, list):
        return ", ".join(value)
    return "not installed" if value is None else value
