"""File descriptors: how many connections this process can hold open."""

from __future__ import annotations

import os
from dataclasses import replace

from keepleft.serving.http.limits import Limits

MAX_DESCRIPTORS = 65_536  # that are asked for, where the system allows more
RESERVED_DESCRIPTORS = 128  # for sandbox processes, files of the page and of runs, refused connections
MIN_CONNECTIONS = 8


def raise_descriptor_limit() -> int | None:
    """Raise the soft limit of open files to the hard one, and return it; None where there is none."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if wanted > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # a system that allows less than it says
            return soft
    return max(soft, wanted)


def open_descriptors() -> int:
    """Descriptors that are in use; a guess where the system does not say."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(folder))
        except OSError:
            continue
    return RESERVED_DESCRIPTORS


def fit_connections(limits: Limits, max_descriptors: int | None, num_open: int) -> Limits:
    """Limits whose connections leave a reserve of descriptors; one address then gets half of them at most.

    Raises ValueError where hardly any are left.
    """
    if max_descriptors is None:
        return limits
    connections = max_descriptors - num_open - RESERVED_DESCRIPTORS
    if connections >= limits.connections:
        return limits
    if connections < MIN_CONNECTIONS:
        raise ValueError(
            f"this process may open {max_descriptors} files, and {num_open} are open already: raise the "
            f"limit (ulimit -n) to at least {num_open + RESERVED_DESCRIPTORS + limits.connections}"
        )
    per_address = min(limits.connections_per_address, connections // 2)
    return replace(limits, connections=connections, connections_per_address=per_address)
