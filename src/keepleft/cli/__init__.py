"""The command line: one short file per command. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import sys
from collections.abc import Callable


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 fine, 1 a finding or a failed quality gate, 2 wrong use."""
    from jsonargparse import ArgumentParser

    from keepleft import __version__
    from keepleft.cli.demo import demo
    from keepleft.cli.doctor import doctor

    commands: dict[str, Callable[..., int]] = {"demo": demo, "doctor": doctor}
    parser = ArgumentParser(prog="keepleft", version=__version__,
                            description="Train, run, serve, see and audit Transformers that do not peek.")
    chosen = parser.add_subcommands(metavar="command")
    for name, command in commands.items():
        own = ArgumentParser(description=command.__doc__)
        own.add_function_arguments(command)
        chosen.add_subcommand(name, own, help=(command.__doc__ or "").splitlines()[0])
    given = parser.parse_args(arguments)
    try:
        return commands[given.subcommand](**vars(given[given.subcommand])) or 0
    except (ValueError, OSError, ImportError) as error:
        print(f"keepleft: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read our output has seen enough
        return 0


