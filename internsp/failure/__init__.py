"""A rank fails: how other ranks learn of it, and how they end or recover."""
