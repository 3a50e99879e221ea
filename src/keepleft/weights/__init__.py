"""Weights under other people's names: one table per family, read in both directions."""
