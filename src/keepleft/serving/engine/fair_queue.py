"""Fair queue: API keys share by weight, users share what their key gets, each in order of arrival.

The key that was served least is next, and in it the user that was served least. A key that was idle returns
at most `BURST` tokens ahead of the one that is being served: a small caller goes first, and idle time is not
saved up. A user returns level with the one of its key that was served last, and a new name starts behind all
others: it is worth nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Generic, TypeVar

from keepleft.serving.engine.request import Tenant

Item = TypeVar("Item")
BURST = 2048.0  # tokens that a key which was idle is ahead of the others
MAX_REMEMBERED = 1024  # keys, and users of each, whose usage is remembered while they have nothing waiting


class FairQueue(Generic[Item]):
    """`weights`: the share of each key, 1 if not given."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = weights or {}
        self.waiting: dict[str, dict[str, deque[Item]]] = {}  # by key and user
        self.key_usage: dict[str, float] = {}  # tokens, divided by the weight
        self.user_usage: dict[str, dict[str, float]] = {}  # tokens, by key and user
        self.key_clock = 0.0  # the usage of the key that was served last, never turned back
        self.user_clocks: dict[str, float] = {}  # the same for the users of each key

    def __len__(self) -> int:
        return sum(len(queue) for users in self.waiting.values() for queue in users.values())

    def push(self, tenant: Tenant, item: Item, *, front: bool = False) -> None:
        key, user = tenant
        users = self.waiting.get(key)
        if users is None:
            users = self.waiting[key] = {}
            self.key_usage[key] = max(self.key_usage.get(key, 0.0), self.key_clock - BURST)
        queue = users.get(user)
        if queue is None:
            usage = self.user_usage.setdefault(key, {})
            usage[user] = max(usage.get(user, 0.0), self._entry_usage(tenant))
            queue = users[user] = deque()
        if front:
            queue.appendleft(item)
        else:
            queue.append(item)

    def _entry_usage(self, tenant: Tenant) -> float:
        """The usage that a user starts with: of the one served last; an unknown name is behind all others."""
        entry_usage = self.user_clocks.get(tenant.key, 0.0)
        usage = self.user_usage[tenant.key]
        if tenant.user not in usage:
            entry_usage = max([entry_usage, *(usage[name] for name in self.waiting[tenant.key])])
        return entry_usage

    def charge(self, tenant: Tenant, tokens: float) -> None:
        key, user = tenant
        self.key_usage[key] = self.key_usage.get(key, 0.0) + tokens / self.weight(key)
        usage = self.user_usage.setdefault(key, {})
        usage[user] = usage.get(user, 0.0) + tokens
        waiting_users = self.waiting.get(key, {})
        if len(usage) > MAX_REMEMBERED + len(waiting_users):
            self.user_usage[key] = {name: usage[name] for name in waiting_users}
        if len(self.key_usage) > MAX_REMEMBERED + len(self.waiting):
            self.key_usage = {name: self.key_usage[name] for name in self.waiting}
            self.user_usage = {name: self.user_usage[name] for name in self.waiting}
            self.user_clocks = {name: self.user_clocks.get(name, 0.0) for name in self.waiting}

    def weight(self, key: str) -> float:
        return self.weights.get(key, 1.0)

    def lag(self, key: str, other: str) -> float:
        """Tokens that a key was served less than another one, by their weights."""
        return self.key_usage.get(other, 0.0) - self.key_usage.get(key, 0.0)

    def rank(self, tenant: Tenant) -> tuple[float, float]:
        """What requests are sorted by so that the least served comes first."""
        key, user = tenant
        return self.key_usage.get(key, 0.0), self.user_usage.get(key, {}).get(user, 0.0)

    def peek(self) -> Item | None:
        """The next item; None if the queue is empty."""
        if not self.waiting:
            return None
        tenant = self._next_tenant()
        return self.waiting[tenant.key][tenant.user][0]

    def pop(self) -> Item:
        """Remove and return the next item."""
        return self.take(self._next_tenant())

    def take(self, tenant: Tenant) -> Item:
        """Remove and return a tenant's first item, whoever is next."""
        key, user = tenant
        self.key_clock = max(self.key_clock, self.key_usage[key])
        self.user_clocks[key] = max(self.user_clocks.get(key, 0.0), self.user_usage[key][user])
        item = self.waiting[key][user].popleft()
        self._drop_empty(key, user)
        return item

    def remove(self, removed: set[Item]) -> None:
        """Remove items wherever they stand."""
        if not removed:
            return
        for key, users in list(self.waiting.items()):
            for user in list(users):
                users[user] = deque(item for item in users[user] if item not in removed)
                self._drop_empty(key, user)

    def items(self) -> list[Item]:
        return [item for users in self.waiting.values() for queue in users.values() for item in queue]

    def _drop_empty(self, key: str, user: str) -> None:
        if not self.waiting[key][user]:
            del self.waiting[key][user]
        if not self.waiting[key]:
            del self.waiting[key]

    def _next_tenant(self) -> Tenant:
        key = min(self.waiting, key=lambda name: self.key_usage[name])
        user = min(self.waiting[key], key=self.user_usage[key].__getitem__)
        return Tenant(key, user)
