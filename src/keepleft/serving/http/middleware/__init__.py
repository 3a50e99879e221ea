"""One file per middleware, outermost first in app.py."""
