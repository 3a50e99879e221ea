"""Which token may attend to which: masks, grids, the entry point to the kernels, and the KV caches."""
