"""keepleft audit --explain: hints from the syntax tree, and nothing of a file is run."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from keepleft.auditing.static.hints import MAX_SOURCE_BYTES, Hint, find_hints, hints_of_source, python_files
from keepleft.auditing.static.rule_table import RULES
from keepleft.cli import main

ROOT = Path(__file__).parents[2]
PACKAGE = Path(kl.__file__).parent
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
every_rule = pytest.mark.parametrize("rule", RULES, ids=[rule.id for rule in RULES])


def rules_of(source: str) -> list[str]:
    return [hint.rule for hint in hints_of_source(dedent(source).encode(), "model.py")]


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main(["audit", *map(str, arguments)])
    return code, *capsys.readouterr()


def hints_or_error(content: bytes) -> tuple[list[Hint], str]:
    try:
        return hints_of_source(content, "model.py"), ""
    except ValueError as error:
        return [], str(error)


# -- the table ---------------------------------------------------------------------------------


@every_rule
def test_a_rule_finds_its_example_and_not_its_counter_example(rule):
    assert rules_of(rule.example) == [rule.id]
    assert rules_of(rule.counter_example) == []


@every_rule
def test_a_row_is_complete(rule):
    assert re.fullmatch(r"[a-z]+(-[a-z]+)+", rule.id)
    assert not rule.looks_for.endswith(".")
    assert not rule.message.endswith(".")
    (hint,) = hints_of_source(rule.example.encode(), "model.py")
    assert "{" not in hint.message
    assert hint.level == rule.level
    compile(rule.counter_example, "counter-example", "exec")


def test_no_two_rules_share_an_id():
    assert len({rule.id for rule in RULES}) == len(RULES)


def test_the_documentation_lists_every_rule_in_the_order_of_the_table():
    page = (ROOT / "docs" / "audit.md").read_text("utf-8")
    section = page[page.index("## Hints without running") : page.index("## Claims")]
    note = {"note": " (a note)", "warning": ""}
    assert re.findall(r"^\| `([\w-]+)` \| (.+) \|$", section, re.M) == [
        (rule.id, rule.looks_for + note[rule.level]) for rule in RULES
    ]


# -- what hints are and are not given for ------------------------------------------------------

ATTENTION = """
import torch, math
import torch.nn.functional as F
from torch import nn

class CausalSelfAttention(nn.Module):
    def __init__(self):
        self.register_buffer("bias", {buffer})

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.qkv(x).split(8, dim=2)
        k = k.view(B, T, 2, 4).transpose(1, 2)
        q = q.view(B, T, 2, 4).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = {masked}
        att = {weights}
        return att @ v
