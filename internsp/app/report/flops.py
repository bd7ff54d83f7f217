"""Floating-point operations of a token, by stated formulas, and the peak rate of a device.

``N`` is the number of parameters that multiply (all but the input embedding, of which a token only
reads a row). With ``L`` layers of ``h`` heads with ``d`` features, and sequences of ``S`` tokens::

    6 N + 12 L h d S       forward and backward (PaLM, arXiv 2204.02311, appendix B)

Recomputation does not count. Attention counts all keys, as if none were masked, so its term is too
high for causal or packed sequences. MFU is these operations per second over the device's peak.
"""

from __future__ import annotations

from internsp.app.config import Config

# Dense 16-bit matrix products, TFLOP/s, from the vendors' data sheets; the longest name first.
_PEAKS = {
    "A100": 312.0, "A800": 312.0, "B200": 2250.0, "GH200": 989.4, "H100": 989.4,
    "H100 NVL": 835.5, "H100 PCIe": 756.5, "H20": 148.0, "H200": 989.4, "H800": 989.4, "L4": 121.0,
    "L40S": 362.0, "V100": 125.0,
}  # fmt: skip


def flops_per_token(config: Config, parameters: int) -> float:
    """Operations of one token, forward and backward, by the formula above.

    Of a mixture a token multiplies its own experts only; those of transformers count as dense.

    Args:
        parameters: number of elements of the full model.
    """
    model = config.model
    embedding = model.vocab_size * model.hidden_size
    head_dim = model.head_dim or model.hidden_size // model.heads
    attention = model.layers * model.heads * head_dim * config.data.sequence_length
    one = 3 * model.hidden_size * model.expert_width
    others = model.mixtures * (model.experts - model.top_k) * one
    multiplied = parameters - others - (0 if model.tie_embeddings else embedding)
    return 6.0 * multiplied + 12.0 * attention


def peak_tflops(config: Config, device: str) -> float | None:
    """Peak TFLOP/s of the device: ``train.peak_tflops``, or looked up by its name.

    Args:
        device: name from ``torch.cuda.get_device_name``; empty without a GPU.
    """
    if config.train.peak_tflops is not None:
        return config.train.peak_tflops
    dtype = config.weight_parallel.compute_dtype or config.train.dtype
    if dtype not in ("bfloat16", "float16"):
        return None
    return rated_tflops(device)


def rated_tflops(device: str) -> float | None:
    """What the vendor's data sheet says of a device, whose name has all words of the entry's."""
    words = device.replace("-", " ").split()
    for name in sorted(_PEAKS, key=len, reverse=True):
        if all(part in words for part in name.split()):
            return _PEAKS[name]
    return None
