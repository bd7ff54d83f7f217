"""Measured steps that others published, and how far the planner's predictions are from them."""
