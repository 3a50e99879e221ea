"""A model that is served, with all that routes need of it: the engine in its thread, the tokenizers, the
limits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from keepleft import __version__
from keepleft.models.design import ClassificationHead
from keepleft.nn.position import LearnedPositions, Rotary
from keepleft.pipelines.loading import LoadedModel
from keepleft.pipelines.predictor import Predictor
from keepleft.pipelines.text_generation import GenerativeModel, TextGenerator
from keepleft.serving.engine.request import Engine, Events
from keepleft.serving.engine.thread import EngineThread, deliver
from keepleft.serving.explorer.html_file import PAGE_FOLDER
from keepleft.serving.http.dynamic_batcher import DynamicBatcher
from keepleft.serving.http.errors import APIError
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.sandbox.client import Sandbox

Result = TypeVar("Result")


class ExplorerProtocol(Protocol):
    """What answers the page's questions, in the engine's thread."""

    def ask(self, question: str, params: Any) -> Any: ...


class Service:
    """`name` is what callers call the model; `max_model_len` the tokens of prompt and text together, at most
    what the model can.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        engine: Engine,
        *,
        name: str,
        limits: Limits = Limits(),
        max_model_len: int | None = None,  # noqa: B008
        explorer: ExplorerProtocol | None = None,
        page_folder: Path = PAGE_FOLDER,
    ) -> None:
        self.model, self.tokenizer, source_tokenizer = loaded
        self.name = name
        self.limits = limits
        self.explorer = explorer
        self.page_folder = page_folder
        self.generator, self.predictor = (
            TextGenerator(cast(GenerativeModel, self.model), self.tokenizer, source_tokenizer),
            Predictor(self.model, self.tokenizer, source_tokenizer),
        )
        self.max_model_len = resolve_max_model_len(self.model.design, max_model_len, limits)
        self.created = int(time.time())
        self.engine_thread = EngineThread(
            engine, max_requests=limits.requests, max_tasks=limits.tasks, on_events=deliver_to_loops
        )
        self.grammar_sandbox, self.template_sandbox = (
            Sandbox(self.tokenizer, max_waiting=4),
            Sandbox(self.tokenizer, max_waiting=limits.requests),
        )
        self.thread_pool = ThreadPoolExecutor(16, "keepleft preparing")
        self.embedding_batcher = DynamicBatcher(self.engine_thread, self.predictor.embed, limits)
        self.classification_batcher = DynamicBatcher(self.engine_thread, self.predictor.probabilities, limits)
        self.draining = False

    @property
    def is_encoder_decoder(self) -> bool:
        return self.generator.is_encoder_decoder

    @property
    def family(self) -> str:
        return self.model.design.kind

    @property
    def chat_template(self) -> str | None:
        """How a chat becomes one text; None: the model was not made for chats."""
        value = self.model.notes.get("chat_template")
        return value if isinstance(value, str) and self.family == "decoder" else None

    @cached_property
    def special_tokenizer(self) -> Any:
        """The tokenizer, for texts in which special tokens are written out."""
        return copy_tokenizer(self.tokenizer, encode_special_tokens=False)

    @cached_property
    def plain_tokenizer(self) -> Any:
        """The tokenizer, for texts in which they are nothing but text."""
        return copy_tokenizer(self.tokenizer, encode_special_tokens=True)

    @property
    def tasks(self) -> list[str]:
        """What it can be asked for."""
        head = self.model.design.head
        out = ["embeddings", "attention"]
        if self.model.design.decoder is not None and not isinstance(head, ClassificationHead):
            out += [
                "completions",
                "score",
                *(["translate"] if self.is_encoder_decoder else []),
                *(["chat"] if self.chat_template else []),
            ]
        return sorted([*out, *(["classify"] if isinstance(head, ClassificationHead) else [])])

    @property
    def fingerprint(self) -> str:
        return f"keepleft-{__version__}"

    @property
    def status(self) -> str:
        if self.draining:
            return "draining"
        return "ready" if self.engine_thread.thread.is_alive() else "failed"

    def check_model(self, model: str | None) -> str:
        """The model that a request names, if it is this one."""
        if model is not None and model != self.name:
            raise APIError(
                404,
                f"there is no model {model[:100]!r} here: it is called {self.name!r}",
                param="model",
                code="model_not_found",
            )
        return self.name

    def require_task(self, task: str) -> None:
        if task not in self.tasks:
            raise APIError(
                400,
                f"this model is no model for {task}: it is for {', '.join(self.tasks)}",
                param="model",
                code="model_not_suited",
            )

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Something that takes its time and does not touch the model, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.thread_pool, work)

    async def in_engine_thread(self, work: Callable[[], Result]) -> Result:
        """Something done with the model between two steps of the engine; given up where nobody waits for it
        any more.
        """
        return await asyncio.wrap_future(self.engine_thread.run_between_steps(work))

    def warm(self) -> None:
        """What the first chat would have to wait for. Takes its time: call it in a thread."""
        if self.chat_template is not None and self.special_tokenizer is not None:
            self.template_sandbox.warm()

    def drain(self, seconds: float) -> bool:
        """No more requests; those on their way may end, for so long.

        It takes as long as that, so call it from a thread.
        """
        self.draining = True
        try:
            return self.engine_thread.drain(seconds)
        finally:
            self.grammar_sandbox.close()
            self.template_sandbox.close()
            self.thread_pool.shutdown(wait=False, cancel_futures=True)

    def abort_all(self) -> None:
        """Whatever is still on its way is given up."""
        for handle in list(self.engine_thread.in_flight):
            self.engine_thread.cancel(handle)


def resolve_max_model_len(design: Any, requested: int | None, limits: Limits) -> int:
    """The most tokens of prompt and text together: learned tables have an end, and beyond what it was trained
    on it babbles.
    """
    model_length = design.position.length if isinstance(design.position, LearnedPositions | Rotary) else None
    if requested is not None and requested < 1:
        raise ValueError(f"max_model_len is {requested}: it must be at least 1")
    if requested is not None and design.max_positions is not None and requested > design.max_positions:
        raise ValueError(
            f"max_model_len is {requested}, and the model has learned {design.max_positions} positions: give at most as many"
        )
    return requested or model_length or limits.context


def copy_tokenizer(tokenizer: Any, *, encode_special_tokens: bool) -> Any:
    from tokenizers import Tokenizer

    out = Tokenizer.from_str(tokenizer.to_str())
    out.encode_special_tokens = encode_special_tokens
    return out


def deliver_to_loops(events: Events) -> None:
    """What a step has to tell, to the event loops of those who wait for it: each is woken once."""
    events_by_loop: dict[Any, Events] = {}
    for handle, event in events:
        events_by_loop.setdefault(getattr(handle.on_event, "loop", None), []).append((handle, event))
    for loop, loop_events in events_by_loop.items():
        if loop is None:
            deliver(loop_events)
            continue
        try:
            loop.call_soon_threadsafe(deliver, loop_events)
        except RuntimeError:  # the loop is closed: nobody waits there any more
            continue
