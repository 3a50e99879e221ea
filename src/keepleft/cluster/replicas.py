"""Replicas of the server by Ray Serve: the app of `keepleft serve`, built anew on each replica.

A replica is described by plain values (`ReplicaArguments`), which a configuration file holds as well. API
keys are not among them: a replica reads them from a file, or from the environment.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from keepleft.cluster.connection import import_ray
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.middleware.auth import API_KEY_VARIABLE, OPERATOR_KEY_VARIABLE, collect_keys
from keepleft.serving.http.request_id import HEADER
from keepleft.serving.http.served_app import ServedApp, ServedAppOptions, build_served_app

if TYPE_CHECKING:
    from ray.serve import Application
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

APPLICATION = "keepleft"
DEPLOYMENT = "replica"
IMPORT_PATH = "keepleft.cluster.replicas:build_application"
BACKPRESSURE_VERSION = (2, 59)  # of Ray, from which its 503 can be a 429
HEALTH_CHECK_SECONDS = 5.0
HEALTH_CHECK_TIMEOUT_SECONDS = 30.0
MAX_CONSTRUCTOR_RETRIES = 3
AUTOSCALING_NAMES = frozenset(  # settings of Ray Serve; the least number of replicas is --replicas
    "max_replicas initial_replicas target_ongoing_requests metrics_interval_s look_back_period_s "
    "upscale_delay_s downscale_delay_s upscaling_factor downscaling_factor".split()
)
LIMIT_NAMES = frozenset(field.name for field in fields(Limits))


@dataclass(frozen=True, kw_only=True)
class ReplicaArguments:
    """`options`: of the app, without keys; `api_key_file`: a path that every replica sees; `requires_key`: a
    replica that finds no key does not start.
    """

    options: ServedAppOptions
    api_key_file: str | None = None
    requires_key: bool = False

    def with_memory_share(self, share: float) -> ReplicaArguments:
        return replace(self, options=replace(self.options, memory_share=share))

    def to_json(self) -> dict[str, Any]:
        """Plain values; those that are as by default are left out."""
        default = asdict(ServedAppOptions(path="", name=""))
        values = {name: value for name, value in asdict(self.options).items() if value != default[name]}
        values.pop("keys", None)
        if self.options.limits != Limits():
            plain = asdict(Limits())
            values["limits"] = {
                name: value for name, value in asdict(self.options.limits).items() if value != plain[name]
            }
        if self.options.allowed_hosts is not None:
            values["allowed_hosts"] = sorted(self.options.allowed_hosts)
        if self.api_key_file is not None:
            values["api_key_file"] = self.api_key_file
        if self.requires_key:
            values["requires_key"] = True
        return json.loads(json.dumps(values))  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ReplicaArguments:
        """Raises ValueError for a name that is not known."""
        values = dict(values)
        known = {field.name for field in fields(ServedAppOptions)} - {"keys"}
        api_key_file = values.pop("api_key_file", None)
        requires_key = bool(values.pop("requires_key", False))
        if unknown := sorted(values.keys() - known):
            raise ValueError(
                f"args has {unknown[0]!r}, which no replica knows: there are {', '.join(sorted(known))}"
            )
        if unknown := sorted(values.get("limits", {}).keys() - LIMIT_NAMES):
            raise ValueError(f"args.limits has {unknown[0]!r}: there is no such limit")
        if missing := [name for name in ("path", "name") if name not in values]:
            raise ValueError(f"args has no {missing[0]!r}: give the path of the model and its name")
        if "limits" in values:
            values["limits"] = Limits(**values["limits"])
        if values.get("allowed_hosts") is not None:
            values["allowed_hosts"] = frozenset(values["allowed_hosts"])
        values["allowed_origins"] = tuple(values.get("allowed_origins", ()))
        return cls(options=ServedAppOptions(**values), api_key_file=api_key_file, requires_key=requires_key)


class Replica:
    """One replica: the app, with the engine behind it. Ray Serve calls its methods."""

    def __init__(self, values: dict[str, Any]) -> None:
        from ray import serve

        arguments = ReplicaArguments.from_json(values)
        keys = collect_keys(
            os.environ.get(API_KEY_VARIABLE), arguments.api_key_file, os.environ.get(OPERATOR_KEY_VARIABLE)
        )
        if arguments.requires_key and not keys:
            raise ValueError(f"this replica must have an API key: set {API_KEY_VARIABLE} before ray start")
        name = serve.get_replica_context().replica_id.unique_id
        options = replace(arguments.options, keys=tuple(keys), replica=name)
        self.stack = ExitStack()
        self.served: ServedApp = self.stack.enter_context(build_served_app(options, can_fork=False))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return without_request_id(self.served.app)

    def check_health(self) -> None:
        """Raises RuntimeError unless the engine is ready: Ray Serve then replaces the replica."""
        if self.served.service.status not in ("ready", "draining"):
            raise RuntimeError(f"the engine has {self.served.service.status}")

    def __del__(self) -> None:
        """After the requests in flight have finished, or their time is up."""
        if hasattr(self, "stack"):
            self.stack.close()


def without_request_id(app: ASGIApp) -> ASGIApp:
    """The app, without the header with the id of a request in its responses: Ray Serve adds the same."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message["headers"] if name.lower() != HEADER]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, send_without)

    return wrapped


