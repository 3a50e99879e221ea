"""Integers to a trained model."""
