"""Architectures: designs as data, and the encoders, decoders and encoder-decoders built from them."""
