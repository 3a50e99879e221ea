"""Published models: their configurations and tensor names, one table per family, read in both directions."""
