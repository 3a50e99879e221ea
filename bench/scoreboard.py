"""The zoo's scoreboard: audit releases of libraries, write OUT/NAME-VERSION.json and OUT/scoreboard.html.

python bench/scoreboard.py --install                      install all releases, audit them, write docs/zoo
python bench/scoreboard.py --releases transformers-5.23.0 --workers 16 --out out/zoo
python bench/scoreboard.py --page docs/zoo                write the page of the results that are there
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.metadata import version
from math import isfinite, log10
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from command_line import make_parser, parse_arguments
from report import print_table, write_json
from zoo_releases import RELEASES, SHARED_FOLDER, SHARED_PACKAGES, Release

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = Path(__file__).with_name("scoreboard.html")
TOKENS_SHAPE = (2, 13)
MODELS_FILE = "models.json"  # the tiny models that bench/confirm.py builds
PAGE_FILE = "scoreboard.html"  # not index.html: the site makes that of zoo.md
CONFIRMED_FILE = "confirmed.json"  # what it found
RESULT_FILES = "*-[0-9]*.json"
MAX_REASON = 300  # letters of why something was not checked
MIN_SIZE = 1e-7  # of the largest output: smaller moves are drawn like this one


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--releases", nargs="*", metavar="NAME-VERSION", help="default: all")
    parser.add_argument("--only", nargs="*", metavar="CLASS", help="audit just these classes of each release")
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache/zoo", help="of the installed releases")
    parser.add_argument("--install", action="store_true", help="first install what is not in that folder")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/zoo")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="only write the page of these results")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--budget", default="quick")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each class")
    parser.add_argument("--in-process", metavar="NAME-VERSION", help="audit what this process imports")
    installed = Release("transformers", version("transformers"))
    options = parse_arguments(
        parser, argv, workers=1, only=["FalconForCausalLM"], folder=Path(), releases=[installed.name]
    )
    if options.page:
        write_page(options.page)
        return
    releases = {release.name: release for release in (installed, *RELEASES)}
    options.out.mkdir(parents=True, exist_ok=True)
    if options.in_process:
        audit_release(releases[options.in_process], options)
        return
    for name in options.releases or [release.name for release in RELEASES]:
        if options.install:
            install(releases[name], options.folder)
        audit_in_child(releases[name], options)
        if releases[name] == RELEASES[0] and not options.only:
            confirm_in_child(releases[name], options)
    write_page(options.out)
    rows = [
        {"release": results["release"], **results["counts"], "seconds": results["seconds"]}
        for results in read_results(options.out)
    ]
    print_table("The zoo", rows)
    write_json(options.json, {"releases": rows})


# -- installing and importing ------------------------------------------------------------------


def install(release: Release, folder: Path) -> None:
    """Install a release and what only it needs into a folder of its own, without PyTorch.

    Older transformers need older tokenizers, so the releases cannot share an environment.
    """
    for target, packages in (
        (SHARED_FOLDER, SHARED_PACKAGES if release.models else ()),
        (release.name, (f"{release.package}=={release.version}", *release.requires)),
    ):
        if packages and not (folder / target).exists():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
            subprocess.run([*command, "--target", str(folder / target), *packages], check=True)


def audit_in_child(release: Release, options: Any) -> None:
    """Audit a release in a process that imports it; where that fails, write why."""
    command = [sys.executable, "-W", "ignore", __file__, "--in-process", release.name]
    command += ["--out", str(options.out), "--workers", str(options.workers), "--budget", options.budget]
    command += ["--limit", str(options.limit), *(["--only", *options.only] if options.only else [])]
    environment = child_environment(release, options)
    ran = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if ran.returncode:
        reason = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        write_results(options.out, release, [], options.budget, 0.0, f"it could not be imported: {reason}")


def child_environment(release: Release, options: Any) -> dict[str, str]:
    """The environment of a process that imports a release."""
    import_path = [*release.import_path(options.folder.resolve()), os.environ.get("PYTHONPATH", "")]
    settings = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(filter(None, import_path))}


def confirm_in_child(release: Release, options: Any) -> None:
    """Confirm the findings of the newest release, by a script that shares no code with the audit."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("confirm.py"))]
    command += ["--folder", str(options.out)]
    subprocess.run(command, env=child_environment(release, options), check=False)


