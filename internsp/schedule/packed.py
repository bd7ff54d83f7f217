"""A user's functions around the all-gather of some weights: one before it, one after it.

A rule of the plan names both (``pre_all_gather``, ``post_all_gather``); FSDP2 has them as methods
of a tensor subclass::

    def pre(shard):             # [rows, ...], padded, in its own dtype, sharded dimension first
        scale = shard.abs().amax() / 448
        return (shard / scale).to(torch.float8_e4m3fn), scale.float()

    def post(parts, out):       # parts: [ranks, ...] of each; out: [ranks, rows, ...], in the slot
        codes, scales = parts
        out.copy_(codes.to(out.dtype) * scales.view(-1, 1, 1))

The tensor or tuple of tensors that ``pre`` returns is sent as bytes in one all-gather; ``post``
fills the unsharded weight in its slot. Every rank reads the same bytes, also those of its own
shard. Shards, gradients and checkpoints are not changed: the gradient of the weight that ``post``
has filled is used as the shard's gradient (straight-through).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from internsp.config.functions import import_path, resolve
from internsp.errors import StructureError
from internsp.schedule.layout import ShardLayout

_ALIGNMENT = 16  # bytes, so that a part can be viewed in any dtype


@dataclass(frozen=True)
class CustomAllGather:
    """The two functions of one rule.

    Attributes:
        pre: returns what is sent of a padded shard; for a shard on the meta device, tensors with
            the same shapes and dtypes.
        post: fills the unsharded weight.
    """

    pre: Callable[[Tensor], object]
    post: Callable[[Tensor | tuple[Tensor, ...], Tensor], object]

    @classmethod
    def of(cls, settings: Mapping[str, Callable[..., object] | str]) -> CustomAllGather | None:
        """The functions that a weight's ``settings`` from the rules name; ``None`` if none.

        Raises:
            ConfigError: a function cannot be imported.
        """
        if "pre_all_gather" not in settings:
            return None
        keys = ("pre_all_gather", "post_all_gather")
        pre, post = (resolve(settings[key], f"weight_parallel.plan: {key}") for key in keys)
        return cls(pre, post)


@dataclass(frozen=True)
class PackedShard:
    """The layout in bytes of what is sent for one shard. Pure; a plan uses it, too.

    Attributes:
        name: of the weight, for errors.
        parts: shape, dtype, first byte and number of bytes of each tensor.
        nbytes: bytes that are sent for the shard.
        single_tensor: ``pre`` returned a tensor, not a tuple.
    """

    name: str
    parts: tuple[tuple[torch.Size, torch.dtype, int, int], ...]
    nbytes: int
    single_tensor: bool
    scratch = ()
    work_dtype = torch.uint8

    @classmethod
    def of(
        cls, name: str, custom: CustomAllGather, layout: ShardLayout, dtype: torch.dtype
    ) -> PackedShard:
        """The layout, from a call of ``custom.pre`` with a shard on the meta device.

        So the number of bytes is known before anything runs.

        Raises:
            StructureError: ``custom.pre`` raises on the meta device, or returns no tensors.
        """
        shard = torch.empty(layout.shard_shape, dtype=dtype, device="meta")
        try:
            returned = custom.pre(shard)
        except Exception as error:
            raise StructureError(
                f"{import_path(custom.pre)}, the pre_all_gather of {name}, raised "
                f"{type(error).__name__} ({error}) for a shard {list(shard.shape)} on the meta "
                "device, by which its bytes are counted: return tensors of the right shapes and "
                "dtypes there, too"
            ) from error
        parts, at = [], 0
        for tensor in _tensors(name, custom, returned):
            size = tensor.numel() * tensor.element_size()
            parts.append((tensor.shape, tensor.dtype, at, size))
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        return cls(name, tuple(parts), at, isinstance(returned, Tensor))

    @torch.no_grad()
    def pack(self, custom: CustomAllGather, shard: Tensor, out: Tensor) -> None:
        """Write what ``custom.pre`` returns for ``shard`` into ``out`` (uint8, flat).

        Raises:
            StructureError: shapes or dtypes are not those of the shard on the meta device.
        """
        returned = _tensors(self.name, custom, custom.pre(shard))
        found = [(tensor.shape, tensor.dtype) for tensor in returned]
        wanted = [(shape, dtype) for shape, dtype, _, _ in self.parts]
        if found != wanted:
            raise StructureError(
                f"{import_path(custom.pre)}, the pre_all_gather of {self.name}, gave "
                f"{_describe(found)} and has given {_describe(wanted)} of a shard on the meta "
                "device: shapes and dtypes must not depend on values"
            )
        for tensor, (_, dtype, start, size) in zip(returned, self.parts, strict=True):
            out[start : start + size].view(dtype).copy_(tensor.reshape(-1))

    @torch.no_grad()
    def unpack(self, custom: CustomAllGather, received: Tensor, out: Tensor) -> None:
        """Fill ``out`` ``[ranks, rows, ...]`` from ``received`` ``[ranks, nbytes]``.

        Raises:
            StructureError: ``custom.post`` returned something, and so may not have filled ``out``.
        """
        parts = tuple(
            received[:, start : start + size].view(dtype).unflatten(1, shape)
            if shape
            else received[:, start : start + size].view(dtype).squeeze(1)
            for shape, dtype, start, size in self.parts
        )
        if custom.post(parts[0] if self.single_tensor else parts, out) is not None:
            raise StructureError(
                f"{import_path(custom.post)}, the post_all_gather of {self.name}, returned "
                "something: write the unsharded weight into its second argument, and return nothing"
            )


def _tensors(name: str, custom: CustomAllGather, returned: object) -> tuple[Tensor, ...]:
    parts = (returned,) if isinstance(returned, Tensor) else returned
    if not isinstance(parts, tuple) or not parts or not all(isinstance(p, Tensor) for p in parts):
        raise StructureError(
            f"{import_path(custom.pre)}, the pre_all_gather of {name}, gave a "
            f"{type(returned).__name__}: give a tensor, or a tuple of tensors"
        )
    return parts


def _describe(kinds: list[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for shape, dtype in kinds)
