"""keepleft audit: three kinds of targets, three exit codes, and no code from a model directory."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import textwrap
from xml.etree import ElementTree

import pytest
import torch

import keepleft as kl
from keepleft.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = '''
import torch
from torch import nn

class Mean(nn.Module):
    """Adds the mean of the positions so far, or of all of them."""

    def __init__(self, honest):
        super().__init__()
        self.honest = honest
        self.embed = nn.Embedding(11, 6)

    def forward(self, tokens):
        x = self.embed(tokens)
        if not self.honest:
            return x + x.mean(1, keepdim=True)
        return x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]

def honest():
    print("not a verdict")
    return Mean(True)

def peeking():
    return Mean(False), torch.zeros(2, 5, dtype=torch.long)

def encoder():
    return {"target": Mean(False), "claim": "full", "checks": ["batch"], "budget": "quick"}

def unfit():
    return nn.Linear(3, 3), torch.zeros(2, 7, 5)

def crash():
    raise KeyError("weights")

def leave():
    raise SystemExit(0)

def sized(width):
    return Mean(True)

def wish():
    return {"target": Mean(True), "budgte": "quick"}

def nothing():
    pass

ready = Mean(True)
number = 3
'''
QUICK = ("--budget", "quick", "--checks", "batch")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a module of models, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "keepleft_models.py").write_text(MODELS)
    yield tmp_path
    for name in ("keepleft_models", "keepleft_parts", "keepleft_parts.inner", "keepleft_parts.outer"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny GPT-2 that transformers can read too."""
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    design = kl.presets.gpt2.but(
        vocab=37,
        dim=12,
        heads=2,
        feedforward=kl.FeedForward(20, "gelu_tanh"),
        position=kl.LearnedPositions(40),
        decoder=kl.StackDesign(2, (kl.causal,)),
    )
    model = kl.build(design)
    model.notes |= {"bos_token_id": 0, "eos_token_id": 0}
    kl.save(model, None, folder)
    return folder


def said(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main(["audit", *map(str, arguments)])
    return code, *capsys.readouterr()


# -- verdicts ----------------------------------------------------------------------------------


def test_a_clean_model_is_0_and_what_it_prints_is_no_verdict(here, capsys):
    code, out, err = said(capsys, "keepleft_models:honest", "--budget", "quick", "--checks", "future,batch")
    assert code == 0
    assert out.startswith("clean: Mean (keepleft_models:honest) keeps to its claim, causal\n")
    assert "checked: future, batch" in out
    assert err == "not a verdict\n"


def test_a_leak_is_1_and_the_files_tell_it(here, capsys):
    code, out, err = said(
        capsys,
        "keepleft_models.py:peeking",
        "--budget",
        "quick",
        "--checks",
        "future",
        "--html",
        "out/page.html",
        "--junit",
        "out/junit.xml",
    )
    assert code == 1
    assert out.startswith("leak: ")
    assert "give --claim full" in err  # no claim was given
    assert sorted(path.name for path in (here / "out").iterdir()) == ["junit.xml", "page.html"]
    suite = ElementTree.parse(here / "out" / "junit.xml").getroot()[0]
    assert suite.find("testcase[@name='future']/failure") is not None
    assert "does not keep to its claim" in (here / "out" / "page.html").read_text("utf-8")


def test_what_cannot_be_audited_is_2_and_json_says_why(here, capsys):
    code, out, err = said(capsys, "keepleft_models:unfit", "--json", "--junit", "junit.xml")
    assert code == 2
    found = json.loads(out)
    assert found["verdict"] == "unchecked"
    assert found["ok"] is False
    assert "does not run" in found["blocked"][0]
    assert ElementTree.parse(here / "junit.xml").getroot().get("errors") == "7"
    assert err == ""


def test_json_is_all_that_stdout_gets(here, capsys):
    code, out, _ = said(capsys, "keepleft_models:honest", *QUICK, "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["verdict"], found["checked"]) == ("clean", ["batch"])
    assert found["about"]["keepleft"] == kl.__version__


def test_a_dict_of_arguments_is_obeyed_and_the_command_line_wins(here, capsys):
    code, out, _ = said(capsys, "keepleft_models:encoder", "--json")
    found = json.loads(out)
    assert (code, found["claim"], found["budget"], found["checked"]) == (0, "full", "quick", ["batch"])
    code, out, err = said(
        capsys, "keepleft_models:encoder", "--claim", "causal", "--checks", "future", "--json"
    )
    assert (code, json.loads(out)["claim"]) == (1, "causal")
    assert err == ""  # a claim was given


def test_an_audit_that_breaks_off_is_never_taken_for_a_leak(here, capsys, monkeypatch):
    def broken(**_):
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(kl, "audit", broken)
    code, out, err = said(capsys, "keepleft_models:ready")
    assert (code, out) == (2, "")
    assert "the audit of keepleft_models:ready broke off: RuntimeError: a bug of ours" in err


def test_a_reader_who_has_seen_enough_does_not_change_the_exit_code(here):
    run = f"{sys.executable} -m keepleft audit keepleft_models:unfit"
    ran = subprocess.run(
        ["bash", "-c", f"{run} | true; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ran.stdout, ran.stderr) == ("2\n", "")


def test_files_are_there_whole_or_not_at_all(here, capsys, monkeypatch):
    from keepleft.disk import atomic

    (here / "page.html").write_text("the last one")
    monkeypatch.setattr(
        atomic, "sync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    code, out, err = said(capsys, "keepleft_models:ready", *QUICK, "--html", "page.html")
    assert code == 2
    assert out.startswith("clean: ")  # the verdict is printed all the same
    assert "page.html could not be written" in err
    assert (here / "page.html").read_text() == "the last one"
    assert not list(here.glob("*.part"))


# -- the user's own code -----------------------------------------------------------------------


def test_a_file_in_a_package_may_import_its_neighbours(here, capsys):
    package = here / "below" / "keepleft_parts"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text(MODELS)
    (package / "outer.py").write_text("from .inner import Mean\n\ndef ours():\n    return Mean(True)\n")
    code, out, _ = said(capsys, "below/keepleft_parts/outer.py:ours", *QUICK)
    assert code == 0, out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "say which model: a directory, FILE.py:FUNCTION"),
        (("a", "b"), "a and b were given: one model at a time"),
        (("keepleft_models:honets",), "keepleft_models has no 'honets': did you mean honest?"),
        (("keepleft_models.py:xyzzy",), "keepleft_models.py has no 'xyzzy': name a function"),
        (("nothing_here:build",), "there is no module 'nothing_here': install it"),
        (("nothing_here.py:build",), "there is no file nothing_here.py"),
        (
            ("keepleft_models:crash",),
            "keepleft_models:crash could not build the model: KeyError: 'weights' (",
        ),
        (("keepleft_models:leave",), "keepleft_models:leave could not build the model: SystemExit: 0 ("),
        (("keepleft_models:sized",), "keepleft_models:sized needs width: name a function without arguments"),
        (("keepleft_models:number",), "keepleft_models:number is int '3': name a function"),
        (("keepleft_models:nothing",), "keepleft_models:nothing returns nothing, which is no model"),
        (
            ("keepleft_models:wish",),
            "keepleft_models:wish returns 'budgte', which is no argument of keepleft.audit",
        ),
        (("broken.py:build",), "broken.py could not be imported: SyntaxError: "),
        (("keepleft_models:ready", "--claim", "cuasal"), "--claim is 'cuasal': no mask is called 'cuasal'"),
        (
            ("keepleft_models:ready", "--checks", "futur"),
            "there is no check 'futur': there are future, padding",
        ),
        (
            ("keepleft_models:ready", "--budget", "fast"),
            "--budget is 'fast': there are quick, standard, full",
        ),
        (("keepleft_models:ready", "--limit", "0"), "--limit is 0: it must be more than 0"),
        (("keepleft_models:ready", "--html", "."), ". is a folder: name a file in it"),
        (
            ("keepleft_models:ready", "--arch", "GPT2Model"),
            "--arch GPT2Model names a class of transformers: it goes with",
        ),
        (("keepleft_models:ready", "--with", "transformers"), "--with transformers is for model directories"),
        (("./nowhere",), "there is no model directory ./nowhere"),
        (("--hf-config", "nope.json"), "there is no file nope.json"),
        (("--zoo", "timm"), "--zoo is 'timm': there is transformers"),
    ],
)
def test_wrong_use_is_2_and_told_in_one_line(arguments, told, here, capsys):
    (here / "broken.py").write_text("def build(:\n")
    code, out, err = said(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"keepleft: {told}")
    assert err.count("\n") == 1


# -- directories and configurations ------------------------------------------------------------


def test_a_directory_of_ours(directory, capsys):
    code, out, _ = said(capsys, directory, *QUICK)
    assert code == 0
    assert out.startswith(f"clean: Decoder ({directory}) keeps to its claim, causal\n")


def test_what_an_encoder_of_ours_is_built_with_is_its_claim(tmp_path, capsys):
    design = kl.presets.bert.but(
        vocab=37,
        dim=12,
        heads=2,
        feedforward=kl.FeedForward(20, "gelu"),
        position=kl.LearnedPositions(40),
        encoder=kl.StackDesign(1, (kl.full,), final_norm=False),
    )
    kl.save(kl.build(design), None, tmp_path / "bert")
    code, out, _ = said(capsys, tmp_path / "bert", *QUICK)
    assert code == 0, out
    assert "keeps to its claim, full" in out


def test_the_class_of_transformers_from_the_same_directory(directory, capsys):
    pytest.importorskip("transformers")
    code, out, _ = said(capsys, directory, "--with", "transformers", *QUICK, "--json")
    found = json.loads(out)
    assert (code, found["subject"]) == (0, f"GPT2LMHeadModel ({directory})")
    assert "transformers" in found["about"]


@pytest.mark.parametrize("arch", ["AutoModelForCausalLM", "GPT2Model", None])
def test_random_weights_of_a_configuration(arch, directory, capsys):
    pytest.importorskip("transformers")
    code, out, _ = said(
        capsys, "--hf-config", directory / "config.json", *(["--arch", arch] if arch else []), *QUICK
    )
    assert code == 0
    assert out.startswith(f"clean: {'GPT2Model' if arch == 'GPT2Model' else 'GPT2LMHeadModel'} (")


@pytest.mark.parametrize(
    ("change", "arguments", "told"),
    [
        ({}, ("--arch", "LlamaForCausalLM"), "is for gpt2, and LlamaForCausalLM takes llama"),
        (
            {},
            ("--arch", "GPT2LMHeadModl"),
            "has no model class 'GPT2LMHeadModl': did you mean GPT2LMHeadModel",
        ),
        ({}, ("--arch", "GPT2Tokenizer"), "has no model class 'GPT2Tokenizer'"),
        ({"architectures": None}, (), "names no class ('architectures' is None): give one, as in --arch"),
        ({"model_type": "gtp2"}, (), "'model_type' is 'gtp2', which transformers "),
        (
            {"attn_implementation": "someone/kernel"},
            (),
            "'attn_implementation' is 'someone/kernel', code that would be fetched",
        ),
        ({"attn_implementation": {"": "someone/kernel"}}, (), "code that would be fetched"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_told_in_one_line(
    change, arguments, told, directory, tmp_path, capsys
):
    pytest.importorskip("transformers")
    config = json.loads((directory / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = said(capsys, "--hf-config", tmp_path, *arguments)
    assert (code, out) == (2, "")
    assert told in err.splitlines()[-1]


def test_a_model_directory_never_runs_code(directory, tmp_path, capsys):
    """Neither pickled weights are loaded nor a module that the configuration names."""
    pytest.importorskip("transformers")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = json.loads((directory / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({}, tmp_path / "pytorch_model.bin")
    code, _, err = said(capsys, tmp_path, "--with", "transformers")
    assert code == 2
    assert "pickled weights can run code" in err
    assert said(capsys, tmp_path)[0] == 2
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    ways = (
        (tmp_path, "--with", "transformers"),
        (tmp_path, "--with", "transformers", "--arch", "AutoModelForCausalLM"),
        ("--hf-config", tmp_path, "--arch", "AutoModelForCausalLM"),
    )
    for arguments in ways:
        assert said(capsys, *arguments, *QUICK)[0] == 0
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "evil"}))
    for arguments in ((tmp_path,), *ways[1:]):
        assert said(capsys, *arguments)[0] == 2
    assert not (tmp_path / "ran").exists()


def test_help_teaches_with_examples(capsys):
    assert main(["audit", "--help"]) == 0
    out = capsys.readouterr().out
    assert "  keepleft audit my/model.py:build\n" in out
    assert "whose code runs the model: keepleft or transformers" in out
    assert "Exit codes: 0 clean, 1 leak, 2 it could not be audited." in out


# -- the zoo -----------------------------------------------------------------------------------


def test_without_transformers_the_zoo_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, out, err = said(capsys, "--zoo", "transformers", "FalconForCausalLM")
    assert (code, out) == (2, "")
    assert err == "keepleft: auditing classes of transformers needs transformers: pip install transformers\n"


def test_a_class_that_is_named_gets_a_report_with_code_that_shows_its_leak():
    pytest.importorskip("transformers")
    names = ["FalconForCausalLM", "PI0ForConditionalGeneration"]
    ran = subprocess.run(
        [sys.executable, "-m", "keepleft", "audit", "--zoo", "transformers", *names, "--budget", "quick"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    leak, unchecked = ran.stdout.split("\n\nunchecked: ")
    assert re.match(r"leak: FalconForCausalLM \(transformers [\d.]+, random weights\) does not keep to", leak)
    assert "\n1. future in transformer.h.0.self_attention: position 0 reads position " in leak
    assert re.search(r"\n   line: modeling_falcon\.py:\d+, in matmul\(\)\n", leak)
    assert unchecked.startswith("there is no verdict on PI0ForConditionalGeneration\nnot checked: ")
    shown = leak.split("   to see it:\n")[1].split("\n\n")[0]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(textwrap.dedent(shown), {})
    assert float(printed.getvalue()) > 0.1


def test_a_run_over_the_whole_zoo_is_a_table(monkeypatch, capsys):
    pytest.importorskip("transformers")
    from keepleft.auditing.zoo import run, tiny_models

    rows = [run.ZooRow("FalconForCausalLM", run.LEAK), run.ZooRow("GPT2LMHeadModel", run.SKIPPED, "why")]
    monkeypatch.setattr(tiny_models, "classes", lambda: [row.name for row in rows])
    monkeypatch.setattr(run, "run", lambda names, budget: rows)
    code, out, _ = said(capsys, "--zoo", "transformers")
    assert (code, out) == (1, "leak     FalconForCausalLM\nskipped  GPT2LMHeadModel why\n")
