"""The command line that all benchmarks share: --json, and --smoke for a run at toy size."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the numbers there too")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="toy sizes and few repetitions: shows that the file runs, measures nothing",
    )
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device, for a benchmark that is meant for a GPU."""
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")


def choose_device(options: argparse.Namespace) -> str | None:
    """The device to run on; None, with a message, where a GPU is needed and there is none."""
    import torch

    if options.device is not None:
        return options.device
    if torch.cuda.is_available():
        return "cuda"
    if options.smoke:
        return "cpu"
    print("This benchmark needs a GPU, and PyTorch sees none: nothing was measured.")
    return None


def parse_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, **smoke_defaults: Any
) -> argparse.Namespace:
    """Parse the arguments. With --smoke, `smoke_defaults` are the defaults, and PyTorch gets one thread."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if "--smoke" in arguments:
        import torch

        parser.set_defaults(**smoke_defaults)
        torch.set_num_threads(1)  # for toy sizes a second thread would only wait
    return parser.parse_args(arguments)
