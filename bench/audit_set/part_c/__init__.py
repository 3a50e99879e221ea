"""Part C: leaks into the future on paths, lengths and surfaces, and families of models; written blind."""
