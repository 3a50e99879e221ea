"""Training a model: the loop and its steps, optimizers, checkpoints, several processes."""
