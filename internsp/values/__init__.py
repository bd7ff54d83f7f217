"""Parameters between two steps: read whole, written, loaded."""
