"""The zoo on Ray: the same verdicts as in this process."""

from __future__ import annotations

import json
import sys

import pytest

from cluster.processes import WAIT_SECONDS, start_keepleft
from keepleft.cli import main

NAMES = ("GPT2LMHeadModel", "FalconForCausalLM", "LlamaForCausalLM")


@pytest.mark.slow
def test_workers_give_the_verdicts_of_one_process():
    pytest.importorskip("transformers")
    pytest.importorskip("ray", reason="needs ray: pip install 'keepleft[ray]'")
    zoo = ("audit", "--zoo", "transformers", *NAMES, "--budget", "quick", "--json")
    reports = []
    for more in ((), ("--workers", "2")):
        out, error = start_keepleft(*zoo, *more).communicate(timeout=WAIT_SECONDS)
        reports.append([(row["name"], row["verdict"]) for row in json.loads(out)["rows"]])
        assert "Traceback" not in error
    assert reports[0] == reports[1]
    assert dict(reports[0])["FalconForCausalLM"] == "leak"


def test_workers_are_for_the_zoo(capsys):
    assert main(["audit", "my/model.py:build", "--workers", "2"]) == 2
    assert "--workers and --address are for --zoo" in capsys.readouterr()[1]
    pytest.importorskip("transformers")
    assert main(["audit", "--zoo", "transformers", NAMES[0], "--workers", "0"]) == 2
    assert "--workers is 0" in capsys.readouterr()[1]


def test_without_ray_the_remedy_is_named(monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["audit", "--zoo", "transformers", NAMES[0], "--workers", "1"]) == 2
    assert "pip install 'keepleft[ray]'" in capsys.readouterr()[1]
