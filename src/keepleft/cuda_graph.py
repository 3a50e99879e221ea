"""CUDA graph capture: a step is recorded once and then replayed without asking Python for each kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Output = TypeVar("Output")


def capture_graph(step: Callable[[], Output], *, warmup: int = 0) -> tuple[torch.cuda.CUDAGraph, Output]:
    """Capture `step`, which must read and write the same tensors each time, and return the graph and its
    output.

    `warmup` steps run on a side stream first: kernels are compiled and tables laid out before anything is
    captured.
    """
    if warmup:
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(warmup):
                step()
        torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    return graph, output
