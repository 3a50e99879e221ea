"""One file with the page and its answers: what the page asks is there, it stays small, and no token gets out of its data."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from keepleft.cli import main
from keepleft.serving.explorer import audit, html_file, snapshot
from keepleft.serving.explorer.explorer import Explorer
from keepleft.serving.explorer.html_file import html_page, write_html
from keepleft.serving.explorer.snapshot import EXAMPLE_MASKS, build_snapshot
from serving.tiny_explorers import FAMILIES, SOURCE, TEXT, explorer, model, texts, words

pytestmark = pytest.mark.usefixtures("one_thread")
SCRIPT = 'const end = "</script>", odd = "<!--", regex = /<\\/SCRIPT/; export default { render() {} };\n'
STYLE = "p::before { content: '</style>' } body { color: red }\n"
EXAMPLES = Path(__file__).resolve().parents[2] / "web" / "src" / "views" / "masks" / "examples.ts"


@pytest.fixture(autouse=True)
def built(tmp_path, monkeypatch):
    """A page to put answers into."""
    folder = tmp_path / "page"
    folder.mkdir()
    (folder / "explorer.js").write_text(SCRIPT)
    (folder / "explorer.css").write_text(STYLE)
    monkeypatch.setattr(html_file, "PAGE_FOLDER", folder)
    real = audit.audit
    monkeypatch.setattr(audit, "audit", lambda net, **said: real(net, checks=["batch"], **said))
    return folder


class Elements(HTMLParser):
    """What a browser makes of a file: elements with their text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag):
        self.found.append((f"/{tag}", {}, ""))

    def handle_data(self, data):
        if self.found:
            tag, attrs, text = self.found[-1]
            self.found[-1] = (tag, attrs, text + data)

    def all(self, tag: str) -> list[tuple[dict, str]]:
        return [(attrs, text) for name, attrs, text in self.found if name == tag]


def asked_of(recordings, question: str) -> list[dict]:
    return [one["given"] for one in recordings if one["question"] == question]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_page_asks_first_is_there(family):
    asked = explorer(family, name="mine")
    found = build_snapshot(asked, **texts(family))
    answers = {one["question"] + json.dumps(one["given"], sort_keys=True): one["answer"] for one in found}
    assert len(answers) == len(found)
    ask = lambda question, **given: answers[question + json.dumps(given, sort_keys=True)]
    about = ask("about")
    read = ask("attention", **about["example"])
    assert about["example"] == texts(family)
    for one in read["attentions"]:
        for layer in range(one["layers"]):
            assert (
                len(ask("summary", key=read["key"], name=one["name"], layer=layer)["heads"]) == one["heads"]
            )
            heads = ["mean", *range(one["heads"]), *(["rollout"] if one["kind"] != "cross" else [])]
            for head in heads:
                which = dict(key=read["key"], name=one["name"], layer=layer, head=head)
                assert ask("tile", **which, row=0, column=0, size=256)["rows"] == one["rows"]
                if head != "rollout":
                    ask("overview", **which, size=64)
    for expression in EXAMPLE_MASKS:
        ask("mask", expression=expression, length=16, padding={"left": 0, "right": 0}, packing=[])
    assert ask("leaks", wait=False)["state"] == "done"
    if family == "encoder":
        assert not asked_of(found, "next")
        return
    wanted = {**texts(family), "text": ""} if family == "encoder-decoder" else texts(family)
    ask("beam", **wanted, width=4, limit=24, length_penalty=1, early_stopping=False)
    ask("unmasked", **texts(family))
    ask("vocabulary")
    greedy = asked.ask("write", {**wanted, "tokens": [], "options": {"do_sample": False}, "limit": 23})
    written = [token["id"] for token in greedy["tokens"]]
    for n in range(len(written) + 1):
        ask("next", **wanted, tokens=written[:n], unmasked=False)
        if n and family == "encoder-decoder":
            ask("alignment", source=SOURCE, tokens=written[:n], layer="mean", head="mean")


def test_the_examples_of_masks_are_those_of_the_page():
    if not EXAMPLES.exists():
        pytest.skip("the page's own code is not here")
    assert sorted(re.findall(r'^  \["([^"]+)"', EXAMPLES.read_text("utf-8"), re.M)) == sorted(EXAMPLE_MASKS)


def test_a_few_views_alone():
    found = build_snapshot(explorer("decoder"), TEXT, views=["masks"])
    assert {one["question"] for one in found} == {"about", "mask"}
    assert found[0]["answer"]["views"] == ["masks"]
    with pytest.raises(
        ValueError, match="there is no view 'training' of this model: there are attention, decoding"
    ):
        build_snapshot(explorer("decoder"), TEXT, views=["training"])


def test_training_is_recorded_as_it_stands(tmp_path):
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / "compare.json").write_text('{"ok": true}')
    found = build_snapshot(
        explorer("decoder", runs=tmp_path / "runs", compare=tmp_path), TEXT, views=["training"]
    )
    answers = {one["question"]: one["answer"] for one in found}
    assert answers["run"]["lines"] == [{"step": 1, "loss": 2.0}]
    assert answers["run"]["ended"]  # no more will come to a file
    assert answers["compare"] == {"ok": True}


