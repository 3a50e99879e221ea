"""What an engine is doing at one moment: in total, and for each API key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from keepleft.serving.engine.request import RequestHandle, Tenant


@dataclass
class KeyActivity:
    """Requests of one API key. `running_rows`: their sequences in the batch; `oldest_wait`: seconds since the
    oldest one came that has not started; `users`: how many of the key's users have requests.
    """

    running_rows: int = 0
    running: int = 0
    paused: int = 0
    waiting: int = 0
    oldest_wait: float = 0.0
    users: int = 0


@dataclass(frozen=True)
class EngineStatus:
    """One moment between two steps. `totals` are the engine's statistics, over all keys; the others are by
    key, and tokens count from the start. `taken_at` is on the clock of time.monotonic().
    """

    taken_at: float
    totals: Mapping[str, float]
    activity: Mapping[str, KeyActivity] = field(default_factory=dict)
    in_flight: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    generation_tokens: Mapping[str, int] = field(default_factory=dict)


def count_activity(
    running: Iterable[tuple[Tenant, int]],
    paused: Iterable[Tenant],
    waiting: Iterable[RequestHandle],
    now: float,
) -> dict[str, KeyActivity]:
    """The activity of each key. `running`: of each request its tenant and its rows."""
    by_key: dict[str, KeyActivity] = {}
    users: dict[str, set[str]] = {}

    def activity_of(tenant: Tenant) -> KeyActivity:
        users.setdefault(tenant.key, set()).add(tenant.user)
        return by_key.setdefault(tenant.key, KeyActivity())

    for tenant, num_rows in running:
        activity = activity_of(tenant)
        activity.running += 1
        activity.running_rows += num_rows
    for tenant in paused:
        activity_of(tenant).paused += 1
    for handle in waiting:
        activity = activity_of(handle.request.tenant)
        activity.waiting += 1
        if handle.started_at is None:
            activity.oldest_wait = max(activity.oldest_wait, now - handle.submitted_at)
    for key, activity in by_key.items():
        activity.users = len(users[key])
    return by_key
