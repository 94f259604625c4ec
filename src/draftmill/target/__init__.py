"""The frozen target: token batches in, hidden states of the tapped layers out."""
