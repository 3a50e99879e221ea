"""Commands that generate, predict and evaluate: input by argument, file or pipe; output as text or JSON."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import keepleft as kl
from decoding.words import byte_tokens, writer
from keepleft import svg
from keepleft.cli import main
from keepleft.data.token_text import token_pieces
from keepleft.pipelines.text_generation import TextGenerator
from keepleft.pipelines.text_tasks import DEFAULT_MAX_NEW_TOKENS

TOKENS = byte_tokens()
LETTERS = str(
    sorted(number for word, number in TOKENS.get_vocab().items() if word.isascii() and word.isalpha())
)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder")
    model = writer(TOKENS)
    kl.save(model, TOKENS, folder)
    return str(folder)


@pytest.fixture(scope="module")
def encoder_decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder_decoder")
    design = kl.presets.small(kl.presets.pegasus).but(
        vocab=TOKENS.get_vocab_size(), initial=kl.NormalInit(0.4)
    )
    model = kl.build(design, generator=torch.Generator().manual_seed(0))
    model.notes = {"decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1}
    kl.save(model, TOKENS, folder)
    return str(folder)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classes")
    design = kl.presets.small(kl.presets.bert).but(
        vocab=TOKENS.get_vocab_size(), head=kl.ClassificationHead(2)
    )
    model = kl.build(design, generator=torch.Generator().manual_seed(0))
    model.notes = {"id2label": {"0": "sad", "1": "glad"}}
    kl.save(model, TOKENS, folder)
    return str(folder)


def run(capsys, *arguments: str, stdin: str | None = None, monkeypatch=None) -> tuple[int, str, str]:
    if stdin is not None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    code = main(list(arguments))
    return code, *capsys.readouterr()


@pytest.mark.slow
def test_a_generating_command_does_not_wait_for_the_compiler(decoder):
    """Importing it takes longer than all the rest."""
    arguments = ["generate", decoder, "the sea", "--max-new-tokens", "2"]
    code = (
        f"import sys; from keepleft.cli import main; main({arguments!r}); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_line_in_is_a_line_out_in_order(decoder, capsys, monkeypatch):
    texts = ["the sea", "a", "calm, and the ship", "12"]
    code, out, _ = run(
        capsys, "generate", decoder, "--max-new-tokens", "5", stdin="\n".join(texts), monkeypatch=monkeypatch
    )
    model, tokenizer = kl.load(decoder)
    alone = [kl.generate(model, tokenizer, text, max_new_tokens=5)[0] for text in texts]
    assert code == 0
    assert out.split("\n")[:-1] == [text.replace("\n", "\\n").replace("\r", "\\r") for text in alone]


def test_a_file_in_and_a_file_out(decoder, capsys, tmp_path):
    (tmp_path / "in.txt").write_text("the sea\nthe ship\n")
    code, out, _ = run(
        capsys,
        "generate",
        decoder,
        "--input",
        str(tmp_path / "in.txt"),
        "--output",
        str(tmp_path / "out.txt"),
        "--max-new-tokens",
        "3",
    )
    assert (code, out) == (0, "")
    assert len((tmp_path / "out.txt").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("folder", "keepleft: folder is a folder: name a file in it\n"),
        (
            "no/such/out.txt",
            "keepleft: no/such/out.txt cannot be written, as there is no folder no/such: create",
        ),
    ],
)
def test_an_output_that_cannot_be_written_is_named(output, message, decoder, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    code, _, stderr = run(capsys, "generate", decoder, "the sea", "--output", output)
    assert code == 2
    assert stderr.startswith(message)


def test_json_has_scores_tokens_and_likely_ones(encoder_decoder, capsys):
    code, out, _ = run(
        capsys,
        "translate",
        encoder_decoder,
        "the sea",
        *"--json --logprobs 2 --num-beams 3 --n-best 2 --max-new-tokens 6".split(),
    )
    result = json.loads(out)
    assert code == 0
    assert result["input"] == "the sea"
    assert len(result["n_best"]) == 2
    assert len(result["logprobs"]) == len(result["tokens"])
    total = sum(part["logprob"] for part in result["logprobs"])
    assert result["score"] == pytest.approx(total / len(result["tokens"]), abs=1e-3)
    assert all(len(part["top"]) == 2 for part in result["logprobs"])


def test_several_texts_are_numbered_with_their_scores(encoder_decoder, capsys):
    code, out, _ = run(
        capsys, "translate", encoder_decoder, "the sea", "calm", "--n-best", "3", "--max-new-tokens", "4"
    )
    rows = [line.split(" ||| ") for line in out.splitlines()]
    assert code == 0
    assert [row[0] for row in rows] == ["0"] * 3 + ["1"] * 3
    assert [float(row[2]) for row in rows[:3]] == sorted((float(row[2]) for row in rows[:3]), reverse=True)


def test_alternatives_begin_differently(decoder, capsys):
    code, out, _ = run(
        capsys, "generate", decoder, "the sea", "--alternatives", "4", "--max-new-tokens", "3", "--json"
    )
    assert code == 0
    assert len({candidate["tokens"][0] for candidate in json.loads(out)["n_best"]}) == 4


@pytest.mark.parametrize("beams", ["1", "2"])
def test_alternatives_end_at_stop_strings_from_their_first_token_on(decoder, encoder_decoder, capsys, beams):
    for command, model in (("generate", decoder), ("translate", encoder_decoder)):
        n_best = lambda *extra, of=(command, model, "the sea"): json.loads(
            run(
                capsys,
                *of,
                *"--alternatives 3 --max-new-tokens 5 --num-beams".split(),
                beams,
                "--shortlist",
                LETTERS,
                "--json",
                *extra,
            )[1]
        )["n_best"]
        plain = n_best()
        assert [len(candidate["tokens"]) for candidate in plain] == [5, 5, 5]
        for n, candidate in enumerate(plain):
            ended = n_best("--stop-strings", TOKENS.decode(candidate["tokens"][:1]))[n]
            assert ended["tokens"] == candidate["tokens"][:1]
            if beams == "1":  # a string of which the first token is the beginning
                assert (
                    n_best("--stop-strings", TOKENS.decode(candidate["tokens"][:2]))[n]["tokens"]
                    == candidate["tokens"][:2]
                )


def test_alternatives_begin_with_the_prefix(decoder, encoder_decoder, capsys):
    for command, model in (("generate", decoder), ("translate", encoder_decoder)):
        code, out, _ = run(
            capsys,
            command,
            model,
            "the sea",
            *"--alternatives 3 --max-new-tokens 4 --prefix".split(),
            " calm",
            "--shortlist",
            LETTERS,
            "--json",
            "--logprobs",
            "1",
        )
        result, num_prefix_tokens = json.loads(out), len(TOKENS.encode(" calm").ids)
        assert code == 0
        assert all(
            candidate["text"].startswith(" calm") and len(candidate["tokens"]) == num_prefix_tokens + 4
            for candidate in result["n_best"]
        )
        assert result["score"] == pytest.approx(
            sum(part["logprob"] for part in result["logprobs"][num_prefix_tokens:]), abs=1e-4
        )
    _, out, _ = run(
        capsys,
        "translate",
        encoder_decoder,
        "the sea",
        "the ship",
        *"--alternatives 2 --max-new-tokens 2 --json --prefix".split(),
        '["calm","sails"]',
    )
    assert [json.loads(line)["text"][:4] for line in out.splitlines()] == ["calm", "sail"]


def test_alternatives_are_only_what_may_come(decoder, capsys):
    options = ["--alternatives", "5", "--max-new-tokens", "3", "--json"]
    result = json.loads(run(capsys, "generate", decoder, "the sea", "--shortlist", "[70,71]", *options)[1])[
        "n_best"
    ]
    assert {token for candidate in result for token in candidate["tokens"]} <= {70, 71}
    assert len(result) == 2
    code, out, _ = run(
        capsys, "generate", decoder, "the sea", *options, "--max-new-tokens", "0", "--prefix", " calm"
    )
    assert (code, json.loads(out)["text"]) == (0, " calm")


@pytest.mark.parametrize("beams", ["1", "3"])
def test_a_plot_of_the_generation(decoder, encoder_decoder, capsys, tmp_path, beams):
    for n, (command, model) in enumerate((("generate", decoder), ("translate", encoder_decoder))):
        path = tmp_path / f"{n}.svg"
        code, _, stderr = run(
            capsys,
            command,
            model,
            "the sea <&",
            "--plot",
            str(path),
            "--num-beams",
            beams,
            "--max-new-tokens",
            "5",
        )
        assert (code, str(path) in stderr) == (0, True)
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


@pytest.mark.parametrize("beams", ["1", "3"])
def test_the_plot_begins_with_the_prefix_that_the_text_has(decoder, encoder_decoder, capsys, tmp_path, beams):
    for command, model in (("generate", decoder), ("translate", encoder_decoder)):
        path = tmp_path / f"{command}.svg"
        code, out, _ = run(
            capsys,
            command,
            model,
            "calm",
            "--prefix",
            " ship sails",
            "--plot",
            str(path),
            "--json",
            "--num-beams",
            beams,
            "--max-new-tokens",
            "3",
            "--shortlist",
            LETTERS,
        )
        result = json.loads(out)
        shown = [
            "".join(text.itertext())
            for text in ElementTree.parse(path).getroot().iter("{http://www.w3.org/2000/svg}text")
        ]
        assert code == 0
        assert result["text"].startswith(" ship sails")
        if command == "translate" and beams == "1":  # a token a row, those of the prefix too
            rows = [svg.show_invisibles(word) for word in token_pieces(TOKENS, result["tokens"])]
            assert shown[-len(rows) :] == rows
        else:
            assert any(result["text"] in line for line in shown)


def test_an_alignment_has_a_pair_for_each_token(encoder_decoder, capsys):
    code, out, _ = run(
        capsys, "translate", encoder_decoder, "the sea", "--alignments", "--json", "--max-new-tokens", "5"
    )
    result = json.loads(out)
    assert code == 0
    assert [int(pair.split("-")[1]) for pair in result["alignment"].split()] == list(
        range(len(result["tokens"]))
    )


def test_a_stream_is_the_text(decoder, capsys):
    _, plain, _ = run(capsys, "generate", decoder, "the sea", "--max-new-tokens", "6")
    code, out, _ = run(capsys, "generate", decoder, "the sea", "--stream", "--max-new-tokens", "6")
    assert code == 0
    assert plain.startswith(out.rstrip("\n"))


@pytest.fixture
def endless_decoder(tmp_path, monkeypatch):
    """A model without an end token, and a short default limit."""
    model = writer(TOKENS)
    model.notes = {name: value for name, value in model.notes.items() if name != "eos_token_id"}
    kl.save(model, TOKENS, tmp_path / "endless")
    monkeypatch.setattr("keepleft.pipelines.text_tasks.DEFAULT_MAX_NEW_TOKENS", 5)
    return tmp_path / "endless"


@pytest.mark.parametrize("extra", [(), ("--stream",)])
def test_a_text_that_the_default_limit_cuts_says_how_to_get_more(endless_decoder, capsys, extra):
    code, out, stderr = run(capsys, "generate", str(endless_decoder), "the sea", *extra)
    assert (code, stderr) == (0, "stopped after 5 tokens; --max-new-tokens N allows more\n")
    with_option = run(capsys, "generate", str(endless_decoder), "the sea", "--max-new-tokens", "5", *extra)
    assert with_option == (0, out, "")  # who has set a limit knows it
    if not extra:
        stderr = run(capsys, "generate", str(endless_decoder), "the sea", "a ship")[2]
        assert "2 of 2 texts were stopped after 5 tokens; --max-new-tokens N allows more\n" in stderr


def test_the_limit_of_the_model_directory_goes_before_the_default_one(endless_decoder, capsys):
    (endless_decoder / "generation_config.json").write_text('{"max_new_tokens": 8}')
    code, out, stderr = run(capsys, "generate", str(endless_decoder), "the sea", "--json")
    assert (code, len(json.loads(out)["tokens"]), stderr) == (0, 8, "")


def test_generate_has_a_default_limit_and_its_help_says_so(capsys):
    assert DEFAULT_MAX_NEW_TOKENS == 256
    assert "It stops after 256 tokens unless --max-new-tokens" in help_text(capsys, "generate")


@pytest.mark.parametrize(
    ("arguments", "streams"),
    [
        (["the sea"], True),
        (["the sea", "a ship"], False),
        (["the sea", "--json"], False),
        (["the sea", "--n-best", "2"], False),
        (["the sea", "--num-beams", "2"], False),
        (["the sea", "--alternatives", "2"], False),
        (["the sea", "--output", "out.txt"], False),
    ],
)
def test_one_text_is_streamed_where_a_terminal_reads_it(
    arguments, streams, decoder, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    streamed = []
    original = TextGenerator.stream
    monkeypatch.setattr(
        TextGenerator,
        "stream",
        lambda self, text, *rest, **named: streamed.append(text) or original(self, text, *rest, **named),
    )
    arguments = ["generate", decoder, *arguments, "--max-new-tokens", "4"]
    code, out, stderr = run(capsys, *arguments)
    assert (code, streamed) == (0, []), stderr  # no terminal
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run(capsys, *arguments)[:2] == (0, out)
    assert bool(streamed) == streams


def test_an_option_without_effect_is_noted_once(decoder, capsys, monkeypatch):
    code, _, stderr = run(
        capsys,
        "generate",
        decoder,
        *"--top-p 0.5 --max-new-tokens 2 --batch-size 1".split(),
        stdin="a\nb\nc",
        monkeypatch=monkeypatch,
    )
    assert code == 0
    assert stderr.count("--do-sample is not set, so --top-p=0.5 changes nothing: set --do-sample, or ") == 1


@pytest.mark.parametrize("extra", [(), ("--alternatives", "2"), ("--stream",)])
def test_a_prompt_without_room_is_noted_once(decoder, capsys, extra):
    code, out, stderr = run(
        capsys, "generate", decoder, "the sea is calm, and the ship sails on", "--max-length", "3", *extra
    )
    assert (code, out) == (0, "\n")
    assert stderr.count("--max-length is 3, and a prompt has") == 1


def test_labels_with_their_probabilities(classifier, capsys):
    code, out, _ = run(capsys, "classify", classifier, "the sea", "calm", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert all(sum(row["probabilities"].values()) == pytest.approx(1.0, abs=1e-4) for row in rows)
    assert {row["label"] for row in rows} <= {"sad", "glad"}


def test_how_likely_a_text_is(decoder, encoder_decoder, capsys):
    code, out, _ = run(capsys, "score", decoder, "the sea is calm")
    model, tokenizer = kl.load(decoder)
    tokens = tokenizer.encode("the sea is calm").ids
    with torch.no_grad():
        logprobs = model(torch.tensor([[1, *tokens[:-1]]]))[0].log_softmax(-1)
    expected = float(logprobs.gather(1, torch.tensor(tokens)[:, None]).sum())
    assert code == 0
    assert float(out.split("\t")[0]) == pytest.approx(expected, abs=1e-3)
    assert run(capsys, "score", encoder_decoder, "the sea\tcalm")[0] == 0
    assert "line 1 has no tab" in run(capsys, "score", encoder_decoder, "the sea")[2]


def test_what_fits_in_a_gap(tmp_path, capsys):
    design = kl.presets.small(kl.presets.bert).but(vocab=TOKENS.get_vocab_size(), head=kl.MaskedLMHead())
    kl.save(kl.build(design, generator=torch.Generator().manual_seed(0)), TOKENS, tmp_path)
    code, out, _ = run(capsys, "fill", str(tmp_path), "the <mask> is <mask>", "--count", "3", "--json")
    gaps = json.loads(out)["gaps"]
    assert code == 0
    assert [len(gap) for gap in gaps] == [3, 3]
    assert "there is no <mask>" in run(capsys, "fill", str(tmp_path), "the sea")[2]


def test_evaluation_alone_against_a_baseline_and_as_a_quality_gate(
    encoder_decoder, classifier, decoder, capsys, tmp_path
):
    (tmp_path / "t.tsv").write_text("src\ttgt\n" + "the sea\tcalm\nthe ship\tsails on\n" * 5)
    code, out, _ = run(
        capsys, "eval", encoder_decoder, str(tmp_path / "t.tsv"), "--max-new-tokens", "4", "--json"
    )
    result = json.loads(out)
    assert (code, result["count"]) == (0, 10)
    assert {"bleu", "chrf", "ter", "exact"} <= result["measures"].keys()
    (tmp_path / "other.txt").write_text("calm\nsails on\n" * 5)
    code, out, _ = run(
        capsys,
        "eval",
        encoder_decoder,
        str(tmp_path / "t.tsv"),
        "--max-new-tokens",
        "4",
        "--baseline",
        str(tmp_path / "other.txt"),
        "--fail-under",
        "99",
    )
    assert code == 1
    assert "other.txt" in out
    code, out, _ = run(
        capsys,
        "eval",
        encoder_decoder,
        str(tmp_path / "t.tsv"),
        *"--max-new-tokens 4 --dtype int8 --baseline".split(),
        str(tmp_path / "other.txt"),
    )
    assert code == 0
    assert "float32" in out
    assert "other.txt" in out
    (tmp_path / "c.tsv").write_text("text\tlabel\nthe sea\tsad\ncalm\tglad\n")
    code, out, _ = run(capsys, "eval", classifier, str(tmp_path / "c.tsv"), "--baseline", classifier)
    assert code == 0
    assert "macro_f1" in out
    (tmp_path / "text.txt").write_text("the sea is calm, and the ship sails on\n" * 4)
    code, out, _ = run(capsys, "eval", decoder, str(tmp_path / "text.txt"))
    assert code == 0
    assert "bits_per_byte" in out


@pytest.mark.parametrize("command", ["generate", "translate", "summarize"])
def test_blank_lines_stay_blank(command, decoder, encoder_decoder, capsys, monkeypatch, tmp_path):
    model = decoder if command == "generate" else encoder_decoder
    options = ["--max-new-tokens", "4", "--batch-size", "2"]
    texts = ["the sea", "", "  ", "\t", "a ship"]
    _, expected, _ = run(capsys, command, model, "the sea", "a ship", *options)
    first, last = expected.splitlines()
    code, out, error = run(
        capsys, command, model, *options, stdin="\n".join(texts) + "\n\n", monkeypatch=monkeypatch
    )
    assert code == 0, error
    assert out.split("\n") == [first, "", "", "", last, "", ""]
    (tmp_path / "in.txt").write_text("\n".join(texts))
    code, out, _ = run(capsys, command, model, *options, "--input", str(tmp_path / "in.txt"), "--json")
    records = list(map(json.loads, out.splitlines()))
    assert [record["input"] for record in records] == texts
    assert records[1] == {"input": "", "text": "", "score": 0.0, "tokens": [], "ended": True}
    _, out, _ = run(capsys, command, model, *options, "--stream", stdin="\na ship\n", monkeypatch=monkeypatch)
    assert out == f"\n{last}\n"
    _, out, _ = run(
        capsys, command, model, *options, "--n-best", "2", stdin="\na ship\n", monkeypatch=monkeypatch
    )
    assert [line.split(" ||| ")[0] for line in out.splitlines()] == ["0", "1", "1"]
    assert run(capsys, command, model, *options, stdin="\n", monkeypatch=monkeypatch)[:2] == (0, "\n")


def test_a_blank_argument_is_a_prompt_for_a_decoder_alone(decoder, encoder_decoder, capsys):
    assert run(capsys, "translate", encoder_decoder, "", "--alignments")[1] == "\t\n"
    _, out, _ = run(capsys, "generate", decoder, "", "--max-new-tokens", "4", "--json")
    assert len(json.loads(out)["tokens"]) == 4


def test_a_seed_for_each_text_counts_blank_lines(encoder_decoder, capsys, monkeypatch):
    options = ["--max-new-tokens", "6", "--do-sample", "--temperature", "2.0"]
    translate = lambda stdin, *more: run(
        capsys, "translate", encoder_decoder, *options, *more, stdin=stdin, monkeypatch=monkeypatch
    )[1].split("\n")
    together = translate("the sea\n\na ship\n", "--seed", "[1,2,3]")
    assert together == [*translate("the sea", "--seed", "1")[:1], "", *translate("a ship", "--seed", "3")]


def test_a_summary_is_shorter_than_its_text_unless_somebody_says_otherwise(encoder_decoder, capsys):
    """The model is a random one, and runs on as long as it may."""
    text = "the sea is calm, and the ship sails on " * 6
    length = len(TOKENS.encode(text).ids)

    def tokens(command, *options):
        forbid_end = ["--suppress-tokens", "[2]"]
        out = run(capsys, command, encoder_decoder, text, "--json", *forbid_end, *options)[1]
        return json.loads(out)["tokens"]

    assert len(tokens("translate")) == 2 * length + 10
    summary = tokens("summarize")
    assert len(summary) == length // 2 + 10
    assert len({tuple(summary[n : n + 3]) for n in range(len(summary) - 2)}) == len(summary) - 2
    assert len(tokens("summarize", "--max-length-factor", "0.25")) == length // 4 + 10
    assert len(tokens("summarize", "--max-new-tokens", "150")) == 150
    repeated = tokens("summarize", "--no-repeat-ngram-size", "0")
    assert repeated != summary
    assert "half as many tokens as its text" in help_text(capsys, "summarize")


def help_text(capsys, command: str) -> str:
    assert main([command, "--help"]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_tokens_are_shown_as_text(decoder, encoder_decoder, capsys):
    """Not as vocabularies write them, with Ġ for a space."""
    options = ["--max-new-tokens", "8", "--json", "--logprobs", "3"]
    _, out, _ = run(capsys, "generate", decoder, "the sea", "--prefix", " is calm", *options)
    result = json.loads(out)
    assert "".join(part["token"] for part in result["logprobs"]).startswith(" is calm")
    assert all(len(part["top"]) == 3 for part in result["logprobs"])
    assert "Ġ" not in out
    _, out, _ = run(capsys, "score", decoder, "the sea is calm", "--tokens")
    assert '" sea"' in out
    assert "Ġ" not in out
    _, out, _ = run(capsys, "score", decoder, "the sea is calm", "--json")
    assert "".join(part["token"] for part in json.loads(out)["tokens"]) == "the sea is calm"


@pytest.fixture(scope="module")
def second_encoder_decoder(encoder_decoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("second")
    first, _ = kl.load(encoder_decoder)
    model = kl.build(first.design, generator=torch.Generator().manual_seed(1))
    model.notes = first.notes
    kl.save(model, TOKENS, folder)
    return str(folder)


def test_several_models_translate_as_an_ensemble(encoder_decoder, second_encoder_decoder, capsys, tmp_path):
    models = f"{encoder_decoder},{second_encoder_decoder}"
    options = ["the sea", "--max-new-tokens", "6", "--num-beams", "3", "--json", "--logprobs", "1"]
    members = [kl.load(path)[0] for path in (encoder_decoder, second_encoder_decoder)]
    for average in ("probabilities", "logprobs"):
        code, out, error = run(capsys, "translate", models, *options, "--ensemble-average", average)
        assert code == 0, error
        together = kl.ensemble(members, average=average)
        expected = kl.completions(together, TOKENS, "the sea", max_new_tokens=6, num_beams=3)[0][0]
        result = json.loads(out)
        assert (result["text"], result["tokens"]) == (expected.text, expected.tokens)
        assert len(result["logprobs"]) == len(result["tokens"])
    twins = f"{encoder_decoder},{encoder_decoder}"
    assert (
        run(capsys, "translate", twins, "the sea")[1]
        == run(capsys, "translate", encoder_decoder, "the sea")[1]
    )
    (tmp_path / "pairs.tsv").write_text("the sea\tthe ship\nthe ship\tthe sea\n")
    code, out, _ = run(capsys, "eval", models, str(tmp_path / "pairs.tsv"), "--baseline", encoder_decoder)
    assert code == 0
    assert "bleu" in out.lower()
    for option in (["--plot", str(tmp_path / "p.svg")], ["--alignments"]):
        code, _, error = run(capsys, "translate", models, "the sea", "--max-new-tokens", "2", *option)
        assert code == 2
        assert "shows the attention of one model, and there are 2: name one" in error


def test_models_with_other_tokens_are_no_ensemble(
    encoder_decoder, decoder, second_encoder_decoder, capsys, tmp_path
):
    other = kl.train_tokenizer(
        "bpe", ["other words, other tokens"] * 3, TOKENS.get_vocab_size(), running_text=True
    )
    kl.save(kl.load(second_encoder_decoder)[0], other, tmp_path / "other")
    code, _, error = run(capsys, "translate", f"{encoder_decoder},{tmp_path / 'other'}", "the sea")
    assert code == 2
    assert "the models of an ensemble need the same tokens, and" in error
    assert str(tmp_path / "other") in error
    assert (
        "the kind is decoder and encoder-decoder"
        in run(capsys, "generate", f"{encoder_decoder},{decoder}", "x")[2]
    )
    error = run(capsys, "generate", f"{decoder},{decoder}", "x", "--revision", "main")[2]
    assert "there are several models: give each MODEL@REVISION" in error


def test_the_perplexity_of_an_ensemble(decoder, capsys, tmp_path):
    (tmp_path / "text.txt").write_text("the sea is calm, and the ship sails on\n" * 4)
    measure = lambda model: json.loads(run(capsys, "eval", model, str(tmp_path / "text.txt"), "--json")[1])
    twins, alone = measure(f"{decoder},{decoder}"), measure(decoder)
    assert twins["measures"]["perplexity"] == pytest.approx(alone["measures"]["perplexity"], rel=1e-5)


def test_a_folder_with_a_comma_in_its_name_is_one_model(decoder, capsys, tmp_path):
    kl.save(*kl.load(decoder), tmp_path / "a,b")
    options = ["the sea", "--max-new-tokens", "4"]
    assert run(capsys, "generate", str(tmp_path / "a,b"), *options) == run(
        capsys, "generate", decoder, *options
    )


def test_usage_errors(decoder, encoder_decoder, classifier, capsys, monkeypatch):
    assert (
        "--regex is '(': it cannot be used; unclosed group"
        in run(capsys, "generate", decoder, "x", "--regex", "(")[2]
    )
    assert (
        "set --do-sample without beams, or at least as many --num-beams"
        in run(capsys, "generate", decoder, "x", "--num-return-sequences", "2")[2]
    )
    assert "this model continues texts and does not summarize" in run(capsys, "summarize", decoder, "x")[2]
    code, out, stderr = run(capsys, "translate", decoder, "abc def")
    assert (code, out) == (2, "")
    assert "this model continues texts and does not translate them: take an encoder-decoder" in stderr
    assert "there is no model directory" in run(capsys, "translate", "./nowhere", "text")[2]
    assert "is an encoder and writes no text" in run(capsys, "generate", classifier, "text")[2]
    assert (
        "--num-beams is 0: it must be a whole number"
        in run(capsys, "generate", decoder, "x", "--num-beams", "0")[2]
    )
    assert "a stream is for one text" in run(capsys, "generate", decoder, "x", "--stream", "--json")[2]
    assert "this model has no labels" in run(capsys, "classify", decoder, "x")[2]
    code, _, stderr = run(capsys, "generate", decoder, "--max-new-token", "3", "x")
    assert code == 2
    assert "--max-new-tokens" in stderr
    monkeypatch.setattr("keepleft.cli.generate.installed_weights", dict)
    monkeypatch.setattr("keepleft.cli.text_io.installed_weights", dict)
    assert "no model was named, and none is installed" in run(capsys, "generate", "some text")[2]


def test_a_long_text_without_a_model_is_a_text_and_flags_can_be_taken_back(
    decoder, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr("keepleft.cli.generate.best_installed", lambda: decoder)
    code, _, stderr = run(capsys, "generate", "word " * 60, "--max-new-tokens", "2", "--do-sample=false")
    assert code == 0, stderr
    assert "--batch-size is 0" in run(capsys, "generate", decoder, "x", "--batch-size", "0")[2]
    drawn = []
    monkeypatch.setattr(
        "keepleft.pipelines.text_generation.TextGenerator.plot",
        lambda self, path, text, options: drawn.append(text) or path,
    )
    run(
        capsys,
        "generate",
        decoder,
        "first",
        "second",
        "third",
        *"--batch-size 2 --max-new-tokens 1 --plot".split(),
        str(tmp_path / "p.svg"),
    )
    assert drawn == ["first"]


def test_an_installed_model_goes_by_its_name(decoder, capsys, monkeypatch):
    monkeypatch.setattr("keepleft.cli.text_io.installed_weights", lambda: {"Little": Path(decoder)})
    options = ["the sea", "--max-new-tokens", "3"]
    assert run(capsys, "generate", "Little", *options) == run(capsys, "generate", decoder, *options)
    assert run(capsys, "score", "Little", "the sea") == run(capsys, "score", decoder, "the sea")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["SmolLM2-135M-Instuct", "Hello"],
            "no model is called 'SmolLM2-135M-Instuct': did you mean SmolLM2-",
        ),
        (["smollm2-135m-instruct", "Hello"], "did you mean SmolLM2-135M-Instruct?"),
        (["SmolLM2-135M-Instuct"], "did you mean SmolLM2-135M-Instruct?"),
        (["SmolLM-Instruct", "--input", "-"], "did you mean SmolLM2-135M-Instruct?"),
        (["texts.txt"], "texts.txt is a file, not a model: to read texts from it, give --input texts.txt"),
        (["a text", "--input", "-"], "a text and --input - were given: leave one of them out"),
    ],
)
def test_a_misspelt_model_or_a_file_is_no_text(arguments, expected, decoder, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("the sea\n")
    monkeypatch.setattr("keepleft.cli.generate.best_installed", lambda: decoder)
    names = {"SmolLM2-135M-Instruct": Path(decoder)}
    monkeypatch.setattr("keepleft.cli.text_io.installed_weights", lambda: names)
    code, out, stderr = run(capsys, "generate", *arguments)
    assert (code, out) == (2, "")
    assert expected in stderr


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (["nomodel", "the sea"], "no model is called 'nomodel', so it is the first of 2 texts\n"),
        (
            ["I", "am", "happy"],
            "no model is called 'I', so it is the first of 3 texts; a text with spaces goes into quotes",
        ),
        (["the sea", "nomodel"], ""),
        (["Translators"], ""),
    ],
)
def test_a_word_before_other_texts_is_a_text_with_a_note(arguments, note, decoder, capsys, monkeypatch):
    monkeypatch.setattr("keepleft.cli.generate.best_installed", lambda: decoder)
    monkeypatch.setattr("keepleft.cli.text_io.installed_weights", lambda: {"translator": Path(decoder)})
    code, out, stderr = run(capsys, "generate", *arguments, "--max-new-tokens", "2", "--json")
    assert code == 0, stderr
    assert [json.loads(line)["input"] for line in out.splitlines()] == arguments
    assert note in stderr
    assert note or "no model is called" not in stderr


@pytest.mark.parametrize(
    "arguments", [[], ["I am happy"], ["Hello"], ["texts.txt"], ["--input", "texts.txt"]]
)
def test_a_translation_needs_a_language_or_a_model(arguments, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("the sea\n")
    code, _, stderr = run(capsys, "translate", *arguments)
    assert code == 2
    assert "say which language to write: --to fr, de, hi or en" in stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["and/or"],
        ["and/or", "he/she"],
        ["TCP/IP"],
        ["24/7"],
        ["OS/2", "the sea"],
        ["yes/no?"],
        ["the and/or the sea"],
        ["e.g./i.e."],
        ["https://a.b/c"],
        ["हाँ/ना", "the sea"],
        ["a/"],
    ],
)
def test_a_text_with_a_slash_is_a_text(arguments, decoder, capsys, monkeypatch):
    monkeypatch.setattr("keepleft.cli.generate.best_installed", lambda: decoder)
    code, out, stderr = run(capsys, "generate", *arguments, "--max-new-tokens", "2", "--json")
    assert code == 0, stderr
    assert [json.loads(line)["input"] for line in out.splitlines()] == arguments


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such/model"],
        ["nobody/gtp2"],
        ["Nobody/NoModel"],
        ["nobody/bloom", "the sea"],
        ["nobody/bloom", "--input", "-"],
        ["nobody/bloom", "and/or", "the sea"],
        ["runs/nvoel"],
    ],
)
def test_a_name_on_the_hub_without_a_network_is_an_error(arguments, decoder, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr("keepleft.cli.generate.best_installed", lambda: decoder)
    code, out, stderr = run(
        capsys, "generate", *arguments, "--max-new-tokens", "2", stdin="the sea", monkeypatch=monkeypatch
    )
    assert (code, out) == (2, "")
    assert stderr.endswith(
        f"there is no directory {arguments[0]}, and the Hugging Face hub could not be reached to look for a "
        "model of that name: check the path, or the connection\n"
    )


def test_a_path_like_a_name_on_the_hub_is_suggested(decoder, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "novel").mkdir(parents=True)
    assert run(capsys, "eval", "runs/nvoel", "a.txt")[2] == (
        "keepleft: there is no directory runs/nvoel: did you mean runs/novel?\n"
    )


@pytest.mark.parametrize(
    "arguments", [["/no/such/model", "hi"], ["runs/novel/model"], ["./nothing"], ["no.gguf", "hi"]]
)
def test_a_path_that_leads_nowhere_is_no_text(arguments, decoder, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("keepleft.cli.generate.best_installed", lambda: decoder)
    code, out, stderr = run(
        capsys, "generate", *arguments, "--max-new-tokens", "2", stdin="the sea", monkeypatch=monkeypatch
    )
    assert (code, out) == (2, "")
    assert arguments[0].removeprefix("./") in stderr


def test_a_seed_for_each_text_goes_with_its_text(decoder, capsys):
    options = ["--do-sample", "--max-new-tokens", "4", "--temperature", "2.0"]
    together = run(
        capsys, "generate", decoder, "a", "b", "c", *"--seed [1,2,3] --batch-size 2 --json".split(), *options
    )[1]
    alone = [
        run(capsys, "generate", decoder, text, "--seed", seed, "--json", *options)[1]
        for text, seed in (("a", "1"), ("b", "2"), ("c", "3"))
    ]
    tokens = lambda out: [json.loads(line)["tokens"] for line in out.splitlines()]
    assert tokens(together) == [row for out in alone for row in tokens(out)]
    assert (
        "seed has 2 values" in run(capsys, "generate", decoder, "a", "b", "c", "--seed", "[1,2]", *options)[2]
    )
