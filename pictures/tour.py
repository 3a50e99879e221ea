"""The notebook docs/tour.ipynb: run it, keep what its cells print, and write it as a page of the docs.

    python pictures/tour.py            run the notebook and save its outputs in it
    python pictures/tour.py --check    run it and compare the outputs; nothing is written

Cells tagged "varies" (training, and what depends on its last digits) run, and their outputs are not compared.
A cell tagged "page" is left out where the explorer's page is not built.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from draw import both_versions
from keepleft.disk import atomic

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "docs" / "tour.ipynb"
PAGE = ROOT / "src" / "keepleft" / "serving" / "explorer" / "page" / "index.html"

WIDGET = "application/vnd.jupyter.widget-view+json"
KINDS = ("image/svg+xml", "text/plain")

Cell = dict[str, Any]


def read_notebook() -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(NOTEBOOK.read_text("utf-8"))
    return notebook


def run_notebook(notebook: Mapping[str, Any]) -> Iterator[tuple[Cell, list[dict[str, Any]]]]:
    """Each code cell with its outputs, as a kernel would send them, run in a temporary folder.

    Raises RuntimeError for a cell that fails.
    """
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    torch.set_num_threads(1)  # for so small a model a second one would only wait
    shell = InteractiveShell.instance()
    results = list[Mapping[str, str]]()  # of the current cell: its value, in the forms to show it in
    shell.displayhook.write_output_prompt = lambda: None
    shell.displayhook.write_format_data = lambda forms, _: results.append(forms)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for cell in notebook["cells"]:
            if cell["cell_type"] != "code" or ("page" in tags(cell) and not PAGE.exists()):
                continue
            results.clear()
            with capture_output() as captured:
                result = shell.run_cell("".join(cell["source"]), store_history=True)
            if not result.success:
                raise RuntimeError(f"{cell['id']} of {NOTEBOOK.name} failed: {result.error_in_exec}")
            yield cell, _outputs(captured.stdout, results, shell.execution_count - 1)


def tags(cell: Cell) -> list[str]:
    return cell["metadata"].get("tags", [])  # type: ignore[no-any-return]


def _outputs(printed: str, results: Sequence[Mapping[str, str]], count: int) -> list[dict[str, Any]]:
    """What a cell printed and displayed; of a widget, which no saved notebook can show, nothing is kept."""
    out: list[dict[str, Any]] = []
    if printed:
        out.append({"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)})
    for forms in results:
        if WIDGET in forms:
            continue
        data = {kind: forms[kind].splitlines(keepends=True) for kind in KINDS if kind in forms}
        result = {"execution_count": count, "metadata": {}, "output_type": "execute_result"}
        out.append({"data": data, **result})
    return out


def save_outputs() -> None:
    notebook = read_notebook()
    outputs = {cell["id"]: cell_outputs for cell, cell_outputs in run_notebook(notebook)}
    for count, cell in enumerate((cell for cell in notebook["cells"] if cell["cell_type"] == "code"), 1):
        cell["outputs"] = outputs.get(cell["id"], [])
        cell["execution_count"] = count
    atomic.write_text(NOTEBOOK, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def check_outputs() -> int:
    """Run the notebook; the exit code is 1 if a cell printed something else than what is saved."""
    stale = [
        cell["id"]
        for cell, outputs in run_notebook(read_notebook())
        if "varies" not in tags(cell) and outputs != cell["outputs"]
    ]
    for name in stale:
        print(f"{name} of {NOTEBOOK.name} does not give the outputs that are saved: python pictures/tour.py")
    return 1 if stale else 0


# -- the page ----------------------------------------------------------------------------------


def draw_tour() -> dict[str, str]:
    """The page tour.md, and its pictures for light and dark pages, from the outputs in the notebook."""
    pictures: dict[str, str] = {}
    parts = [
        "<!-- written by pictures/make.py from tour.ipynb: change that -->",
        "!!! note\n\n    This page is a notebook: [download it](tour.ipynb) and run it yourself.",
    ]
    for cell in read_notebook()["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if svg := "".join(output.get("data", {}).get("image/svg+xml", [])):
                name = f"tour-{len(pictures) // 2 + 1}"
                title = ElementTree.fromstring(svg).findtext("{http://www.w3.org/2000/svg}title")
                pictures |= both_versions(name, svg, f"What this cell of the notebook draws: {title}.")
                parts.append(
                    "\n".join(
                        f"![A drawing of {title}](pictures/{name}-{version}.svg#gh-{version}-mode-only)"
                        for version in ("light", "dark")
                    )
                )
            else:
                lines = output.get("text") or output["data"]["text/plain"]
                parts.append(f"``` {{ .text .output }}\n{''.join(lines).rstrip()}\n```")
    heading = next(n for n, part in enumerate(parts) if part.startswith("# "))
    title, _, rest = parts.pop(heading).partition("\n")
    parts = [title, *parts[:heading], rest.strip(), *parts[heading:]]
    return {**pictures, "../tour.md": "\n\n".join(parts) + "\n"}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run docs/tour.ipynb.")
    parser.add_argument("--check", action="store_true", help="compare with the saved outputs; write nothing")
    if parser.parse_args().check:
        return check_outputs()
    save_outputs()
    return 0


if __name__ == "__main__":
    sys.exit(main())
