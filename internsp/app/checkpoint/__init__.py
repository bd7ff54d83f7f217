"""Checkpoints of a run: written beside training, read, exported."""
