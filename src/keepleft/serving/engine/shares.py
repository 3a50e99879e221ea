"""Fair shares of the rows, or of the pages, and who gives some of them to another tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from keepleft.serving.engine.fair_queue import FairQueue
from keepleft.serving.engine.request import Tenant


class Shares:
    """What each tenant holds of `capacity` rows or pages, as the tenant `claimant` sees it, who wants some.

    Keys that hold some or have requests waiting share the capacity by weight, and the users of the claimant's
    key share what that key gets.
    """

    def __init__(
        self, queue: FairQueue[Any], held: Mapping[Tenant, int], capacity: int, claimant: Tenant
    ) -> None:
        self.queue = queue
        self.capacity = capacity
        self.claimant = claimant
        self.is_alone = held.keys() <= {claimant}
        self.key_held: Counter[str] = Counter()
        self.user_held: Counter[str] = Counter()  # of the claimant's key
        for tenant, amount in held.items():
            self.key_held[tenant.key] += amount
            if tenant.key == claimant.key:
                self.user_held[tenant.user] += amount
        keys = {*self.key_held, *queue.waiting, claimant.key}
        self.total_weight = sum(map(queue.weight, keys))
        self.num_users = len({*self.user_held, *queue.waiting.get(claimant.key, {}), claimant.user})

    def key_share(self, key: str) -> float:
        return self.capacity * self.queue.weight(key) / self.total_weight

    def gives_way(self, tenant: Tenant, num_held: int, num_needed: int, light_lag: float) -> bool:
        """Whether a request of another tenant, which holds `num_held`, gives way to the claimant.

        Another key gives way if it has more than its share, and the claimant's has less or was served much
        less: by at least `light_lag` tokens. A key that has none at all and was served much less gets what it
        needs from anybody, and keeps it. A user of the same key gives way if it has more than its share, and
        the claimant less.
        """
        claimant = self.claimant
        if tenant.key != claimant.key:
            is_light = self.queue.lag(claimant.key, tenant.key) >= light_lag
            if is_light and not self.key_held[claimant.key]:
                return True
            is_only_one = self.key_held[tenant.key] == num_held
            if is_only_one and self.queue.lag(tenant.key, claimant.key) >= light_lag:
                return False
            has_less = self.key_held[claimant.key] + num_needed <= max(1, self.key_share(claimant.key))
            return self.key_held[tenant.key] > self.key_share(tenant.key) and (has_less or is_light)
        if tenant.user == claimant.user:
            return False
        user_share = max(1, self.key_share(tenant.key) / self.num_users)
        has_less = self.user_held[claimant.user] + num_needed <= user_share
        return has_less and self.user_held[tenant.user] > user_share
