"""Threads and memory follow the limits of a container, in both versions of control groups."""

from __future__ import annotations

import os

import pytest

from keepleft.cgroup import available_cores, cpu_quota, free_memory

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path):
    """Write the files of a machine; its root."""

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


VERSION_2 = {
    "proc/self/cgroup": "0::/user.slice/job\n",
    "sys/fs/cgroup/user.slice/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/user.slice/job/cpu.max": "max 100000\n",
}
VERSION_1 = {
    "proc/self/cgroup": "4:memory:/docker/12ab\n1:cpu,cpuacct:/docker/12ab\n0::/\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",  # the path of the group is that of the host
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        (VERSION_2, 1.5),
        (VERSION_1, 0.5),
        (VERSION_1 | {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n"}, None),
        (VERSION_2 | {"sys/fs/cgroup/user.slice/cpu.max": "max 100000\n"}, None),
        (VERSION_2 | {"sys/fs/cgroup/user.slice/cpu.max": "nonsense\n"}, None),
        ({"proc/self/cgroup": "1:cpu:/\n"}, None),
        ({}, None),
    ],
)
def test_the_quota_is_the_lowest_on_the_way_up(machine, files, quota):
    root = machine(files)
    assert cpu_quota(root) == quota
    num_cores = len(os.sched_getaffinity(0))
    assert available_cores(root) == (
        num_cores if quota is None else min(num_cores, max(1, round(quota + 0.5)))
    )


def test_free_memory_is_what_the_limit_leaves_and_file_cache_counts_as_free(machine):
    limits = {
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": f"{64 * MIB}\n",
        "sys/fs/cgroup/job/memory.current": f"{48 * MIB}\n",
    }
    root = machine(limits)
    assert free_memory(root) == 16 * MIB
    machine({"sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {8 * MIB}\nactive_file {4 * MIB}\n"})
    assert free_memory(root) == 28 * MIB


def test_free_memory_in_version_1(machine):
    limits = {
        "proc/self/cgroup": "9:memory:/job\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{32 * MIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{40 * MIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",  # no limit
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
    }
    root = machine(limits)
    assert free_memory(root) == 0
    machine({"sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 3\ntotal_inactive_file {16 * MIB}\n"})
    assert free_memory(root) == 8 * MIB


def test_without_limits_the_machine_counts(machine):
    assert free_memory(machine({})) > 0
    assert available_cores(machine({})) == len(os.sched_getaffinity(0))
