"""Make every picture of the README and the docs, each for light and for dark pages, into docs/pictures/.

    python pictures/make.py            run the program, then draw (two minutes)
    python pictures/make.py --draw     draw again from what the last run saw, pictures/facts.json
    python pictures/make.py --check    draw into memory and compare with the files

The charts of the benchmark page are drawn from bench/results/, those of the tour from docs/tour.ipynb. The
picture of the explorer is taken by a browser, where the page is built (`make page`), and only by a full run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from bench_charts import draw_charts
from draw import draw_all
from explorer import NAMES, is_page_built, take_pictures
from keepleft.disk import atomic
from tour import draw_tour, save_outputs

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "pictures"
FACTS = ROOT / "pictures" / "facts.json"
MAX_BYTES = 300_000  # of one picture
TRANSLATOR = "translator"  # the model that comes with keepleft


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="run nothing: draw from facts.json")
    parser.add_argument("--check", action="store_true", help="compare with the files, and write nothing")
    parser.add_argument(
        "--model", default=None, help="a model directory; the translator of keepleft if not given"
    )
    parser.add_argument("--tag", default=None, help="the language tag that the model directory wants")
    parser.add_argument("--to", default="fr", help="the language that keepleft's own translator is asked for")
    parser.add_argument("--sentence", default="She has a black cat.", help="what is looked into")
    parser.add_argument("--phrase", default="Where is the station?", help="what the terminal translates")
    arguments = parser.parse_args()
    if not (arguments.draw or arguments.check):
        save_outputs()
        _photograph(arguments)
        atomic.write_text(FACTS, json.dumps(_collect(arguments), indent=1, ensure_ascii=False) + "\n")
    pictures = draw_pictures(json.loads(FACTS.read_text("utf-8")))
    return _compare(pictures) if arguments.check else _write(pictures)


def draw_pictures(facts: Mapping[str, Any]) -> dict[str, str]:
    """File name below docs/pictures → SVG, of every picture; and the page that the notebook becomes."""
    pictures = {**draw_all(facts), **draw_charts(ROOT / "bench" / "results"), **draw_tour()}
    if too_large := [name for name, picture in pictures.items() if len(picture.encode()) > MAX_BYTES]:
        raise ValueError(f"{', '.join(too_large)}: larger than {MAX_BYTES:,} bytes; draw less")
    return pictures


def _collect(arguments: argparse.Namespace) -> dict[str, Any]:
    from collect import collect

    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        return collect(
            Path(folder),
            model=arguments.model or TRANSLATOR,
            tag=arguments.tag or (f"<2{arguments.to}>" if arguments.model is None else None),
            to=arguments.to if arguments.model is None else None,
            sentence=arguments.sentence,
            phrase=arguments.phrase,
        )


def _photograph(arguments: argparse.Namespace) -> None:
    """The explorer's page about the sentence, as a browser shows it."""
    if not is_page_built():
        print("the explorer's page is not built (make page): its pictures stay as they are", file=sys.stderr)
        return
    from collect import show

    tag = arguments.tag or (f"<2{arguments.to}>" if arguments.model is None else None)
    with tempfile.TemporaryDirectory() as folder:
        page = show(
            Path(folder), arguments.model or TRANSLATOR, " ".join(filter(None, [tag, arguments.sentence]))
        )
        for name, picture in take_pictures(page).items():
            if len(picture) > MAX_BYTES:
                raise ValueError(f"{name}: larger than {MAX_BYTES:,} bytes; show less")
            (OUT / name).write_bytes(picture)


def _write(pictures: Mapping[str, str]) -> int:
    for path in OUT.iterdir():
        if path.name not in {*pictures, *NAMES.values()}:
            path.unlink()
    for name, picture in pictures.items():
        atomic.write_text(OUT / name, picture)
        print(f"{(OUT / name).resolve().relative_to(ROOT)}  {len(picture.encode()):,} bytes")
    return 0


def _compare(pictures: Mapping[str, str]) -> int:
    stale = [
        name
        for name, picture in pictures.items()
        if not (OUT / name).exists() or (OUT / name).read_text("utf-8") != picture
    ]
    unknown = [path.name for path in sorted(OUT.iterdir()) if path.name not in {*pictures, *NAMES.values()}]
    for name in stale:
        print(f"{name} is not what the script draws: make pictures")
    for name in unknown:
        print(f"{name} is not made by the script: remove it")
    return 1 if stale or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
