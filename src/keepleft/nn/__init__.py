"""The layers that models are built from, and their configs."""
