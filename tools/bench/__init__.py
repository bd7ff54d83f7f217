"""What the benchmarks share: options, rounds, tables, model, ranks, a schedule played on a link."""
