"""What each worker or replica gets of a cluster: processors, GPUs, and a share of the memory."""

from __future__ import annotations

from math import ceil
from types import ModuleType
from typing import NamedTuple


class Resources(NamedTuple):
    """`memory_share`: of what an engine alone on its machine or GPU would take for its KV cache."""

    cpus: float
    gpus: float
    memory_share: float


def divide_cluster(
    ray: ModuleType,
    *,
    count: int,
    what: str,
    gpus: float | None,
    cpus: float = 1.0,
    device: str | None = None,
    max_count: int | None = None,
) -> Resources:
    """What each of `count` workers or replicas (`what`) gets. `gpus`: None for a GPU, or an equal part of one
    where they are fewer; none for another device. `max_count`: so many may share the cluster later.

    Raises ValueError if the cluster has not so much: Ray itself would wait for ever.
    """
    have = ray.cluster_resources()
    num_gpus = have.get("GPU", 0.0)
    most = max_count or count
    if gpus is None:
        uses_gpus = num_gpus >= 1 and (device is None or device.startswith("cuda"))
        gpus = 1 / ceil(most / int(num_gpus)) if uses_gpus else 0.0  # so that each lies on one GPU
    for name, wanted in (("GPU", gpus * count), ("CPU", cpus * count)):
        if wanted > have.get(name, 0.0) + 1e-6:
            each = f"{count} {what}s need" if count != 1 else f"a {what} needs"
            raise ValueError(
                f"{each} {wanted:g} {name}{'' if wanted == 1 else 's'}, and the cluster has "
                f"{have.get(name, 0.0):g}: ask for fewer, or add machines"
            )
    return Resources(cpus, gpus, memory_share(gpus, most, sum(node["Alive"] for node in ray.nodes())))


def memory_share(gpus: float, count: int, num_machines: int) -> float:
    """The share of each of `count`: of its GPU, or of one of so many machines."""
    return min(1.0, gpus) if gpus else 1 / max(1, ceil(count / max(1, num_machines)))
