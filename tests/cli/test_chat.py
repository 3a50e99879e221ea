"""keepleft chat, at a terminal and from a pipe; and keepleft generate with a chat template."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path

import pytest

import keepleft as kl
from decoding.words import byte_tokens, writer
from keepleft.cli import main
from keepleft.cli.chat import with_sampling
from keepleft.cli.chat_commands import CHAT_COMMANDS, set_option
from keepleft.cli.message_input import MessageInput, user_state_folder

TOKENS = byte_tokens()
LETTERS = sorted(number for word, number in TOKENS.get_vocab().items() if re.fullmatch("[a-z]{2,}", word))
CHAT = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("talker")
    model = writer(TOKENS)
    # letters alone, and never the end
    model.notes |= {"chat_template": CHAT, "generation": {"shortlist": LETTERS, "max_new_tokens": 5}}
    kl.save(model, TOKENS, folder)
    return str(folder)


@pytest.fixture(scope="module")
def loaded(talker):
    return kl.load(talker)


@pytest.fixture(autouse=True)
def state_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def pipe(capsys, monkeypatch, stdin: str, *arguments: str) -> tuple[int, list[str], str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    code = main(["chat", *arguments])
    out, error = capsys.readouterr()
    return code, out.splitlines(), error


# generate ---------------------------------------------------------------------------------------


def test_generate_answers_by_the_chat_template_and_says_so_once(talker, loaded, capsys):
    assert main(["generate", talker, "the sea", "a ship"]) == 0
    out, error = capsys.readouterr()
    assert out.splitlines() == [kl.chat(*loaded, text) for text in ("the sea", "a ship")]
    assert error.count("each text is answered as a message; --raw continues the text instead") == 1
    assert main(["generate", talker, "the sea", "--system", "calm"]) == 0
    assert capsys.readouterr()[0].strip() == kl.chat(*loaded, "the sea", system="calm")


def test_raw_continues_the_text(talker, loaded, capsys):
    assert main(["generate", talker, "the sea", "--raw"]) == 0
    out, error = capsys.readouterr()
    assert out.strip("\n") == kl.generate(*loaded, "the sea")[0]
    assert "chat template" not in error


def test_a_system_message_needs_a_template(talker, tmp_path, capsys):
    assert main(["generate", talker, "x", "--raw", "--system", "calm"]) == 2
    assert "--raw does without: leave one out" in capsys.readouterr()[1]
    kl.save(writer(TOKENS), TOKENS, tmp_path / "plain")
    assert main(["generate", str(tmp_path / "plain"), "x", "--system", "calm"]) == 2
    assert "the model has no chat template" in capsys.readouterr()[1]
    assert main(["generate", str(tmp_path / "plain"), "x", "--max-new-tokens", "2"]) == 0
    assert "chat template" not in capsys.readouterr()[1]


# from a pipe ------------------------------------------------------------------------------------


def test_each_line_of_a_pipe_is_a_message_of_one_conversation(talker, loaded, capsys, monkeypatch):
    code, answers, error = pipe(capsys, monkeypatch, "the sea\n\na ship\n", talker, "--do-sample=false")
    assert code == 0, error
    talk = kl.ChatSession(*loaded)
    assert answers == [talk.answer("the sea"), talk.answer("a ship")]
    assert "> " not in error


def test_several_lines_make_one_message(talker, loaded, capsys, monkeypatch):
    text = 'the\\\nsea\n"""a\nship\n"""\n"""calm"""\n'
    _, answers, _ = pipe(capsys, monkeypatch, text, talker, "--do-sample=false")
    talk = kl.ChatSession(*loaded)
    assert answers == [talk.answer("the\nsea"), talk.answer("a\nship"), talk.answer("calm")]


def test_an_error_in_a_pipe_is_the_exit_status_and_does_not_end_the_chat(talker, capsys, monkeypatch):
    code, answers, error = pipe(capsys, monkeypatch, "/rest\nthe sea\n", talker)
    assert code == 2
    assert len(answers) == 1
    assert "there is no command /rest: did you mean /reset?" in error


def test_the_commands(talker, capsys, monkeypatch, tmp_path):
    saved = tmp_path / "chat.json"
    lines = [
        "/help", "/system", "/system be calm", "/set temperature 0.5", "/set", "/set do_sample maybe",
        "/set tempratur 1", "/set temperature 0", "/undo", "/retry", "one", "/tokens", "/retry",
        f"/save {saved}", "two", "/undo", "/reset", f"/load {saved}", "/load nowhere.json", "/save",
        "/system none", "/exit", "three",
    ]  # fmt: skip
    code, answers, error = pipe(capsys, monkeypatch, "\n".join(lines), talker, "--seed", "1")
    assert code == 2
    assert len(answers) == 3  # one, its retry, two
    for name in CHAT_COMMANDS:
        assert name in error
    for message in (
        "there is no system message",
        "system: be calm",
        "temperature is 0.5",
        "do_sample is 'maybe': it must be true or false",
        "did you mean temperature?",
        "/set do_sample false is greedy",
        "there is nothing to take back",
        "there is no message to answer again",
        "conversation: ",
        "from the KV cache",
        f"2 messages are in {saved}",
        "taken back: two",
        "the conversation is forgotten",
        "2 messages are loaded",
        "nowhere.json",
        "/save needs a file",
    ):
        assert message in error
    record = json.loads(saved.read_text())
    assert [message["role"] for message in record["messages"]] == ["system", "user", "assistant"]
    assert record["messages"][2]["content"] == answers[1]


def test_a_saved_conversation_is_continued(talker, loaded, capsys, monkeypatch, tmp_path):
    saved = tmp_path / "chat.json"
    pipe(capsys, monkeypatch, f"the sea\n/save {saved}\n", talker, "--system", "calm")
    _, answers, _ = pipe(capsys, monkeypatch, "a ship\n", talker, "--load", str(saved), "--do-sample=false")
    messages = json.loads(saved.read_text())["messages"]
    assert answers == [kl.chat(*loaded, [*messages, {"role": "user", "content": "a ship"}])]
    for text, message in [("{", "is no JSON"), ("{}", "no list of messages"), ("[1]", "message 0 is")]:
        saved.write_text(text)
        assert main(["chat", talker, "--load", str(saved)]) == 2
        assert message in capsys.readouterr()[1]


def test_what_a_chat_cannot_do(talker, tmp_path, capsys, monkeypatch):
    kl.save(writer(TOKENS), TOKENS, tmp_path / "plain")
    assert main(["chat", str(tmp_path / "plain")]) == 2
    assert "the model has no chat template" in capsys.readouterr()[1]
    assert main(["chat", talker, "hello"]) == 2
    assert "chat takes one model and asks for the messages" in capsys.readouterr()[1]
    code, _, error = pipe(capsys, monkeypatch, "a\n", talker, "--num-beams", "2")
    assert code == 2
    assert "num_beams is 2, which a chat cannot do" in error


def test_a_chat_samples_unless_somebody_says_otherwise():
    options = kl.GenerationConfig()
    assert with_sampling(options).do_sample
    assert with_sampling(options).temperature == 0.7
    assert with_sampling(options.but(temperature=1.5)).top_p is None
    assert not with_sampling(options.but(do_sample=False)).do_sample


def test_options_are_read_as_json_or_as_text():
    options = kl.GenerationConfig()
    assert set_option(options, "stop_strings", '["a", "b"]').stop_strings == ["a", "b"]
    assert set_option(options, "stop_strings", "a b").stop_strings == "a b"
    assert set_option(options, "regex", "12").regex == "12"
    assert set_option(options.but(top_k=3), "top_k", "none").top_k is None
    with pytest.raises(ValueError, match="top_p is 2: it must be above 0 and at most 1"):
        set_option(options, "top_p", "2")


def test_where_the_history_is(monkeypatch, tmp_path):
    assert user_state_folder() == tmp_path / "state" / "keepleft"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert user_state_folder() == tmp_path / ".local" / "state" / "keepleft"


def test_the_end_of_a_pipe_ends_a_message_too():
    read = lambda text: MessageInput(io.StringIO(text), history_file=None, completions=()).read()
    assert read("a\\") == "a"
    assert read('"""a\nb') == "a\nb"
    assert read("") is None


