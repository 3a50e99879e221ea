"""keepleft doctor"""

from __future__ import annotations

import json as json_format
import platform
import sys
from importlib import metadata


def doctor(json: bool = False) -> int:
    """Say what this machine has: versions, devices, and real weights that are installed.

    Args:
        json: print the same as JSON
    """
    import torch

    import keepleft
    from keepleft.cli.installed_weights import installed_weights

    facts: dict[str, object] = {
        "keepleft": keepleft.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    for name in ("tokenizers", "safetensors", "transformers", "gguf", "huggingface_hub"):
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = None
    facts["threads"] = torch.get_num_threads()
    facts["devices"] = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] or ["cpu"]
    facts["weights"] = {name: str(path) for name, path in installed_weights().items()}
    if json:
        json_format.dump(facts, sys.stdout, indent=2)
        print()
    else:
        for name, value in facts.items():
            if isinstance(value, dict):
                value = "; ".join(f"{weights}: {path}" for weights, path in value.items()) or None
            print(
                f"{name:16} {', '.join(value) if isinstance(value, list) else 'not installed' if value is None else value}"
            )
    return 0
