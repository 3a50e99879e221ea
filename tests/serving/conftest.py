"""What the tests of this room share."""

from serving.browsing import browser, visit

__all__ = ["browser", "visit"]
