"""Families of transformers compared with one process: ``python -m tools.families --help``."""
