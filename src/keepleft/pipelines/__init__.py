"""A model directory in use: generate, classify, fill in masks, score, embed, evaluate."""
