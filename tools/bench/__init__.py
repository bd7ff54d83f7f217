"""Parts of ``tools/bench_overlap.py``: a slow link of our own, the variants, and the report."""
