"""How weights travel: shards, slots, collectives, reductions, the communicators; see README.md."""
