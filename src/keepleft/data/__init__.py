"""From text files to batches of token ids."""
