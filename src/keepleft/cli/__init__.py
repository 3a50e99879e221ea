"""The command line: one file per command. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import sys
from collections.abc import Callable


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Exit codes: 0 success, 1 a finding or a failed quality gate, 2 a usage error."""
    from argparse import ArgumentError

    from keepleft.cli.audit import audit_model
    from keepleft.cli.compare import compare
    from keepleft.cli.demo import demo
    from keepleft.cli.doctor import doctor
    from keepleft.cli.eval import evaluate_model
    from keepleft.cli.export import export
    from keepleft.cli.generate import generate_text, summarize, translate
    from keepleft.cli.parser import build_parser, command_arguments, normalise_arguments
    from keepleft.cli.predict import classify, fill, score
    from keepleft.cli.push import push_model
    from keepleft.cli.serve import serve
    from keepleft.cli.show import show
    from keepleft.cli.threads import configure_threads
    from keepleft.cli.train import train_model

    commands: dict[str, Callable[..., int]] = {
        "demo": demo,
        "train": train_model,
        "generate": generate_text,
        "translate": translate,
        "summarize": summarize,
        "classify": classify,
        "fill": fill,
        "score": score,
        "eval": evaluate_model,
        "audit": audit_model,
        "compare": compare,
        "serve": serve,
        "show": show,
        "export": export,
        "push": push_model,
        "doctor": doctor,
    }
    arguments = normalise_arguments(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser(commands, arguments)
    try:
        parsed = parser.instantiate(parser.parse_args(arguments))
        explicit_options = parser.parse_args(arguments, defaults=False)[parsed.subcommand].keys()
    except (ArgumentError, ValueError) as error:  # ValueError: an options dataclass rejects its values
        from keepleft.cli.usage_errors import explain_usage_error

        print(f"keepleft: {explain_usage_error(str(error), parser, arguments)}", file=sys.stderr)
        return 2
    command = commands[parsed.subcommand]
    values = vars(parsed[parsed.subcommand])
    try:
        configure_threads(values["threads"])
        return command(**command_arguments(command, values, explicit_options))
    except KeyboardInterrupt:
        print("keepleft: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has closed the pipe
        return 0
    except (ValueError, OSError, ImportError, MemoryError, FloatingPointError) as error:
        print(f"keepleft: {error}", file=sys.stderr)
        return 2
