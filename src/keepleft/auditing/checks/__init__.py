"""The seven checks: one file for each kind of leak."""
