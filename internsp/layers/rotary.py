"""Rotary position embedding from explicit positions (RoFormer, arXiv 2104.09864).

There is no module and no buffer: each sequence shard has its own positions (they restart at every
document), the tables are computed once a forward and passed to the blocks, and a model built on the
meta device has nothing to materialize.
"""

from __future__ import annotations

import torch
from torch import Tensor

from internsp.sp.heads import Rotation

RotaryTables = tuple[Tensor, Tensor]
"""(cosine, sine), each ``[B, s, 1, head_dim / 2]``; the axis of size 1 is the heads'."""


def rotary_tables(
    positions: Tensor,
    head_dim: int,
    theta: float = 10000.0,
    dtype: torch.dtype = torch.float32,
) -> RotaryTables:
    """Cosines and sines of the angles ``position * theta ** (-2 i / head_dim)``.

    Args:
        positions: ``[B, s]`` integers, counted from the start of each document.
        head_dim: even number of channels a head.
        theta: base of the geometric series of wavelengths.
        dtype: dtype of the activations; the tables are in ``promote_types(dtype, float32)``.

    Returns:
        Two tensors ``[B, s, 1, head_dim / 2]`` on the positions' device. Does not block.

    Raises:
        ValueError: ``head_dim`` is odd.
    """
    if head_dim % 2:
        raise ValueError(f"rotary embedding needs an even head_dim, got {head_dim}")
    # The angle of position 10**6 is only precise to 0.06 radian in fp32, so the angles are computed
    # in fp64 whatever the model's dtype: once a forward, for one head, that costs nothing.
    channels = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    angles = positions[..., None].to(torch.float64) * theta ** (-channels / head_dim)
    angles = angles[:, :, None, :]
    wide = torch.promote_types(dtype, torch.float32)
    return angles.cos().to(wide), angles.sin().to(wide)


def apply_rotary(x: Tensor, rotary: RotaryTables) -> Tensor:
    """Rotate each pair of channels ``(i, i + head_dim / 2)`` of ``x`` by its position's angle.

    The pairing is that of the Hugging Face checkpoints of Llama and InternLM2 (halves); Meta's own
    Llama files pair neighbors ``(2 i, 2 i + 1)`` and need their query and key rows permuted.

    Args:
        x: ``[B, s, heads, head_dim]``, any floating dtype.
        rotary: from :func:`rotary_tables`, for the same ``B`` and ``s``.

    Returns:
        ``[B, s, heads, head_dim]`` in the dtype of ``x``; computed in the tables' dtype.
    """
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def rotation(rotary: RotaryTables) -> Rotation:
    """:func:`apply_rotary` and its adjoint, a rotation by the opposite angles."""
    cos, sin = rotary
    return lambda x: apply_rotary(x, rotary), lambda x: apply_rotary(x, (cos, -sin))
