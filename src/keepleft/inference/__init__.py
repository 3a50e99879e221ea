"""The fast decode step: one token per row over static or paged KV buffers."""
