"""A model directory in use: generate, classify, score, evaluate."""
