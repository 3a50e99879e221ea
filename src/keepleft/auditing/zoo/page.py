"""The table of a zoo run, as an HTML page and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from html import escape

from keepleft.auditing.report import json_safe
from keepleft.auditing.zoo.run import CLEAN, LEAK, SKIPPED, ZooRow

STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 78rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% } td { overflow-wrap: anywhere }
td, th { text-align: left; vertical-align: top; padding: .35rem .6rem; border-bottom: 1px solid #8884 }
th { position: sticky; top: 0; background: Canvas }
.leak { font-weight: bold; color: #b3261e } .clean { color: #2e7d32 } .skipped { color: #80868b }
@media (prefers-color-scheme: dark) { .leak { color: #f2b8b5 } .clean { color: #81c995 } }
code { font-size: .9em } small { color: GrayText } details { margin: .1rem 0 }
@media (max-width: 44em) {
  body { margin: 1rem auto }
  table, tbody, tr, td { display: block } tr:first-child { display: none }
  tr { border: 1px solid #8884; border-radius: 4px; margin-bottom: .6rem; padding: .4rem }
  td { border: 0; padding: .1rem .3rem } summary::before { content: "not checked: " }
  summary { display: list-item }
}
"""


def as_json(rows: Sequence[ZooRow], about: dict[str, str]) -> str:
    counts = Counter(row.verdict for row in rows)
    return (
        json.dumps(
            json_safe(
                {
                    "about": about,
                    "counts": dict(sorted(counts.items())),
                    "rows": [_row_dict(row) for row in rows],
                }
            ),
            indent=1,
            ensure_ascii=False,
        )
        + "\n"
    )


def _row_dict(row: ZooRow) -> dict[str, object]:
    return {name: value for name, value in asdict(row).items() if name != "report"}


def as_html(rows: Sequence[ZooRow], about: dict[str, str], *, home: str = "") -> str:
    """Classes with leaks first, then those that were skipped, then the clean ones. `home`: a link on top."""
    counts = Counter(row.verdict for row in rows)
    order = {LEAK: 0, SKIPPED: 1, CLEAN: 2}
    about_text = ", ".join(f"{name} {value}" for name, value in about.items())
    out = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>keepleft: the zoo, {escape(about_text)}</title><style>{STYLE}</style>",
        f'<p><a href="{escape(home)}">← back to the documentation</a></p>' if home else "",
        f"<h1>The zoo</h1><p>{len(rows)} classes: {counts[CLEAN]} clean, {counts[LEAK]} with findings, "
        f"{counts[SKIPPED]} skipped. <small>{escape(about_text)}</small></p>",
        "<p>Each is a tiny model with random weights, audited in a process of its own. A finding is "
        "something that this build of the class does; whether anyone relies on the opposite is another "
        "question, so read its path.</p>",
        "<table><tr><th>class<th>verdict<th>what was found<th>not checked",
    ]
    for row in sorted(rows, key=lambda row: (order[row.verdict], row.name)):
        findings_html = "".join(_finding_html(finding) for finding in row.findings) or escape(row.why)
        unchecked_html = "".join(f"<div>{escape(line)}</div>" for line in row.left)
        out.append(
            f"<tr><td><code>{escape(row.name)}</code><br><small>{row.seconds:g} s</small>"
            f"<td class={row.verdict}>{row.verdict}<td>{findings_html}"
            f"<td><details><summary>{len(row.left)}</summary><small>{unchecked_html}</small></details>"
        )
    return "\n".join([*out, "</table></html>\n"])


def _finding_html(finding: dict[str, object]) -> str:
    return (
        f"<div><b>{escape(str(finding['kind']))}</b> {escape(str(finding['message']))}<br><small>"
        f"{escape(str(finding['path']))}</small></div>"
    )
