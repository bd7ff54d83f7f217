"""Shared by the benchmarks: options, rounds, tables, model, ranks, simulation of a schedule."""
