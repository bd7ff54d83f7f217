"""Bits of tensors: compared exactly, and summed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(values: Tensor) -> Tensor:
    """The bits of ``values``, as integers (so that NaN equals NaN)."""
    return values.view(_BITS[math.gcd(values.element_size(), 8)])


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype and shape hold the same bits."""
    return torch.equal(bits_of(one), bits_of(other))


def plain_parts(value: Tensor) -> Iterator[Tensor]:
    """The plain tensors that make up ``value``, if its class tells them."""
    if not is_traceable_wrapper_subclass(value):
        yield value
        return
    for name in value.__tensor_flatten__()[0]:
        yield from plain_parts(getattr(value, name))


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the bytes of a tensor; for a ``DTensor``, of its local tensor."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    on_host = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(on_host.view(torch.uint8).numpy().data)
