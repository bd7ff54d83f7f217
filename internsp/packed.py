"""A user's own all-gather of some weights: one function before it, one after.

A rule of the plan names both (``pre_all_gather``, ``post_all_gather``), as FSDP2 has them on a
tensor subclass::

    def pre(shard):             # [rows, ...], padded, in its own dtype, cut dimension first
        scale = shard.abs().amax() / 448
        return (shard / scale).to(torch.float8_e4m3fn), scale.float()

    def post(parts, out):       # parts: [ranks, ...] of each; out: [ranks, rows, ...], in the slot
        codes, scales = parts
        out.copy_(codes.to(out.dtype) * scales.view(-1, 1, 1))

What the first returns, a tensor or a tuple of them, travels as bytes in one message; the second
fills the unsharded weight in its slot. Every rank reads the same bytes, its own shard's too.
Shards, gradients and checkpoints are untouched by it: the gradient is that of the weight that was
computed with (straight through).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from internsp.config.functions import place_of, resolve
from internsp.errors import StructureError
from internsp.wp.layout import ShardLayout

_ALIGNED = 16  # bytes: a part may be viewed in any dtype


@dataclass(frozen=True)
class OwnGather:
    """The functions of one rule.

    Attributes:
        pre: of a padded shard what is sent of it; of one on meta its shapes and dtypes.
        post: fills the unsharded weight.
    """

    pre: Callable[[Tensor], Any]
    post: Callable[[Any, Tensor], object]

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> OwnGather | None:
        """What rules say of a weight.

        Raises:
            ConfigError: no such function.
        """
        if "pre_all_gather" not in said:
            return None
        place = "weight_parallel.plan: {}".format
        pre, post = (resolve(said[k], place(k)) for k in ("pre_all_gather", "post_all_gather"))
        return cls(pre, post)


@dataclass(frozen=True)
class PackedShard:
    """Pure: what one shard travels as, as a plan counts it.

    Attributes:
        name: of the weight, for errors.
        parts: shape, dtype, first byte and bytes of each tensor.
        nbytes: that travel.
        alone: one tensor that is no tuple.
    """

    name: str
    parts: tuple[tuple[torch.Size, torch.dtype, int, int], ...]
    nbytes: int
    alone: bool
    scratch = ()
    work_dtype = torch.uint8

    @classmethod
    def of(
        cls, name: str, own: OwnGather, layout: ShardLayout, dtype: torch.dtype
    ) -> PackedShard:
        """What ``own`` makes of a shard on the meta device: bytes are known before anything runs.

        Raises:
            StructureError: it gives no tensors, or cannot be asked so.
        """
        shard = torch.empty(layout.shard_shape, dtype=dtype, device="meta")
        try:
            given = own.pre(shard)
        except Exception as error:
            raise StructureError(
                f"{place_of(own.pre)}, the pre_all_gather of {name}, raised {type(error).__name__} "
                f"({error}) for a shard {list(shard.shape)} on the meta device, by which its "
                "bytes are counted: give tensors of the right shapes and dtypes there, too"
            ) from error
        parts, at = [], 0
        for tensor in _tensors(name, own, given):
            size = tensor.numel() * tensor.element_size()
            parts.append((tensor.shape, tensor.dtype, at, size))
            at += -(-size // _ALIGNED) * _ALIGNED
        return cls(name, tuple(parts), at, isinstance(given, Tensor))

    @torch.no_grad()
    def pack(self, own: OwnGather, shard: Tensor, out: Tensor) -> None:
        """Write what is sent of ``shard`` into ``out`` (uint8, flat).

        Raises:
            StructureError: it is not what it was for the plan.
        """
        given = _tensors(self.name, own, own.pre(shard))
        found = [(tensor.shape, tensor.dtype) for tensor in given]
        wanted = [(shape, dtype) for shape, dtype, _, _ in self.parts]
        if found != wanted:
            raise StructureError(
                f"{place_of(own.pre)}, the pre_all_gather of {self.name}, gave "
                f"{_words(found)} and has given {_words(wanted)} of a shard on the meta device: "
                "shapes and dtypes must not depend on values"
            )
        for tensor, (_, dtype, start, size) in zip(given, self.parts, strict=True):
            out[start : start + size].view(dtype).copy_(tensor.reshape(-1))

    @torch.no_grad()
    def unpack(self, own: OwnGather, received: Tensor, out: Tensor) -> None:
        """Have ``out`` ``[ranks, rows, ...]`` filled from ``received`` ``[ranks, nbytes]``.

        Raises:
            StructureError: the function returned something: it may have filled nothing.
        """
        parts = tuple(
            received[:, start : start + size].view(dtype).unflatten(1, shape)
            if shape
            else received[:, start : start + size].view(dtype).squeeze(1)
            for shape, dtype, start, size in self.parts
        )
        if own.post(parts[0] if self.alone else parts, out) is not None:
            raise StructureError(
                f"{place_of(own.post)}, the post_all_gather of {self.name}, returned something: "
                "write the unsharded weight into its second argument, and return nothing"
            )


def _tensors(name: str, own: OwnGather, given: Any) -> tuple[Tensor, ...]:
    parts = (given,) if isinstance(given, Tensor) else given
    if not isinstance(parts, tuple) or not parts or not all(isinstance(p, Tensor) for p in parts):
        raise StructureError(
            f"{place_of(own.pre)}, the pre_all_gather of {name}, gave a {type(given).__name__}: "
            "give a tensor, or a tuple of tensors"
        )
    return parts


def _words(kinds: list[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for shape, dtype in kinds)
