"""Hidden states in, gradients, updates and checkpoints out."""
