"""The served model with all that the routes need: the engine in its thread, the tokenizers, the limits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from tokenizers import Tokenizer

from keepleft import __version__
from keepleft.data.chat_template import template_source
from keepleft.data.tokenizer import copy_tokenizer
from keepleft.decoding.grammar import GrammarCompiler
from keepleft.disk.tokenizer_cost import quick_text_length
from keepleft.inference.int8_linear import CompilableInt8Linear, Int8Linear
from keepleft.models.design import ClassificationHead, Design
from keepleft.nn.position import LearnedPositions, Rotary
from keepleft.pipelines.loading import LoadedModel
from keepleft.pipelines.predictor import Predictor
from keepleft.pipelines.text_generation import GenerativeModel, TextGenerator
from keepleft.serving.engine.activity import EngineStatus
from keepleft.serving.engine.request import NOBODY, Engine, Events, ShuttingDownError, Tenant
from keepleft.serving.engine.thread import EngineThread, deliver
from keepleft.serving.explorer.html_file import PAGE_FOLDER
from keepleft.serving.http.connections import ConnectionCounter
from keepleft.serving.http.errors import APIError
from keepleft.serving.http.explorer_process.client import ExplorerProcess
from keepleft.serving.http.explorer_process.tasks import ExplorerProtocol, TaskName, make_tasks, run_task
from keepleft.serving.http.fair_executor import FairExecutor
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.sandbox.client import SandboxPool
from keepleft.serving.http.schemas.responses import HealthStatus
from keepleft.serving.http.text_encoder import TextEncoder

Result = TypeVar("Result")
WorkName = Literal[
    "questions", "audits", "templates", "grammars", "tokenizing", "preparation", "validation", "responses"
]
VALIDATION_THREADS = 2  # bounds the memory that large bodies take while they are parsed
RESPONSE_THREADS = 2  # for large responses; more would only take the interpreter from the event loop
MIN_VALUES_FOR_THREAD = 1 << 12  # a smaller response is built faster than it is handed to a thread
PREPARATION_THREADS = 16  # for tokenizing and other work without the model
SANDBOXES = 2  # processes for grammars, as many for chat templates, and for each slow tokenizer
STATUS_TIMEOUT_SECONDS = 1.0  # for the engine to say what it is doing
MAX_WAITING_GRAMMARS = 16  # grammars of one key that wait to be compiled; more get 429


class Service:
    """`name`: of the model in the API; `max_model_len`: maximum tokens of prompt and output together.

    `pivot`: the language that the model translates to and from, where it knows no pair without it.
    Questions to the `explorer` are answered by `explorer_process`, or without one in a thread here.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        engine: Engine,
        *,
        name: str,
        pivot: str | None = None,
        limits: Limits = Limits(),  # noqa: B008 (it is frozen)
        max_model_len: int | None = None,
        explorer: ExplorerProtocol | None = None,
        explorer_process: ExplorerProcess | None = None,
        page_folder: Path = PAGE_FOLDER,
    ) -> None:
        self.model, self.tokenizer, source_tokenizer = loaded
        self.name = name
        self.pivot = pivot
        self.limits = limits
        self.explorer = explorer
        self.explorer_process = explorer_process
        self.explorer_tasks = make_tasks(self.model, explorer)
        self.explorer_thread = FairExecutor(1, "keepleft explorer", max_waiting=limits.questions)
        self.page_folder = page_folder
        self.generator = TextGenerator(cast(GenerativeModel, self.model), self.tokenizer, source_tokenizer)
        self.predictor = Predictor(self.model, self.tokenizer, source_tokenizer)
        self.max_model_len = resolve_max_model_len(self.model.design, max_model_len, limits)
        self.created = int(time.time())
        self.started_at = time.monotonic()
        self.connections: ConnectionCounter | None = None  # of the server, where it is ours
        self.engine_thread = EngineThread(
            engine, max_requests=limits.requests, max_prompts=limits.texts, on_events=deliver_to_loops
        )
        self.validation = FairExecutor(VALIDATION_THREADS, "keepleft validating")
        self.responses = FairExecutor(RESPONSE_THREADS, "keepleft responding")
        self.preparation = FairExecutor(PREPARATION_THREADS, "keepleft preparing")
        # a pool of its own for each purpose: a template that hangs holds up chats, and nothing else
        self.grammars = FairExecutor(SANDBOXES, "keepleft grammars", max_waiting=MAX_WAITING_GRAMMARS)
        self.templates = FairExecutor(SANDBOXES, "keepleft templates")
        self.grammar_sandboxes = SandboxPool(self.tokenizer, SANDBOXES)
        self.template_sandboxes = SandboxPool(self.tokenizer, SANDBOXES)
        self.tokenizing = FairExecutor(SANDBOXES, "keepleft tokenizing")
        self.encoder = self._make_encoder(self.tokenizer)
        self.input_encoder = (
            self.encoder if source_tokenizer is None else self._make_encoder(source_tokenizer)
        )
        self.draining = False
        self.condition = threading.Condition()
        self.num_answering = 0  # requests that may still submit something to the engine
        self.aborted = False

    def _make_encoder(self, tokenizer: Tokenizer) -> TextEncoder:
        return TextEncoder(
            tokenizer,
            quick_text_length(tokenizer),
            SandboxPool(tokenizer, SANDBOXES),
            self.limits.tokenize_seconds,
        )

    @property
    def is_encoder_decoder(self) -> bool:
        return self.generator.is_encoder_decoder

    @property
    def family(self) -> str:
        return self.model.design.kind

    @property
    def chat_template(self) -> str | None:
        """The Jinja chat template; None for a model without one."""
        return template_source(self.model.notes) if self.family == "decoder" else None

    @cached_property
    def special_encoder(self) -> TextEncoder:
        """Encodes spelled-out special tokens as special tokens."""
        return replace(self.encoder, tokenizer=copy_tokenizer(self.tokenizer, encode_special_tokens=False))

    @cached_property
    def plain_encoder(self) -> TextEncoder:
        """Encodes spelled-out special tokens as plain text."""
        return replace(self.encoder, tokenizer=copy_tokenizer(self.tokenizer, encode_special_tokens=True))

    @cached_property
    def grammar_compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer)

    @property
    def tasks(self) -> list[str]:
        """What the model can do, in the words of GET /v1/models."""
        tasks = ["embeddings", "attention"]
        if isinstance(self.model.design.head, ClassificationHead):
            tasks.append("classify")
        elif self.model.design.decoder is not None:
            tasks += ["completions", "score"]
            if self.is_encoder_decoder:
                tasks.append("translate")
            if self.chat_template:
                tasks.append("chat")
        return sorted(tasks)

    @property
    def fingerprint(self) -> str:
        return f"keepleft-{__version__}"

    @cached_property
    def dtype(self) -> str:
        """The data type of the weights, as --dtype calls it."""
        if any(isinstance(module, Int8Linear | CompilableInt8Linear) for module in self.model.modules()):
            return "int8"
        return str(self.model.token.weight.dtype).removeprefix("torch.")

    @property
    def status(self) -> HealthStatus:
        """What GET /health answers. The engine is not asked: it may never answer."""
        if self.engine_thread.has_failed:
            return "failed"
        if self.engine_thread.seconds_in_step > self.limits.step_seconds:
            return "stalled"
        return "draining" if self.draining else "ready"

    def check_model(self, model: str | None) -> str:
        """The name of the model. Raises APIError if the request names another one."""
        if model is not None and model != self.name:
            raise APIError(
                404,
                f"there is no model {model[:100]!r} here: the model is called {self.name!r}",
                param="model",
                code="model_not_found",
            )
        return self.name

    def require_task(self, task: str) -> None:
        """Raise APIError if the model cannot do this."""
        if task not in self.tasks:
            raise APIError(
                400,
                f"this model cannot do {task}: it is for {', '.join(self.tasks)}",
                param="model",
                code="model_not_suited",
            )

    async def in_thread(
        self, work: Callable[[], Result], tenant: Tenant = NOBODY, texts: Iterable[str] = ()
    ) -> Result:
        """Run slow work that does not use the model in a thread, when the tenant's turn comes.

        `texts`: that it encodes; work that waits for a sandbox to do so does not hold up the rest.
        """
        is_quick = all(
            encoder.is_quick(text) for text in texts for encoder in (self.encoder, self.input_encoder)
        )
        return await (self.preparation if is_quick else self.tokenizing).run(tenant, work)

    async def build_response(
        self, build: Callable[[], Result], num_values: int, tenant: Tenant = NOBODY
    ) -> Result:
        """Build a response or a part of it; in a thread if it has many values (numbers, texts)."""
        if num_values < MIN_VALUES_FOR_THREAD:
            return build()
        return await self.responses.run(tenant, build)

    async def run_beside_engine(self, task: TaskName, params: Mapping[str, Any], key: str) -> bytes:
        """The answer to a question of the explorer, or attention maps, as JSON; `key`: the tenant's."""
        if self.explorer_process is not None:
            return await self.explorer_process.run(task, params, key)
        work = partial(run_task, self.explorer_tasks, task, params)
        return await self.explorer_thread.run(Tenant(key), work)

    async def engine_status(self) -> EngineStatus:
        """What the engine is doing; during a long step, what it was doing when it was last asked."""
        future = asyncio.wrap_future(self.engine_thread.request_status())
        try:
            return await asyncio.wait_for(future, STATUS_TIMEOUT_SECONDS)
        except TimeoutError:
            return self.engine_thread.status

    def work_beside_engine(self) -> dict[WorkName, tuple[int, int]]:
        """How many calls of each kind run, and how many wait."""
        explorer_process = self.explorer_process
        return {
            "questions": (
                self.explorer_thread if explorer_process is None else explorer_process.queue
            ).counts(),
            "audits": (0, 0) if explorer_process is None else explorer_process.audit_queue.counts(),
            "templates": self.templates.counts(),
            "grammars": self.grammars.counts(),
            "tokenizing": self.tokenizing.counts(),
            "preparation": self.preparation.counts(),
            "validation": self.validation.counts(),
            "responses": self.responses.counts(),
        }

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A request that is prepared and answered: until then, `drain` does not close the engine."""
        with self.condition:
            self.num_answering += 1
        try:
            yield
        finally:
            with self.condition:
                self.num_answering -= 1
                self.condition.notify_all()

    def warm(self) -> None:
        """Prepare what the first requests would wait for. Slow: call it in a thread."""
        with suppress(ShuttingDownError):
            if self.chat_template is not None and self.special_encoder is not None:
                self.template_sandboxes.warm()
            for encoder in (self.encoder, self.input_encoder):
                if not encoder.is_quick(""):
                    encoder.sandboxes.warm(with_encoder=True)

    def drain(self, seconds: float) -> bool:
        """Take no new requests and wait for those in flight, at most this long; then cancel them and close.

        Were all able to finish? Blocks: call it in a thread.
        """
        self.draining = True
        deadline = time.monotonic() + seconds
        try:
            with self.condition:
                self.condition.wait_for(lambda: not self.num_answering or self.aborted, seconds)
            all_finished = self.engine_thread.drain(0.0 if self.aborted else deadline - time.monotonic())
            if self.explorer_process is not None:
                all_finished &= self.explorer_process.drain(max(0.0, deadline - time.monotonic()))
            return all_finished
        finally:
            if self.explorer_process is not None:
                self.explorer_process.close()
            for executor in (
                self.explorer_thread,
                self.validation,
                self.responses,
                self.preparation,
                self.grammars,
                self.templates,
                self.tokenizing,
            ):
                executor.shutdown()
            self.grammar_sandboxes.close()
            self.template_sandboxes.close()
            self.encoder.sandboxes.close()
            self.input_encoder.sandboxes.close()

    def abort_all(self) -> None:
        """Cancel all requests in flight."""
        if self.explorer_process is not None:
            self.explorer_process.close()
        with self.condition:
            self.aborted = True
            self.condition.notify_all()
        for handle in list(self.engine_thread.in_flight):
            self.engine_thread.cancel(handle)


def resolve_max_model_len(design: Design, requested: int | None, limits: Limits) -> int:
    """The maximum tokens of prompt and output together.

    If not requested, the positions that the model was trained on: beyond them the output is of no use.
    """
    model_length = design.position.length if isinstance(design.position, LearnedPositions | Rotary) else None
    if requested is not None and requested < 1:
        raise ValueError(f"max_model_len is {requested}: it must be at least 1")
    if requested is not None and design.max_positions is not None and requested > design.max_positions:
        raise ValueError(
            f"max_model_len is {requested}, and the model has {design.max_positions} learned positions: give "
            "at most as many"
        )
    return requested or model_length or limits.context


def deliver_to_loops(events: Events) -> None:
    """Deliver the events of one step in the event loops of their listeners; each loop is woken once."""
    events_by_loop: dict[asyncio.AbstractEventLoop | None, Events] = {}
    for handle, event in events:
        events_by_loop.setdefault(getattr(handle.on_event, "loop", None), []).append((handle, event))
    for loop, loop_events in events_by_loop.items():
        if loop is None:
            deliver(loop_events)
            continue
        try:
            loop.call_soon_threadsafe(deliver, loop_events)
        except RuntimeError:  # the loop is closed: nobody listens there any more
            continue
