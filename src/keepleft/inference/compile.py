"""torch.compile of the decode step on a CPU: about a minute for each new shape, then few kernels instead of
hundreds.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import torch

# weights are packed at compile time, matrix products are autotuned, and the step becomes one C++ function
INDUCTOR_OPTIONS: dict[str, Any] = {
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP,ATEN",
    "cpp_wrapper": True,
    "cpp.weight_prepack": True,
}

MAX_COMPILED_SHAPES = 256  # in one process


def find_cxx_compiler() -> str | None:
    """Path of a C++ compiler, which Inductor needs on a CPU; None if there is none."""
    return next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))),
        None,
    )


def compile_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, compiled on its first call; all calls must have tensors of the same shapes."""
    compiled_step = torch.compile(step, dynamic=False, fullgraph=True)
    is_compiled = False

    def run(*args: Any) -> Any:
        nonlocal is_compiled
        if is_compiled:
            return compiled_step(*args)
        from torch._dynamo import config as dynamo_config
        from torch._inductor import config as inductor_config

        # not as options of torch.compile: tracing already needs to know that weights are constant
        with (
            inductor_config.patch(INDUCTOR_OPTIONS),
            dynamo_config.patch(recompile_limit=MAX_COMPILED_SHAPES),
            redirect_stderr(io.StringIO()),
        ):
            out = compiled_step(*args)  # autotuning prints a table for every product
        is_compiled = True
        return out

    return run
