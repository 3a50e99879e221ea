"""`keepleft train`, from plain files to a model directory, for every task; what is wrong is said, and nothing is lost."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
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

QUICK = [
    "--size",
    "tiny",
    "--recipe.steps",
    "4",
    "--recipe.save_every",
    "2",
    "--recipe.eval_every",
    "2",
    "--design.dim",
    "32",
    "--design.layers",
    "1",
    "--device",
    "cpu",
    "--batch.tokens",
    "256",
]
PAIRS = split("fr", test=100)[0][:300]


@pytest.fixture
def texts(tmp_path) -> Path:
    (tmp_path / "a.en").write_text("".join(f"{a}\n" for a, _ in PAIRS), "utf-8")
    (tmp_path / "a.fr").write_text("".join(f"{b}\n" for _, b in PAIRS), "utf-8")
    labelled = "".join(f"{b}\t{'yes' if 'pas' in b else 'no'}\n" for _, b in PAIRS)
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + labelled, "utf-8")
    with gzip.open(tmp_path / "a.txt.gz", "wt", encoding="utf-8") as file:
        file.write("".join(f"{b}.\n\n" for _, b in PAIRS))
    return tmp_path


def given(task: str, folder: Path) -> list[str]:
    if task in ("translate", "summarize"):
        return ["--train.src", str(folder / "a.en"), "--train.tgt", str(folder / "a.fr")]
    return ["--train", str(folder / ("a.tsv" if task == "classify" else "a.txt.gz"))]


def trained(task: str, folder: Path, *more: str) -> Path:
    out = folder / "run"
    assert main(["train", "--task", task, *given(task, folder), "--out", str(out), *QUICK, *more]) == 0
    return out


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

    out = trained(task, texts)
    assert capsys.readouterr().out.strip() == str(out / "model")
    there = {path.name for path in out.iterdir()}
    assert there >= {
        "config.yaml",
        "resolved.json",
        "metrics.jsonl",
        "checkpoints",
        "model",
        "data",
        "loss.svg",
    }
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert "loss" in lines[-1]["measures"]
    ours, tokenizer = kl.load(out / "model")
    theirs = getattr(transformers, name).from_pretrained(out / "model").eval()
    words = transformers.AutoTokenizer.from_pretrained(out / "model")
    plain = tokenizer.encode("Bonjour le monde", add_special_tokens=False).ids
    assert words("Bonjour le monde", add_special_tokens=False)["input_ids"] == plain
    around = {"lm": plain, "classify": [1, *plain, 2], "mlm": [1, *plain, 2]}.get(task, [*plain, 2])
    assert words("Bonjour le monde")["input_ids"] == tokenizer.encode("Bonjour le monde").ids == around
    tokens = torch.tensor([around])
    with torch.no_grad():
        if isinstance(ours, kl.EncoderDecoder):
            mine, other = ours(tokens, tokens), theirs(input_ids=tokens, decoder_input_ids=tokens).logits
        else:
            mine, other = ours(tokens), theirs(input_ids=tokens).logits
    torch.testing.assert_close(mine, other, atol=2e-5, rtol=2e-4)
    if task == "classify":
        assert theirs.config.id2label == {0: "no", 1: "yes"}
    if task == "translate":
        assert theirs.config.decoder_start_token_id == words.bos_token_id


def test_a_run_goes_on_as_if_it_had_never_stopped(texts):
    whole = trained("translate", texts)
    state = kl.load(whole / "model")[0].state_dict()
    other = texts / "stopped"
    job = jobs.from_yaml((whole / "config.yaml").read_text())
    job = jobs.TrainJob(
        **{**{name: getattr(job, name) for name in job.__dataclass_fields__}, "out": str(other)}
    )
    steps = []

    def stop() -> bool:
        steps.append(1)
        return len(steps) == 3

    events = list(run_job(job, stop=stop))
    assert isinstance(events[-1], TrainingFinished)
    assert events[-1].stopped
    assert not (other / "model").exists()
    assert main(["train", "--out", str(other), "--resume"]) == 0
    again = kl.load(other / "model")[0].state_dict()
    assert all(torch.equal(state[name], again[name]) for name in state)
    lines = [json.loads(line)["step"] for line in (other / "metrics.jsonl").read_text().splitlines()]
    assert lines == [2, 3, 4]


def test_a_run_is_not_overwritten_and_goes_on_only_as_it_was(texts, capsys):
    out = trained("lm", texts)
    again = ["train", "--task", "lm", *given("lm", texts), "--out", str(out), *QUICK]
    assert main(again) == 2
    assert "holds a run already: add --resume" in capsys.readouterr().err
    assert main([*again, "--resume", "--recipe.lr", "0.5"]) == 2
    assert "recipe.lr was 0.002 and is 0.5" in capsys.readouterr().err
    assert main([*again[:4], str(texts / "a.tsv"), *again[5:], "--resume"]) == 2
    assert "train was" in capsys.readouterr().err
    assert main(["train", "--out", str(texts / "nowhere"), "--resume"]) == 2
    assert "no run to go on with" in capsys.readouterr().err


def test_two_cannot_train_in_one_folder(texts, capsys):
    with atomic.lock_folder(texts / "run"):
        assert main(["train", "--task", "lm", *given("lm", texts), "--out", str(texts / "run"), *QUICK]) == 2
    assert "another process is at work" in capsys.readouterr().err
    trained("lm", texts)


def test_a_config_file_says_the_same(texts, capsys):
    out = trained("lm", texts)
    (texts / "run.yaml").write_text((out / "config.yaml").read_text().replace("/run", "/other"))
    assert main(["train", "--config", str(texts / "run.yaml")]) == 0
    one, other = (kl.load(texts / name / "model")[0].state_dict() for name in ("run", "other"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["train", "--config", str(texts / "run.yaml"), "--recipe.steps", "9", "--print_config"])
    assert "steps: 9" in capsys.readouterr().out


def test_fine_tuning_with_low_rank_matrices(texts):
    out = trained("translate", texts)
    first = kl.load(out / "model")[0].state_dict()
    assert (
        main(
            [
                "train",
                "--task",
                "translate",
                *given("translate", texts),
                "--out",
                str(texts / "tuned"),
                *QUICK,
                "--init-from",
                str(out / "model"),
                "--lora",
                "2",
                "--recipe.lr",
                "0.01",
            ]
        )
        == 0
    )
    tuned = kl.load(texts / "tuned" / "model")[0].state_dict()
    assert first.keys() == tuned.keys()
    changed = {name for name in first if not torch.equal(first[name], tuned[name])}
    assert changed
    assert all(name.endswith("weight") and "norm" not in name and "token" not in name for name in changed)


def test_a_classifier_is_tuned_with_low_rank_matrices_and_its_head(texts):
    out = trained("classify", texts)
    assert (
        main(
            [
                "train",
                "--task",
                "classify",
                *given("classify", texts),
                "--out",
                str(texts / "tuned"),
                *QUICK,
                "--init-from",
                str(out / "model"),
                "--lora",
                "2",
            ]
        )
        == 0
    )
    first, tuned = (kl.load(folder / "model")[0].state_dict() for folder in (out, texts / "tuned"))
    assert not torch.equal(first["head.out.weight"], tuned["head.out.weight"])
    assert torch.equal(first["token.weight"], tuned["token.weight"])


def test_columns_are_named_beside_the_file(texts):
    rows = "".join(json.dumps({"summary": b, "body": a}) + "\n" for a, b in PAIRS)
    (texts / "p.jsonl").write_text(rows, "utf-8")
    assert (
        main(
            [
                "train",
                "--task",
                "summarize",
                "--train",
                str(texts / "p.jsonl"),
                "--train.columns",
                "[body, summary]",
                "--out",
                str(texts / "run"),
                *QUICK,
            ]
        )
        == 0
    )


def test_records_of_a_table_do_not_run_into_one_another(texts):
    (texts / "a.jsonl").write_text("".join(json.dumps({"text": b}) + "\n" for _, b in PAIRS), "utf-8")
    assert (
        main(
            ["train", "--task", "lm", "--train", str(texts / "a.jsonl"), "--out", str(texts / "run"), *QUICK]
        )
        == 0
    )
    tokens = TokenStore.open(texts / "run" / "data" / "train")["text"].tokens.tolist()
    assert tokens.count(2) == len(PAIRS)


def test_a_long_document_becomes_many_texts(texts):
    (texts / "lines.txt").write_text(
        "".join(f"{b}\n" for _, b in PAIRS), "utf-8"
    )  # no blank line: one document
    assert (
        main(
            [
                "train",
                "--task",
                "mlm",
                "--train",
                str(texts / "lines.txt"),
                "--out",
                str(texts / "run"),
                *QUICK,
            ]
        )
        == 0
    )
    store = TokenStore.open(texts / "run" / "data" / "train")
    assert len(store) > 5
    assert {(row[0], row[-1]) for row in store["text"].take(np.arange(len(store))).to_lists()} == {(1, 2)}


def test_what_a_failed_run_left_is_not_used_by_the_next(texts):
    (texts / "run" / "data" / "valid").mkdir(parents=True)  # by one that was killed
    (texts / "run" / "source_tokenizer.json").write_text("{}")
    trained("translate", texts)
    assert not (texts / "run" / "model" / "source_tokenizer.json").exists()
    assert not (texts / "run" / "data" / "valid").exists()


def test_two_vocabularies_tags_and_several_sources(texts):
    out = trained(
        "translate", texts, "--tokenizer.joint", "false", "--tokenizer.kind", "word", "--batch.pack", "true"
    )
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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--train.src", "a.en", "--train.tgt", "short.fr"], "300"),
        (["--train.src", "a.en"], "line-aligned texts need both src and tgt"),
        (["--train.src", "empty", "--train.tgt", "empty"], "holds no text"),
        (["--train.src", "a.en", "--train.tgt", "latin.fr"], "latin.fr"),
        (["--train.src", "a.en", "--train.tgt", "a.rf"], "a.fr"),
        (
            ["--train", "a.tsv", "--valid", "dev.tsv", "--task", "classify"],
            "label 'maybe', which was never seen",
        ),
        (["--train.src", "a.en", "--train.tgt", "a.fr", "--design.dims", "3"], "a design has no dims"),
        (["--train.src", "a.en", "--train.tgt", "a.fr", "--preset", "marion"], "did you mean marian"),
        (["--task", "lm", "--train", "a.txt.gz", "--design.position", "nowhere"], "position"),
        (["--task", "lm", "--train", "a.txt.gz", "--init-from", "missing/dir"], "missing/dir"),
        (
            ["--task", "lm", "--train", "a.txt.gz", "--preset", "t5"],
            "the task lm needs a model with decoder, and t5 has",
        ),
        (
            ["--train.src", "a.en", "--train.tgt", "a.fr", "--preset", "gpt2"],
            "needs a model with encoder and decoder",
        ),
        (["--train.src", "a.en", "--train.tgt", "a.fr", "--preset", "small"], "no preset is called 'small'"),
        (
            ["--task", "lm", "--train", "a.txt.gz", "--recipe.metric", "bleu"],
            "the metric 'bleu' is not measured for the task lm",
        ),
        (["--train.src", "a.en", "--train.tgt", "a.fr", "--lora", "4"], "give a model with --init-from"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_left_half_done(wrong, said, texts, capsys, monkeypatch):
    monkeypatch.chdir(texts)
    (texts / "short.fr").write_text("".join(f"{b}\n" for _, b in PAIRS[:-7]), "utf-8")
    (texts / "empty").write_text("")
    (texts / "latin.fr").write_bytes("".join(f"{b} é\n" for _, b in PAIRS).encode("cp1252"))
    (texts / "dev.tsv").write_text("text\tlabel\nJe suis\tmaybe\n", "utf-8")
    arguments = [
        "train",
        *([] if "--task" in wrong else ["--task", "translate"]),
        *wrong,
        "--out",
        "out",
        *QUICK,
    ]
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
    assert not (texts / "out" / "config.yaml").exists()
    assert not list(texts.glob("out/**/*.part"))


def test_a_text_longer_than_the_model_is_said(texts, capsys):
    out = trained("lm", texts)
    assert (
        main(
            [
                "train",
                "--task",
                "lm",
                *given("lm", texts),
                "--out",
                str(texts / "o"),
                *QUICK,
                "--init-from",
                str(out / "model"),
                "--batch.max_length",
                "4096",
            ]
        )
        == 2
    )
    assert "do not fit a model of" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_two_processes_train_what_one_does(way, texts):
    whole = trained("translate", texts, "--batch.micro_tokens", "128")
    out = texts / way
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "keepleft",
        "train",
        "--task",
        "translate",
        *given("translate", texts),
        "--out",
        str(out),
        *QUICK,
        "--batch.micro_tokens",
        "128",
        "--parallel",
        way,
    ]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    one, two = (kl.load(folder / "model")[0].state_dict() for folder in (whole, out))
    for name in one:
        # AdamW moves a bias of keys, whose gradient is zero but for rounding, about as far as any other weight
        loose = "qkv.bias" in name or "kv.bias" in name
        torch.testing.assert_close(one[name], two[name], atol=1e-2 if loose else 2e-4, rtol=0.0)
    assert not [
        path
        for path in out.rglob("*")
        if path.suffix in (".pt", ".pkl", ".distcp") or path.name == ".metadata"
    ]


def test_ctrl_c_and_sigterm_save(texts):
    command = [
        sys.executable,
        "-m",
        "keepleft",
        "train",
        "--task",
        "lm",
        *given("lm", texts),
        "--out",
        str(texts / "run"),
        "--size",
        "tiny",
        "--recipe.steps",
        "100000",
        "--design.dim",
        "32",
        "--device",
        "cpu",
        "--batch.tokens",
        "256",
    ]
    process = subprocess.Popen(
        command,
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
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopped, and saved" in err
    assert list((texts / "run" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_recipe_can_be_read_and_written(path):
    job = jobs.from_yaml(path.read_text("utf-8"), path.name)
    assert jobs.from_yaml(jobs.to_yaml(job)) == job