def build_application(values: dict[str, Any]) -> Application:
    """The Ray Serve application of a configuration file: `values` are its args."""
    import_ray()
    from ray import serve

    ReplicaArguments.from_json(values)  # errors come here, and not on each replica
    deployment: Any = serve.deployment(name=DEPLOYMENT)(serve.ingress()(Replica))
    return deployment.bind(values)  # type: ignore[no-any-return]


def backpressure_options() -> dict[str, Any]:
    """429 where Ray Serve itself has too many requests; older versions of it always answer with 503."""
    try:
        installed = tuple(map(int, version("ray").split(".")[:2]))
    except (PackageNotFoundError, ValueError):  # the cluster may have it
        installed = BACKPRESSURE_VERSION
    if installed < BACKPRESSURE_VERSION:
        return {}
    return {"backpressure_config": {"status_code": 429, "retry_after_s": 1.0}}


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """How many replicas, and what each gets.

    `gpus`: None for an equal part of what there is; `autoscaling`: what Ray Serve's AutoscalingConfig takes,
    instead of a fixed number.
    """

    replicas: int = 1
    cpus: float = 1.0
    gpus: float | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    shutdown_timeout: float = 30.0
    autoscaling: dict[str, Any] | None = None

    @property
    def max_replicas(self) -> int:
        return self.replicas if self.autoscaling is None else int(self.autoscaling["max_replicas"])

    def deployment_options(self, limits: Limits) -> dict[str, Any]:
        """The options of the deployment, as Ray Serve and its configuration files name them.

        The app refuses by itself what is above its limits, with its own 429; Ray Serve's limits lie where the
        server has its limit of connections.
        """
        actor: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus or 0.0}
        scale: dict[str, Any] = (
            {"num_replicas": self.replicas}
            if self.autoscaling is None
            else {"autoscaling_config": {"min_replicas": self.replicas, **self.autoscaling}}
        )
        return {
            **scale,
            "ray_actor_options": actor,
            "max_ongoing_requests": limits.connections,
            "max_queued_requests": limits.connections,
            **backpressure_options(),
            "graceful_shutdown_timeout_s": self.shutdown_timeout,
            "health_check_period_s": HEALTH_CHECK_SECONDS,
            "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_SECONDS,
            "max_constructor_retry_count": MAX_CONSTRUCTOR_RETRIES,
        }


def serve_config(arguments: ReplicaArguments, settings: ReplicaSettings) -> dict[str, Any]:
    """A configuration that `serve deploy` takes, and KubeRay's RayService as serveConfigV2."""
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": settings.host, "port": settings.port},
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": arguments.to_json(),
                "deployments": [
                    {"name": DEPLOYMENT, **settings.deployment_options(arguments.options.limits)}
                ],
            }
        ],
    }
