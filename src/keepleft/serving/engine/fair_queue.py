"""Fair queue: the tenant that was served least is next, its requests in order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item")
MAX_REMEMBERED_TENANTS = 1024


class FairQueue(Generic[Item]):
    """A tenant that returns after a while starts level with the others: idle time earns no credit."""

    def __init__(self) -> None:
        self.waiting: dict[str, deque[Item]] = {}
        self.usage: dict[str, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))

    def push(self, tenant: str, item: Item, *, front: bool = False) -> None:
        if tenant not in self.waiting:
            min_usage = min((self.usage[name] for name in self.waiting), default=0.0)
            self.usage[tenant] = max(self.usage.get(tenant, 0.0), min_usage)
            self.waiting[tenant] = deque()
        if front:
            self.waiting[tenant].appendleft(item)
        else:
            self.waiting[tenant].append(item)

    def charge(self, tenant: str, amount: float) -> None:
        """Add to a tenant's usage. Once there are too many tenants, idle ones are forgotten."""
        self.usage[tenant] = self.usage.get(tenant, 0.0) + amount
        if len(self.usage) > MAX_REMEMBERED_TENANTS + len(self.waiting):
            self.usage = {name: self.usage[name] for name in self.waiting}

    def charge_all(self, amounts: Iterable[tuple[str, float]]) -> None:
        totals: dict[str, float] = {}
        for tenant, amount in amounts:
            totals[tenant] = totals.get(tenant, 0.0) + amount
        for tenant, amount in totals.items():
            self.charge(tenant, amount)

    def peek(self) -> Item | None:
        """The next item; None if the queue is empty."""
        return self.waiting[self._next_tenant()][0] if self.waiting else None

    def pop(self) -> Item:
        """Remove and return the next item."""
        tenant = self._next_tenant()
        item = self.waiting[tenant].popleft()
        if not self.waiting[tenant]:
            del self.waiting[tenant]
        return item

    def remove(self, removed: set[Item]) -> None:
        """Remove items wherever they stand."""
        for tenant in list(self.waiting):
            remaining = deque(item for item in self.waiting[tenant] if item not in removed)
            if remaining:
                self.waiting[tenant] = remaining
            else:
                del self.waiting[tenant]

    def items(self) -> list[Item]:
        return [item for queue in self.waiting.values() for item in queue]

    def _next_tenant(self) -> str:
        return min(self.waiting, key=lambda name: self.usage[name])
