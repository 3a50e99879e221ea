"""The served app, built from options: by `keepleft serve`, and by each replica of a cluster."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from fastapi import FastAPI

from keepleft.pipelines.loading import load_for_inference
from keepleft.serving.engine import capacity
from keepleft.serving.engine.thread import run_in_own_thread
from keepleft.serving.explorer.explorer import Explorer
from keepleft.serving.http.app import make_app
from keepleft.serving.http.descriptors import fit_connections, open_descriptors, raise_descriptor_limit
from keepleft.serving.http.explorer_process.client import ExplorerProcess, start_workers
from keepleft.serving.http.explorer_process.tasks import make_tasks
from keepleft.serving.http.explorer_process.worker import ModelSource
from keepleft.serving.http.json_log import LogLevel, make_log, make_log_writer
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.log_writer import LogWriter
from keepleft.serving.http.middleware.auth import APIKey, APIKeys
from keepleft.serving.http.service import Service

SWITCH_INTERVAL = 0.0003  # seconds a thread may hold the GIL: the engine asks for it hundreds of times a step
GC_THRESHOLD = 700  # Python's own


@dataclass(frozen=True, kw_only=True)
class ServedAppOptions:
    """What is served, to whom, and with how much memory.

    `path`: a model directory or file; `name`: of the model in the API; `pivot`: the language that it
    translates to and from, where it knows no pair without it; `keys`: the API keys, none for a
    server that everybody may use; `allowed_hosts`: the Host headers that are accepted, None for any.
    """

    path: str
    name: str
    pivot: str | None = None
    keys: tuple[APIKey, ...] = ()
    allowed_hosts: frozenset[str] | None = None
    allowed_origins: tuple[str, ...] = ()
    dtype: str = "float32"
    device: str | None = None
    threads: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    kv_cache_memory: float | None = None
    memory_share: float = 1.0  # of what the KV cache takes by default: other servers have the rest
    runs: str | None = None
    compare: str | None = None
    replica: str | None = None  # the name of this server among several
    limits: Limits = Limits()  # noqa: RUF009 (it is frozen)
    log_level: LogLevel = "info"


class ServedApp(NamedTuple):
    app: FastAPI
    service: Service
    log_writer: LogWriter


@contextmanager
def build_served_app(options: ServedAppOptions, *, can_fork: bool = True) -> Iterator[ServedApp]:
    """Load the model and build its engine and the app. At the end everything is closed.

    `can_fork`: this process has no threads yet that hold locks, so that the processes for the explorer's
    questions can share the weights. Without, they load the model themselves, at the first question.
    """
    api_keys = APIKeys(options.keys)
    max_descriptors = raise_descriptor_limit()
    loaded = run_in_own_thread(
        lambda: load_for_inference(options.path, dtype=options.dtype, device=options.device)
    )
    explorer = Explorer(
        *loaded, name=options.name, runs=options.runs, compare=options.compare, pivot=options.pivot
    )
    # Forked while there is only this thread, and before there is a socket that a fork would keep open.
    workers = start_workers(
        loaded.model,
        make_tasks(loaded.model, explorer),
        ModelSource(options.path, options.dtype, options.name, options.runs, options.compare, options.pivot),
        can_fork=can_fork,
    )
    with (
        closing(make_log_writer(options.replica)) as log_writer,
        closing(ExplorerProcess(workers, max_waiting=options.limits.questions)) as explorer_process,
    ):
        torch.set_num_threads(options.threads or capacity.best_threads(loaded.model))
        sys.setswitchinterval(SWITCH_INTERVAL)
        engine = run_in_own_thread(
            lambda: capacity.make_engine(
                loaded.model,
                loaded.tokenizer,
                max_num_seqs=options.max_num_seqs,
                kv_cache_memory=options.kv_cache_memory,
                max_model_len=options.max_model_len,
                memory_share=options.memory_share,
                weights=api_keys.weights,
            )
        )
        service = Service(
            loaded,
            engine,
            name=options.name,
            pivot=options.pivot,
            limits=fit_connections(options.limits, max_descriptors, open_descriptors()),
            max_model_len=options.max_model_len,
            explorer=explorer,
            explorer_process=explorer_process,
        )
        app = make_app(
            service,
            keys=api_keys,
            allowed_hosts=options.allowed_hosts,
            allowed_origins=options.allowed_origins,
            replica=options.replica,
            log=make_log(options.log_level, log_writer, options.replica),
        )
        gc.collect()
        gc.freeze()  # a full collection would look at every object of PyTorch, and stop all threads for 0.2 s
        gc.set_threshold(GC_THRESHOLD)  # a collection stops all threads: many short ones, not few long ones
        try:
            yield ServedApp(app, service, log_writer)
        finally:
            if not service.draining:
                service.drain(0.0)
