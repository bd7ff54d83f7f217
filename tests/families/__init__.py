"""Families of transformers compared with one process: ``python -m tests.families --help``."""
