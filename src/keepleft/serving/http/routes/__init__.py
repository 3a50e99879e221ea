"""One file per route: `routes(service)` returns its router."""
