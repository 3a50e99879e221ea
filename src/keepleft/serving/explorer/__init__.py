"""The explorer: questions about a model in, plain JSON out, for a web page, a notebook or a static file."""
