"""The examples of docs/training.md that use trained models run."""

from __future__ import annotations

import re
from pathlib import Path

from keepleft.cli import main
from keepleft.demo.phrases.corpus import split

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text("utf-8")


def test_the_examples_run_and_name_the_labels(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [french for _, french in split("fr", test=100)[0][:300]]
    Path("a.txt").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    labelled = "".join(f"{line}\t{'not' if 'pas' in line else 'so'}\n" for line in lines)
    Path("a.tsv").write_text("text\tlabel\n" + labelled, "utf-8")
    for task, file in (("lm", "a.txt"), ("classify", "a.tsv")):
        options = "--size tiny --recipe.steps 3 --design.dim 32 --design.layers 1 --device cpu".split()
        assert main(["train", "--task", task, "--train", file, *options]) == 0
    capsys.readouterr()
    exec("\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)), {})
    assert re.search(r"^not: [\d.]+%\nso: [\d.]+%\n'", capsys.readouterr().out, re.M)
