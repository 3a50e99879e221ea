"""docs/commands.md is what the program says about itself."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from keepleft.cli.command_table import COMMANDS, find_command
from keepleft.cli.option_table import command_options
from keepleft.cli.parser import build_parser
from keepleft.cli.reference_page import reference_page

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text("utf-8") == reference_page(), (
        "write it again: python -m keepleft.cli.reference_page docs/commands.md"
    )


def test_every_command_and_option_is_there():
    page = reference_page()
    for command in COMMANDS:
        assert f"\n### keepleft {command.name}\n" in page
        for option in command_options(command):
            assert option.is_positional or f"| `{option.flag}` |" in page


def test_positional_arguments_are_named_one_by_one():
    section = reference_page().partition("### keepleft push\n")[2].partition("\n### ")[0]
    assert "\n`MODEL`: a model directory" in section
    assert "\n`REPO`: the repository, OWNER/NAME" in section
    assert section.count("MODEL REPO") == 1  # in the usage line


def test_every_key_is_there_and_no_other():
    section = reference_page().partition("## YAML keys")[2]
    keys = set()
    for title, table in re.findall(r"### (Keys .+)\n\n((?:\|.+\n)+)", section):
        names = re.findall(r"^\| `(\w+)` \|", table, re.M)
        prefixes = (
            [] if "first level" in title else re.findall(r"train|valid|design|tokenizer|batch|recipe", title)
        )
        keys |= {f"{prefix}.{name}" for prefix in prefixes for name in names} if prefixes else set(names)
    options = command_options(find_command("train"))
    assert keys == {option.key for option in options if option.is_key}


def test_the_yaml_of_the_page_is_a_config(tmp_path):
    block = re.search(r"```yaml\n(.*?)```", reference_page(), re.S)[1]
    (tmp_path / "job.yaml").write_text(block)
    parsed = build_parser(find_command("train").load()).parse_args(["--config", str(tmp_path / "job.yaml")])
    assert parsed.task == yaml.safe_load(block)["task"]
    assert parsed.recipe.steps == 2000


def test_every_row_of_a_table_has_the_columns_of_its_heading_and_no_column_is_empty():
    tables = re.findall(r"(?:^\|.*\n)+", reference_page(), re.M)
    assert len(tables) > 40
    for table in tables:
        heading, _, *rows = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()
        ]
        assert all(heading), heading
        assert all(len(row) == len(heading) for row in rows), rows
        assert all(any(column) for column in zip(*rows, strict=True)), heading
