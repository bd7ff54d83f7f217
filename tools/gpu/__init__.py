"""Parts of ``tools/bench_gpu.py``."""
