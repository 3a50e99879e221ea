"""Who may look at whom: masks, grids, the door to the kernels, and the caches."""
