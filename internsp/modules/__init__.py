"""The user's modules: how they read their weights, and every hook on them."""
