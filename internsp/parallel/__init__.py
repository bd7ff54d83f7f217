"""``parallelize``: a model and a mesh become communicators and hooks; what ranks agree on first."""