# at a terminal ----------------------------------------------------------------------------------


@pytest.fixture
def terminal(talker):
    pexpect = pytest.importorskip("pexpect")
    processes = []

    def start(*arguments: str):
        command = ["-W", "error", "-m", "keepleft", "chat", talker, "--threads", "1", *arguments]
        environment = {**os.environ, "TERM": "dumb", "INPUTRC": "/dev/null"}
        process = pexpect.spawn(
            sys.executable, command, timeout=60, encoding="utf-8", env=environment, dimensions=(24, 200)
        )
        processes.append(process)
        process.expect_exact("Ctrl-D ends the chat")
        process.expect_exact("> ")
        return process

    yield start
    for process in processes:
        process.close(force=True)


@pytest.mark.slow
def test_a_chat_at_a_terminal(terminal, loaded, tmp_path):
    import pexpect

    talk = kl.ChatSession(*loaded)
    process = terminal("--do-sample=false")
    process.sendline("the sea")
    process.expect_exact(talk.answer("the sea"))
    process.expect_exact("> ")
    process.sendline("a\\")
    process.expect_exact(". ")
    process.sendline("ship")
    process.expect_exact(talk.answer("a\nship"))
    process.expect_exact("> ")
    process.send("/tok\t")  # completed
    process.sendline("")
    process.expect(r"conversation: \d+ tokens")
    process.expect_exact("> ")
    process.send("half a line")
    process.expect_exact("half a line")
    for _ in range(5):  # readline misses a signal that comes while it reads a character, or draws its prompt
        process.sendintr()  # Ctrl-C at the prompt drops the line
        if process.expect_exact(["Ctrl-D or /exit ends the chat", pexpect.TIMEOUT], timeout=10):
            continue
        if process.expect_exact(["> ", pexpect.TIMEOUT], timeout=10) == 0:
            break
    process.send("\x15")  # Ctrl-U: after several signals readline may still hold the line
    process.sendline("calm")
    process.expect_exact(talk.answer("calm"))
    process.expect_exact("> ")
    process.sendeof()
    process.expect("\n")
    process.wait()
    assert process.exitstatus == 0
    history = tmp_path / "state" / "keepleft" / "chat_history"
    assert history.read_text().splitlines()[-4:] == ["a\\", "ship", "/tokens ", "calm"]
    assert history.stat().st_mode & 0o077 == 0  # nobody else's
    again = terminal("--do-sample=false")
    again.send("\x1b[A")  # arrow up: what was typed last time
    again.sendline("")
    again.expect_exact(kl.ChatSession(*loaded).answer("calm"))
    again.expect_exact("> ")
    again.sendline("/exit")
    again.wait()
    assert again.exitstatus == 0


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_not_the_chat(terminal, tmp_path):
    process = terminal("--max-new-tokens", "100000", "--no-history")
    process.sendline("the sea")
    process.expect(r"[a-z]{40}")  # it streams
    process.sendintr()
    process.expect_exact("stopped")
    process.expect_exact("> ")
    process.sendline("/set max_new_tokens 4")
    process.expect_exact("> ")
    process.sendline("go on")
    process.expect_exact("cut at 4 tokens")
    process.expect_exact("> ")
    process.sendline("/tokens")
    # the KV cache has survived
    process.expect(r"4 tokens, after a prompt of (\d+), (\d+) of them from the KV cache")
    prompt, reused = map(int, process.match.groups())
    assert prompt > 40
    assert reused > 15
    process.sendeof()
    process.wait()
    assert process.exitstatus == 0
    assert not (tmp_path / "state").exists()


def test_control_characters_of_a_model_do_not_reach_a_terminal():
    from keepleft.cli.chat import CONTROL_CHARACTERS

    assert "a\x1b[2Jb\n\tç\x9b".translate(CONTROL_CHARACTERS) == "a\ufffd[2Jb\n\tç\ufffd"
