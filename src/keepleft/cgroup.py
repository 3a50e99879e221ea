"""What a container may use: the CPU quota and the memory limit of the control groups of this process.

Both versions of Linux' control groups. A group cannot have more than the groups above it, so the lowest limit
on the way up counts. Inside a container the path of the group is often that of the host, and does not exist:
then the limit is at the root of the mount.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),  # version 1
)
NO_MEMORY_LIMIT = 1 << 60  # version 1 writes a number near 2^63 where there is no limit


def available_cores(root: Path = ROOT) -> int:
    """Cores that this process may use: its CPU affinity, or the quota of its control group, rounded up."""
    try:
        num_cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        num_cores = os.cpu_count() or 1
    quota = cpu_quota(root)
    return num_cores if quota is None else max(1, min(num_cores, math.ceil(quota)))


def cpu_quota(root: Path = ROOT) -> float | None:
    """Cores that may be used on average; None if there is no quota."""
    quotas = []
    for folder in _group_folders(root, "cpu"):
        version_1 = (*_read_words(folder / "cpu.cfs_quota_us"), *_read_words(folder / "cpu.cfs_period_us"))
        match _read_words(folder / "cpu.max") or version_1:
            case (quota, period) if quota.isdigit() and period.isdigit():  # "max" or -1: no quota
                quotas.append(int(quota) / max(1, int(period)))
    return min(quotas, default=None)


def free_memory(root: Path = ROOT) -> int:
    """Free bytes of main memory, of the machine or below the limit of the control group."""
    free = [_free_memory_of_machine()]
    for folder in _group_folders(root, "memory"):
        for limit_name, usage_name in MEMORY_FILES:
            match _read_words(folder / limit_name), _read_words(folder / usage_name):
                case (limit,), (usage,) if limit.isdigit() and int(limit) < NO_MEMORY_LIMIT:
                    free.append(max(0, int(limit) - int(usage) + _file_cache(folder)))
    return min(free)


def _free_memory_of_machine() -> int:
    """Free bytes of main memory; on macOS, which does not say, half of all."""
    if sys.platform == "win32":
        return _free_memory_of_windows()
    page_size = os.sysconf("SC_PAGE_SIZE")
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * page_size
    except ValueError:  # the system does not have the name
        return os.sysconf("SC_PHYS_PAGES") * page_size // 2


def _free_memory_of_windows() -> int:
    import ctypes

    class MemoryStatus(ctypes.Structure):
        """MEMORYSTATUSEX of the Windows API."""

        _fields_ = [
            ("length", ctypes.c_uint32),
            ("load", ctypes.c_uint32),
            *((name, ctypes.c_uint64) for name in ("total", "available", "total_page", "available_page")),
            *((name, ctypes.c_uint64) for name in ("total_virtual", "available_virtual", "extended")),
        ]

    status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
    library = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined]
    if not library.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise OSError(f"GlobalMemoryStatusEx failed: error {ctypes.get_last_error()}")  # type: ignore[attr-defined]
    return int(status.available)


def _file_cache(folder: Path) -> int:
    """Bytes of files that the kernel keeps in memory for this group, and gives up when memory is short."""
    words = [line.split() for line in _read_lines(folder / "memory.stat")]
    numbers = {name: int(number) for name, number in words}
    prefix = "total_" if "total_inactive_file" in numbers else ""  # in version 1, with the groups below
    return sum(numbers.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active"))


def _group_folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process' control groups that have this controller, and of all groups above them."""
    for line in _read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mounts = (controllers, controller) if controllers else ("", "unified")
        for mount in dict.fromkeys(mounts):
            group = PurePosixPath(path.lstrip("/"))
            for folder in (group, *group.parents):
                yield root / "sys/fs/cgroup" / mount / folder


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _read_words(path: Path) -> tuple[str, ...]:
    return tuple(" ".join(_read_lines(path)).split())
