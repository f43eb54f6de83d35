"""Training: configuration, data, optimizer, checkpoints, and the loop."""
