"""The static page: what it asks is in the snapshot, it stays small, and no token escapes from its data."""

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
from serving.tiny_explorers import FAMILIES, SOURCE, TEXT, example_texts, make_explorer, make_model, tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
SCRIPT = 'const end = "</script>", odd = "<!--", regex = /<\\/SCRIPT/; export default { render() {} };\n'
STYLE = "p::before { content: '</style>' } body { color: red }\n"
EXAMPLES = Path(__file__).resolve().parents[2] / "web" / "src" / "views" / "masks" / "examples.ts"


@pytest.fixture(autouse=True)
def built(tmp_path, monkeypatch):
    """A small page to write snapshots into."""
    folder = tmp_path / "page"
    folder.mkdir()
    (folder / "explorer.js").write_text(SCRIPT)
    (folder / "explorer.css").write_text(STYLE)
    monkeypatch.setattr(html_file, "PAGE_FOLDER", folder)
    real = audit.audit
    monkeypatch.setattr(audit, "audit", lambda model, **options: real(model, checks=["batch"], **options))
    return folder


class Elements(HTMLParser):
    """The elements of a page with their text, as a browser parses them."""

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


def params_of(entries, question: str) -> list[dict]:
    return [entry["params"] for entry in entries if entry["question"] == question]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_page_asks_first_is_there(family):
    explorer = make_explorer(family, name="mine")
    entries = build_snapshot(explorer, **example_texts(family))
    answers = {
        entry["question"] + json.dumps(entry["params"], sort_keys=True): entry["answer"] for entry in entries
    }
    assert len(answers) == len(entries)
    ask = lambda question, **params: answers[question + json.dumps(params, sort_keys=True)]
    model_info = ask("model_info")
    attention_answer = ask("attention", **model_info["example"])
    assert model_info["example"] == example_texts(family)
    for attention in attention_answer["attentions"]:
        for layer in range(attention["layers"]):
            layer_params = dict(key=attention_answer["key"], name=attention["name"], layer=layer)
            assert len(ask("head_stats", **layer_params)["heads"]) == attention["heads"]
            heads = [
                "mean",
                *range(attention["heads"]),
                *(["rollout"] if attention["kind"] != "cross" else []),
            ]
            for head in heads:
                map_params = {**layer_params, "head": head}
                assert ask("tile", **map_params, row=0, column=0, size=256)["rows"] == attention["rows"]
                if head != "rollout":
                    ask("overview", **map_params, size=64)
    for expression in EXAMPLE_MASKS:
        ask("mask", expression=expression, length=16, padding={"left": 0, "right": 0}, packing=[])
    assert ask("audit", wait=False)["state"] == "done"
    if family == "encoder":
        assert not params_of(entries, "next_token")
        return
    prompt_texts = (
        {**example_texts(family), "text": ""} if family == "encoder-decoder" else example_texts(family)
    )
    ask("beam", **prompt_texts, num_beams=4, max_new_tokens=24, length_penalty=1, early_stopping=False)
    ask("unmasked", **example_texts(family))
    ask("vocabulary")
    greedy = explorer.ask(
        "continue_text", {**prompt_texts, "tokens": [], "options": {"do_sample": False}, "max_new_tokens": 23}
    )
    new_ids = [token["id"] for token in greedy["tokens"]]
    for n in range(len(new_ids) + 1):
        ask("next_token", **prompt_texts, tokens=new_ids[:n], unmasked=False)
        if n and family == "encoder-decoder":
            ask("alignment", source=SOURCE, tokens=new_ids[:n], layer="mean", head="mean")


def test_the_examples_of_masks_are_those_of_the_page():
    if not EXAMPLES.exists():
        pytest.skip("the page's own code is not here")
    assert sorted(re.findall(r'^  \["([^"]+)"', EXAMPLES.read_text("utf-8"), re.M)) == sorted(EXAMPLE_MASKS)


def test_a_few_views_alone():
    entries = build_snapshot(make_explorer("decoder"), TEXT, views=["masks"])
    assert {entry["question"] for entry in entries} == {"model_info", "mask"}
    assert entries[0]["answer"]["views"] == ["masks"]
    with pytest.raises(
        ValueError, match="there is no view 'training' of this model: there are attention, decoding"
    ):
        build_snapshot(make_explorer("decoder"), TEXT, views=["training"])


