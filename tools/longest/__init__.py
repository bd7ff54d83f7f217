"""The longest sequence that a limit of memory allows; see ``__main__``."""
