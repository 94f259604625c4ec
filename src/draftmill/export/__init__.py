"""Checkpoints that serving engines load."""
