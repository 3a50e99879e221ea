"""The engine behind HTTP: OpenAI's routes and our own. Imports nothing, for a quick start of the sandbox."""
