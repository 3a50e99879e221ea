"""Weights of keepleft's small translator, in the folder `model`, for keepleft to read. No code is here."""
