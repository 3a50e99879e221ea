"""The device to compute on."""

from __future__ import annotations

import torch


def pick_device(device: str | None = None, local_rank: int | None = None) -> torch.device:
    """The requested device, or a GPU where there is one, else the CPU.

    `local_rank` picks the GPU where several processes share a machine. Raises ValueError for a device that
    PyTorch lacks.
    """
    device_type = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if device_type == "cuda" and local_rank is not None:
            torch_device = torch.device(device_type, local_rank)
        else:
            torch_device = torch.device(device_type)
        torch.empty(0, device=torch_device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        if device_type.lower() in ("gpu", "nvidia"):
            raise ValueError(f"device is {device_type!r}: did you mean cuda?") from error
        raise ValueError(
            f"device is {device_type!r}, which PyTorch {torch.__version__} does not find here: leave it out, "
            "or give cpu; `keepleft doctor` shows what there is"
        ) from error
    return torch_device
