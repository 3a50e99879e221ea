"""The layers that models are built of, and their configs."""
