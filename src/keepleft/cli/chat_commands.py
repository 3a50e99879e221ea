"""The commands of a chat: /help, /system, /reset … One row each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from keepleft.decoding.generation_config import GenerationConfig

if TYPE_CHECKING:
    from keepleft.pipelines.chat import ChatSession

MAX_SAVED_BYTES = 64 << 20  # of a file that /load reads
UNSET = "none"


@dataclass(frozen=True)
class ChatCommand:
    """`run` takes the session and what follows the name, and returns what to print; None: the chat itself
    does it.
    """

    arguments: str
    help: str
    run: Callable[[ChatSession, str], str] | None


def find_chat_command(line: str) -> tuple[str, ChatCommand, str]:
    """The name, the command and the argument of a line that begins with a slash.

    Raises ValueError for an unknown command.
    """
    name, _, argument = line.partition(" ")
    command = CHAT_COMMANDS.get(name)
    if command is None:
        matches = get_close_matches(name, CHAT_COMMANDS, 1)
        raise ValueError(
            f"there is no command {name}: "
            + (f"did you mean {matches[0]}?" if matches else "/help lists them")
            + " (a message that begins with a slash: put a space before it)"
        )
    return name, command, argument.strip()


def _help(session: ChatSession, argument: str) -> str:
    width = max(len(f"{name} {command.arguments}") for name, command in CHAT_COMMANDS.items())
    rows = [
        f"{f'{name} {command.arguments}':<{width}}  {command.help}" for name, command in CHAT_COMMANDS.items()
    ]
    keys = [
        "A backslash at the end of a line, or three quotes around several lines, make one message of them.",
        "Ctrl-C stops an answer. Ctrl-D ends the chat.",
    ]
    return "\n".join([*rows, *keys])


def _system(session: ChatSession, argument: str) -> str:
    if argument:
        session.system = None if argument == UNSET else argument
    if session.system is None:
        return "there is no system message: the model's own is used, if it has one"
    return f"system: {session.system}"


def _reset(session: ChatSession, argument: str) -> str:
    session.reset()
    return "the conversation is forgotten"


def _undo(session: ChatSession, argument: str) -> str:
    text = session.undo()
    return "there is nothing to take back" if text is None else f"taken back: {text}"


def _save(session: ChatSession, argument: str) -> str:
    from keepleft.disk.atomic import write_text

    path = _require_path(argument, "/save")
    system = [] if session.system is None else [{"role": "system", "content": session.system}]
    record = {"messages": [*system, *session.messages]}
    write_text(path, json.dumps(record, ensure_ascii=False, indent=1) + "\n")
    return f"{len(session.messages)} messages are in {path}"


def _load(session: ChatSession, argument: str) -> str:
    from keepleft.disk.regular_file import read_regular_file

    path = _require_path(argument, "/load")
    session.load(parse_messages(read_regular_file(path, max_bytes=MAX_SAVED_BYTES), path))
    return f"{len(session.messages)} messages are loaded"


def parse_messages(data: bytes, path: Path) -> list[dict[str, str]]:
    """The messages of a file that /save has written, or of any list of messages in JSON."""
    try:
        record = json.loads(data)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}): /load takes what /save has written") from error
    messages = record.get("messages") if isinstance(record, dict) else record
    if not isinstance(messages, list):
        raise ValueError(f"{path} has no list of messages: /load takes what /save has written")
    return messages


def _require_path(argument: str, command: str) -> Path:
    if not argument:
        raise ValueError(f"{command} needs a file: {command} chat.json")
    return Path(argument).expanduser()


def _set(session: ChatSession, argument: str) -> str:
    name, _, text = argument.replace("=", " ", 1).partition(" ")
    name = name.replace("-", "_")
    if name:
        GenerationConfig().but(**{name: None})  # raises ValueError for an unknown name
        if text.strip():
            session.options = set_option(session.options, name, text.strip())
        return f"{name} is {getattr(session.options, name)}"
    set_options = {
        field.name: getattr(session.options, field.name)
        for field in fields(GenerationConfig)
        if getattr(session.options, field.name) is not None
    }
    return "\n".join(f"{name} is {value}" for name, value in set_options.items())


def set_option(options: GenerationConfig, name: str, text: str) -> GenerationConfig:
    """The options with one of them read from text: JSON, or a string as it is. Raises ValueError."""
    value: Any
    try:
        value = None if text == UNSET else json.loads(text)
    except ValueError:
        value = text
    hint = get_type_hints(GenerationConfig)[name]
    if hint == bool | None and not isinstance(value, bool | None):
        raise ValueError(f"{name} is {text!r}: it must be true or false")
    if hint == str | None and not isinstance(value, str | None):
        value = text
    if name == "temperature" and value == 0:
        raise ValueError("temperature is 0: it must be above 0; /set do_sample false is greedy")
    return replace(options, **{name: value})


def _tokens(session: ChatSession, argument: str) -> str:
    limit = session.context_length
    num_tokens = len(session.prompt_tokens()) if session.messages else 0
    lines = [f"conversation: {num_tokens} tokens" + ("" if limit is None else f" of {limit}")]
    if session.visible_from:
        lines[0] += f"; the first {session.visible_from // 2} turns are no longer seen"
    if (stats := session.stats) is not None:
        lines.append(
            f"last answer: {stats.new_tokens} tokens, after a prompt of {stats.prompt_tokens}, "
            f"{stats.reused_tokens} of them from the KV cache"
        )
    return "\n".join(lines)


CHAT_COMMANDS = {
    "/help": ChatCommand("", "this list", _help),
    "/system": ChatCommand("[TEXT]", "show or change the system message; none: remove it", _system),
    "/reset": ChatCommand("", "forget the conversation", _reset),
    "/undo": ChatCommand("", "take back the last message and its answer", _undo),
    "/retry": ChatCommand("", "answer the last message again", None),
    "/save": ChatCommand("FILE", "save the conversation as JSON", _save),
    "/load": ChatCommand("FILE", "continue a saved conversation", _load),
    "/set": ChatCommand("[NAME VALUE]", "show or change a generation option, as temperature 0.7", _set),
    "/tokens": ChatCommand("", "how long the conversation is, and what was in the KV cache", _tokens),
    "/exit": ChatCommand("", "end the chat", None),
}
