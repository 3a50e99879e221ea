"""Memory and time of a cluster on this machine: of each replica or worker, and of Ray's own processes."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
MIB = 1 << 20
REPLICA_MARK = "ServeReplica"
KINDS = {  # what is in the command line or the title of a process
    REPLICA_MARK: "replica",
    "MapWorker": "worker",
    "ServeController": "Ray's controller",
    "HAProxyManager": "Ray's proxy",
    "ProxyActor": "Ray's proxy",
    "haproxy": "HAProxy",
    "gcs_server": "Ray's GCS",
    "raylet": "raylet",
    "ray::": "Ray's other processes",
    "/ray/": "Ray's other processes",
}


def process_memory(root: int | None = None) -> dict[str, list[int]]:
    """Bytes of the processes below this one (or `root`), by kind; nothing where there is no /proc.

    Memory that processes share counts in equal parts (PSS), where this user may see it.
    """
    out: defaultdict[str, list[int]] = defaultdict(list)
    for process, kind in _processes(root):
        out[kind].append(_pss(process))
    return dict(out)


def processor_seconds(root: int | None = None) -> dict[str, float]:
    """Seconds of processor time that they have used so far, by kind."""
    out: defaultdict[str, float] = defaultdict(float)
    for process, kind in _processes(root):
        stat = _read(PROC / str(process) / "stat").rpartition(b")")[2].split()
        if stat:
            user, system = stat[11:13]
            out[kind] += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return dict(out)


def _processes(root: int | None) -> Iterator[tuple[int, str]]:
    """The processes of a cluster, and what each is."""
    for process in descendants(os.getpid() if root is None else root):
        title = _read(PROC / str(process) / "cmdline").replace(b"\0", b" ").decode(errors="replace")
        kind = next((kind for mark, kind in KINDS.items() if mark in title), None)
        if kind is not None:
            yield process, kind


def process_memory_lines() -> list[str]:
    """The same in words."""
    memory = process_memory()
    if not memory:
        return []
    parts = [
        f"{kind}{f' × {len(sizes)}' if len(sizes) > 1 else ''} {sum(sizes) // MIB:,} MiB"
        for kind, sizes in sorted(memory.items(), key=lambda item: -sum(item[1]))
    ]
    return [f"memory: {', '.join(parts)}"]


def descendants(root: int) -> list[int]:
    """All processes that come from this one, as far as /proc tells."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    if not PROC.is_dir():
        return []
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (stat := _read(entry / "stat")):
            parent = int(stat.rpartition(b")")[2].split()[1])
            children[parent].append(int(entry.name))
    out: list[int] = []
    pending = [root]
    while pending:
        found = children.pop(pending.pop(), [])
        out += found
        pending += found
    return out


def _pss(process: int) -> int:
    for line in _read(PROC / str(process) / "smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) << 10
    return 0


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended, or is another user's
        return b""
