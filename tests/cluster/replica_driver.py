"""A process that runs replicas for a test: python replica_driver.py MODEL [nodes=2] [haproxy=0]

It writes `ready PORT`, and takes commands from its standard input: `update` replaces all replicas one by one,
`lose` takes the second machine away, and the end of the input is the end.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from keepleft.cluster.connection import import_ray
from keepleft.cluster.replicas import ReplicaArguments, ReplicaSettings
from keepleft.cluster.serve import cluster_environment, deploy, free_port, running_replicas
from keepleft.serving.http.served_app import ServedAppOptions


def say(text: str) -> None:
    print(text, flush=True)


@contextmanager
def two_machines():
    """A cluster of two nodes on this machine, with a processor each."""
    import_ray()
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        second = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        yield cluster.address, lambda: cluster.remove_node(second, allow_graceful=False)
    finally:
        cluster.shutdown()


def main(model: str, *words: str) -> None:
    options = dict(word.split("=") for word in words)
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = options.get("haproxy", "1")
    os.environ["RAY_SERVE_WORKER_PROXY_HTTP_PORT"] = str(free_port())  # of the second machine's proxy
    arguments = ReplicaArguments(
        options=ServedAppOptions(path=model, name="tiny", threads=1, max_num_seqs=16)
    )
    settings = ReplicaSettings(replicas=2, port=0, shutdown_timeout=20.0)
    with ExitStack() as stack:
        address, lose = None, lambda: None
        if options.get("nodes") == "2":
            stack.enter_context(cluster_environment("x-session-id"))
            address, lose = stack.enter_context(two_machines())
        port = stack.enter_context(running_replicas(arguments, settings, address=address))
        settings = replace(settings, port=port)
        say(f"ready {port}")
        for command in sys.stdin:
            if command.strip() == "update":
                arguments = replace(arguments, options=replace(arguments.options, max_num_seqs=8))
                deploy(arguments, settings)
            elif command.strip() == "lose":
                lose()
            say(f"done {command.strip()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
