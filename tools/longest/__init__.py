"""The longest sequence that fits a memory limit; see ``__main__``."""
