"""Environment variables of ranks whose memory is measured. Imports nothing."""

GIVES_BACK = {"MKL_DISABLE_FAST_MM": "1"}
"""Makes MKL free its buffers after each product; otherwise it keeps some MiB, depending on the
processor's instruction set and the largest product."""
