"""What each worker or replica gets: no more than there is, and equal parts where nothing was asked for."""

from __future__ import annotations

from math import floor
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepleft.cluster.resources import divide_cluster


def cluster(gpus: int = 0, cpus: int = 1000, machines: int = 1) -> SimpleNamespace:
    resources = {"CPU": float(cpus), **({"GPU": float(gpus)} if gpus else {})}
    return SimpleNamespace(cluster_resources=lambda: resources, nodes=lambda: [{"Alive": True}] * machines)


@given(count=st.integers(1, 64), gpus=st.integers(1, 16))
def test_all_fit_on_the_gpus_and_none_lies_across_two(count, gpus):
    given_gpus = divide_cluster(cluster(gpus), count=count, what="worker", gpus=None).gpus
    assert 0 < given_gpus <= 1
    assert gpus * floor(1 / given_gpus + 1e-9) >= count


def test_gpus_are_for_those_who_use_them():
    assert divide_cluster(cluster(4), count=2, what="worker", gpus=None, device="cpu").gpus == 0
    assert divide_cluster(cluster(4), count=2, what="worker", gpus=None, device="cuda").gpus == 1
    assert divide_cluster(cluster(4), count=2, what="worker", gpus=0).gpus == 0
    assert divide_cluster(cluster(0), count=2, what="worker", gpus=None).gpus == 0
    assert divide_cluster(cluster(1), count=1, max_count=4, what="replica", gpus=None).gpus == 0.25


def test_memory_is_divided_among_those_on_a_machine_or_a_gpu():
    def share(gpus: float | None, num_gpus: int = 0, **kwargs: int) -> float:
        return divide_cluster(
            cluster(num_gpus, machines=kwargs.pop("machines", 1)), what="replica", gpus=gpus, **kwargs
        ).memory_share

    assert share(None, count=1) == 1
    assert share(None, count=4) == 0.25
    assert share(None, count=4, machines=4) == 1
    assert share(None, count=5, machines=4) == 0.5
    assert share(0.5, 1, count=2) == 0.5
    assert share(2, 8, count=4) == 1


def test_what_is_not_there_is_refused():
    with pytest.raises(ValueError, match="a worker needs 1 GPU, and the cluster has 0: ask for fewer"):
        divide_cluster(cluster(), count=1, what="worker", gpus=1)
    with pytest.raises(ValueError, match="3 replicas need 6 CPUs, and the cluster has 2"):
        divide_cluster(cluster(cpus=2), count=3, what="replica", gpus=None, cpus=2)
