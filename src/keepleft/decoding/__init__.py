"""Logits to tokens: sampling, beam search, speculative decoding, structured output."""
