"""The model card: complete, valid for the hub, made again unless it was edited, and true."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

import keepleft as kl
from keepleft.cli import main
from keepleft.demo.phrases.corpus import split
from keepleft.runs import model_card
from keepleft.runs.audit_verdict import AuditVerdict
from keepleft.runs.job import DataConfig, RecipeOverrides, TrainJob
from keepleft.runs.model_card import find_languages, is_generated, make_card, read_metadata, write_card
from keepleft.runs.train import run_job

pytestmark = pytest.mark.usefixtures("one_thread")
PAIRS = split("fr", test=100)[0][:300]
SECTIONS = ["Use", "Data", "Training", "Results", "Audit", "Licence"]
JOB = TrainJob(
    task="translate",
    train=DataConfig(src="private/a.en", tgt="private/a.fr"),
    out="runs/mine",
    size="tiny",
    device="cpu",
    design={"dim": 32, "layers": 1},
    recipe=RecipeOverrides(steps=2),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A working directory with data and the run runs/mine."""
    folder = tmp_path_factory.mktemp("card")
    (folder / "private").mkdir()
    (folder / "private" / "a.en").write_text("".join(f"{english}\n" for english, _ in PAIRS), "utf-8")
    (folder / "private" / "a.fr").write_text("".join(f"{french}\n" for _, french in PAIRS), "utf-8")
    (folder / "text.txt").write_text("".join(f"{french}.\n\n" for _, french in PAIRS), "utf-8")
    labelled = "".join(f"{french}\t{'yes' if 'pas' in french else 'no'}\n" for _, french in PAIRS)
    (folder / "labels.tsv").write_text("text\tlabel\n" + labelled, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        list(run_job(replace(JOB, audit=False)))
    return folder


@pytest.fixture
def model(trained, tmp_path, monkeypatch) -> Path:
    """A copy of the model directory, in the working directory."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Path("runs/mine/model")


def test_a_trained_model_has_a_card_with_every_section(model):
    card = (model / "README.md").read_text("utf-8")
    assert re.findall(r"^## (.*)$", card, re.M) == SECTIONS
    parameters = sum(p.numel() for p in kl.load(model)[0].parameters())
    assert f"An encoder-decoder of {parameters:,} parameters that translates texts" in card
    assert "- training: a.en, a.fr: 294 records" in card
    assert "- validation: held out of a.en, a.fr: 6 records" in card
    assert "| steps | 2 |" in card
    assert "private" not in card  # no folders of this machine
    long_texts = [text for pair in PAIRS for text in pair if len(text.split()) > 3]
    assert not any(text in card for text in long_texts)  # nor a text of the data
    assert is_generated(model)


def test_the_metadata_are_what_the_hub_reads(model):
    from huggingface_hub import ModelCard
    from huggingface_hub.repocard_data import model_index_to_eval_results

    card = make_card(model, repo="me/en-fr", license="mit")
    metadata = read_metadata(card)
    assert metadata["language"] == ["en", "fr"]
    assert metadata["license"] == "mit"
    assert metadata["pipeline_tag"] == "translation"
    assert metadata["library_name"] == "transformers"
    assert metadata["tags"] == ["keepleft", "translate"]
    assert metadata["metrics"] == ["perplexity"]
    name, results = model_index_to_eval_results(metadata["model-index"])
    assert name == "en-fr"
    assert [(result.task_type, result.metric_type) for result in results] == [("translation", "perplexity")]
    theirs = ModelCard(card)
    assert theirs.data.license == "mit"
    assert theirs.data.to_dict()["metrics"] == ["perplexity"]
    assert theirs.text.strip().startswith("# me/en-fr\n")


def test_a_card_that_was_edited_is_left_alone_and_a_generated_one_is_made_again(model):
    card = make_card(model, license="mit")
    assert write_card(model, card)
    assert (model / "README.md").read_text("utf-8") == card
    assert read_metadata(make_card(model))["license"] == "mit"  # what was said once is kept
    edited = card.replace("# mine", "# My model")
    (model / "README.md").write_text(edited, "utf-8")
    assert not is_generated(model)
    assert not write_card(model, card)
    assert main(["train", "--out", "runs/mine", "--resume"]) == 0  # it is finished: writes the model again
    assert (model / "README.md").read_text("utf-8") == edited


@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        (None, "The model was not audited."),
        (
            AuditVerdict("clean", "causal", ["future"], []),
            "These weights were audited with `keepleft audit`. It is",
        ),
        (AuditVerdict("leak", "causal", ["future"], []), "**It leaks**"),
        (AuditVerdict("unchecked", "causal", ["future"], ["cache"]), "Checked: future. Not checked: cache."),
    ],
)
def test_the_audit_is_reported_as_it_was(verdict, sentence, model):
    assert sentence in make_card(model, verdict=verdict)


def test_the_card_has_the_audit_from_before_training(model):
    AuditVerdict("clean", "causal", ["future", "cache"], []).write(model.parent)
    card = make_card(model)
    assert "Before training, the model was audited" in card
    assert "Checked: future, cache." in card


def test_a_model_without_a_run_and_a_run_without_its_data_have_cards_too(model, tmp_path):
    shutil.rmtree("runs/mine/data")
    assert "- training: a.en, a.fr\n" in make_card(model)
    shutil.copytree(model, tmp_path / "alone")
    (tmp_path / "alone" / "README.md").unlink()
    card = make_card(tmp_path / "alone")
    assert re.findall(r"^## (.*)$", card, re.M) == ["Use", "Audit", "Licence"]
    assert read_metadata(card) == {"library_name": "transformers", "tags": ["keepleft"]}


@pytest.mark.parametrize(
    ("train", "languages"),
    [
        ("a.tsv", ()),
        (DataConfig(path="a.tsv"), ()),
        (DataConfig(src="x/train.de.gz", tgt="x/train.en.gz"), ("de", "en")),
        ([DataConfig(path="a.tsv", tag="<2fr>"), DataConfig(path="b.tsv", tag="<2hi>")], ("fr", "hi")),
        (DataConfig(src="a.src", tgt="a.xx", tag="<to_french>"), ()),
    ],
)
def test_languages_are_those_that_files_and_tags_name(train, languages):
    assert find_languages(replace(JOB, train=train)) == languages


def test_a_model_from_the_hub_is_named_and_a_path_is_not():
    assert model_card._base_model(replace(JOB, init_from="some/model@0123abc")) == "some/model"
    assert model_card._base_model(replace(JOB, init_from="/home/me/secret/model")) is None
    assert model_card._base_model(JOB) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "data", "tag"),
    [
        ("translate", None, "translation"),
        ("summarize", None, "summarization"),
        ("lm", "text.txt", "text-generation"),
        ("classify", "labels.tsv", "text-classification"),
        ("mlm", "text.txt", "fill-mask"),
        ("span", "text.txt", None),
        ("denoise", "text.txt", None),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_examples_of_a_card_run(task, data, tag, model, capsys):
    job = replace(JOB, task=task, train=data or JOB.train, out=f"runs/{task}", audit=False)
    list(run_job(job))
    card = Path(f"runs/{task}/model/README.md").read_text("utf-8")
    assert read_metadata(card).get("pipeline_tag") == tag
    blocks = re.findall(r"^```python\n(.*?)^```$", card, re.M | re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, {})
    (command,) = re.findall(r"^\$ keepleft (.*)$", card, re.M)
    assert main(shlex.split(command)) == 0, capsys.readouterr().err


def test_a_design_that_no_published_family_has_is_for_keepleft_alone(tmp_path):
    design = kl.presets.small(kl.presets.gpt2).but(norm=kl.RMSNorm())
    kl.save(kl.build(design, generator=torch.Generator().manual_seed(0)), None, tmp_path / "odd")
    assert json.loads((tmp_path / "odd" / "config.json").read_text())["model_type"] == "keepleft"
    assert yaml.safe_load(make_card(tmp_path / "odd").split("---\n")[1])["library_name"] == "keepleft"