def build_from_code(models: dict[str, str], name: str) -> tuple[Any, Any]:
    """The model that a piece of code makes, and tokens for it; the weights are random but always the same."""
    import torch

    from keepleft.auditing.zoo.randomize import randomize_weights

    torch.manual_seed(0)
    made: dict[str, Any] = {}
    exec(models[name], made)
    model = randomize_weights(made["model"], 0).eval()
    tokens = torch.randint(
        5, 60, made.get("tokens", TOKENS_SHAPE), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        model(tokens)
    return model, tokens


def code_to_show(models: dict[str, str], name: str) -> str:
    return f"import torch\n{models[name].strip()}\nmodel.eval()"


def find_library(release: Release) -> tuple[Any, list[str]]:
    """How the models of a release are built, and their names."""
    from keepleft.auditing.zoo.library import TRANSFORMERS, Library
    from keepleft.auditing.zoo.tiny_models import classes

    if not release.models:
        return TRANSFORMERS, classes()
    models = dict(release.models)
    library = Library(release.package, partial(build_from_code, models), partial(code_to_show, models))
    return library, list(models)


# -- auditing ----------------------------------------------------------------------------------


def audit_release(release: Release, options: Any) -> None:
    """Audit all models of a release that this process imports, and write the results."""
    from keepleft.auditing.zoo.run import run

    library, names = find_library(release)
    if options.only:
        names = [name for name in names if name in options.only]
    started, rows = time.monotonic(), []
    for row in run(names, options.budget, options.limit, options.workers, library=library):
        rows.append(row)
        findings = "; ".join(
            f"{finding['kind']} {finding['module']} {finding['size']:.2g}" for finding in row.findings
        )
        print(
            f"{release.name} {len(rows):4}/{len(names)} {row.name:48} {row.verdict:8} {row.seconds:6.1f} s  "
            f"{findings or row.why[:90]}",
            flush=True,
        )
    rows.sort(key=lambda row: row.name.lower())
    seconds = time.monotonic() - started
    write_results(options.out, release, [result_row(row) for row in rows], options.budget, seconds)
    if release == RELEASES[0]:
        write_models(options.out / MODELS_FILE, release, [row.name for row in rows if row.findings])


def result_row(row: Any) -> dict[str, Any]:
    """What the page shows of one class; what can be derived or is empty is left out."""
    from keepleft.auditing.report import KINDS, json_safe

    unchecked = [kind for kind in KINDS if kind not in row.checked]
    findings = [
        {name: finding[name] for name in ("kind", "reader", "source", "size", "path", "module", "message")}
        | {name: finding[name] for name in ("line", "reproduce", "also") if finding[name]}
        for finding in row.findings
    ]
    out = {
        "name": row.name,
        "verdict": row.verdict,
        "seconds": row.seconds,
        "why": row.why[:MAX_REASON],
        "unchecked": unchecked if row.checked else [],
        "left": [line[:MAX_REASON] for line in row.left] if row.findings else [],
        "findings": findings,
        "moves": moves_picture(row.report.claimed, row.report.measured) if row.findings else [],
    }
    return json_safe({name: value for name, value in out.items() if value not in ("", [], ())})


def moves_picture(claimed: Sequence[Sequence[bool]], measured: Sequence[Sequence[float]]) -> list[str]:
    """A line for each reader, a letter for each source: `.` does not move it, a to j moves it by 1e-7 to 1
    and may, A to J moves it and must not; `~` and `!` for NaN.
    """
    lines = []
    for allowed, sizes in zip(claimed, measured, strict=True):
        line = ""
        for may, size in zip(allowed, sizes, strict=True):
            if not isfinite(size):
                letter = "~" if may else "!"
            elif not size:
                letter = "." if may else " "
            else:
                level = 1 - log10(max(size, MIN_SIZE)) / log10(MIN_SIZE)
                letter = "abcdefghij"[min(9, max(0, int(10 * level)))]
                letter = letter if may else letter.upper()
            line += letter
        lines.append(line)
    return lines


def write_results(
    folder: Path, release: Release, rows: list[dict[str, Any]], budget: str, seconds: float, problem: str = ""
) -> None:
    import torch

    results = {
        "release": release.name,
        "package": release.package,
        "version": release.version,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "budget": budget,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(seconds),
        "problem": problem,
        "counts": dict(sorted(Counter(row["verdict"] for row in rows).items())),
        "rows": rows,
    }
    (folder / f"{release.name}.json").write_text(json_lines(results), "utf-8")


def json_lines(results: dict[str, Any]) -> str:
    """JSON with a line for each row, so that the differences between two runs can be read."""
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in results["rows"])
    about = {name: value for name, value in results.items() if name != "rows"}
    return f'{json.dumps(about, ensure_ascii=False)[:-1]}, "rows": [\n{rows}\n]}}\n'


def write_models(path: Path, release: Release, names: Iterable[str]) -> None:
    """The configurations of tiny models and the shapes of their inputs: all that a check needs
    which shares no code with the audit.
    """
    from keepleft.auditing.zoo.tiny_models import UnbuildableError, tiny_model

    models = []
    for name in names:
        try:
            model, inputs = tiny_model(name)
            config: Any = model.config
            models.append(
                {
                    "name": name,
                    "config class": type(config).__name__,
                    "config": json.loads(config.to_json_string(use_diff=False)),
                    "inputs": {
                        name: [str(value.dtype).removeprefix("torch."), list(value.shape)]
                        for name, value in inputs.items()
                    },
                }
            )
        except (UnbuildableError, TypeError, ValueError) as error:
            print(f"{name} is not in {path.name}: {error}", file=sys.stderr)
    path.write_text(json_lines({"release": release.name, "rows": models}), "utf-8")


# -- the page ----------------------------------------------------------------------------------


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The results in a folder, in the order of the table of releases."""
    order = [release.name for release in RELEASES]
    results = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob(RESULT_FILES))]
    return sorted(
        results, key=lambda results: order.index(results["release"]) if results["release"] in order else 0
    )


def write_page(folder: Path) -> None:
    """Write the page: the template, with all results and confirmations inside."""
    confirmed_path = folder / CONFIRMED_FILE
    confirmed = json.loads(confirmed_path.read_text("utf-8")) if confirmed_path.exists() else {}
    data = {"releases": read_results(folder), "confirmed": confirmed}
    (folder / PAGE_FILE).write_text(page_html(data), "utf-8")


def page_html(data: dict[str, Any]) -> str:
    """The page. No text of the data can end the script element that holds it: `<` is written as an escape."""
    embedded = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return TEMPLATE.read_text("utf-8").replace("{{data}}", embedded)


if __name__ == "__main__":
    main()
