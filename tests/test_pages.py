"""The pages are true: their code runs, their commands and files exist, their lists are complete."""

from __future__ import annotations

import ast
import builtins
import json
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import keepleft as kl
from keepleft.cli.command_table import COMMANDS
from keepleft.cli.option_table import command_options as command_options_of
from keepleft.cli.paths import installed_weights
from keepleft.disk.safetensors import ShardedDirectory
from keepleft.models import presets
from keepleft.runs.tasks import TASKS
from keepleft.weights.rules import export_tensors, load_tensors

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "keepleft"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    ROOT / "bench" / "README.md",
    *DOCS,
]
README = (ROOT / "README.md").read_text("utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
ABSENT_PATHS = {
    "src/keepleft/serving/explorer/page/",  # built, and not in git
    "weights/families/opt.py",  # the family that CONTRIBUTING adds
}


def read_doc(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text("utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.M | re.S)


def run_python(code: str, folder: Path) -> str:
    """Standard output of the code, run in a process of its own with warnings as errors."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def assert_prints_its_comments(code: str, printed: str) -> None:
    """`print(…)  # comment` prints the comment, unless that explains the drawing of a mask."""
    for comment in re.findall(r"^print\(.*?\)[ \t]+#[ \t]+(\S.*)$", code, re.M):
        if "■" not in comment:
            assert comment in printed, f"the page says that {comment!r} is printed"


# -- code and commands


# added to commands of the README that would take minutes
README_SHORTCUTS = {
    "keepleft train": " --recipe.steps 2 --no-audit --design.dim 32",
    "keepleft compare": " --lengths 16 --steps 20",
}


def readme_outputs(page: str = README) -> dict[str, str]:
    """The commands of the README, and what they print according to it."""
    outputs: dict[str, str] = {}
    for block in blocks(page, "console"):
        for line in block.splitlines(keepends=True):
            if line.startswith("$"):
                command = line.removeprefix("$ ").partition("  #")[0].strip()
                outputs[command] = ""
            else:
                outputs[command] += line
    return outputs


def available_readme() -> str:
    """The README without the blocks that need a package that is not installed."""
    block = r"^<!-- test: needs (\w+) -->\n(```.*?^```$)"
    return re.sub(block, lambda match: match[2] if find_spec(match[1]) else "", README, flags=re.M | re.S)


def assert_prints(command: str, shown: str, printed: str) -> None:
    """What a page shows is what a command prints, wrapped, with … for what is left out. How many calls an
    audit makes depends on the machine, and how long they take.
    """
    counts = re.compile(r"\d+ code paths, \d+ calls, [\d.]+ s, \d+% of it in the model")
    words = " ".join(counts.sub("", printed).split())
    for part in shown.split("…"):
        expected = " ".join(counts.sub("", part).split())
        assert expected in words, f"{command} prints {printed}"
        words = words[words.index(expected) + len(expected) :]


def readme_commands() -> list[str]:
    return list(readme_outputs())


@pytest.fixture(scope="module")
def readme_folder(tmp_path_factory) -> Path:
    """A folder in which every keepleft command of the README has run, in its order."""
    folder = tmp_path_factory.mktemp("readme")
    for command, shown in readme_outputs(available_readme()).items():
        if command.startswith("keepleft "):
            for start, shortcut in README_SHORTCUTS.items():
                command = (
                    command.replace(" --minutes 3", "") + shortcut if command.startswith(start) else command
                )
            ran = subprocess.run(
                [sys.executable, "-m", *shlex.split(command)],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert ran.returncode == shown.startswith("leak: "), ran.stderr
            assert_prints(command, shown, ran.stdout)
    return folder


def test_every_run_folder_on_a_page_or_in_a_message_is_made_by_a_command():
    """`keepleft train` makes runs/TASK, and runs/NAME where a page says --out runs/NAME."""
    recipes = [path.read_text("utf-8") for path in (ROOT / "recipes").glob("*.yaml")]
    pages = [page.read_text("utf-8") for page in PAGES]
    modules = [path.read_text("utf-8") for path in PACKAGE.rglob("*.py")]
    made = re.findall(r"^out: runs/([\w-]+)|--out runs/([\w-]+)", "\n".join(pages + recipes), re.M)
    known = {name for names in made for name in names} | set(TASKS) | {"NAME", "TASK", "new"}
    shown = re.findall(r"\bruns/([\w-]+)(?![\w.-])", "\n".join(pages + modules))
    assert sorted(set(shown) - known) == []


@pytest.mark.slow
def test_every_python_block_of_the_readme_runs_and_prints_what_it_says(readme_folder):
    for code in blocks(README, "python"):
        assert_prints_its_comments(code, run_python(code, readme_folder))
    assert (readme_folder / "mask.svg").exists()


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_every_python_block_defines_what_it_uses_and_uses_what_it_imports(path):
    for code in blocks(path.read_text("utf-8"), 'python(?: title=".+?")?'):
        nodes = list(ast.walk(ast.parse(code)))
        imported = {
            (alias.asname or alias.name).partition(".")[0]
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        defined = {
            node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        defined |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert used <= imported | defined | set(dir(builtins)), (
            f"{path.name} has a block that does not run on its own"
        )
        assert imported <= used, f"{path.name} imports what it does not use"


@pytest.mark.parametrize("page", ["attention", "audit", "generation", "index", "models", "sizing", "weights"])
def test_every_python_block_of_a_page_runs(page, tmp_path):
    """The blocks of evaluation.md, serving.md and training.md are run by the tests of their rooms."""
    code = "\n".join(blocks(read_doc(page), "python"))
    printed = run_python(code, tmp_path)
    if page in ("index", "models"):
        assert_prints_its_comments(code, printed)


def test_every_picture_and_link_of_the_readme_exists():
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README) + re.findall(
        r'(?:src|srcset)="([^"]+)"', README
    )
    assert len([target for target in targets if target.endswith(".svg")]) >= 6  # light and dark
    for target in targets:
        assert (ROOT / target).exists(), f"README.md links to {target}"


def test_every_make_target_exists():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for path in PAGES:
        for target in re.findall(r"`make ([a-z-]+)`", path.read_text("utf-8")):
            assert re.search(rf"^{target}:", makefile, re.M), f"{path.name} names make {target}"


def test_every_command_of_the_readme_exists():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert readme_commands()
    for command in readme_commands():
        match command.split():
            case ["keepleft", *_]:
                pass
            case ["make", target]:
                assert re.search(rf"^{target}:", makefile, re.M), command
            case ["pip", "install", "./translator", requirement]:
                assert (ROOT / "translator" / "pyproject.toml").exists()
                names = re.fullmatch(r"'\.\[(.+)\]'", requirement)
                assert names, command
                assert set(names[1].split(",")) <= set(extras), command
            case _:
                pytest.fail(f"nobody checks the command {command!r}")


@cache
def command_options() -> dict[str, set[str]]:
    """The option names of every command."""
    return {
        command.name: {"help", "help-all", *(option.flag[2:] for option in command_options_of(command))}
        for command in COMMANDS
    }


def _is_option(option: str, options: set[str]) -> bool:
    """`--train.src`, `--design.dim` and the like are fields of an option that takes any."""
    return option in options or option.partition(".")[0] in options & {"train", "valid", "design"}


def test_every_option_on_a_command_line_is_an_option_of_that_command():
    checked = 0
    for path in [ROOT / "README.md", ROOT / "SECURITY.md", *DOCS]:
        page = path.read_text("utf-8").replace("\\\n", " ")
        if "translator" not in installed_weights():  # what its blocks show came with it
            page = re.sub(r"<!-- test: needs translator -->\n```.*?```", "", page, flags=re.S)
        for command, arguments in re.findall(r"\bkeepleft ([a-z]+)((?: [^`\n]*)?)", page):
            if command not in command_options():
                continue
            for option in re.findall(r"(?<= )--([a-z][\w.-]*)", arguments.partition("  #")[0]):
                assert _is_option(option, command_options()[command]), (
                    f"{path.name}: keepleft {command} has no option --{option}"
                )
                checked += 1
    assert checked > 40


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", ROOT / "SECURITY.md", *DOCS],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_every_option_named_in_a_sentence_exists(path):
    options = set.union(*command_options().values())
    others = {"audit-budget", "audit-html", "limits.NAME"}  # of pytest, and a placeholder
    for option in re.findall(r"`--([a-z][\w.-]*)[^`\n]*`", path.read_text("utf-8")):
        assert option in others or _is_option(option, options), f"{path.name}: there is no option --{option}"


# -- lists that must be complete


def mapped_paths() -> dict[str, str]:
    """Path below src/keepleft → description, from the map in CONTRIBUTING; folders end with a slash."""
    tree = CONTRIBUTING[CONTRIBUTING.index("## The map") :].split("```")[1]
    paths, parents = {}, []
    for indent, name, description in re.findall(r"^( +)(\S+)(.*)$", tree, re.M):
        parents = [*parents[: len(indent) // 2 - 1], name]
        paths["".join(parents)] = description.strip()
    return paths


def test_the_map_of_contributing_lists_every_module_and_every_folder():
    modules = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    modules = {path for path in modules if not path.endswith("/__init__.py")}
    folders = {f"{parent.as_posix()}/" for path in modules for parent in Path(path).parents if parent.name}
    mapped = mapped_paths()
    assert mapped.keys() == modules | folders, (
        f"CONTRIBUTING.md, the map: add {sorted((modules | folders) - mapped.keys())}, "
        f"remove {sorted(mapped.keys() - modules - folders)}"
    )
    assert all(mapped.values()), "a line of the map says what the module is"


def first_files() -> list[Path]:
    return [ROOT / path for path in re.findall(r"^\d\. \[`(.+?)`\]\(\1\)", CONTRIBUTING, re.M)]


def test_seven_files_are_named_and_none_needs_a_later_one():
    files = first_files()
    assert len(files) == 7
    modules = ["keepleft." + ".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in files]
    for n, file in enumerate(files):
        assert file.exists(), f"CONTRIBUTING.md names {file.relative_to(ROOT)}, which does not exist"
        tree = ast.parse(file.read_text("utf-8"))
        assert ast.get_docstring(tree), f"{file} does not say what it is for"
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not imported & set(modules[n + 1 :]), f"{file} needs a file that comes later"


def test_the_start_page_and_the_navigation_list_every_page():
    names = {path.relative_to(ROOT / "docs").as_posix() for path in DOCS}
    issues = {name for name in names if name.startswith("zoo/issues/")}  # the page of the zoo lists these
    assert set(re.findall(r"\]\((zoo/issues/[\w-]+\.md)\)", read_doc("zoo"))) == issues
    pages = names - issues
    assert set(re.findall(r"\]\(([\w/-]+\.md)\)", read_doc("index"))) == pages - {"index.md"}
    navigation = tomllib.loads((ROOT / "zensical.toml").read_text("utf-8"))["project"]["nav"]
    listed = list(pages_of(navigation))
    assert sorted(listed) == sorted(pages)


def pages_of(navigation: list) -> Iterator[str]:
    """The pages of a navigation, sections unfolded."""
    for entry in navigation:
        for target in entry.values():
            yield from [target] if isinstance(target, str) else pages_of(target)


def test_the_reference_covers_every_public_name():
    page = read_doc("reference")
    modules = re.findall(r"^::: keepleft\.(\S+)$", page, re.M)
    assert len(modules) == len(set(modules))
    for module in modules:
        assert PACKAGE.joinpath(*module.split(".")).with_suffix(".py").exists(), (
            f"there is no keepleft.{module}"
        )
    homes = set(kl._NAMES.values()) | {"models.presets"}
    assert homes <= set(modules), f"docs/reference.md lacks ::: keepleft.{sorted(homes - set(modules))}"
    lists = re.findall(r"^## .+\n\n((?:`.+\n)+)", page, re.M)
    listed = [name for names in lists for name in re.findall(r"`(\w+)`", names)]
    assert sorted(listed) == kl.__all__


def test_every_preset_is_in_the_table_and_exists():
    page = read_doc("models")
    table = page[page.index("| designs | presets |") :].partition("\n\n")[0]
    names = set(re.findall(r"`([a-z0-9_]+)`", table))
    endings = {name for name in names if name.startswith("_")}
    named = (names - endings) | {base + ending for base in ("t5_v1_1", "mt5") for ending in endings}
    assert named == set(presets.ALL)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_paths_lead_somewhere(path):
    page = path.read_text("utf-8")
    for target in re.findall(r"\]\((?!http)([^)#]+)", page):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"
    for name in re.findall(r"`(?:python )?([a-z]\w*/[\w./-]*)[^`]*`", page):
        is_module = name.endswith(".py") and (PACKAGE / name.split("/")[0]).is_dir()
        is_path = is_module or name.startswith(("src/", "tests/", "bench/", "web/", "requirements/"))
        if is_path and name not in ABSENT_PATHS:
            assert (ROOT / name).exists() or (PACKAGE / name).exists(), f"{path.name} names {name}"
    for module in re.findall(r"`keepleft\.((?:[a-z]\w*\.)*[a-z]\w*)", page):
        parts = module.split(".")
        if (PACKAGE / parts[0]).is_dir():
            candidates = [PACKAGE.joinpath(*parts[:n]) for n in (len(parts), len(parts) - 1)]
            assert any(c.with_suffix(".py").exists() or c.is_dir() for c in candidates), (
                f"{path.name} names {module}"
            )


def test_anchors_lead_to_headings():
    slug = lambda heading: re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))
    for path in PAGES:
        links = re.findall(r"(?<!!)\[[^\]]*\]\((?!http)([^)#]*)#([\w-]+)\)", path.read_text("utf-8"))
        for target, anchor in links:
            page = (path.parent / target if target else path).read_text("utf-8")
            assert anchor in map(slug, re.findall(r"^#+ (.+)$", page, re.M)), f"{path.name}: #{anchor}"


# -- the family that CONTRIBUTING adds


def test_the_family_that_contributing_adds_computes_what_the_original_computes(tmp_path, monkeypatch):
    space = dict(vars(presets))
    exec(blocks(CONTRIBUTING, "python preset")[0], space)
    monkeypatch.setattr(presets, "opt", space["opt"], raising=False)
    exec(blocks(CONTRIBUTING, "python family")[0], space)
    family = space["FAMILY"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import OPTConfig, OPTForCausalLM

        config = OPTConfig(
            vocab_size=53,
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=3,
            ffn_dim=44,
            max_position_embeddings=37,
            word_embed_proj_dim=24,
        )
        peer = OPTForCausalLM(config).double().eval()
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
