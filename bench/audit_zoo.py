"""Audit every language model of the installed transformers; write OUT/zoo-VERSION.json and .html.

python bench/audit_zoo.py --out out --workers 16 --budget standard
PYTHONPATH=src:/path/to/another/release python bench/audit_zoo.py --out out
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from command_line import make_parser, parse_arguments
from report import write_json


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--budget", default="standard")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for each class")
    parser.add_argument("--home", default="", help="an address that the page links to: zoo/ in docs/")
    parser.add_argument("--only", nargs="*", metavar="CLASS", help="audit just these classes")
    options = parse_arguments(parser, argv, workers=1, budget="quick", only=["GPT2LMHeadModel"])

    import torch
    import transformers

    from keepleft.auditing.zoo import page
    from keepleft.auditing.zoo.run import run
    from keepleft.auditing.zoo.tiny_models import classes

    names = options.only or classes()
    started, rows = time.monotonic(), []
    for row in run(names, options.budget, options.limit, options.workers):
        rows.append(row)
        findings = "; ".join(
            f"{finding['kind']} {finding['module']} {finding['size']:.2g}" for finding in row.findings
        )
        print(
            f"{len(rows):4}/{len(names)} {row.name:48} {row.verdict:8} {row.seconds:6.1f} s  "
            f"{findings or row.why[:110]}",
            flush=True,
        )
    about = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "budget": options.budget,
        "date": time.strftime("%Y-%m-%d"),
    }
    rows.sort(key=lambda row: row.name)
    options.out.mkdir(parents=True, exist_ok=True)
    stem = f"zoo-{transformers.__version__}"
    (options.out / f"{stem}.json").write_text(page.as_json(rows, about), "utf-8")
    (options.out / f"{stem}.html").write_text(page.as_html(rows, about, home=options.home), "utf-8")
    print(f"{len(rows)} classes in {time.monotonic() - started:.0f} s", file=sys.stderr)
    verdicts = [{"class": row.name, "verdict": row.verdict, "why": row.why} for row in rows]
    write_json(options.json, {"about": about, "rows": verdicts})


if __name__ == "__main__":
    main()
