"""A steady step compiled for a CPU: a minute the first time for each shape, then a few small kernels instead of hundreds."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import torch

# weights are laid out when the step is compiled, products are chosen by trial, and the step is one function of C++
INDUCTOR_OPTIONS: dict[str, Any] = {"freezing": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN",
                           "cpp_wrapper": True, "cpp.weight_prepack": True}

MAX_COMPILED_SHAPES = 256  # that one process may compile


def find_cxx_compiler() -> str | None:
    """The C++ compiler that there is; None: there is none."""
    return next((path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))), None)


def compile_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, compiled when it is first called: always for tensors of the same shape."""
    compiled_step = torch.compile(step, dynamic=False, fullgraph=True)
    is_compiled = False

    def run(*args: Any) -> Any:
        nonlocal is_compiled
        if is_compiled:
            return compiled_step(*args)
        from torch._dynamo import config as dynamo_config
        from torch._inductor import config as inductor_config

        # not as options of torch.compile: what is traced must know already that weights never change
        with inductor_config.patch(INDUCTOR_OPTIONS), dynamo_config.patch(recompile_limit=MAX_COMPILED_SHAPES), redirect_stderr(io.StringIO()):
            out = compiled_step(*args)  # trials of products are told at length: nobody wants to hear it
        is_compiled = True
        return out
    return run
