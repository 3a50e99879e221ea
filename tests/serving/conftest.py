"""What the tests of this room share."""

from serving.browser import browser, visit

__all__ = ["browser", "visit"]
