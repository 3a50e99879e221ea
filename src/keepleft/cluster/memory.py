"""Memory of a cluster on this machine: of each replica or worker, and of Ray's own processes."""

from __future__ import annotations

import os
from collections import defaultdict
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


def process_memory() -> dict[str, list[int]]:
    """Bytes of the processes below this one, by kind; nothing where there is no /proc.

    Memory that processes share counts in equal parts (PSS), where this user may see it.
    """
    out: defaultdict[str, list[int]] = defaultdict(list)
    for process in descendants(os.getpid()):
        title = _read(PROC / str(process) / "cmdline").replace(b"\0", b" ").decode(errors="replace")
        kind = next((kind for mark, kind in KINDS.items() if mark in title), None)
        if kind is not None:
            out[kind].append(_pss(process))
    return dict(out)


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
