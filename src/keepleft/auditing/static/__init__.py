"""Hints without running: suspicious lines of a model's source file, found in its syntax tree."""
