"""One file per route."""