def test_training_is_recorded_as_it_stands(tmp_path):
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / "compare.json").write_text('{"ok": true}')
    entries = build_snapshot(
        make_explorer("decoder", runs=tmp_path / "runs", compare=tmp_path), TEXT, views=["training"]
    )
    answers = {entry["question"]: entry["answer"] for entry in entries}
    assert answers["run"]["lines"] == [{"step": 1, "loss": 2.0}]
    assert answers["run"]["finished"]  # a static page polls for no more
    assert answers["compare"] == {"ok": True}


@pytest.mark.parametrize("max_bytes", [30_000, 120_000])
def test_a_long_text_stays_within_its_room_and_what_matters_comes_first(max_bytes):
    explorer = make_explorer("decoder")
    entries = build_snapshot(
        explorer, "the sea is calm " * 80, views=["attention", "masks"], max_bytes=max_bytes
    )
    size = len(json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode())
    assert max_bytes / 4 < size <= max_bytes + len(entries) + 1
    assert [entry["question"] for entry in entries[:3]] == ["model_info", "attention", "head_stats"]
    assert len(params_of(entries, "mask")) == len(EXAMPLE_MASKS)
    assert not [params for params in params_of(entries, "tile") if params["head"] != "mean"]


def test_what_is_wrong_with_the_text_is_said():
    with pytest.raises(ValueError, match="source is 'x', and this model reads none"):
        build_snapshot(make_explorer("decoder"), TEXT, "x")
    with pytest.raises(ValueError, match="writes it from a source: give source, too"):
        build_snapshot(make_explorer("encoder-decoder"), TEXT)
    with pytest.raises(ValueError, match="text has 200,001 characters"):
        build_snapshot(make_explorer("decoder"), "a" * 200_001)


NASTY = "</script><script>alert(1)</script> <!-- ]]> </SCRIPT  <b onmouseover=x> & </style> </sea"


def test_no_token_gets_out_of_its_data(tmp_path):
    model = make_model("decoder")
    entries = build_snapshot(
        Explorer(model, tokenizer(), name="</title><script>alert(2)</script>"),
        NASTY,
        views=["attention", "decoding"],
    )
    path = write_html(tmp_path / "new" / "page.html", entries, title="</title><script>alert(2)</script>")
    text = path.read_text("utf-8")
    assert len(re.findall("</script", text, re.I)) == len(re.findall("<script", text, re.I)) == 2
    assert "<!--" not in text
    elements = Elements(text)
    (data, answers), (_, script) = elements.all("script")
    assert data == {"type": "application/json", "id": "keepleft-snapshot"}
    assert "<" not in answers
    assert json.loads(answers) == json.loads(json.dumps(entries))
    entry = next(entry for entry in json.loads(answers) if entry["question"] == "attention")
    tokens = entry["answer"]["tokens"]["text"]
    assert "".join(token["text"] for token in tokens) == NASTY
    assert elements.all("title") == [({}, "</title><script>alert(2)</script>")]
    assert [attrs.get("id") for attrs, _ in elements.all("div")] == ["keepleft"]
    assert "alert" not in script


def test_only_our_own_script_and_style_may_run():
    elements = Elements(html_page([]))
    ((_, style),) = elements.all("style")
    (_, answers), (kind, script) = elements.all("script")
    (policy,) = [
        attrs["content"]
        for attrs, _ in elements.all("meta")
        if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    hashed = lambda text: f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    assert (directives["default-src"], directives["script-src"], directives["style-src"]) == (
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
        html_page([{"question": "x", "params": {}, "answer": {"text": text}}], title=text)
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
    kl.save(make_model("decoder"), tokenizer(), folder)
    return str(folder)


def test_the_command_writes_the_page(directory, tmp_path, capsys):
    file = tmp_path / "deep" / "page.html"
    assert main(["show", directory, TEXT, "--html", str(file), "--views", "attention, masks"]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"{re.escape(str(file))}: a page of [\d.]+ MB; open it in a browser, .*\n", out)
    assert err == ""
    (_, answers), _ = Elements(file.read_text("utf-8")).all("script")
    model_info = json.loads(answers)[0]["answer"]
    assert model_info["name"] == "mine"
    assert model_info["example"] == {"text": TEXT}
    assert model_info["views"] == ["attention", "masks"]


@pytest.mark.parametrize(
    ("arguments", "message"),
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
def test_wrong_use_is_told_in_a_line(directory, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["show", directory, *(given.format(folder=tmp_path) for given in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "p.html").exists()


def test_without_a_model_there_is_nothing_to_show(capsys):
    assert main(["show", "--html", "p.html"]) == 2
    assert "show needs MODEL" in capsys.readouterr().err


def test_room_is_bounded_by_default():
    assert snapshot.MAX_BYTES <= 20_000_000
