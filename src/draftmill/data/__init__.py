"""Conversations → fixed-shape token batches. In order: `read`, `rules`, `render`, `prepare`, `prepared`, `plan`."""
