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
    "{{ bos_token }}{% for message in messages %}<s>{{ message.role }}: {{ message.content | trim }}</s>{% endfor %}"
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
    """Takes its time over each token."""

    wait = 0.02

    def step(self):
        time.sleep(self.wait)
        return super().step()


@contextmanager
def service(opened: LoadedModel, engine=SequentialEngine, limits: Limits = PLAIN, **given):
    """A service that is closed at the end; the tensors are too small for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Service(opened, engine(opened.model, opened.tokenizer), name="tiny", limits=limits, **given)
    try:
        yield made
    finally:
        made.drain(0.0)
        torch.set_num_threads(before)


@contextmanager
def client(
    opened: LoadedModel,
    engine=SequentialEngine,
    limits: Limits = PLAIN,
    explorer=None,
    page=None,
    reach=None,
    **given,
):
    """In this process, without a socket."""
    from starlette.testclient import TestClient

    more = {} if page is None else {"page_folder": page}
    with service(opened, engine, limits, explorer=explorer, max_model_len=reach, **more) as made:
        out = TestClient(make_app(made, **given), base_url="http://localhost", raise_server_exceptions=False)
        out.service = made
        yield out


@contextmanager
def running(
    opened: LoadedModel, engine=SequentialEngine, limits: Limits = PLAIN, drain: float = 5.0, **given
):
    """A real server on a free port of this machine: its port and the service."""
    from keepleft.serving.http.server import Server

    heard: list[int] = []
    there = threading.Event()

    def ready(host: str, port: int) -> None:
        heard.append(port)
        there.set()

    with service(opened, engine, limits) as made:
        server = Server(make_app(made, **given), made, port=0, shutdown_timeout=drain, on_ready=ready)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        assert there.wait(30)
        try:
            yield heard[0], made, server
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()
