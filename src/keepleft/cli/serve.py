"""keepleft serve"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from keepleft.serving.http.limits import Limits

if TYPE_CHECKING:
    from keepleft.serving.http.served_app import ServedAppOptions

REPLICA_VARIABLE = "KEEPLEFT_REPLICA"


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
    replicas: int | None = None,
    gpus_per_replica: float | None = None,
    address: str | None = None,
    autoscaling: str | None = None,
    session_header: str = "x-session-id",
    print_config: bool = False,
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
            of the server (KEY name=team-a weight=2); keys share the model and its capacity, and nothing else
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
        max_requests: prompts of one API key in flight. More are answered with 429 and Retry-After (short for
            --limits.requests)
        shutdown_timeout: seconds that requests in flight may take to finish when the server shuts down
        allow_origin: origin of web pages that may use the API (CORS), as in https://example.org. Several as
            in '[https://a.example, https://b.example]'
        allow_host: further host names that are accepted on a loopback address, for a server behind a proxy
        runs: a folder of run directories, for the training view of the page
        compare: the folder that `keepleft compare` wrote, for the page
        replica: the name of this server among several behind a gateway, as a label of all metrics and a field
            of log lines; the environment variable KEEPLEFT_REPLICA does the same
        replicas: serve so many replicas of the model, by Ray Serve
        gpus_per_replica: GPUs of each replica; half a one is 0.5. If not given, they share what there is
        address: the Ray cluster of the replicas: auto, HOST:PORT or ray://HOST:PORT. If not given, Ray is
            started on this machine
        autoscaling: let the number of replicas follow the load, from --replicas on: settings of Ray Serve as
            in '{max_replicas: 8, target_ongoing_requests: 16}'
        session_header: requests with the same value of this header go to the same replica, and find its
            prefix cache
        print_config: print a configuration of the replicas that `serve deploy` and KubeRay take, and stop
        log_level: requests are logged at info, one JSON object per line on stderr
        limits: limits of a request and of the server
    """
    from dataclasses import replace

    from keepleft.cli.paths import check_folders, model_name, model_path
    from keepleft.cli.translate import SHIPPED_PIVOT, SHIPPED_TRANSLATOR, shipped_translator

    try:
        from keepleft.serving.http.descriptors import raise_descriptor_limit
        from keepleft.serving.http.metrics import check_replica
        from keepleft.serving.http.middleware.allowed_hosts import allowed_hosts
        from keepleft.serving.http.middleware.auth import (
            API_KEY_VARIABLE,
            OPERATOR_KEY_VARIABLE,
            collect_keys,
        )
        from keepleft.serving.http.served_app import ServedAppOptions, build_served_app
        from keepleft.serving.http.server import Server, check_address
    except ImportError as error:
        raise ImportError(f"serving needs {error.name}: pip install 'keepleft[serve]'") from error

    if shutdown_timeout < 0:
        raise ValueError(f"--shutdown-timeout is {shutdown_timeout}: give seconds, or 0 for no wait")
    if not 0 <= port < 65_536:
        raise ValueError(f"--port is {port}: a port is a number below 65,536; 0 takes a free one")
    check_folders(runs=runs, compare=compare)
    is_cluster = replicas is not None or print_config
    if not is_cluster and (address or autoscaling or gpus_per_replica is not None):
        raise ValueError(
            "--address, --autoscaling and --gpus-per-replica are for replicas: give --replicas N"
        )
    if not print_config and address is None:
        check_address(host, port)
    replica = replica or os.environ.get(REPLICA_VARIABLE) or None
    if replica is not None:
        check_replica(replica)
    api_key = api_key or os.environ.get(API_KEY_VARIABLE)
    operator_key = operator_key or os.environ.get(OPERATOR_KEY_VARIABLE)
    keys = collect_keys(api_key, api_key_file, operator_key)
    if len(inputs) > 1:
        raise ValueError(f"{inputs[1]!r} is too much: serve takes one model, and options")
    model = inputs[0] if inputs else SHIPPED_TRANSLATOR
    options = ServedAppOptions(
        path=model_path(model, revision) if inputs else shipped_translator(),
        name=served_model_name or model_name(model),
        pivot=SHIPPED_PIVOT if model == SHIPPED_TRANSLATOR else None,
        keys=tuple(keys),
        allowed_hosts=allowed_hosts(host, _as_list(allow_host)),
        allowed_origins=tuple(_as_list(allow_origin)),
        dtype=dtype,
        device=device,
        threads=threads,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        kv_cache_memory=kv_cache_memory,
        runs=runs,
        compare=compare,
        replica=replica,
        limits=limits if max_requests is None else replace(limits, requests=max_requests),
        log_level=log_level,
    )

    if is_cluster:
        environment = {API_KEY_VARIABLE: api_key, OPERATOR_KEY_VARIABLE: operator_key}
        return _serve_replicas(
            options,
            host=host,
            port=port,
            replicas=1 if replicas is None else replicas,
            gpus=gpus_per_replica,
            address=address,
            autoscaling=autoscaling,
            session_header=session_header,
            shutdown_timeout=shutdown_timeout,
            api_key_file=api_key_file,
            secrets={name: value for name, value in environment.items() if value},
            print_config=print_config,
        )

    def on_ready(host: str, port: int) -> None:
        base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        message = f"keepleft: the page is at {base_url}/ and the API at {base_url}/v1"
        print(message, file=sys.stderr, flush=True)

    def on_drain(num_requests: int) -> None:
        if num_requests:
            seconds = f"{shutdown_timeout:g} seconds to finish"
            log_writer.write(
                f"keepleft: shutting down; {num_requests} in flight, with {seconds}: "
                "a second signal cancels them\n"
            )

    with build_served_app(options) as (app, service, log_writer):
        if service.limits.connections < options.limits.connections:
            print(
                f"keepleft: {service.limits.connections} connections instead of "
                f"{options.limits.connections}, since this process may open {raise_descriptor_limit()} "
                "files: raise the limit (ulimit -n) for more",
                file=sys.stderr,
            )
        if not keys and options.allowed_hosts is None:
            print(f"keepleft: {_open_server_warning(host)}", file=sys.stderr)
        Server(
            app,
            service,
            host=host,
            port=port,
            shutdown_timeout=shutdown_timeout,
            on_ready=on_ready,
            on_drain=on_drain,
        ).run()
    if service.engine_thread.thread.is_alive():
        # The interpreter would wait for it, or crash in it, on the way out.
        sys.stderr.flush()
        os._exit(0)
    return 0


