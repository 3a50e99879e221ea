"""Usage errors are one line that names the option, its value and what was probably meant."""

from __future__ import annotations

import pytest

from keepleft.cli import main
from keepleft.cli.command_table import COMMANDS, find_command
from keepleft.cli.parser import normalise_arguments

MODEL_WORDS = "(a folder, a GGUF file, an installed model or a name on the Hugging Face hub)"
CASES = {
    "unknown commands": [
        (["trian"], "there is no command 'trian': did you mean train?"),
        (["version"], "there is no command 'version': keepleft --version prints the version"),
        (["xyzzy"], "there is no command 'xyzzy': there are demo, compare, translate, "),
        (["--task", "lm"], "--task stands before a command: say what to do first, as in keepleft demo"),
    ],
    "missing arguments": [
        (
            ["export"],
            f"export needs MODEL {MODEL_WORDS}, for example: keepleft export runs/lm/model --to gguf",
        ),
        (
            ["eval"],
            f"eval needs MODEL {MODEL_WORDS}, for example: keepleft eval runs/translate/model test.tsv",
        ),
        (["eval", "model"], "eval needs DATA, for example: keepleft eval runs/translate/model test.tsv"),
        (["push"], f"push needs MODEL {MODEL_WORDS}, for example: keepleft push runs/translate/model OWNER/"),
        (["push", "x"], "push needs REPO, for example: keepleft push runs/translate/model OWNER/NAME"),
        (["completion"], "completion needs SHELL (bash, zsh or fish), for example: keepleft completion bash"),
        (["audit"], "say which model: a directory, FILE.py:FUNCTION, "),
        (["show", "model"], "say where the page goes: keepleft show MODEL TEXT --html page.html"),
        (
            ["export", "model"],
            "say what to write and where: keepleft export MODEL --to gguf --out model.gguf",
        ),
        (["train"], "say what to do and from which data: keepleft train --task translate "),
    ],
    "arguments too many": [
        (["serve", "a", "b c"], "'b c' is too much: serve takes one model, and options"),
        (["doctor", "x"], "'x' is not an option, and doctor takes options only"),
        (["train", "lm"], "'lm' is not an option: did you mean --task lm?"),
        (["doctor", "--json=3"], "--json takes no value, and got '3': leave it out"),
    ],
    "unknown options": [
        (["train", "--sise", "3"], "there is no option --sise: did you mean --size?"),
        (["train", "--recipe.step", "5"], "there is no option --recipe.step: did you mean --recipe.steps?"),
        (["train", "--steps", "5"], "there is no option --steps: did you mean --recipe.steps?"),
        (["train", "--resum"], "there is no option --resum: did you mean --resume?"),
        (["train", "--train.scr", "a"], "there is no option --train.scr: did you mean --train.src?"),
        (
            ["train", "--train.xyz", "a"],
            "there is no option --train.xyz: there are path, src, tgt, columns, tag",
        ),
        (["train", "-t", "lm"], "there is no option -t: options are spelled out, as in --task"),
        (["serve", "m", "--limits.bdy", "3"], "there is no option --limits.bdy: did you mean --limits.body?"),
        (["doctor", "--help-al"], "there is no option --help-al: did you mean --help-all?"),
        (["doctor", "--hlep"], "there is no option --hlep: did you mean --help?"),
        (["translate", "--version"], "translate has no option --version: keepleft --version prints the ver"),
        (["doctor", "--xyzzy"], "there is no option --xyzzy: keepleft doctor --help lists them"),
    ],
    "options of other commands": [
        (
            ["translate", "m", "--size", "tiny"],
            "translate has no option --size: it is an option of keepleft train",
        ),
        (
            ["serve", "m", "--max-new-tokens", "5"],
            "serve has no option --max-new-tokens: it is an option of ",
        ),
        (["train", "--html", "x"], "train has no option --html: it is an option of keepleft audit or show"),
    ],
    "missing values": [
        (["train", "--task"], "--task stands alone: it needs classify, denoise, lm, "),
        (["train", "--train"], "--train stands alone: it needs a file"),
        (["compare", "--lengths"], "--lengths stands alone: it needs whole numbers, separated by spaces"),
        (["export", "m", "--to"], "--to stands alone: it needs ctranslate2, onnx, hf, int8 or gguf"),
    ],
    "wrong types": [
        (["train", "--recipe.steps", "many"], "--recipe.steps is 'many': it must be a whole number"),
        (
            ["train", "--recipe.betas", "3"],
            "--recipe.betas is '3': it must be two numbers, as in '[0.9, 0.98]'",
        ),
        (
            ["train", "--tokenizer.joint", "perhaps"],
            "--tokenizer.joint is 'perhaps': it must be true or false",
        ),
        (["train", "--design", "big"], "--design is 'big': it must be names with values, as in '{dim: 256}'"),
        (["train", "--design.dim", "big"], "--design.dim is 'big': it must be a whole number"),
        (["train", "--design.kv-heads", "2.5"], "--design.kv-heads is 2.5: it must be a whole number"),
        (["train", "--recipe", "4"], "--recipe is '4': it takes a YAML file"),
        (
            ["train", "--train.columns", "text"],
            "--train.columns is 'text': it must be names or numbers, as in ",
        ),
        (["compare", "--lengths", "x"], "--lengths is 'x': it must be whole numbers"),
        (["serve", "m", "--port", "x"], "--port is 'x': it must be a whole number"),
        (["generate", "--temperature", "x", "hi"], "--temperature is 'x': it must be a number above 0"),
        (["generate", "--seed", "1.5", "hi"], "--seed is '1.5': it must be a whole number, or several as in"),
        (
            ["generate", "--suppress-tokens", "a", "hi"],
            "--suppress-tokens is 'a': it must be whole numbers, as in",
        ),
        (["generate", "--do-sample=maybe", "hi"], "--do-sample is 'maybe': it must be true or false"),
    ],
    "wrong choices": [
        (["train", "--size", "huge"], "--size is 'huge': there are tiny, small, base"),
        (["train", "--task", "translat"], "--task is 'translat': did you mean translate?"),
        (["serve", "m", "--dtype", "int9"], "--dtype is 'int9': did you mean int8?"),
        (["completion", "csh"], "SHELL is 'csh': did you mean zsh?"),
        (["completion", "cmd"], "SHELL is 'cmd': there are bash, zsh, fish"),
    ],
    "values out of range": [
        (["generate", "--temperature", "0", "hi"], "--temperature is 0.0: it must be a number above 0"),
        (["generate", "--num_beams", "0", "hi"], "--num-beams is 0: it must be a whole number, at least 1"),
        (["serve", "m", "--limits.body", "0"], "--limits.body is 0: it must be above 0"),
        (["serve", "m", "--max-num-seqs", "0"], "--max-num-seqs is 0: it must be a whole number, at least 1"),
        (["demo", "--steps", "-1"], "--steps is -1: it must be a whole number, at least 0"),
        (["compare", "--steps", "0"], "--steps is 0: it must be a whole number of at least 1"),
        (
            ["classify", "m", "hi", "--batch-size", "0"],
            "--batch-size is 0: it must be a whole number, at least 1",
        ),
        (["eval", "m", "d", "--limit", "0"], "--limit is 0: it must be a whole number, at least 1"),
        (["fill", "m", "hi", "--count", "0"], "--count is 0: it must be a whole number, at least 1"),
        (["doctor", "--threads", "0"], "--threads is 0: give at least one, or leave it out"),
        (
            ["train", "--task", "lm", "--train", "a.txt", "--recipe.lr", "-1"],
            "--recipe.lr is -1.0: it must be a number above 0",
        ),
    ],
    "files and models": [
        (
            ["translate", "runs/ml/model", "hi"],
            "there is no model directory runs/ml/model: did you mean runs/lm/",
        ),
        (
            ["translate", "runs/lm/modle", "hi"],
            "there is no model directory runs/lm/modle: did you mean runs/lm/model?",
        ),
        (
            ["translate", "data/xyz/abc", "hi"],
            "there is no model directory data/xyz/abc: give a folder such as runs/lm/model",
        ),
        (
            ["train", "--task", "lm", "--train", "b.csv"],
            "there is no file b.csv: check its name, or the folder",
        ),
        (
            ["export", "m.gguf", "--to", "hf", "--out", "m"],
            "there is no file m.gguf: check its name, or the ",
        ),
        (
            ["audit", "no_file.py:build"],
            "there is no file no_file.py: check its name, or the folder that you",
        ),
        (
            ["serve", "runs/lm/model", "--api-key-file", "k"],
            "there is no file k: check its name, or the folder",
        ),
        (["translate", "./nowhere", "hi"], "there is no model directory ./nowhere: give a folder such as "),
        (["serve", "runs/lm/model", "--api-key-file", "a.tx"], "there is no file a.tx: did you mean a.txt?"),
        (
            ["train", "--task", "lm", "--train", "a.txt", "--preset", "xyzzy"],
            "no preset is called 'xyzzy': there are",
        ),
        (
            ["generate", "--json-schema", "{", "hi"],
            "--json-schema is '{': it must be JSON; Expecting property",
        ),
        (
            ["generate", "--json-schema", "a.txt", "hi"],
            "--json-schema is 'a.txt': it must be JSON; for a file, give ",
        ),
    ],
    "config files": [
        (["train", "--config", "joob.yaml"], "there is no file joob.yaml: did you mean job.yaml?"),
        (["train", "--config", "no/job.yaml"], "there is no file no/job.yaml: there is no folder no; check"),
        (["train", "--config", "job.yaml"], "there is no option recipe.stepps: did you mean recipe.steps?"),
        (["train", "--config", "short.yaml"], "there is no option stepps: did you mean recipe.steps?"),
        (["train", "--config", "data.yaml"], "there is no option train.scr: did you mean train.src?"),
        (["train", "--config", "rate.yaml"], "--recipe.lr is 'fast': it must be a number"),
        (["train", "--config", "broken.yaml"], "--config is not YAML"),
        (["train", "--config", "list.yaml"], "--config holds '- 1': it must name options with values"),
    ],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("recipe: {stepps: 5}\n")
    (tmp_path / "short.yaml").write_text("stepps: 5\n")
    (tmp_path / "data.yaml").write_text("train: {scr: a.txt}\n")
    (tmp_path / "rate.yaml").write_text("recipe: {lr: fast}\n")
    (tmp_path / "broken.yaml").write_text("recipe: [\n")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "a.txt").write_text("a text\n")
    (tmp_path / "runs" / "lm" / "model").mkdir(parents=True)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(*case, id=f"{kind}: {' '.join(case[0])}")
        for kind, cases in CASES.items()
        for case in cases
    ],
)
def test_a_line_says_what_was_wrong_and_what_was_meant(arguments, expected, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"keepleft: {expected}")
    assert err.count("\n") == 1


def test_only_options_of_the_command_are_suggested(capsys):
    assert main(["doctor", "--sise"]) == 2  # train has --size
    assert "--size" not in capsys.readouterr().err


@pytest.mark.parametrize("command", [row for row in COMMANDS if row.arguments[:1] not in ("", "[")])
def test_a_command_without_its_arguments_shows_an_example(command, capsys):
    assert main([command.name]) == 2
    error = capsys.readouterr().err
    assert f"{command.name} needs {command.arguments.split()[0]} (" in error
    assert f"for example: keepleft {command.name} " in error


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--do-sample", "A text"], ["--do-sample=true", "A text"]),
        (["A text", "--do-sample"], ["A text", "--do-sample=true"]),
        (["--do_sample", "--seed", "1"], ["--do-sample=true", "--seed", "1"]),
        (["--do-sample", "false", "A text"], ["--do-sample", "false", "A text"]),
        (["--do-sample=false"], ["--do-sample=false"]),
    ],
)
def test_a_switch_of_generation_does_not_swallow_the_text(words, expected):
    assert normalise_arguments(words, find_command("generate").load()) == expected
