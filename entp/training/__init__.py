"""Training: the one loop, its optimizers, checkpoints, metrics and processes."""
