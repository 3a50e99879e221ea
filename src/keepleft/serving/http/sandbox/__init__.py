"""A sandbox process for grammars and chat templates, with limits of time and memory."""
