"""Reads a model: its blocks, the rules for its parts, its units and their bytes."""
