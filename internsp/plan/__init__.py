"""What ``internsp plan`` and ``parallelize`` share: a model read, its units, bytes and schedule."""
