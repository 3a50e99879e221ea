"""A second process for grammars and chat templates, with time limits."""
