"""Checks that all ranks have the same model, batch and order, before they launch collectives."""
