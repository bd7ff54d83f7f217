"""Other programs' loops, such as ``transformers.Trainer``; each needs an optional package."""
