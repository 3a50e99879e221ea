"""The engine behind HTTP: OpenAI's routes and our own.

Nothing is imported here, so that the process apart starts quickly.
"""
