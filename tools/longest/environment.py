"""What ranks whose memory is measured have in their environment. Imports nothing."""

GIVES_BACK = {"MKL_DISABLE_FAST_MM": "1"}
"""Of ranks' environment: MKL gives its buffers back after each product, of which it keeps some MiB
else, by the processor's instruction set and the largest product."""
