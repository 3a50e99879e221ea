"""Architectures: designs as data, and the encoder, decoder and encoder-decoder built from them."""
