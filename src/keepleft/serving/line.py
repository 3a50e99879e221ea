"""Who is next: tenants in turn by what they were served already, the requests of each in the order in which they came."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

Thing = TypeVar("Thing")
MANY = 1024  # tenants that are remembered


class Line(Generic[Thing]):
    """A tenant that comes back after a while begins where the others are: nobody saves up."""

    def __init__(self) -> None:
        self.waiting: dict[str, deque[Thing]] = {}
        self.served: dict[str, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))

    def join(self, tenant: str, thing: Thing, *, front: bool = False) -> None:
        if tenant not in self.waiting:
            least = min((self.served[name] for name in self.waiting), default=0.0)
            self.served[tenant] = max(self.served.get(tenant, 0.0), least)
            self.waiting[tenant] = deque()
        if front:
            self.waiting[tenant].appendleft(thing)
        else:
            self.waiting[tenant].append(thing)

    def charge(self, tenant: str, amount: float) -> None:
        """What was done for a tenant. Where there were many, those who do not wait now are forgotten."""
        self.served[tenant] = self.served.get(tenant, 0.0) + amount
        if len(self.served) > MANY + len(self.waiting):
            self.served = {name: self.served[name] for name in self.waiting}

    def charge_all(self, amounts: Iterable[tuple[str, float]]) -> None:
        sums: dict[str, float] = {}
        for tenant, amount in amounts:
            sums[tenant] = sums.get(tenant, 0.0) + amount
        for tenant, amount in sums.items():
            self.charge(tenant, amount)

    def first(self) -> Thing | None:
        """Whose turn it is."""
        return self.waiting[self._tenant()][0] if self.waiting else None

    def leave(self) -> Thing:
        """The same, out of the line."""
        tenant = self._tenant()
        out = self.waiting[tenant].popleft()
        if not self.waiting[tenant]:
            del self.waiting[tenant]
        return out

    def drop(self, gone: set[Thing]) -> None:
        """Those who left without being served."""
        for tenant in list(self.waiting):
            kept = deque(thing for thing in self.waiting[tenant] if thing not in gone)
            if kept:
                self.waiting[tenant] = kept
            else:
                del self.waiting[tenant]

    def all(self) -> list[Thing]:
        return [thing for some in self.waiting.values() for thing in some]

    def _tenant(self) -> str:
        return min(self.waiting, key=lambda name: self.served[name])
