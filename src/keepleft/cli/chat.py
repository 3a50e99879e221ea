"""keepleft chat"""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from keepleft.cli.chat_commands import CHAT_COMMANDS, MAX_SAVED_BYTES, find_chat_command, parse_messages
from keepleft.cli.generate import best_installed
from keepleft.cli.generate_texts import Dtype
from keepleft.cli.message_input import MessageInput, user_state_folder
from keepleft.cli.paths import model_name, model_path
from keepleft.decoding.generation_config import GenerationConfig

if TYPE_CHECKING:
    from keepleft.pipelines.chat import ChatSession

HISTORY_FILE = "chat_history"
DEFAULT_TEMPERATURE = 0.7
DEFAULT_TOP_P = 0.9
# a model must not move the cursor or rename the window of a terminal
CONTROL_CHARACTERS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def chat_with_model(
    inputs: list[str],
    options: GenerationConfig,
    system: str | None = None,
    load: str | None = None,
    no_history: bool = False,
    revision: str | None = None,
    dtype: Dtype = "float32",
    device: str | None = None,
) -> int:
    """Chat with a model that has a chat template, as instruct models have.

    At a terminal, /help lists the commands; from a pipe, each line is a message.

    Args:
        inputs: a model (a folder, a GGUF file, an installed one, a name on the hub)
        system: the system message
        load: continue a conversation that /save has written to this file
        no_history: do not keep what is typed for the next chat's arrow keys
        revision: the branch, tag or commit of a model on the hub; MODEL@REVISION does the same
        dtype: data type of the weights: float32, bfloat16, float16, or int8 on CPUs
        device: cpu or cuda; a GPU is used if there is one
    """
    if len(inputs) > 1:
        raise ValueError(
            f"{len(inputs)} arguments were given: chat takes one model and asks for the messages; "
            f"`keepleft generate {inputs[0]} {inputs[1]!r}` answers one"
        )
    messages = None
    if load is not None:
        from keepleft.disk.regular_file import read_regular_file

        messages = parse_messages(read_regular_file(Path(load), max_bytes=MAX_SAVED_BYTES), Path(load))
    model = inputs[0] if inputs else best_installed()
    history_file = None if no_history else user_state_folder() / HISTORY_FILE
    message_input = MessageInput(sys.stdin, history_file=history_file, completions=list(CHAT_COMMANDS))
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always", UserWarning)
        session = _start_session(model_path(model, revision), system, options, dtype, device)
        if messages is not None:
            session.load(messages)
        if message_input.is_interactive:
            _print_note(f"{model_name(model)}: /help lists the commands, Ctrl-D ends the chat")
        chat_loop = _ChatLoop(session, message_input, caught_warnings)
        try:
            chat_loop.run()
        finally:
            try:
                message_input.close()
            except OSError as error:
                _print_note(f"the history was not saved ({error}): --no-history leaves it out")
    # at a terminal one has seen the error and gone on
    return 2 if chat_loop.num_errors and not message_input.is_interactive else 0


def _start_session(
    path: str, system: str | None, options: GenerationConfig, dtype: Dtype, device: str | None
) -> ChatSession:
    from keepleft.pipelines.chat import ChatSession
    from keepleft.pipelines.text_generation import load_generator

    generator = load_generator(path, dtype=dtype, device=device)
    session = ChatSession(generator.model, generator.tokenizer, system=system, options=options)
    session.options = with_sampling(session.options)
    return session


def with_sampling(options: GenerationConfig) -> GenerationConfig:
    """The options with sampling where neither the user nor the model directory says anything about it."""
    if options.do_sample is not None or options.beam_count > 1 or options.penalty_alpha:
        return options
    options = replace(options, do_sample=True)
    if options.temperature is None and options.top_p is None and options.top_k is None:
        options = replace(options, temperature=DEFAULT_TEMPERATURE, top_p=DEFAULT_TOP_P)
    return options


class _ChatLoop:
    """Reads messages and commands until the end; an error in one does not end the chat."""

    def __init__(
        self,
        session: ChatSession,
        message_input: MessageInput,
        caught_warnings: list[warnings.WarningMessage],
    ) -> None:
        self.session = session
        self.message_input = message_input
        self.caught_warnings = caught_warnings
        self.shown_warnings: set[str] = set()
        self.num_errors = 0

    def run(self) -> None:
        is_interactive = self.message_input.is_interactive
        while True:
            try:
                message = self.message_input.read()
            except KeyboardInterrupt:
                if not is_interactive:
                    raise
                print()
                _print_note("Ctrl-D or /exit ends the chat")
                continue
            if message is None:
                if is_interactive:
                    print()
                return
            if not message.strip():
                continue
            try:
                if message.startswith("/"):
                    if not self._run_command(message):
                        return
                else:
                    self._print_answer(self.session.stream(message.strip()))
            except (ValueError, OSError, ImportError) as error:
                if isinstance(error, BrokenPipeError):
                    raise
                self.num_errors += 1
                _print_note(f"keepleft: {error}")
            self._print_warnings()

    def _run_command(self, line: str) -> bool:
        """Whether the chat goes on."""
        name, command, argument = find_chat_command(line)
        if name == "/exit":
            return False
        if name == "/retry":
            self._print_answer(self.session.retry())
        elif command.run is not None:
            _print_note(command.run(self.session, argument))
        return True

    def _print_answer(self, pieces: Iterator[str]) -> None:
        is_interactive = self.message_input.is_interactive
        last_piece = "\n"
        with _interrupt_flag() as interrupted:
            try:
                for piece in pieces:
                    last_piece = piece
                    text = piece.translate(CONTROL_CHARACTERS) if is_interactive else piece
                    print(text, end="", flush=True)
                    if interrupted:
                        break
            except KeyboardInterrupt:
                if not is_interactive:
                    raise
            finally:
                pieces.close()  # type: ignore[attr-defined]
        if not last_piece.endswith("\n"):
            print()
        if is_interactive:
            print(flush=True)
        self._print_finish()

    def _print_finish(self) -> None:
        stats = self.session.stats
        if stats is None:
            return
        if stats.dropped_turns:
            _print_note(
                f"the conversation outgrew the context of {self.session.context_length} tokens: the model no "
                f"longer sees the oldest turns ({stats.dropped_turns} more)"
            )
        if stats.finish_reason == "length":
            _print_note(f"cut at {stats.new_tokens} tokens: /set max_new_tokens allows more")
        elif stats.finish_reason == "interrupted":
            _print_note("stopped")

    def _print_warnings(self) -> None:
        for message in {str(warning.message) for warning in self.caught_warnings} - self.shown_warnings:
            self.shown_warnings.add(message)
            _print_note(f"note: {message}")
        self.caught_warnings.clear()


@contextmanager
def _interrupt_flag() -> Iterator[list[int]]:
    """Ctrl-C as a list that is empty until then: the token under way is finished, and the KV cache kept.

    A second Ctrl-C raises KeyboardInterrupt at once.
    """
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, previous)


def _print_note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
