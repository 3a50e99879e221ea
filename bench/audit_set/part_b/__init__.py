"""Part B: padding, packing, caches, batches and NaN, labels and losses, encoders and encoder-decoders."""
