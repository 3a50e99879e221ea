"""keepleft audit"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from keepleft import __version__
from keepleft.cli import audit_targets
from keepleft.cli.audit_hints import explain_files
from keepleft.cli.progress import AuditBar, Bar

if TYPE_CHECKING:
    from keepleft.attention.masks import Mask
    from keepleft.auditing.progress import AuditProgress
    from keepleft.auditing.report import AuditReport
    from keepleft.auditing.zoo.run import ZooRow

EXIT_CODES = {"clean": 0, "leak": 1, "unchecked": 2}


def audit_model(
    inputs: list[str],
    hf_config: str | None = None,
    arch: str | None = None,
    with_: Literal["keepleft", "transformers"] = "keepleft",
    claim: str | None = None,
    checks: str | None = None,
    budget: Literal["quick", "standard", "full"] = "standard",
    layers: int | None = None,
    limit: float | None = 60.0,
    revision: str | None = None,
    html: str | None = None,
    junit: str | None = None,
    sarif: str | None = None,
    badge: str | None = None,
    watch: bool = False,
    zoo: str | None = None,
    workers: int | None = None,
    address: str | None = None,
    explain: bool = False,
    json: bool = False,
    explicit_options: frozenset[str] = frozenset(),
) -> int:
    """Check that a model attends only where it may: to no later token, padding or other text.

    Exit codes: 0 clean, 1 leak, 2 it could not be audited.

    Code is named as FILE.py:NAME or MODULE:NAME, a function without arguments that returns a torch model:

      keepleft audit my/model.py:build
      keepleft audit package.module:build --claim "causal & window(3)"

    The function may also return (model, example), or a dict of arguments of keepleft.audit with the model
    under target:

      def build():
          model = MyModel(vocab=100)
          return model, torch.randint(0, 100, (2, 16))

    Where a model cannot be built, hints for its source files are printed without running them:

      keepleft audit --explain my/model.py

    Args:
        inputs: a folder, a GGUF file, an installed model, a name on the Hugging Face hub, or code:
            FILE.py:NAME or MODULE:NAME. With --explain, Python files and folders of them
        hf_config: a Hugging Face config.json. The model gets random weights
        arch: the class of transformers, such as AutoModelForCausalLM. If not given, the one that the
            configuration names
        with_: whose code runs the model: keepleft or transformers
        claim: the mask that the model says it has: "causal & window(3)", or full. If not given, the mask that
            one of our models was built with, and causal for any other
        checks: some of future, padding, packing, cache, batch, nan, labels, separated by commas. All if not
            given
        budget: how much to try: quick (seconds), standard (about a minute) or full
        layers: how many layers apply a mask of limited reach (window) one after another (default: counted)
        limit: seconds for one call of the model; more for a large one
        revision: the branch, tag or commit of a model on the hub; MODEL@REVISION does the same
        html: write a page with a map of which position influences which
        junit: write the report as JUnit XML, for build servers
        sarif: write findings, or hints, as SARIF, from which forges annotate lines
        badge: write the verdict as a small SVG picture, for a README
        watch: audit again whenever a file of the model changes, until Ctrl-C
        zoo: the library whose classes to audit, as tiny random models: transformers. Each class that is
            named, as in --zoo transformers FalconForCausalLM, gets a report. Without names every class is
            audited, and the result is a table
        workers: audit the classes of --zoo on this many workers, by Ray
        address: the Ray cluster of the workers: auto, HOST:PORT or ray://HOST:PORT. If not given, Ray is
            started on this machine
        explain: name suspicious lines of .py files, without running them. Hints are no verdict: the exit
            code is 0, or 2 where a file is missing or is not Python
        json: print the complete report as JSON. With --explain, one object per hint and line
    """
    values = dict(locals())
    if explain:
        other_options = explicit_options - {"inputs", "explain", "json", "sarif"}
        return explain_files(inputs, json=json, sarif=sarif, other_options=other_options)
    if zoo is not None and (sarif is not None or badge is not None or watch):
        option = "sarif" if sarif is not None else "badge" if badge is not None else "watch"
        raise ValueError(f"--{option} is for the audit of one model: leave it out with --zoo")
    if zoo is not None:
        return _zoo(zoo, inputs, budget=budget, html=html, json=json, workers=workers, address=address)
    if workers is not None or address is not None:
        raise ValueError("--workers and --address are for --zoo: one model is audited in this process")
    name = _target_name(inputs, hf_config, arch, with_)
    if badge is not None and not badge.endswith(".svg"):
        raise ValueError(f"--badge is {badge!r}: it is an SVG picture, so name a file that ends in .svg")
    if watch:
        from keepleft.cli.audit_watch import audit_on_change, command_line

        return audit_on_change(inputs, hf_config, command_line(values, explicit_options - {"watch"}))
    for file in (html, junit, sarif, badge):
        if file is not None and Path(file).is_dir():
            raise ValueError(f"{file} is a folder: name a file in it")
    for option, number in (("layers", layers), ("limit", limit)):
        if number is not None and number <= 0:
            raise ValueError(f"--{option} is {number:g}: it must be more than 0")
    overrides = {
        "claim": _parse_claim(claim),
        "checks": _split_names(checks),
        "budget": budget,
        "layers": layers,
        "limit": limit,
    }
    overrides = {
        key: value
        for key, value in overrides.items()
        if key in explicit_options and (value is not None or key == "limit")
    }
    with AuditBar() as bar, redirect_stdout(sys.stderr):  # stdout is for the verdict alone
        arguments, code = _load_target(inputs, hf_config, arch, with_, revision)
        claim_assumed = claim is None and "claim" not in arguments
        report = _run_audit(arguments | overrides, name, bar.show)
    report = report.with_model(code)
    _print_stdout(report.json() if json else report.text())
    exit_code = _write_report(report, arguments["target"], html=html, junit=junit, sarif=sarif, badge=badge)
    if claim_assumed and any(finding.kind == "future" for finding in report.findings):
        print(
            "keepleft: the claim was assumed to be causal; if the model may attend to later tokens, "
            "give --claim full",
            file=sys.stderr,
        )
    return exit_code


def _parse_claim(text: str | None) -> Mask | None:
    if text is None:
        return None
    from keepleft.attention.masks import parse_mask

    try:
        return parse_mask(text)
    except ValueError as error:
        raise ValueError(f"--claim is {text!r}: {error}") from error


def _split_names(text: str | None) -> list[str] | None:
    return None if text is None else [name for name in text.replace(",", " ").split() if name]


def _target_name(inputs: list[str], hf_config: str | None, arch: str | None, with_: str) -> str:
    """The name of the one model to audit. Raises ValueError unless exactly one is given, and consistently."""
    if len(inputs) + (hf_config is not None) != 1:
        named_targets = " and ".join(
            [*inputs, *([f"--hf-config {hf_config}"] if hf_config is not None else [])]
        )
        raise ValueError(
            f"{named_targets} were given: one model at a time"
            if named_targets
            else "say which model: a directory, FILE.py:FUNCTION, MODULE:FUNCTION, or --hf-config config.json"
        )
    if arch is not None and hf_config is None and with_ != "transformers":
        raise ValueError(
            f"--arch {arch} names a class of transformers: it goes with --hf-config, or with --with "
            "transformers"
        )
    if hf_config is not None:
        return f"{hf_config}, random weights"
    if inputs[0].endswith(".py"):
        raise ValueError(
            f"{inputs[0]} is code: say which function builds the model, as in {inputs[0]}:build, or give "
            "--explain for hints without running it"
        )
    if with_ == "transformers" and audit_targets.is_code(inputs[0]):
        raise ValueError(f"--with transformers is for model directories: {inputs[0]} is code")
    return inputs[0]


def _load_target(
    inputs: list[str], hf_config: str | None, arch: str | None, with_: str, revision: str | None
) -> tuple[dict[str, Any], str]:
    """The arguments of keepleft.audit, and code that makes the model of them. Whatever goes wrong becomes an
    error of one line.
    """
    import torch

    torch.manual_seed(0)  # the same random weights each time
    load: Callable[..., dict[str, Any]] = audit_targets.from_directory
    source: tuple[str | None, ...] = (inputs[0] if inputs else None, revision)
    if hf_config is not None:
        load, source = audit_targets.from_config, (hf_config, arch)
    elif audit_targets.is_code(inputs[0]):
        load, source = audit_targets.from_code, (inputs[0],)
    elif with_ == "transformers":
        load, source = audit_targets.from_transformers, (inputs[0], arch)
    code = (
        f"from keepleft.cli.audit_targets import {load.__name__}\n"
        "torch.manual_seed(0)\n"
        f'model = {load.__name__}({", ".join(map(repr, source))})["target"]'
    )
    if revision is not None and (hf_config is not None or ":" in inputs[0] or with_ == "transformers"):
        raise ValueError(
            f"--revision is {revision!r}, but {hf_config or inputs[0]} is not loaded from the hub: leave it "
            "out"
        )
    try:
        return load(*source), code
    except (ValueError, OSError, ImportError, MemoryError):
        raise
    except Exception as error:  # transformers may raise anything
        raise ValueError(
            f"{hf_config or inputs[0]} could not be built: {type(error).__name__}: {error}"
        ) from error


def _run_audit(
    arguments: dict[str, Any], name: str, on_progress: Callable[[AuditProgress], None]
) -> AuditReport:
    import keepleft as kl

    try:
        report = kl.audit(**{"on_progress": on_progress, **arguments})
    except (ValueError, KeyboardInterrupt):
        raise
    except BaseException as error:  # left alone, it would end with exit code 1, which means a leak
        traceback.print_exc()
        raise ValueError(f"the audit of {name} broke off: {type(error).__name__}: {error}") from error
    about = {"keepleft": kl.__version__, **report.about}
    if "transformers" in sys.modules:
        about["transformers"] = sys.modules["transformers"].__version__
    return replace(report, subject=f"{report.subject} ({name})", about=about)


def _write_report(
    report: AuditReport,
    target: Any,
    *,
    html: str | None,
    junit: str | None,
    sarif: str | None,
    badge: str | None,
) -> int:
    """Write the files, after the report is printed: one that cannot be written does not cost the verdict."""
    from keepleft.auditing.sarif import sarif as sarif_log
    from keepleft.disk import atomic

    contents = (
        (html, report.html),
        (junit, report.junit),
        (sarif, lambda: sarif_log([(report, audit_targets.locate(target))], version=__version__)),
        (badge, report.badge),
    )
    for file, content in contents:
        if file is not None:
            with atomic.explain_os_error(file):
                Path(file).parent.mkdir(parents=True, exist_ok=True)
                atomic.write_text(Path(file), content())
            if file == html:
                print(f"keepleft: the page is in {file}", file=sys.stderr)
    return EXIT_CODES[report.verdict]


def _print_stdout(text: str) -> None:
    """Print to stdout. A reader that closes the pipe early does not change the exit code."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _zoo(
    library: str,
    selected: list[str],
    *,
    budget: str,
    html: str | None,
    json: bool,
    workers: int | None,
    address: str | None,
) -> int:
    """Audit every class of a library and print a table, or the selected ones and print a report of each."""
    if library != "transformers":
        raise ValueError(f"--zoo is {library!r}: there is transformers")
    transformers = audit_targets.import_transformers()
    import torch

    from keepleft.auditing.zoo.page import as_html, as_json
    from keepleft.auditing.zoo.run import CLEAN, LEAK, run
    from keepleft.auditing.zoo.tiny_models import classes
    from keepleft.disk import atomic

    names = selected or classes()
    for name in names:
        if not hasattr(transformers, name):
            suggestions = get_close_matches(name, classes(), 1)
            raise ValueError(
                f"transformers has no {name}" + (f": did you mean {suggestions[0]}?" if suggestions else "")
            )
    if workers is not None and workers < 1:
        raise ValueError(f"--workers is {workers}: give at least 1, or leave it out")
    rows: list[ZooRow] = []
    with Bar("auditing", len(names)) as bar:
        if workers is None:
            zoo_rows = run(names, budget)
        else:
            from keepleft.cluster.zoo_workers import audit_classes

            zoo_rows = audit_classes(names, budget, workers=workers, address=address)
        for row in zoo_rows:
            rows.append(row)
            bar.update(len(rows), f"{row.name}: {row.verdict}")
    rows.sort(key=lambda row: names.index(row.name))
    about = {"transformers": transformers.__version__, "torch": str(torch.__version__), "budget": budget}
    if html is not None:
        atomic.write_text(Path(html), as_html(rows, about))
    if json:
        _print_stdout(as_json(rows, about))
    elif selected:
        _print_stdout("\n\n".join(row.text() for row in rows))
    else:
        _print_stdout("\n".join(f"{row.verdict:8} {row.name} {row.why}".rstrip() for row in rows))
    verdicts = {row.verdict for row in rows}
    return 1 if LEAK in verdicts else 0 if CLEAN in verdicts else 2