"""
CORRECT = {
    "buffer": "torch.tril(torch.ones(9, 9)).view(1, 1, 9, 9)",
    "masked": "att.masked_fill(self.bias[:, :, :T, :T] == 0, float('-inf'))",
    "weights": "F.softmax(att, dim=-1)",
}


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({}, []),
        ({"buffer": "torch.tril(torch.ones(9, 9), diagonal=1).view(1, 1, 9, 9)"}, ["mask-tril-diagonal"]),
        ({"buffer": "torch.ones(9, 9).tril(-1)[None, None]"}, ["mask-tril-diagonal"]),
        ({"buffer": "torch.triu(torch.ones(9, 9)).view(1, 1, 9, 9)"}, ["mask-inverted"]),
        ({"buffer": "torch.triu(torch.ones(9, 9)).T.view(1, 1, 9, 9)"}, []),
        ({"buffer": "~torch.triu(torch.ones(9, 9).bool(), 1)"}, []),
        ({"buffer": "1 - torch.triu(torch.ones(9, 9), diagonal=1)"}, []),
        ({"buffer": "1 - torch.triu(torch.ones(9, 9), diagonal=2)"}, ["mask-triu-diagonal"]),
        ({"buffer": "torch.ones(9, 9).tril() & torch.ones(9, 9).triu(-3)"}, []),  # a window
        ({"buffer": "torch.ones(9, 9).tril().triu(-3)"}, []),
        ({"masked": "att.masked_fill(self.bias == 1, float('-inf'))"}, ["mask-inverted"]),
        ({"masked": "att.masked_fill(self.bias.logical_not(), float('-inf'))"}, []),
        ({"masked": "att.masked_fill(self.bias.eq(0), -torch.inf)"}, []),
        ({"masked": "torch.where(self.bias > 0, att, float('-inf'))"}, []),
        ({"masked": "torch.where(self.bias > 0, float('-inf'), att)"}, ["mask-inverted"]),
        ({"masked": "torch.where(self.bias > 0, att, -1e4)"}, ["mask-value-small"]),
        ({"masked": "att.masked_fill(self.bias == 0, -65504.0)"}, ["mask-value-finite"]),
        ({"masked": "att.masked_fill(self.bias == 0, float('inf'))"}, ["mask-value-positive"]),
        ({"masked": "att.masked_fill(self.bias == 0, 0)"}, ["mask-zeroes-scores"]),
        ({"masked": "att + (1 - self.causal_mask) * -1e4"}, ["mask-value-small"]),
        ({"masked": "att + torch.full((T, T), float('-inf')).triu(1)"}, []),
        (
            {"masked": "att + torch.triu(torch.full((T, T), float('-inf')), diagonal=0)"},
            ["mask-triu-diagonal"],
        ),
        ({"masked": "att + torch.ones(T, T).triu(2) * -torch.inf"}, []),  # 0 * inf is another story
        ({"weights": "F.softmax(att, dim=3)"}, []),
        ({"weights": "F.softmax(att, dim=1)"}, ["softmax-axis"]),
        ({"weights": "F.softmax(att, dim=2)"}, ["softmax-axis"]),
        ({"weights": "att.softmax(-2)"}, ["softmax-axis"]),
        ({"weights": "F.softmax(att)"}, ["softmax-axis"]),
        ({"weights": "nn.Softmax(dim=1)(att)"}, ["softmax-axis"]),
        ({"weights": "nn.Softmax(dim=-1)(att)"}, []),
        ({"masked": "att", "weights": "att.softmax(-1) * self.bias"}, ["mask-after-softmax"]),
        ({"masked": "att", "weights": "att.softmax(-1) * torch.ones(T, T).tril()"}, ["mask-after-softmax"]),
    ],
)
def test_attention_by_hand(changes, rules):
    assert rules_of(ATTENTION.format(**CORRECT | changes)) == rules


@pytest.mark.parametrize(
    ("lines", "rules"),
    [
        # a mask made by another function, and the triangle of PyTorch's own tutorial
        (
            """
            def subsequent(n):
                return torch.triu(torch.ones(1, n, n), diagonal=1).type(torch.uint8) == 0

            def attend(scores, v):
                return scores.masked_fill(subsequent(9) == 0, float("-inf")).softmax(-1) @ v
            """,
            [],
        ),
        (
            """
            def square(n):
                mask = (torch.triu(torch.ones(n, n)) == 1).transpose(0, 1)
                return mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, 0.0)
            """,
            [],
        ),
        # ignored labels, sampling, experts and images are no masks of scores
        ("labels = labels.masked_fill(attention_mask == 0, -100)", []),
        ("logits = logits.masked_fill(logits < kept, -100.0)", []),
        ("weights = torch.softmax(router_logits, -1) * expert_mask", []),
        ("pixels = torch.where(mask, pixels, -10.0)", []),
        ("attended = torch.softmax(energy, dim=1)", []),  # energy (B, T) of additive attention
        # zeros in rows that are hidden entirely
        (
            """
            def attend(q, k, v, mask):
                scores = (q @ k.mT).masked_fill(mask, float("-inf"))
                return scores.softmax(-1).masked_fill(mask.all(-1, keepdim=True), 0.0) @ v
            """,
            [],
        ),
        # in place
        (
            """
            def attend(q, k, v, mask):
                scores = q @ k.mT
                scores[mask == 0] = -1e4
                return scores.softmax(-1) @ v
            """,
            ["mask-value-small"],
        ),
        (
            """
            def attend(q, k, v, mask):
                weights = F.softmax(q @ k.mT, -1)
                weights *= mask
                return weights @ v
            """,
            ["mask-after-softmax"],
        ),
        # keys before queries
        ('def attend(q, k):\n    return torch.einsum("bkd,bqd->bkq", k, q).softmax(1)', []),
        ('def attend(q, k):\n    return torch.einsum("bkd,bqd->bkq", k, q).softmax(-1)', ["softmax-axis"]),
        (
            """
            def attend(Q, K, V, mask):
                scores = torch.matmul(Q, K.transpose(1, 2)) / 8
                return torch.matmul(F.softmax(scores.masked_fill(mask == 0, -1e9), dim=1), V)
            """,
            ["softmax-axis", "mask-value-finite"],
        ),
        # heads in the batch
        (
            """
            def attend(q, k):
                q = q.view(B, T, H, D).transpose(1, 2).reshape(B * H, T, D)
                k = k.view(B, T, H, D).transpose(1, 2).reshape(B * H, T, D)
                return torch.bmm(q, k.transpose(1, 2)).softmax(2)
            """,
            [],
        ),
        # claims: of others, of encoders, of what a GPT is made of
        ("class Attention(nn.Module):\n    def forward(self, q, k, v):\n        return sdpa(q, k, v)", []),
        (
            """
            class BertAttention(nn.Module):
                def forward(self, q, k, v):
                    return F.scaled_dot_product_attention(q, k, v)
            """,
            [],
        ),
        (
            """
            class Attention(nn.Module):
                def forward(self, q, k, v):
                    return F.scaled_dot_product_attention(q, k, v)

            class GPT(nn.Module):
                def __init__(self):
                    self.attn = Attention()
            """,
            ["attention-unmasked"],
        ),
        (
            """
            class Attention(nn.Module):
                def forward(self, q, k, v):
                    return F.scaled_dot_product_attention(q, k, v)

            class Encoder(nn.Module):
                def __init__(self):
                    self.attn = Attention()

            class GPT(nn.Module):
                def __init__(self):
                    self.attn = Attention()
            """,
            [],
        ),
        (
            """
            class GPTCrossAttention(nn.Module):
                def forward(self, q, k, v):
                    return F.scaled_dot_product_attention(q, k, v)
            """,
            [],
        ),
        (
            """
            class GPTBlock(nn.Module):
                def forward(self, x, memory):
                    q, k, v = self.q(x), self.k(memory), self.v(memory)
                    return F.scaled_dot_product_attention(q, k, v)
            """,
            [],
        ),
        (
            """
            class GPTAttention(nn.Module):
                def forward(self, q, k, v):
                    if q.shape[2] == 1:
                        return F.scaled_dot_product_attention(q, k, v)
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            """,
            [],
        ),
        (
            """
            class VideoDecoder(nn.Module):
                def __init__(self):
                    self.up = nn.Conv2d(3, 3, 3)
                def forward(self, q, k, v):
                    return F.scaled_dot_product_attention(q, k, v)
            """,
            [],
        ),
        # caches
        (
            """
            def attend(q, k, v, cache):
                k, v = cache.update(k, v)
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            """,
            ["is-causal-with-cache"],
        ),
        (
            """
            def attend(q, k, v):
                return F.scaled_dot_product_attention(q[:, :, -1:], k, v, is_causal=True)
            """,
            ["is-causal-with-cache"],
        ),
        (
            """
            def attend(q, k, v, past_k):
                if past_k is None:
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
                k = torch.cat([past_k, k], 2)
                return F.scaled_dot_product_attention(q, k, v, is_causal=False)
            """,
            [],
        ),
        # modules of torch.nn
        (
            """
            class Seq2Seq(nn.Module):
                def __init__(self):
                    self.embed = nn.Embedding(9, 8)
                    self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2), 2)
                def forward(self, src, tgt):
                    return self.decoder(self.embed(tgt), src)
            """,
            ["module-unmasked"],
        ),
        (
            """
            class DETR(nn.Module):
                def __init__(self):
                    self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2), 2)
                def forward(self, src, queries):
                    return self.decoder(queries, src)
            """,
            [],
        ),
        (
            """
            class GPT(nn.Module):
                def __init__(self):
                    self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2) for _ in range(2)])
                def forward(self, x):
                    for layer in self.layers:
                        x = layer(x)
                    return x
            """,
            ["module-unmasked"],
        ),
        # over time
        (
            """
            class CausalConv(nn.Module):
                def __init__(self, width, kernel, dilation):
                    self.conv = nn.Conv1d(width, width, kernel, padding="same", dilation=dilation)
                def forward(self, x):
                    return self.conv(x)
            """,
            ["conv-padding"],
        ),
        (
            """
            class CausalConv(nn.Module):
                def __init__(self, width):
                    self.conv = nn.Conv1d(width, width, 1, padding=0)
                    self.weights = nn.Conv1d(width, width, 4, padding=3)
                def forward(self, x):
                    return conv_fn(self.conv(x), self.weights.weight)
            """,
            [],
        ),
        (
            """
            class GPT(nn.Module):
                def __init__(self):
                    self.text_encoder = nn.LSTM(8, 8, bidirectional=True)
            """,
            [],
        ),
        # padding
        ("encoder(x, src_key_padding_mask=(tokens != pad_id))", ["padding-mask-inverted"]),
        ("encoder(x, src_key_padding_mask=(tokens == pad_id))", []),
        ('encoder(x, src_key_padding_mask=batch["attention_mask"] == 0)', []),
        ('encoder(x, src_key_padding_mask=batch["attention_mask"])', ["padding-mask-inverted"]),
        # labels
        (
            """
            def train(model: GPT, batch):
                logits = model(batch["input_ids"]).logits
                return F.cross_entropy(logits.view(-1, 9), batch["input_ids"].view(-1))
            """,
            ["labels-not-shifted"],
        ),
        (
            """
            class GPT(nn.Module):
                def forward(self, idx, targets):
                    return F.cross_entropy(self.head(idx).view(-1, 9), targets.view(-1))
            """,
            [],  # the caller shifts targets
        ),
        (
            """
            class GPTForTokenClassification(nn.Module):
                def forward(self, input_ids, labels):
                    return F.cross_entropy(self.head(input_ids).view(-1, 9), labels.view(-1))
            """,
            [],
        ),
        (
            """
            from transformers import AutoModelForCausalLM
            model = AutoModelForCausalLM.from_pretrained("gpt2")
            loss = model(input_ids=ids[:, :-1], labels=ids[:, 1:]).loss
            """,
            ["labels-shifted-twice"],
        ),
        (
            """
            def get_batch(data, i):
                return data[i : i + 8], data[i + 1 : i + 9]

            def loss(logits, y):
                return F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())
            """,
            ["labels-shifted-twice"],
        ),
        (
            """
            def loss(logits, labels, mask):
                if mask is None:
                    shifted = labels[:, 1:]
                else:
                    shifted = labels[:, 1:][mask[:, 1:]]
                return F.cross_entropy(logits, shifted)
            """,
            [],
        ),
    ],
)
def test_code_as_people_write_it(lines, rules):
    assert rules_of(lines) == rules


def test_a_hint_has_its_place_and_its_line():
    source = "def attend(q, k, v):\n    ä = 'ß'; return F.softmax(q @ k.transpose(1, 2), dim=1) @ v\n"
    (hint,) = hints_of_source(source.encode(), "my/model.py")
    assert (hint.path, hint.line, hint.column, hint.rule) == ("my/model.py", 2, 21, "softmax-axis")
    assert hint.code == source.splitlines()[1].strip()
    assert "dim=1" in hint.message
    with pytest.raises(dataclasses.FrozenInstanceError):
        hint.line = 3


# -- our own code and that of transformers -----------------------------------------------------


def test_our_own_code_gives_no_hints():
    hints = [hint for file in python_files(PACKAGE) for hint in find_hints(file)]
    assert [f"{hint.path}:{hint.line} {hint.rule}" for hint in hints] == []


def test_transformers_gives_few_hints():
    models = Path(pytest.importorskip("transformers").__file__).parent / "models"
    names = "llama gpt2 bert t5 mistral qwen2 bart opt gpt_neox mamba".split()
    files = [models / name / f"modeling_{name}.py" for name in names]
    hints = [hint for file in files if file.exists() for hint in find_hints(file)]
    # BartForCausalLM compares logits with labels as they are
    assert {(Path(hint.path).name, hint.rule) for hint in hints} <= {
        ("modeling_bart.py", "labels-not-shifted")
    }


# -- nothing is run ----------------------------------------------------------------------------


def test_a_file_is_not_run(tmp_path, capsys):
    marker = tmp_path / "marker"
    file = tmp_path / "model.py"
    file.write_text(f"open({str(marker)!r}, 'w').close()\nraise SystemExit(7)\n" + RULES[0].example)
    code, out, err = run(capsys, "--explain", file)
    assert (code, err) == (0, "")
    assert not marker.exists()
    assert f"{file}:5:" in out
    assert list(tmp_path.iterdir()) == [file]  # not compiled to a file either


def test_nothing_heavy_is_imported(tmp_path):
    (tmp_path / "model.py").write_text(RULES[0].example)
    code = (
        "import sys; from keepleft.cli import main; assert main(['audit', '--explain', 'model.py']) == 0; "
        "print([m for m in ('torch', 'numpy', 'transformers', 'model') if m in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout.splitlines()[-1] == "[]"


# -- any file ----------------------------------------------------------------------------------

OWN_SOURCES = sorted(PACKAGE.rglob("*.py"))[::7]
STATEMENTS = [
    ast.unparse(node)
    for rule in RULES
    for source in (rule.example, rule.counter_example)
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.stmt)
]


def subscripts(node: ast.expr) -> list[ast.expr]:
    """The parts of an expression that may only stand between brackets."""
    return node.elts if isinstance(node, ast.Tuple) else [node]


EXPRESSIONS = [
    ast.unparse(node)
    for rule in RULES
    for node in ast.walk(ast.parse(rule.example))
    if isinstance(node, ast.expr) and not any(isinstance(part, ast.Slice) for part in subscripts(node))
]


@given(st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_statements_in_any_order_give_no_crash(statements):
    source = "\n".join(statements)
    try:
        compile(source, "model.py", "exec", dont_inherit=True)
    except SyntaxError:  # return outside of a function
        source = "def function(x):\n" + "\n".join(f"    {line}" for line in source.splitlines())
    for hint in hints_of_source(source.encode(), "model.py"):
        assert 1 <= hint.line <= len(source.splitlines())


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_expressions_in_any_place_give_no_crash(data):
    """Arguments of the examples are replaced by other expressions."""
    tree = ast.parse(data.draw(st.sampled_from([rule.example for rule in RULES])))
    expressions = st.sampled_from(EXPRESSIONS)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and data.draw(st.booleans()):
            node.args[0] = ast.parse(data.draw(expressions), mode="eval").body
        elif isinstance(node, ast.Assign | ast.Return) and data.draw(st.booleans()):
            node.value = ast.parse(data.draw(expressions), mode="eval").body
    hints_of_source(ast.unparse(tree).encode(), "model.py")


@given(st.sampled_from(OWN_SOURCES), st.integers(0, 400), st.integers(1, 60))
@settings(max_examples=25, deadline=None)
def test_pieces_of_real_files_give_hints_or_one_clear_error(path, start, length):
    lines = path.read_text("utf-8").splitlines(keepends=True)
    piece = "".join(lines[start : start + length])
    hints, error = hints_or_error(piece.encode())
    assert hints == sorted(hints)
    assert error == "" or (error.startswith("model.py") and "\n" not in error)


@given(st.binary(max_size=80))
@settings(max_examples=100, deadline=None)
def test_any_bytes_give_hints_or_one_clear_error(content):
    _, error = hints_or_error(content)
    assert error == "" or (error.startswith("model.py") and len(error.splitlines()) == 1)


@pytest.mark.parametrize(
    "source",
    [
        "x = 10 ** 10 ** 10\ny = scores.masked_fill(mask, 9 ** 9 ** 9 ** 9).softmax(-1)\n",
        "x = " + "+".join(["x"] * 900) + "\n",
        "if x:\n    pass\n" + "elif x:\n    pass\n" * 900,
        "scores = q @ k.mT\n" + "if a: scores = scores + scores * mask\n" * 2000 + "scores.softmax(1)\n",
        "mask = torch.ones(9, 9).tril()\n"
        + "if a: mask = ~mask | mask & mask\n" * 2000
        + "attention_mask = attention_mask.masked_fill(mask, -torch.inf)\n",
        "def f(): return g()\ndef g(): return f()\nx = f()\nscores.masked_fill(f(), g()).softmax(f())\n",
        "x = x.masked_fill(x, x)\nx = x.softmax(x)\n",
        "torch.triu(x, float('inf'))\nscores.masked_fill(torch.triu(x, float('nan')), -1e9)\n",
        "scores.masked_fill(mask, 1" + "0" * 4000 + ").softmax(-1)\n",
        "scores.masked_fill(*a, **b).softmax(*c)\nF.softmax()\nF.cross_entropy(*a, b)\ntorch.where(a)\n",
        "lambda q: (yield)\nmatch x:\n    case {'a': [*_]}: pass\n",
    ],
)
def test_a_file_that_is_made_to_take_long_does_not(source):
    started = time.perf_counter()
    hints_of_source(source.encode(), "model.py")
    assert time.perf_counter() - started < 20


def test_a_big_file_takes_seconds(tmp_path):
    function = "def attend_{n}(q, k, v, mask):\n    return (q @ k.mT * mask).softmax(-1) @ v\n\n"
    file = tmp_path / "big.py"
    file.write_text("".join(function.format(n=n) for n in range(5000)))
    assert len(find_hints(file)) == 5000


# -- silenced lines ----------------------------------------------------------------------------

LINE = "weights = F.softmax(q @ k.transpose(1, 2), dim=1)"


@pytest.mark.parametrize(
    ("comment", "rules"),
    [
        ("", ["softmax-axis"]),
        ("  # keepleft: ignore[softmax-axis]", []),
        ("  # slots compete  # keepleft: ignore[mask-inverted, softmax-axis]", []),
        ("  #keepleft:ignore[ softmax-axis ]  ", []),
        ("  # keepleft: ignore[mask-inverted]", ["softmax-axis"]),
        ("  # keepleft: ignore", ["softmax-axis"]),
        ("  # keepleft: ignore[softmax-axis] or not", ["softmax-axis"]),
    ],
)
def test_a_comment_silences_a_rule_on_its_line(comment, rules):
    assert rules_of(LINE + comment) == rules
    assert rules_of(f"{LINE}{comment}\n{LINE}") == [*rules, "softmax-axis"]


def test_a_comment_may_stand_on_any_line_of_an_expression():
    lines = "weights = F.softmax(\n    q @ k.transpose(1, 2),\n    dim=1,{}\n)\n"
    assert rules_of(lines.format("")) == ["softmax-axis"]
    assert rules_of(lines.format("  # keepleft: ignore[softmax-axis]")) == []


# -- files and folders -------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_is_searched_without_hidden_folders_and_environments(here, capsys):
    for folder in ("model", "model/parts", "model/.git", "model/__pycache__", "model/env/lib"):
        (here / folder).mkdir(parents=True, exist_ok=True)
        (here / folder / "layer.py").write_text(LINE)
    (here / "model" / "env" / "pyvenv.cfg").touch()
    (here / "model" / "notes.txt").write_text(LINE)
    code, out, err = run(capsys, "--explain", "model", "model/layer.py")
    assert (code, err) == (0, "")
    places = [Path("model/layer.py"), Path("model/parts/layer.py")]
    assert re.findall(r"^(\S+):1:11: softmax-axis$", out, re.M) == [str(place) for place in places]
    assert "2 hints in 2 files; hints are no verdict" in out


def test_json_is_one_object_per_hint(here, capsys):
    (here / "model.py").write_text(f"{LINE}\nscores = scores.masked_fill(mask, -1e9)\n")
    code, out, err = run(capsys, "--explain", "model.py", "--json")
    assert (code, err) == (0, "")
    hints = [Hint(**json.loads(line)) for line in out.splitlines()]
    assert hints == find_hints(Path("model.py"))
    assert [(hint.line, hint.level) for hint in hints] == [(1, "warning"), (2, "note")]


def test_no_hints_are_no_verdict(here, capsys):
    (here / "model.py").write_text("x = 1\n")
    code, out, err = run(capsys, "--explain", "model.py")
    assert (code, err) == (0, "")
    assert out == (
        "0 hints in 1 file; hints are no verdict: keepleft audit FILE.py:NAME runs the model and says what "
        "leaks\n"
    )
    assert run(capsys, "--explain", "model.py", "--json") == (0, "", "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"def f(:\n", f"bad.py:1 is not Python {PYTHON}: invalid syntax"),
        (b"print 'two'\n", f"bad.py:1 is not Python {PYTHON}: Missing parentheses"),
        (b"x = 1\x00\n", "bad.py"),
        (b"x = '\xff'\n", "bad.py is not Python: it cannot be decoded"),
        (b"# coding: klingon\n", "bad.py is not Python: it cannot be decoded"),
        (b"x = " + b"(" * 5000 + b")" * 5000, "bad.py"),
        (b"x = " + b"-" * 100_000 + b"1", "bad.py"),
    ],
)
def test_what_is_not_python_is_2_with_one_line_and_the_other_files_are_read(here, capsys, content, message):
    (here / "bad.py").write_bytes(content)
    (here / "good.py").write_text(LINE)
    code, out, err = run(capsys, "--explain", "bad.py", "good.py")
    assert code == 2
    assert err.startswith(f"keepleft: {message}")
    assert len(err.splitlines()) == 1
    assert "good.py:1:11: softmax-axis" in out
    assert "1 hint in 1 file" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["modle.py"], "there is no file modle.py: did you mean model.py?"),
        (["model.py:build"], "--explain reads whole files: give model.py without :build"),
        (["package.model:build"], "--explain reads whole files: give package/model.py without :build"),
        (["empty"], "there is no Python file in the folder empty: give another, or name a file"),
        ([], "--explain needs Python files or folders, as in keepleft audit --explain my/model.py"),
        (["model.py", "--budget", "quick"], "--budget is for an audit that runs the model"),
        (["model.py", "--with", "transformers"], "--with is for an audit that runs the model"),
    ],
)
def test_what_cannot_be_explained_is_2_and_one_line(here, capsys, arguments, message):
    (here / "model.py").write_text(LINE)
    (here / "empty").mkdir()
    code, out, err = run(capsys, "--explain", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"keepleft: {message}")
    assert len(err.splitlines()) == 1


def test_a_file_that_is_too_large_is_not_read(here, capsys):
    with open("big.py", "wb") as file:
        file.truncate(MAX_SOURCE_BYTES + 1)
    code, _, err = run(capsys, "--explain", "big.py")
    assert code == 2
    assert "big.py has" in err


@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1", "utf-8"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_encodings_and_line_ends(here, encoding, newline):
    text = f"# coding: {encoding}\nname = 'naïve'\n'é'; {LINE}  # \x0c\n"
    Path("model.py").write_bytes(text.replace("\n", newline).encode(encoding))
    (hint,) = find_hints(Path("model.py"))
    assert (hint.line, hint.column, hint.rule) == (3, 16, "softmax-axis")


def test_escape_sequences_of_a_file_do_not_reach_the_terminal(here, capsys):
    Path("model.py").write_text(f"{LINE}  # \x1b[2J", encoding="utf-8")
    _, out, _ = run(capsys, "--explain", "model.py")
    assert "\x1b" not in out
    assert "[2J" in out
