"""Find modules that compute one position from others, and so are wrong on a shard of a sequence."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.padding import _ConstantPadNd
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AvgPoolNd, _MaxPoolNd

# Functions by which a user's own module mixes positions.
_CALLS = frozenset({
    "scaled_dot_product_attention", "multi_head_attention_forward", "flash_attn_func",
    "flash_attn_varlen_func", "varlen_attn", "flex_attention", "conv1d", "causal_conv1d_fn",
    "selective_scan_fn", "associative_scan", "chunk_gated_delta_rule", "roll", "rfft", "fft",
})  # fmt: skip
_TYPES: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (nn.MultiheadAttention, "it would attend to this rank's tokens only"),
    (nn.RNNBase, "its state would begin anew on every rank"),
    (_ConvNd, "it would see this rank's neighbors only"),
    ((_NormBase, nn.GroupNorm), "it would take its statistics over this rank's tokens only"),
    ((_AvgPoolNd, _MaxPoolNd, _AdaptiveAvgPoolNd, _ConstantPadNd), "it works along positions"),
)


class Refused(NamedTuple):
    """Why a model cannot be made parallel.

    Attributes:
        module: dotted name of the module; empty for the model itself.
        reason: what is wrong with it, and the remedy.
    """

    module: str
    reason: str

    def __str__(self) -> str:
        return f"{self.module or 'the model'}: {self.reason}"


def mixes_positions(module: nn.Module) -> str | None:
    """Why ``module`` itself (not its children) is wrong on a shard of a sequence, or None.

    Recognizes torch's own modules, and modules whose class calls a known function of attention or
    of a scan.
    """
    kind = type(module).__name__
    for types, reason in _TYPES:
        if isinstance(module, types):
            return f"{kind}: {reason}"
    if type(module).__module__.startswith(("torch.", "internsp.")):
        return None
    names = {name for m in class_functions(type(module)) for name in m.__code__.co_names}
    calls = sorted(_CALLS & names)
    if calls:
        return f"{kind} calls {calls[0]}, which would see this rank's tokens only"
    return None


def class_functions(kind: type) -> list:
    """The functions of a class and its bases up to ``nn.Module``, with their decorators removed."""
    found = []
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for value in vars(base).values():
            while hasattr(value, "__wrapped__"):
                value = value.__wrapped__
            if hasattr(value, "__code__"):
                found.append(value)
    return found
