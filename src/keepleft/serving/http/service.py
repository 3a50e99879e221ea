"""A model that is served, with all that routes need of it: the engine in its thread, the tokenizers, the limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from keepleft import __version__
from keepleft.models.design import Classes
from keepleft.nn.position import Learned, Rotary
from keepleft.runs.judging import Judge
from keepleft.runs.opened import Opened
from keepleft.runs.using import Voice
from keepleft.serving.asks import Engine, Heard, Ticket
from keepleft.serving.explorer.bundle import PAGE
from keepleft.serving.http.aside import Aside
from keepleft.serving.http.errors import RefusedError
from keepleft.serving.http.gathering import Gathered
from keepleft.serving.http.limits import Limits
from keepleft.serving.running import Running

Result = TypeVar("Result")


class Explorer(Protocol):
    """What answers the page's questions, in the engine's thread."""

    def ask(self, question: str, given: Any) -> Any: ...


class Service:
    """`name` is what callers call the model; `reach` the tokens of prompt and text together, at most what the model can."""

    def __init__(self, opened: Opened, engine: Engine, *, name: str, limits: Limits = Limits(), reach: int | None = None,  # noqa: B008
                 explorer: Explorer | None = None, page: Path = PAGE) -> None:
        self.model, self.tokenizer, source = opened
        self.name, self.limits, self.explorer, self.page = name, limits, explorer, page
        self.voice, self.judge = Voice(self.model, self.tokenizer, source), Judge(self.model, self.tokenizer, source)
        self.reach = reached(self.model.design, reach, limits)
        self.created = int(time.time())
        self.running = Running(engine, most=limits.requests, errands=limits.errands, deliver=delivered)
        self.rules, self.templates = Aside(self.tokenizer, most=4), Aside(self.tokenizer, most=limits.requests)
        self.threads = ThreadPoolExecutor(16, "keepleft preparing")
        self.vectors = Gathered(self.running, self.judge.vectors, limits)
        self.chances = Gathered(self.running, self.judge.chances, limits)
        self.draining = False

    @property
    def pair(self) -> bool:
        return self.voice.pair

    @property
    def family(self) -> str:
        if self.model.design.decoder is None:
            return "encoder"
        return "encoder-decoder" if self.pair else "decoder"

    @property
    def template(self) -> str | None:
        """How a chat becomes one text; None: the model was not made for chats."""
        found = self.model.notes.get("chat_template")
        return found if isinstance(found, str) and self.family == "decoder" else None

    @cached_property
    def marked(self) -> Any:
        """The tokenizer, for texts in which special tokens are written out."""
        return copied(self.tokenizer, plain=False)

    @cached_property
    def plain(self) -> Any:
        """The tokenizer, for texts in which they are nothing but text."""
        return copied(self.tokenizer, plain=True)

    @property
    def tasks(self) -> list[str]:
        """What it can be asked for."""
        head = self.model.design.head
        out = ["embeddings", "attention"]
        if self.model.design.decoder is not None and not isinstance(head, Classes):
            out += ["completions", "score", *(["translate"] if self.pair else []), *(["chat"] if self.template else [])]
        return sorted([*out, *(["classify"] if isinstance(head, Classes) else [])])

    @property
    def fingerprint(self) -> str:
        return f"keepleft-{__version__}"

    @property
    def status(self) -> str:
        if self.draining:
            return "draining"
        return "ready" if self.running.thread.is_alive() else "failed"

    def named(self, model: str | None) -> str:
        """The model that a request names, if it is this one."""
        if model is not None and model != self.name:
            raise RefusedError(404, f"there is no model {model[:100]!r} here: it is called {self.name!r}", param="model",
                               code="model_not_found")
        return self.name

    def can(self, task: str) -> None:
        if task not in self.tasks:
            raise RefusedError(400, f"this model is no model for {task}: it is for {', '.join(self.tasks)}", param="model",
                               code="model_not_suited")

    async def apart(self, work: Callable[[], Result]) -> Result:
        """Something that takes its time and does not touch the model, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    async def errand(self, work: Callable[[], Result]) -> Result:
        """Something done with the model between two steps of the engine; given up where nobody waits for it any more."""
        return await asyncio.wrap_future(self.running.errand(work))

    def warm(self) -> None:
        """What the first chat would have to wait for. Takes its time: call it in a thread."""
        if self.template is not None and self.marked is not None:
            self.templates.warm()

    def drain(self, seconds: float) -> bool:
        """No more requests; those on their way may end, for so long. It takes as long as that, so call it from a thread."""
        self.draining = True
        try:
            return self.running.drain(seconds)
        finally:
            self.rules.close()
            self.templates.close()
            self.threads.shutdown(wait=False, cancel_futures=True)

    def hurry(self) -> None:
        """Whatever is still on its way is given up."""
        for ticket in list(self.running.open):
            self.running.cancel(ticket)


def reached(design: Any, said: int | None, limits: Limits) -> int:
    """The most tokens of prompt and text together: learned tables have an end, and beyond what it was trained on it babbles."""
    own = design.position.length if isinstance(design.position, Learned | Rotary) else None
    if said is not None and said < 1:
        raise ValueError(f"max_model_len is {said}: it must be at least 1")
    if said is not None and design.longest is not None and said > design.longest:
        raise ValueError(f"max_model_len is {said}, and the model has learned {design.longest} positions: give at most as many")
    return said or own or limits.context


def copied(tokenizer: Any, *, plain: bool) -> Any:
    from tokenizers import Tokenizer

    out = Tokenizer.from_str(tokenizer.to_str())
    out.encode_special_tokens = plain
    return out


def delivered(heard: Heard) -> None:
    """What a step has to tell, to the event loops of those who wait for it: each is woken once."""
    loops: dict[Any, Heard] = {}
    for ticket, event in heard:
        loops.setdefault(getattr(ticket.hear, "loop", None), []).append((ticket, event))
    for loop, some in loops.items():
        if loop is None:
            _handed(some)
            continue
        try:
            loop.call_soon_threadsafe(_handed, some)
        except RuntimeError:  # the loop is closed: nobody waits there any more
            continue


def _handed(heard: list[tuple[Ticket, Any]]) -> None:
    for ticket, event in heard:
        ticket.hear(event)
