"""Usage errors are one line that names the option, its value and what was probably meant."""

from __future__ import annotations

import pytest

from keepleft.cli import main


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "there is no command 'trian': did you mean train?"),
        (["xyzzy"], "there is no command 'xyzzy': there are demo, train, generate, "),
        (["train", "--sise", "3"], "there is no option --sise: did you mean --size?"),
        (["train", "--recipe.step", "5"], "there is no option --recipe.step: did you mean --recipe.steps?"),
        (["train", "--resum"], "there is no option --resum: did you mean --resume?"),
        (
            ["train", "--train.scr", "a"],
            "there is no option --train.scr: there are path, src, tgt, columns and tag",
        ),
        (["train", "lm"], "'lm' is not an option"),
        (["train", "--task"], "--task stands alone: it needs one value"),
        (["train", "--size", "huge"], "--size is 'huge': there are tiny, small, base"),
        (["train", "--recipe.steps", "many"], "--recipe.steps is 'many': it must be a whole number"),
        (
            ["train", "--tokenizer.joint", "perhaps"],
            "--tokenizer.joint is 'perhaps': it must be true or false",
        ),
        (["train", "--design", "big"], "--design is 'big': it must be names with values"),
        (["train", "--recipe", "4"], "--recipe is '4': it takes a YAML file"),
        (["compare", "--lengths", "x"], "--lengths is 'x': it must be a whole number"),
        (["train", "--config", "joob.yaml"], "there is no file joob.yaml: did you mean job.yaml?"),
        (["train", "--config", "no/job.yaml"], "there is no file no/job.yaml: there is no folder no"),
        (["train", "--config", "job.yaml"], "there is no option recipe.stepps: did you mean recipe.steps?"),
        (["train", "--config", "short.yaml"], "there is no option stepps: did you mean recipe.steps?"),
        (["train", "--config", "broken.yaml"], "--config is not YAML"),
    ],
)
def test_a_line_says_what_was_wrong_and_what_was_meant(arguments, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("recipe: {stepps: 5}\n")
    (tmp_path / "short.yaml").write_text("stepps: 5\n")
    (tmp_path / "broken.yaml").write_text("recipe: [\n")
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"keepleft: {expected}")
    assert err.count("\n") == 1


def test_only_options_of_the_command_are_suggested(capsys):
    assert main(["doctor", "--sise"]) == 2  # train has --size
    assert "--size" not in capsys.readouterr().err


def test_the_help_of_train_says_how_to_name_data(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    help_text = capsys.readouterr().out
    for option in ("--train.src", "--train.tgt", "--train.columns", "--train.tag", "--valid.src"):
        assert option in help_text
    assert "CLASS" not in help_text
