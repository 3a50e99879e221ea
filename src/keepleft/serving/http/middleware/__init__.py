"""One file per middleware; app.py puts them together."""
