"""Small models that leak, and small models that do not, each with a proof by brute force."""
