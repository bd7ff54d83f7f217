"""Families of transformers beside one process: see ``python -m tools.families --help``."""
