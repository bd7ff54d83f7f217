"""What ``internsp plan`` and ``parallelize`` share: a model's units, memory, bytes and schedule."""
