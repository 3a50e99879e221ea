"""Text to integers."""
