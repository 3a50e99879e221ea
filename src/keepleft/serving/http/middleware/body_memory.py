"""Memory for the bodies of all requests, shared by API keys so that none takes all of it."""

from __future__ import annotations

from collections import Counter


class BodyMemory:
    """Counts bytes by key. A key may hold as much as it leaves free, and so half of all that it finds free.

    So N greedy keys together leave room for one like them, and a small body of another key finds a place.
    On a server without keys everybody is the same caller (the key ""), which may hold everything.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.by_key: Counter[str] = Counter()

    def add(self, key: str, num_bytes: int) -> bool:
        """Count bytes that have arrived, whatever they are; False if the key holds too many now."""
        self.num_bytes += num_bytes
        self.by_key[key] += num_bytes
        num_free = self.max_bytes - self.num_bytes
        return num_free >= (self.by_key[key] if key else 0)

    def remove(self, key: str, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self.by_key[key] -= num_bytes
        if not self.by_key[key]:
            del self.by_key[key]
