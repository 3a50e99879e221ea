"""Open connections, counted in total and by address, and refused beyond the limits."""

from __future__ import annotations

from collections import Counter
from ipaddress import IPv6Address, ip_address

from keepleft.serving.http.limits import Limits


class ConnectionCounter:
    """For one event loop; a connection that is refused counts as open until it is closed."""

    def __init__(self, limits: Limits) -> None:
        self.max_open = limits.connections
        self.max_per_address = min(limits.connections_per_address, limits.connections)
        self.num_open = 0
        self.num_refused = 0
        self.by_address: Counter[str] = Counter()

    def add(self, address: str) -> str | None:
        """Count a connection; returns why it must be refused, or None."""
        self.num_open += 1
        self.by_address[address] += 1
        if self.num_open > self.max_open:
            self.num_refused += 1
            return f"{self.max_open} connections are open already"
        if self.by_address[address] > self.max_per_address:
            self.num_refused += 1
            return f"{self.max_per_address} connections from your address are open already"
        return None

    def remove(self, address: str) -> None:
        self.num_open -= 1
        self.by_address[address] -= 1
        if not self.by_address[address]:
            del self.by_address[address]


def address_key(host: str) -> str:
    """What counts as one client: an IPv4 address, or an IPv6 network of 64 bits, which one client may own."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:  # a Unix socket
        return host
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Address(int(address) >> 64 << 64))