def _serve_replicas(
    options: ServedAppOptions,
    *,
    host: str,
    port: int,
    replicas: int,
    gpus: float | None,
    address: str | None,
    autoscaling: str | None,
    session_header: str,
    shutdown_timeout: float,
    api_key_file: str | None,
    secrets: dict[str, str],
    print_config: bool,
) -> int:
    """Serve replicas until a signal comes, or print their configuration."""
    from dataclasses import replace

    from keepleft.cluster.replicas import ReplicaArguments, ReplicaSettings, serve_config
    from keepleft.cluster.resources import memory_share

    if replicas < 1:
        raise ValueError(f"--replicas is {replicas}: give at least 1")
    if gpus is not None and gpus < 0:
        raise ValueError(f"--gpus-per-replica is {gpus:g}: give 0 or more")
    if options.replica is not None:
        raise ValueError("--replica names one server: the replicas of --replicas get names of their own")
    arguments = ReplicaArguments(
        options=replace(
            options,
            keys=(),
            path=_absolute(options.path),
            runs=options.runs and _absolute(options.runs),
            compare=options.compare and _absolute(options.compare),
        ),
        api_key_file=api_key_file and _absolute(api_key_file),
        requires_key=bool(options.keys),
    )
    settings = ReplicaSettings(
        replicas=replicas,
        cpus=options.threads or 1,
        gpus=gpus,
        host=host,
        port=port,
        shutdown_timeout=shutdown_timeout,
        autoscaling=_parse_autoscaling(autoscaling, replicas),
    )
    if print_config:
        shared = arguments.with_memory_share(memory_share(gpus or 0.0, 1, 1))
        _print_config(serve_config(shared, settings), session_header, list(secrets))
        return 0
    if host not in ("127.0.0.1", "localhost", "0.0.0.0"):
        raise ValueError(f"--host is {host!r}: replicas listen on 127.0.0.1 or on 0.0.0.0")
    if address is not None and secrets:
        raise ValueError(
            f"{' and '.join(secrets)} would pass through the cluster's log: put the keys into a file that "
            "all machines have (--api-key-file)"
        )
    if address is not None and not port:
        raise ValueError("--port is 0: on a cluster give the port that its machines listen on")
    if not options.keys and options.allowed_hosts is None:
        print(f"keepleft: {_open_server_warning(host)}", file=sys.stderr)
    from keepleft.cluster.memory import process_memory_lines
    from keepleft.cluster.serve import running_replicas
    from keepleft.pipelines.loading import resolve_model

    if address is None:
        resolve_model(options.path)  # rather than when Ray has started
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    what = "a replica" if replicas == 1 else f"{replicas} replicas"
    print(f"keepleft: starting {what}, which takes a while …", file=sys.stderr, flush=True)
    with (
        running_replicas(
            arguments, settings, address=address, session_header=session_header, secrets=secrets
        ) as bound_port,
        _signals() as stop,  # Ray has put its own in place
    ):
        base_url = f"http://{f'[{host}]' if ':' in host else host}:{bound_port}"
        for line in process_memory_lines():
            print(f"keepleft: {line}", file=sys.stderr)
        message = f"keepleft: the page is at {base_url}/ and the API at {base_url}/v1"
        print(message, file=sys.stderr, flush=True)
        while not stop.wait(1.0):
            continue
        print("keepleft: shutting down the replicas", file=sys.stderr, flush=True)
    return 0


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; a second one raises KeyboardInterrupt."""
    from keepleft.cluster.signals import is_repeated_signal

    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        is_repeated = is_repeated_signal()
        if stop.is_set() and not is_repeated:
            raise KeyboardInterrupt
        stop.set()

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _parse_autoscaling(text: str | None, replicas: int) -> dict[str, Any] | None:
    """The settings. Raises ValueError for names that Ray Serve would pass over, and too low a maximum."""
    from keepleft.cluster.replicas import AUTOSCALING_NAMES

    if text is None:
        return None
    import yaml

    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        values = None
    if not isinstance(values, dict):
        raise ValueError(
            f"--autoscaling is {text!r}: give names with values, as in '{{max_replicas: 8, "
            "target_ongoing_requests: 16}}'"
        )
    if unknown := sorted(values.keys() - AUTOSCALING_NAMES):
        known = ", ".join(sorted(AUTOSCALING_NAMES))
        raise ValueError(f"--autoscaling has {unknown[0]!r}: there are {known}")
    maximum = values.get("max_replicas")
    if not isinstance(maximum, int) or maximum < replicas:
        raise ValueError(f"max_replicas of --autoscaling is {maximum}: give at least --replicas, {replicas}")
    return values


def _absolute(path: str) -> str:
    """The path from the root; the name of a model on the hub as it is."""
    return os.path.abspath(path) if os.path.exists(path) else path


def _open_server_warning(host: str) -> str:
    return (
        f"whoever reaches {host} can use this model: set KEEPLEFT_API_KEY, give --api-key-file, or "
        "--host 127.0.0.1"
    )


def _print_config(config: dict[str, Any], session_header: str, secrets: list[str]) -> None:
    import yaml

    from keepleft.cluster.serve import default_environment

    print(
        "# serve deploy FILE; or, in KubeRay's RayService, as serveConfigV2. Before ray start, on every node:"
    )
    for name, value in default_environment(session_header).items():
        print(f"#   export {name}={shlex.quote(value) if chr(10) not in value else _ansi_quote(value)}")
    for name in secrets:
        print(f"#   export {name}=…      the key is not written into a file")
    print(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), end="")


def _ansi_quote(value: str) -> str:
    """A value with line breaks as bash reads it: $'…'"""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"$'{escaped}'"


def _as_list(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []
