"""The zoo on whatever transformers is importable, with as many workers as asked for: writes
OUT/zoo-VERSION.json and .html.

python bench/zoo.py --out out --workers 16 --budget standard PYTHONPATH=src:/path/to/another/release python
bench/zoo.py --out out
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="out")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--budget", default="standard")
    parser.add_argument("--limit", type=float, default=240.0)
    parser.add_argument("--only", nargs="*")
    given = parser.parse_args()

    import torch
    import transformers

    from keepleft.auditing.zoo import page
    from keepleft.auditing.zoo.run import run
    from keepleft.auditing.zoo.tiny_models import classes

    names = given.only or classes()
    began, rows = time.monotonic(), []
    for row in run(names, given.budget, given.limit, given.workers):
        rows.append(row)
        found = "; ".join(f"{one['kind']} {one['module']} {one['size']:.2g}" for one in row.findings)
        told = found or row.why[:110]
        print(
            f"{len(rows):4}/{len(names)} {row.name:48} {row.verdict:8} {row.seconds:6.1f} s  {told}",
            flush=True,
        )
    about = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "budget": given.budget,
        "date": time.strftime("%Y-%m-%d"),
    }
    rows.sort(key=lambda row: row.name)
    folder = Path(given.out)
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"zoo-{transformers.__version__}"
    stem.with_name(stem.name + ".json").write_text(page.as_json(rows, about), "utf-8")
    stem.with_name(stem.name + ".html").write_text(page.as_html(rows, about), "utf-8")
    print(f"{len(rows)} classes in {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
