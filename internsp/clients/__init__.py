"""Training loops of other programs; each module needs an optional package."""
