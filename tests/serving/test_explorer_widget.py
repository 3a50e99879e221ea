"""The page in a notebook: each message gets its answer, and whatever goes wrong is an answer too."""

from __future__ import annotations

import subprocess
import sys

import pytest

import keepleft as kl
from keepleft.serving.explorer import html_file
from serving.tiny_explorers import SOURCE, TEXT, ask, make_explorer, make_model, tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def page(tmp_path, monkeypatch):
    (tmp_path / "explorer.js").write_text("export default { render() {} };")
    (tmp_path / "explorer.css").write_text("p { color: red }")
    monkeypatch.setattr(html_file, "PAGE_FOLDER", tmp_path)


@pytest.fixture
def widget(page):
    pytest.importorskip("anywidget")
    out = kl.explore(make_model("decoder"), tokenizer(), text=TEXT, name="mine")
    out.sent = []
    out.send = out.sent.append
    yield out
    out.close()


def test_the_built_page_is_what_the_notebook_loads(widget):
    assert widget._esm == "export default { render() {} };"
    assert widget._css == "p { color: red }"
    assert {"_esm", "_css"} <= set(widget.keys)


def test_a_question_is_answered_under_its_number(widget):
    widget._handle_custom_msg({"id": "a-1", "question": "model_info", "params": {}}, [])
    widget._handle_custom_msg(
        {"id": "a-2", "question": "next_token", "params": {"text": TEXT, "tokens": []}}, []
    )
    assert [reply["id"] for reply in widget.sent] == ["a-1", "a-2"]
    assert widget.sent[0]["answer"]["name"] == "mine"
    assert widget.sent[0]["answer"]["example"] == {"text": TEXT}
    assert widget.sent[1]["answer"] == ask(make_explorer("decoder"), "next_token", text=TEXT, tokens=[])


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (
            {"question": "model_inof", "params": {}},
            {"message": "there is no question 'model_inof': did you mean model_info?"},
        ),
        (
            {"question": "head_stats", "params": {"key": "x", "name": "decoder.self", "layer": 0}},
            {"message": "the text 'x' is no longer kept: ask for its attention again", "code": "expired"},
        ),
        ({}, {"message": "there is no question '': there are"}),
    ],
)
def test_an_error_is_an_answer(widget, content, error):
    widget._handle_custom_msg({"id": 5, **content}, [])
    (reply,) = widget.sent
    assert reply["id"] == 5
    assert reply["error"]["message"].startswith(error["message"])
    assert reply["error"].get("code") == error.get("code")


def test_what_is_no_question_is_passed_over(widget):
    for content in ("text", {"question": "model_info"}, None, 3):
        widget._handle_custom_msg(content, [])
    assert widget.sent == []


def test_a_bug_is_an_answer_too(widget, monkeypatch):
    monkeypatch.setattr(type(widget.explorer), "ask", lambda *given: 1 / 0)
    widget._handle_custom_msg({"id": 1, "question": "model_info", "params": {}}, [])
    assert widget.sent == [{"id": 1, "error": {"message": "division by zero"}}]


def test_a_pair_begins_with_its_source(page):
    pytest.importorskip("anywidget")
    out = kl.explore(make_model("encoder-decoder"), tokenizer(), source=SOURCE)
    assert out.explorer.example == {"text": "", "source": SOURCE}
    out.close()


def test_without_the_page_it_is_said_what_is_missing(tmp_path, monkeypatch):
    pytest.importorskip("anywidget")
    monkeypatch.setattr(html_file, "PAGE_FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"explorer\.js, a part of the explorer's page, is missing"):
        kl.explore(make_model("decoder"), tokenizer())


def test_without_anywidget_it_is_said_how_to_get_it():
    code = """
import sys
sys.modules["anywidget"] = None
import keepleft as kl
try:
    kl.explore(None, None)
except ImportError as error:
    print(error)
assert "torch" not in sys.modules
"""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.stdout == "the explorer in a notebook needs anywidget: pip install 'keepleft[notebook]'\n", (
        ran.stderr
    )
