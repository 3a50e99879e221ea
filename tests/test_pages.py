"""What README and CONTRIBUTING say is true: their code runs, their files are there, their family works."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import keepleft as kl
from keepleft.disk.safetensors import ShardedDirectory
from keepleft.models import presets
from keepleft.weights.rules import export_tensors, load_tensors

ROOT = Path(__file__).parent.parent
README, CONTRIBUTING = ((ROOT / name).read_text("utf-8") for name in ("README.md", "CONTRIBUTING.md"))


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.M | re.S)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder in which every keepleft command of the README has run, in its order."""
    folder = tmp_path_factory.mktemp("readme")
    for command in commands():
        if command.startswith("keepleft "):
            if command == "keepleft compare":
                command += " --lengths 16 --steps 20"  # the whole takes a minute or two
            ran = subprocess.run([sys.executable, "-m", *shlex.split(command)], cwd=folder, capture_output=True, text=True,
                                 timeout=300, check=False)
            assert ran.returncode == 0, ran.stderr
    return folder


def commands() -> list[str]:
    return [line.removeprefix("$ ").partition("  #")[0].strip() for block in blocks(README, "console")
            for line in block.splitlines() if line.startswith("$")]


@pytest.mark.parametrize("page", ["generation", "audit"])
def test_the_python_block_of_a_page_runs(page):
    code = "\n".join(blocks((ROOT / "docs" / f"{page}.md").read_text("utf-8"), "python"))
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_every_python_block_of_the_readme_runs_and_prints_what_it_says(place):
    tmp_path = place
    code = "\n".join(blocks(README, "python"))
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True,
                         timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    for said in re.findall(r"^print\(.*?\)\s+#\s+(\S.*)$", code, re.M):
        if "■" not in said:
            assert said in ran.stdout, f"the README says {said!r}"
    assert (tmp_path / "mask.svg").exists()


def test_every_command_of_the_readme_is_there():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert commands()
    for command in commands():
        tool, target, *_ = command.split()
        assert tool == "keepleft" or re.search(rf"^{target}:", makefile, re.M), command


def reading_order() -> list[Path]:
    return [ROOT / path for path in re.findall(r"^\d\. \[`(.+?)`\]\(\1\)", README, re.M)]


def test_seven_files_are_named_and_none_needs_a_later_one():
    files = reading_order()
    assert len(files) == 7
    modules = ["keepleft." + ".".join(file.relative_to(ROOT / "src" / "keepleft").with_suffix("").parts) for file in files]
    for n, file in enumerate(files):
        tree = ast.parse(file.read_text("utf-8"))
        assert ast.get_docstring(tree), f"{file} does not say what it is for"
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not imported & set(modules[n + 1:]), f"{file} needs a file that comes later"


def test_every_preset_of_the_readme_exists_and_none_is_left_out():
    table = README[README.index("| | presets |"):README.index("## Weights from elsewhere")]
    names = set(re.findall(r"`([a-z0-9_]+)`", table))
    endings = {name for name in names if name.startswith("_")}
    named = (names - endings) | {base + ending for base in ("t5_v1_1", "mt5") for ending in endings}
    assert named == set(presets.ALL)


def test_the_family_that_contributing_adds_computes_what_the_original_computes(tmp_path, monkeypatch):
    space = dict(vars(presets))
    exec(blocks(CONTRIBUTING, "python preset")[0], space)
    monkeypatch.setattr(presets, "opt", space["opt"], raising=False)
    exec(blocks(CONTRIBUTING, "python family")[0], space)
    family = space["FAMILY"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import OPTConfig, OPTForCausalLM

        numbers = dict(vocab_size=53, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, ffn_dim=44,
                       max_position_embeddings=37, word_embed_proj_dim=24)
        peer = OPTForCausalLM(OPTConfig(**numbers)).double().eval()
        peer.save_pretrained(tmp_path)
    source = ShardedDirectory(tmp_path)
    design = family.config_to_design(json.loads((tmp_path / "config.json").read_text()), source.names())
    model = kl.build(design, dtype=torch.float64).eval()
    load_tensors(family.rules(design), source, model.state_dict(), prefix=family.prefix)
    tokens = torch.randint(53, (2, 11))
    with torch.no_grad():
        assert (model(tokens) - peer(tokens).logits).abs().max() < 1e-9
    theirs = dict(export_tensors(family.rules(design), model.state_dict(), prefix=family.prefix))
    assert all(torch.equal(theirs[name], peer.state_dict()[name]) for name in theirs)
    assert family.config_to_design(family.design_to_config(design)) == design
    assert kl.count_parameters(space["opt"]) == 125_239_296  # the published size of its smallest


def test_the_rooms_of_contributing_are_the_rooms():
    said = set(re.findall(r"^  ([a-z]+)/ ", CONTRIBUTING, re.M))
    there = {path.name for path in (ROOT / "src" / "keepleft").iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert said == there


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_within_the_repository_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / page).read_text("utf-8")):
        assert (ROOT / target).exists(), f"{page} links to {target}"
