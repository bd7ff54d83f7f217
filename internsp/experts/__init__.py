"""Experts that some ranks own: their tokens travel to the owners and back. Knows nothing of how
weights are sharded."""
