"""keepleft serve"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from keepleft.serving.http.limits import Limits

if TYPE_CHECKING:
    from keepleft.serving.http.log_writer import LogWriter
    from keepleft.serving.http.middleware.auth import APIKey
    from keepleft.serving.http.middleware.request_log import Log

API_KEY_VARIABLE = "KEEPLEFT_API_KEY"
OPERATOR_KEY_VARIABLE = "KEEPLEFT_OPERATOR_KEY"
REPLICA_VARIABLE = "KEEPLEFT_REPLICA"
SWITCH_INTERVAL = 0.0003  # seconds a thread may hold the GIL: the engine asks for it hundreds of times a step
GC_THRESHOLD = 700  # Python's own
LOG_LEVELS = ("debug", "info", "warning", "error")


def serve(
    inputs: list[str],
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    api_key_file: str | None = None,
    operator_key: str | None = None,
    served_model_name: str | None = None,
    max_model_len: int | None = None,
    revision: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16", "int8"] = "float32",
    device: str | None = None,
    threads: int | None = None,
    max_num_seqs: int | None = None,
    kv_cache_memory: float | None = None,
    max_requests: int | None = None,
    shutdown_timeout: float = 30.0,
    allow_origin: str | list[str] | None = None,
    allow_host: str | list[str] | None = None,
    runs: str | None = None,
    compare: str | None = None,
    replica: str | None = None,
    log_level: Literal["debug", "info", "warning", "error"] = "info",
    limits: Limits = Limits(),  # noqa: B008 (it is frozen)
) -> int:
    """Serve a model, or the translator that comes with keepleft, over HTTP.

    OpenAI clients take base_url http://127.0.0.1:8000/v1; a browser opens the page.

    On Ctrl-C or SIGTERM the server finishes the requests in flight.

    Args:
        inputs: a model (a folder, a GGUF file, an installed one, a name on the hub)
        host: the address to listen on; 0.0.0.0 lets other machines in
        port: the port to listen on; 0 takes a free one. It is printed to stderr
        api_key: the key that clients must send (Authorization: Bearer KEY). The environment variable
            KEEPLEFT_API_KEY does the same without showing up in the process list
        api_key_file: a file with a key on each line. A key may have a name for logs and metrics and a share
            of the server (KEY name=team-a weight=2); nothing is shared between clients with different keys
        operator_key: the key that may see all metrics, and the page's view of the server; the environment
            variable KEEPLEFT_OPERATOR_KEY or `operator` after a key in the file does the same
        served_model_name: the name of the model in the API. If not given, NAME for runs/NAME/model, and
            the name of the directory or file for any other
        max_model_len: the most tokens of prompt and output together
        revision: the branch, tag or commit of a model on the hub; MODEL@REVISION does the same
        dtype: data type of the weights: float32, bfloat16, float16, or int8 on CPUs
        device: cpu or cuda; a GPU is used if there is one
        threads: CPU threads for the model. If not given, one for a small model and all for others
        max_num_seqs: sequences decoded together (continuous batching). Each beam is one
        kv_cache_memory: GiB for the KV cache. If not given, a quarter of the free memory on a CPU, four
            fifths on a GPU
        max_requests: requests in flight. More are answered with 429 and Retry-After (short for
            --limits.requests)
        shutdown_timeout: seconds that requests in flight may take to finish when the server shuts down
        allow_origin: web pages that may use the API (CORS), as in https://example.org. Several as in
            '[https://a.example, https://b.example]'
        allow_host: further host names that are accepted on a loopback address, for a server behind a proxy
        runs: a folder of run directories, for the training view of the page
        compare: the folder that `keepleft compare` wrote, for the page
        replica: the name of this server among several behind a gateway, as a label of all metrics and a field
            of log lines; the environment variable KEEPLEFT_REPLICA does the same
        log_level: requests are logged at info, one JSON object per line on stderr
        limits: limits of a request and of the server
    """
    from contextlib import closing
    from dataclasses import replace

    import torch

    from keepleft.cli.paths import check_folders, model_name, model_path
    from keepleft.cli.translate import SHIPPED_TRANSLATOR, shipped_translator
    from keepleft.pipelines.loading import load_for_inference
    from keepleft.serving.engine import capacity
    from keepleft.serving.engine.thread import run_in_own_thread
    from keepleft.serving.explorer.explorer import Explorer

    try:
        from keepleft.serving.http.app import make_app
        from keepleft.serving.http.descriptors import (
            fit_connections,
            open_descriptors,
            raise_descriptor_limit,
        )
        from keepleft.serving.http.explorer_process.client import ExplorerProcess, start_workers
        from keepleft.serving.http.explorer_process.tasks import make_tasks
        from keepleft.serving.http.explorer_process.worker import ModelSource
        from keepleft.serving.http.metrics import check_replica
        from keepleft.serving.http.middleware.allowed_hosts import allowed_hosts
        from keepleft.serving.http.middleware.auth import APIKeys
        from keepleft.serving.http.server import Server, check_address
        from keepleft.serving.http.service import Service
    except ImportError as error:
        raise ImportError(f"serving needs {error.name}: pip install 'keepleft[serve]'") from error

    if shutdown_timeout < 0:
        raise ValueError(f"--shutdown-timeout is {shutdown_timeout}: give seconds, or 0 for no wait")
    if not 0 <= port < 65_536:
        raise ValueError(f"--port is {port}: a port is a number below 65,536; 0 takes a free one")
    check_folders(runs=runs, compare=compare)
    check_address(host, port)
    replica = replica or os.environ.get(REPLICA_VARIABLE) or None
    if replica is not None:
        check_replica(replica)
    api_keys = APIKeys(_read_api_keys(api_key, api_key_file, operator_key))
    max_descriptors = raise_descriptor_limit()
    host_names = allowed_hosts(host, _as_list(allow_host))
    limits = limits if max_requests is None else replace(limits, requests=max_requests)
    if len(inputs) > 1:
        raise ValueError(f"{inputs[1]!r} is too much: serve takes one model, and options")
    model = inputs[0] if inputs else SHIPPED_TRANSLATOR
    path = model_path(model, revision) if inputs else shipped_translator()
    loaded = run_in_own_thread(lambda: load_for_inference(path, dtype=dtype, device=device))
    name = served_model_name or model_name(model)
    explorer = Explorer(*loaded, name=name, runs=runs, compare=compare)
    # Forked while there is only this thread, and before there is a socket that a fork would keep open.
    workers = start_workers(
        loaded.model, make_tasks(loaded.model, explorer), ModelSource(path, dtype, name, runs, compare)
    )

    def on_ready(host: str, port: int) -> None:
        base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        message = f"keepleft: the page is at {base_url}/ and the API at {base_url}/v1"
        print(message, file=sys.stderr, flush=True)

    with (
        closing(_make_log_writer(replica)) as log_writer,
        closing(ExplorerProcess(workers, max_waiting=limits.questions)) as explorer_process,
    ):
        torch.set_num_threads(threads or capacity.best_threads(loaded.model))
        log = _make_log(log_level, log_writer, replica)
        sys.setswitchinterval(SWITCH_INTERVAL)
        engine = run_in_own_thread(
            lambda: capacity.make_engine(
                loaded.model,
                loaded.tokenizer,
                max_num_seqs=max_num_seqs,
                kv_cache_memory=kv_cache_memory,
                max_model_len=max_model_len,
                weights=api_keys.weights,
            )
        )
        requested_connections = limits.connections
        limits = fit_connections(limits, max_descriptors, open_descriptors())
        if limits.connections < requested_connections:
            print(
                f"keepleft: {limits.connections} connections instead of {requested_connections}, since this "
                f"process may open {max_descriptors} files: raise the limit (ulimit -n) for more",
                file=sys.stderr,
            )
        service = Service(
            loaded,
            engine,
            name=name,
            limits=limits,
            max_model_len=max_model_len,
            explorer=explorer,
            explorer_process=explorer_process,
        )
        if not api_keys.hashes and host_names is None:
            print(
                f"keepleft: whoever reaches {host} can use this model: set KEEPLEFT_API_KEY, give "
                "--api-key-file, or --host 127.0.0.1",
                file=sys.stderr,
            )
        app = make_app(
            service,
            keys=api_keys,
            allowed_hosts=host_names,
            allowed_origins=_as_list(allow_origin),
            replica=replica,
            log=log,
        )

        def on_drain(num_requests: int) -> None:
            if num_requests:
                seconds = f"{shutdown_timeout:g} seconds to finish"
                log_writer.write(
                    f"keepleft: shutting down; {num_requests} in flight, with {seconds}: "
                    "a second signal cancels them\n"
                )

        server = Server(
            app,
            service,
            host=host,
            port=port,
            shutdown_timeout=shutdown_timeout,
            on_ready=on_ready,
            on_drain=on_drain,
        )
        gc.collect()
        gc.freeze()  # a full collection would look at every object of PyTorch, and stop all threads for 0.2 s
        gc.set_threshold(GC_THRESHOLD)  # a collection stops all threads: many short ones, not few long ones
        try:
            server.run()
        finally:
            if not service.draining:
                service.drain(0.0)
    if service.engine_thread.thread.is_alive():
        # The interpreter would wait for it, or crash in it, on the way out.
        sys.stderr.flush()
        os._exit(0)
    return 0


def _as_list(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


def _read_api_keys(key: str | None, file: str | None, operator_key: str | None) -> list[APIKey]:
    """The keys of the options and of the environment."""
    from keepleft.serving.http.middleware.auth import APIKey, check_distinct, read_key_file

    key = key or os.environ.get(API_KEY_VARIABLE)
    operator_key = operator_key or os.environ.get(OPERATOR_KEY_VARIABLE)
    keys = [APIKey(key)] if key else []
    if file is not None:
        keys += read_key_file(file)
        for key_of_file in keys[1:] if key else ():
            check_distinct(keys[:1], key_of_file)
    if operator_key:
        if not keys:
            raise ValueError("there is an operator key and no other: give --api-key or --api-key-file too")
        operator = APIKey(operator_key, operator=True, name="operator")
        check_distinct(keys, operator)
        keys.append(operator)
    return keys


def _make_log_writer(replica: str | None) -> LogWriter:
    """Writes to stderr, whoever reads it or does not."""
    from keepleft.serving.http.log_writer import LogWriter, write_to_descriptor

    def describe_dropped(num_lines: int) -> str:
        message = f"{num_lines} lines of the log were dropped: nobody read them in time"
        return _format_line("warning", {"dropped": num_lines, "message": message}, replica)

    if sys.__stderr__ is None:  # it is closed, and its number may be that of a connection
        return LogWriter(lambda line: None, describe_dropped)
    return LogWriter(partial(write_to_descriptor, sys.__stderr__.fileno()), describe_dropped)


def _format_line(level: str, fields: dict[str, Any], replica: str | None) -> str:
    from keepleft.serving.http.middleware.request_log import log_line

    if replica is not None:
        fields = {**fields, "replica": replica}
    return json.dumps(log_line(level, fields), ensure_ascii=False) + "\n"


def _make_log(level: str, writer: LogWriter, replica: str | None) -> Log:
    """A log of JSON lines, which those of uvicorn and asyncio go to as well."""
    threshold = LOG_LEVELS.index(level)

    def log(level: str, fields: dict[str, Any]) -> None:
        if LOG_LEVELS.index(level) >= threshold:
            writer.write(_format_line(level, fields, replica))

    class JSONLogHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            name = record.levelname.lower()
            fields = {"logger": record.name, "message": record.getMessage()}
            log(name if name in LOG_LEVELS else "error", fields)

    for name in ("uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [JSONLogHandler()]
        logger.propagate = False
        logger.setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    return log
