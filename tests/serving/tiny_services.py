"""Tiny models behind HTTP."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import torch

import keepleft as kl
from decoding.models import pair
from decoding.words import byte_tokens, writer
from keepleft.data.tokenizer import BOS_TOKEN, EOS_TOKEN
from keepleft.pipelines.loading import LoadedModel
from keepleft.serving.engine.sequential import SequentialEngine
from keepleft.serving.http.app import make_app
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.service import Service

TOKENS = byte_tokens()
PLAIN = Limits()
CHAT = (
    "{{ bos_token }}"
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def decoder(**notes) -> LoadedModel:
    model = writer(TOKENS)
    model.notes |= notes
    return LoadedModel(model, TOKENS)


def talker() -> LoadedModel:
    return decoder(chat_template=CHAT)


def translator() -> LoadedModel:
    model = pair(0, vocab=TOKENS.get_vocab_size())
    model.notes = {
        "decoder_start_token_id": TOKENS.token_to_id(BOS_TOKEN),
        "eos_token_id": TOKENS.token_to_id(EOS_TOKEN),
    }
    return LoadedModel(model, TOKENS)


def encoder(head=None) -> LoadedModel:
    design = kl.presets.small(kl.presets.bert).but(
        vocab=TOKENS.get_vocab_size(), dim=16, heads=2, head=head, dropout=0.0
    )
    model = kl.build(design, generator=torch.Generator().manual_seed(1)).eval()
    if isinstance(head, kl.ClassificationHead):
        model.notes["id2label"] = {"0": "calm", "1": "rough", "2": "none"}
    return LoadedModel(model, TOKENS)


class Slow(SequentialEngine):
    """A sequential engine that sleeps before each token."""

    wait = 0.02

    def step(self):
        time.sleep(self.wait)
        return super().step()


@contextmanager
def service(loaded: LoadedModel, engine=SequentialEngine, limits: Limits = PLAIN, **options):
    """A service that is drained at the end; the tensors are too small for a second thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    running_service = Service(
        loaded, engine(loaded.model, loaded.tokenizer), name="tiny", limits=limits, **options
    )
    try:
        yield running_service
    finally:
        running_service.drain(0.0)
        torch.set_num_threads(num_threads)


@contextmanager
def client(
    loaded: LoadedModel,
    engine=SequentialEngine,
    limits: Limits = PLAIN,
    explorer=None,
    page_folder=None,
    max_model_len=None,
    pivot=None,
    **app_options,
):
    """An HTTP client in this process, without a socket."""
    from starlette.testclient import TestClient

    page_options = {} if page_folder is None else {"page_folder": page_folder}
    with service(
        loaded, engine, limits, explorer=explorer, max_model_len=max_model_len, pivot=pivot, **page_options
    ) as running_service:
        app = make_app(running_service, **app_options)
        test_client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
        test_client.service = running_service
        yield test_client


@contextmanager
def running(
    loaded: LoadedModel,
    engine=SequentialEngine,
    limits: Limits = PLAIN,
    shutdown_timeout: float = 5.0,
    explorer=None,
    **app_options,
):
    """A real server on a free port of this machine: its port, the service and the server."""
    from keepleft.serving.http.server import Server

    ports: list[int] = []
    is_ready = threading.Event()

    def on_ready(host: str, port: int) -> None:
        ports.append(port)
        is_ready.set()

    with service(loaded, engine, limits, explorer=explorer) as running_service:
        app = make_app(running_service, **app_options)
        server = Server(app, running_service, port=0, shutdown_timeout=shutdown_timeout, on_ready=on_ready)
        server.thread = thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        assert is_ready.wait(30)
        try:
            yield ports[0], running_service, server
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()
