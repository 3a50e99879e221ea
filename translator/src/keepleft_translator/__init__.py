"""Weights of keepleft's small translator, in the folder `model`. keepleft reads them; there is no code here."""