@pytest.mark.parametrize("most", [30_000, 120_000])
def test_a_long_text_stays_within_its_room_and_what_matters_comes_first(most):
    asked = explorer("decoder")
    found = build_snapshot(asked, "the sea is calm " * 80, views=["attention", "masks"], max_bytes=most)
    size = len(json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode())
    assert most / 4 < size <= most + len(found) + 1
    assert [one["question"] for one in found[:3]] == ["about", "attention", "summary"]
    assert len(asked_of(found, "mask")) == len(EXAMPLE_MASKS)
    assert not [given for given in asked_of(found, "tile") if given["head"] != "mean"]


def test_what_is_wrong_with_the_text_is_said():
    with pytest.raises(ValueError, match="source is 'x', and this model reads none"):
        build_snapshot(explorer("decoder"), TEXT, "x")
    with pytest.raises(ValueError, match="writes it from a source: give source, too"):
        build_snapshot(explorer("encoder-decoder"), TEXT)
    with pytest.raises(ValueError, match="text has 200,001 characters"):
        build_snapshot(explorer("decoder"), "a" * 200_001)


NASTY = "</script><script>alert(1)</script> <!-- ]]> </SCRIPT  <b onmouseover=x> & </style> </sea"


def test_no_token_gets_out_of_its_data(tmp_path):
    net = model("decoder")
    found = build_snapshot(
        Explorer(net, words(), name="</title><script>alert(2)</script>"),
        NASTY,
        views=["attention", "decoding"],
    )
    path = write_html(tmp_path / "new" / "page.html", found, title="</title><script>alert(2)</script>")
    text = path.read_text("utf-8")
    assert len(re.findall("</script", text, re.I)) == len(re.findall("<script", text, re.I)) == 2
    assert "<!--" not in text
    elements = Elements(text)
    (data, answers), (_, script) = elements.all("script")
    assert data == {"type": "application/json", "id": "keepleft-answers"}
    assert "<" not in answers
    assert json.loads(answers) == json.loads(json.dumps(found))
    spelt = next(one for one in json.loads(answers) if one["question"] == "attention")["answer"]["tokens"][
        "text"
    ]
    assert "".join(token["text"] for token in spelt) == NASTY
    assert elements.all("title") == [({}, "</title><script>alert(2)</script>")]
    assert [attrs.get("id") for attrs, _ in elements.all("div")] == ["keepleft"]
    assert "alert" not in script


def test_only_our_own_script_and_style_may_run():
    elements = Elements(html_page([]))
    ((_, style),) = elements.all("style")
    (_, answers), (kind, script) = elements.all("script")
    (rules,) = [
        attrs["content"]
        for attrs, _ in elements.all("meta")
        if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    said = dict(part.strip().split(" ", 1) for part in rules.split(";"))
    hashed = lambda text: f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    assert (said["default-src"], said["script-src"], said["style-src"]) == (
        "'none'",
        hashed(script),
        hashed(style),
    )
    assert kind == {"type": "module"}
    assert answers == "[]"
    assert script.endswith("export default { render() {} };\n")


@given(st.text(max_size=60))
@settings(max_examples=60)
def test_any_text_comes_back_as_it_was(text):
    (_, answers), _ = Elements(
        html_page([{"question": "x", "given": {}, "answer": {"text": text}}], title=text)
    ).all("script")
    assert json.loads(answers)[0]["answer"]["text"] == text


def test_a_page_that_was_not_built_is_told_in_a_line(built, tmp_path, capsys):
    (built / "explorer.css").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"explorer\.css, a part of the explorer's page, is missing: `make page`"
    ):
        write_html(tmp_path / "page.html", [])
    assert not (tmp_path / "page.html").exists()
    assert main(["show", "nowhere/model", "--html", str(tmp_path / "page.html")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "mine" / "model"
    kl.save(model("decoder"), words(), folder)
    return str(folder)


def test_the_command_writes_the_page(directory, tmp_path, capsys):
    file = tmp_path / "deep" / "page.html"
    assert main(["show", directory, TEXT, "--html", str(file), "--views", "attention, masks"]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"{re.escape(str(file))}: [\d,]+ answers, [\d,]+ bytes\n", out)
    assert err == ""
    (_, answers), _ = Elements(file.read_text("utf-8")).all("script")
    about = json.loads(answers)[0]["answer"]
    assert about["name"] == "mine"
    assert about["example"] == {"text": TEXT}
    assert about["views"] == ["attention", "masks"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "say where the page goes: keepleft show MODEL TEXT --html page.html"),
        (["--html", "{folder}"], "is a folder: name a file in it"),
        (["one", "two", "--html", "p.html"], "2 texts were given: one at a time, in quotes"),
        (["--source", "x", "--html", "p.html"], "source is 'x', and this model reads none"),
        (["--views", "decodings", "--html", "p.html"], "there is no view 'decodings' of this model"),
        (["--runs", "nowhere", "--html", "p.html"], "--runs is 'nowhere', and there is no such folder"),
        (["--htm", "p.html"], "there is no option --htm: did you mean --html?"),
    ],
)
def test_wrong_use_is_told_in_a_line(directory, tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert main(["show", directory, *(given.format(folder=tmp_path) for given in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "p.html").exists()


def test_without_a_model_there_is_nothing_to_show(capsys):
    assert main(["show", "--html", "p.html"]) == 2
    assert "say which model" in capsys.readouterr().err


def test_room_is_bounded_by_default():
    assert snapshot.MAX_BYTES <= 20_000_000
