"""Floating-point operations of a token, by stated formulas, and what a device could do at most.

For a model of ``N`` parameters that multiply (all but the input embedding's, of which a token looks
one row up), ``L`` layers of ``h`` heads with ``d`` features, and sequences of ``S`` tokens::

    model     6 N + 12 L h d S       forward and backward (PaLM, arXiv 2204.02311, appendix B)
    hardware  model + f (2 N_b + 4 L h d S)    and what is computed again

``f`` is the share of the blocks that recompute and ``N_b`` the parameters of all blocks; selective
checkpointing keeps attention's output, so that its last term is not there. Attention counts all
keys, as if none were masked: of causal or packed sequences its term is too high. MFU is the model's
operations a second over the device's peak.
"""

from __future__ import annotations

from typing import NamedTuple

from internsp.config import Config

# Dense 16-bit matrix products, TFLOP/s, from the vendors' data sheets; the longest name first.
_PEAKS = {
    "A100": 312.0, "A800": 312.0, "B200": 2250.0, "GH200": 989.4, "H100": 989.4,
    "H100 NVL": 835.5, "H100 PCIe": 756.5, "H20": 148.0, "H200": 989.4, "H800": 989.4, "L4": 121.0,
    "L40S": 362.0, "V100": 125.0,
}  # fmt: skip


class Flops(NamedTuple):
    """Operations of one token, forward and backward."""

    model: float
    hardware: float


def flops_per_token(config: Config, parameters: int) -> Flops:
    """By the formulas above; of dense models, whose every parameter a token meets.

    Args:
        parameters: elements of the whole model.
    """
    model, again = config.model, config.activation_checkpoint
    embedding = model.vocab_size * model.hidden_size
    head_dim = model.head_dim or model.hidden_size // model.heads
    attention = model.layers * model.heads * head_dim * config.data.sequence_length
    multiplied = parameters - (0 if model.tie_embeddings else embedding)
    own = 6.0 * multiplied + 12.0 * attention
    share = len(again.selected(model.layers)) / model.layers
    blocks = multiplied - embedding  # the head has as many
    repeated = 2.0 * blocks + (4.0 * attention if again.mode == "full" else 0.0)
    return Flops(own, own + share * repeated)


def peak_tflops(config: Config, device: str) -> float | None:
    """TFLOP/s of the device at most: ``train.peak_tflops``, or what is known of its name.

    Args:
        device: its name, as ``torch.cuda.get_device_name`` gives it; empty: none.
    """
    if config.train.peak_tflops is not None:
        return config.train.peak_tflops
    dtype = config.weight_parallel.compute_dtype or config.train.dtype
    if dtype not in ("bfloat16", "float16"):
        return None
    words = device.replace("-", " ").split()
    for name in sorted(_PEAKS, key=len, reverse=True):
        if all(part in words for part in name.split()):
            return _PEAKS[name]
    return None
