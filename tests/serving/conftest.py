"""Fixtures of the serving tests."""

from serving.browser import browser, visit

__all__ = ["browser", "visit"]
