"""Part D: padding, packing, caches, rows, NaN, labels and bridges, written without a look at the auditor."""
