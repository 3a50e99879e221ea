"""`keepleft train`, from plain files to a model directory, for every task; mistakes are named."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import keepleft as kl
from keepleft.cli import main
from keepleft.data.token_store import TokenStore
from keepleft.demo.phrases.corpus import split
from keepleft.disk import atomic
from keepleft.runs import job as jobs
from keepleft.runs.train import TrainingFinished, run_job

QUICK = "--size tiny --recipe.steps 4 --recipe.save-every 2 --recipe.eval-every 2 --batch.tokens 256".split()
QUICK += "--design.dim 32 --design.layers 1 --device cpu".split()
PAIRS = split("fr", test=100)[0][:300]
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.fixture
def texts(tmp_path) -> Path:
    """A folder with the same sentences as line-aligned files, as a labelled table and as compressed text."""
    (tmp_path / "a.en").write_text("".join(f"{a}\n" for a, _ in PAIRS), "utf-8")
    (tmp_path / "a.fr").write_text("".join(f"{b}\n" for _, b in PAIRS), "utf-8")
    labelled = "".join(f"{b}\t{'yes' if 'pas' in b else 'no'}\n" for _, b in PAIRS)
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + labelled, "utf-8")
    with gzip.open(tmp_path / "a.txt.gz", "wt", encoding="utf-8") as file:
        file.write("".join(f"{b}.\n\n" for _, b in PAIRS))
    return tmp_path


def data_flags(task: str, folder: Path) -> list[str]:
    if task in ("translate", "summarize"):
        return ["--train.src", str(folder / "a.en"), "--train.tgt", str(folder / "a.fr")]
    return ["--train", str(folder / ("a.tsv" if task == "classify" else "a.txt.gz"))]


def train_tiny(task: str, folder: Path, *flags: str, out: str = "run") -> Path:
    """Train a tiny model with the command, and return its run folder."""
    run = ["--task", task, *data_flags(task, folder), "--out", str(folder / out)]
    assert main(["train", *run, *QUICK, *flags]) == 0
    return folder / out


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("translate", "PegasusForConditionalGeneration"),
        ("summarize", "PegasusForConditionalGeneration"),
        ("lm", "GPT2LMHeadModel"),
        ("classify", "BertForSequenceClassification"),
        ("mlm", "BertForMaskedLM"),
        ("span", "T5ForConditionalGeneration"),
        ("denoise", "BartForConditionalGeneration"),
    ],
)
def test_every_task_ends_in_a_directory_that_transformers_reads(task, name, texts, capsys):
    import transformers

    out = train_tiny(task, texts)
    assert capsys.readouterr().out.strip() == str(out / "model")
    files = {"config.yaml", "resolved.json", "metrics.jsonl", "loss.svg"}
    assert {path.name for path in out.iterdir()} >= files | {"checkpoints", "model", "data"}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert "loss" in lines[-1]["measures"]
    assert ("perplexity" in lines[-1]["measures"]) == (task != "classify")  # labels are no text
    ours, tokenizer = kl.load(out / "model")
    theirs = getattr(transformers, name).from_pretrained(out / "model").eval()
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(out / "model")
    text = "Bonjour le monde"
    plain = tokenizer.encode(text, add_special_tokens=False).ids
    assert their_tokenizer(text, add_special_tokens=False)["input_ids"] == plain
    wrapped = {"lm": plain, "classify": [1, *plain, 2], "mlm": [1, *plain, 2]}.get(task, [*plain, 2])
    assert their_tokenizer(text)["input_ids"] == tokenizer.encode(text).ids == wrapped
    tokens = torch.tensor([wrapped])
    with torch.no_grad():
        if isinstance(ours, kl.EncoderDecoder):
            our_logits = ours(tokens, tokens)
            their_logits = theirs(input_ids=tokens, decoder_input_ids=tokens).logits
        else:
            our_logits = ours(tokens)
            their_logits = theirs(input_ids=tokens).logits
    torch.testing.assert_close(our_logits, their_logits, atol=2e-5, rtol=2e-4)
    if task == "classify":
        assert theirs.config.id2label == {0: "no", 1: "yes"}
    if task == "translate":
        assert theirs.config.decoder_start_token_id == their_tokenizer.bos_token_id


def test_a_resumed_run_ends_as_if_it_had_never_stopped(texts):
    unbroken = train_tiny("translate", texts)
    expected = kl.load(unbroken / "model")[0].state_dict()
    stopped = texts / "stopped"
    job = replace(jobs.from_yaml((unbroken / "config.yaml").read_text()), out=str(stopped))
    steps = []

    def stop() -> bool:
        steps.append(1)
        return len(steps) == 3

    events = list(run_job(job, stop=stop))
    assert isinstance(events[-1], TrainingFinished)
    assert events[-1].stopped
    assert not (stopped / "model").exists()
    assert main(["train", "--out", str(stopped), "--resume"]) == 0
    resumed = kl.load(stopped / "model")[0].state_dict()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    lines = (stopped / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 3, 4]


def test_a_run_is_not_overwritten_and_resumes_only_unchanged(texts, capsys):
    out = train_tiny("lm", texts)
    again = ["train", "--task", "lm", *data_flags("lm", texts), "--out", str(out), *QUICK]
    assert main(again) == 2
    assert "holds a run already: add --resume" in capsys.readouterr().err
    assert main([*again, "--resume", "--recipe.lr", "0.5"]) == 2
    assert "recipe.lr was 0.002 and is 0.5" in capsys.readouterr().err
    assert main([*again[:4], str(texts / "a.tsv"), *again[5:], "--resume"]) == 2
    assert "train was" in capsys.readouterr().err
    assert main(["train", "--out", str(texts / "nowhere"), "--resume"]) == 2
    assert "no run to resume" in capsys.readouterr().err


def test_two_cannot_train_in_one_folder(texts, capsys):
    run = ["--task", "lm", *data_flags("lm", texts), "--out", str(texts / "run")]
    with atomic.lock_folder(texts / "run"):
        assert main(["train", *run, *QUICK]) == 2
    assert "another process is at work" in capsys.readouterr().err
    train_tiny("lm", texts)


def test_a_config_file_gives_the_same_run(texts, capsys):
    out = train_tiny("lm", texts)
    (texts / "run.yaml").write_text((out / "config.yaml").read_text().replace("/run", "/other"))
    assert main(["train", "--config", str(texts / "run.yaml")]) == 0
    one, other = (kl.load(texts / name / "model")[0].state_dict() for name in ("run", "other"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["train", "--config", str(texts / "run.yaml"), "--recipe.steps", "9", "--print-config"])
    assert "steps: 9" in capsys.readouterr().out


def test_lora_changes_only_matrices_of_the_layers(texts):
    out = train_tiny("translate", texts)
    first = kl.load(out / "model")[0].state_dict()
    lora = ["--init-from", str(out / "model"), "--lora", "2", "--recipe.lr", "0.01"]
    train_tiny("translate", texts, *lora, out="tuned")
    tuned = kl.load(texts / "tuned" / "model")[0].state_dict()
    assert first.keys() == tuned.keys()
    changed = {name for name in first if not torch.equal(first[name], tuned[name])}
    assert changed
    assert all(name.endswith("weight") and "norm" not in name and "token" not in name for name in changed)


def test_lora_trains_the_head_of_a_classifier_too(texts):
    out = train_tiny("classify", texts)
    train_tiny("classify", texts, "--init-from", str(out / "model"), "--lora", "2", out="tuned")
    first, tuned = (kl.load(folder / "model")[0].state_dict() for folder in (out, texts / "tuned"))
    assert not torch.equal(first["head.out.weight"], tuned["head.out.weight"])
    assert torch.equal(first["token.weight"], tuned["token.weight"])


def test_columns_are_named_beside_the_file(texts):
    rows = "".join(json.dumps({"summary": b, "body": a}) + "\n" for a, b in PAIRS)
    (texts / "p.jsonl").write_text(rows, "utf-8")
    data = ["--train", str(texts / "p.jsonl"), "--train.columns", "[body, summary]"]
    assert main(["train", "--task", "summarize", *data, "--out", str(texts / "run"), *QUICK]) == 0


def test_each_record_of_a_table_ends_with_an_end_token(texts):
    (texts / "a.jsonl").write_text("".join(json.dumps({"text": b}) + "\n" for _, b in PAIRS), "utf-8")
    data = ["--train", str(texts / "a.jsonl")]
    assert main(["train", "--task", "lm", *data, "--out", str(texts / "run"), *QUICK]) == 0
    tokens = TokenStore.open(texts / "run" / "data" / "train")["text"].tokens.tolist()
    assert tokens.count(2) == len(PAIRS)


def test_a_long_document_is_split(texts):
    lines = "".join(f"{b}\n" for _, b in PAIRS)
    (texts / "lines.txt").write_text(lines, "utf-8")  # without a blank line it is one document
    data = ["--train", str(texts / "lines.txt")]
    assert main(["train", "--task", "mlm", *data, "--out", str(texts / "run"), *QUICK]) == 0
    store = TokenStore.open(texts / "run" / "data" / "train")
    assert len(store) > 5
    rows = store["text"].take(np.arange(len(store))).to_lists()
    assert {(row[0], row[-1]) for row in rows} == {(1, 2)}


def test_what_a_failed_run_left_is_not_used_by_the_next(texts):
    (texts / "run" / "data" / "valid").mkdir(parents=True)  # left by a run that was killed
    (texts / "run" / "source_tokenizer.json").write_text("{}")
    train_tiny("translate", texts)
    assert not (texts / "run" / "model" / "source_tokenizer.json").exists()
    assert not (texts / "run" / "data" / "valid").exists()


def test_two_vocabularies_tags_and_several_sources(texts):
    flags = "--tokenizer.joint false --tokenizer.kind word --batch.pack true".split()
    out = train_tiny("translate", texts, *flags)
    model, _ = kl.load(out / "model")
    assert model.design.source_vocab is not None
    assert (out / "model" / "source_tokenizer.json").exists()
    sides = {"src": str(texts / "a.en"), "tgt": str(texts / "a.fr")}
    job = jobs.TrainJob(
        task="translate",
        train=[jobs.DataConfig(**sides, tag="<2fr>"), jobs.DataConfig(**sides, tag="<2hi>")],
        size="tiny",
        out=str(texts / "tags"),
        recipe=jobs.RecipeOverrides(steps=2),
        design={"dim": 32, "layers": 1},
        device="cpu",
    )
    list(run_job(job))
    tokenizer = kl.load(texts / "tags" / "model")[1]
    assert tokenizer.token_to_id("<2hi>") is not None


ALIGNED = "--train.src a.en --train.tgt a.fr".split()
TEXT = "--task lm --train a.txt.gz".split()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train.src", "a.en", "--train.tgt", "short.fr"], "300"),
        (
            ["--train.src", "a.en"],
            "line-aligned texts need both src and tgt, as in --train.src a.en --train.tgt",
        ),
        (["--train.src", "empty", "--train.tgt", "empty"], "holds no text"),
        (["--train.src", "a.en", "--train.tgt", "latin.fr"], "latin.fr"),
        (["--train.src", "a.en", "--train.tgt", "a.rf"], "a.fr"),
        (
            ["--train", "a.tsv", "--valid", "dev.tsv", "--task", "classify"],
            "label 'maybe', which was never seen",
        ),
        ([*ALIGNED, "--design.dims", "3"], "there is no option --design.dims: did you mean --design.dim?"),
        ([*ALIGNED, "--preset", "marion"], "did you mean marian"),
        ([*TEXT, "--design.position", "nowhere"], "position"),
        ([*TEXT, "--init-from", "missing/dir"], "missing/dir"),
        ([*TEXT, "--preset", "t5"], "the task lm needs a model with decoder, and t5 has"),
        ([*ALIGNED, "--preset", "gpt2"], "needs a model with encoder and decoder"),
        ([*ALIGNED, "--preset", "small"], "no preset is called 'small'"),
        ([*TEXT, "--recipe.metric", "bleu"], "the metric 'bleu' is not measured for the task lm"),
        ([*ALIGNED, "--lora", "4"], "give a model with --init-from"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_left_half_done(flags, message, texts, capsys, monkeypatch):
    monkeypatch.chdir(texts)
    (texts / "short.fr").write_text("".join(f"{b}\n" for _, b in PAIRS[:-7]), "utf-8")
    (texts / "empty").write_text("")
    (texts / "latin.fr").write_bytes("".join(f"{b} é\n" for _, b in PAIRS).encode("cp1252"))
    (texts / "dev.tsv").write_text("text\tlabel\nJe suis\tmaybe\n", "utf-8")
    task = [] if "--task" in flags else ["--task", "translate"]
    assert main(["train", *task, *flags, "--out", "out", *QUICK]) == 2
    assert message in capsys.readouterr().err
    assert not (texts / "out" / "config.yaml").exists()
    assert not list(texts.glob("out/**/*.part"))


def test_texts_longer_than_the_model_are_refused(texts, capsys):
    out = train_tiny("lm", texts)
    run = ["--task", "lm", *data_flags("lm", texts), "--out", str(texts / "o")]
    too_long = ["--init-from", str(out / "model"), "--batch.max-length", "4096"]
    assert main(["train", *run, *QUICK, *too_long]) == 2
    assert "do not fit a model of" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_two_processes_train_what_one_does(strategy, texts):
    alone = train_tiny("translate", texts, "--batch.micro-tokens", "128")
    out = texts / strategy
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2 -m keepleft train".split()
    run = ["--task", "translate", *data_flags("translate", texts), "--out", str(out)]
    flags = ["--batch.micro-tokens", "128", "--parallel", strategy]
    result = subprocess.run(
        [sys.executable, *launch, *run, *QUICK, *flags],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    one, two = (kl.load(folder / "model")[0].state_dict() for folder in (alone, out))
    for name in one:
        # the gradient of a key bias is zero but for rounding, yet AdamW moves it as far as any other weight
        loose = "qkv.bias" in name or "kv.bias" in name
        torch.testing.assert_close(one[name], two[name], atol=1e-2 if loose else 2e-4, rtol=0.0)
    pickles = (".pt", ".pkl", ".distcp")
    assert not [path for path in out.rglob("*") if path.suffix in pickles or path.name == ".metadata"]


def test_sigterm_saves_a_checkpoint(texts):
    run = ["--task", "lm", *data_flags("lm", texts), "--out", str(texts / "run")]
    options = "--size tiny --recipe.steps 100000 --design.dim 32 --device cpu --batch.tokens 256".split()
    process = subprocess.Popen(
        [sys.executable, "-m", "keepleft", "train", *run, *options],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    metrics = texts / "run" / "metrics.jsonl"
    for _ in range(600):
        if process.poll() is not None or (metrics.exists() and metrics.stat().st_size):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "stopped, and saved" in stderr
    assert list((texts / "run" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_read_and_written(path):
    job = jobs.from_yaml(path.read_text("utf-8"), path.name)
    assert jobs.from_yaml(jobs.to_yaml(job)) == job
