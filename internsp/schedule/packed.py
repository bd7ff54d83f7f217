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
gets a tensor where ``pre`` returned one, a tuple where it returned one, and fills the unsharded
weight in its slot (or returns it: then it is copied there). Both are called on the meta device
first, so that wrong shapes are found before anything runs. Every rank reads the same bytes, also
those of its own shard. Shards, gradients and checkpoints are not changed: the gradient of the
weight that ``post`` has filled is used as the shard's gradient (straight-through).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
        post: fills the unsharded weight, or returns it.
    """

    pre: Callable[[Tensor], object]
    post: Callable[[Tensor | tuple[Tensor, ...], Tensor], object]
    sharded = None
    """See :class:`internsp.schedule.extended.ExtendedGather`: the shard is plain."""

    @classmethod
    def of(cls, settings: Mapping[str, Callable[..., object] | str]) -> CustomAllGather:
        """The functions that a weight's ``settings`` from the rules name.

        Raises:
            ConfigError: a function cannot be imported.
        """
        keys = ("pre_all_gather", "post_all_gather")
        pre, post = (resolve(settings[key], f"weight_parallel.rules: {key}") for key in keys)
        return cls(pre, post)

    def encoding(
        self, name: str, layout: ShardLayout, dtype: torch.dtype, compute_dtype: torch.dtype
    ) -> PackedShard:
        """How shards travel, from calls of the functions on the meta device, before anything runs.

        Args:
            name: of the weight, for errors.
            dtype: of the shard.
            compute_dtype: of the unsharded weight.

        Raises:
            StructureError: a function raises there; ``pre`` returns no tensors; or ``post`` writes
                nothing and returns nothing, returns something else than the weight, or writes the
                same values for all ranks, as one does who takes the first rank's part for a tuple's
                first tensor.
        """
        shard = torch.empty(layout.shard_shape, dtype=dtype, device="meta")
        try:
            returned = self.pre(shard)
        except Exception as error:
            raise StructureError(
                f"{import_path(self.pre)}, the pre_all_gather of {name}, raised "
                f"{type(error).__name__} ({error}) for a shard {list(shard.shape)} on the meta "
                "device, by which its bytes are counted: return tensors of the right shapes and "
                "dtypes there, too"
            ) from error
        parts = Parts.of(_tensors(name, self, returned))
        made = PackedShard(name, self, parts, isinstance(returned, Tensor))
        whole = (layout.size, *layout.shard_shape)
        made._require_filled(torch.empty(whole, dtype=compute_dtype, device="meta"))
        return made


@dataclass(frozen=True)
class Parts:
    """Tensors as bytes, one after another.

    Attributes:
        kinds: shape and dtype of each.
        ranges: first byte and number of bytes of each.
        nbytes: of all.
    """

    kinds: tuple[tuple[torch.Size, torch.dtype], ...]
    ranges: tuple[tuple[int, int], ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Parts:
        """The bytes of tensors like ``tensors``."""
        ranges, at = [], 0
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            ranges.append((at, size))
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        return cls(kinds_of(tensors), tuple(ranges), at)

    def write(self, tensors: Iterable[Tensor], flat: Tensor) -> None:
        """Copy ``tensors`` into ``flat`` ``[nbytes]``."""
        for tensor, (_, dtype), (start, size) in zip(
            tensors, self.kinds, self.ranges, strict=True
        ):
            flat[start : start + size].view(dtype).copy_(tensor.reshape(-1))

    def read(self, flat: Tensor) -> Iterator[Tensor]:
        """Views of ``flat`` ``[..., nbytes]``: of each tensor ``[..., *shape]``."""
        for (shape, dtype), (start, size) in zip(self.kinds, self.ranges, strict=True):
            yield flat[..., start : start + size].view(dtype).view((*flat.shape[:-1], *shape))


@dataclass(frozen=True)
class PackedShard:
    """A shard as the tensors that ``custom.pre`` returns for it.

    Attributes:
        name: of the weight, for errors.
        custom: the user's functions.
        parts: the tensors.
        single_tensor: ``pre`` returned a tensor, not a tuple.
    """

    name: str
    custom: CustomAllGather
    parts: Parts
    single_tensor: bool
    scratch = ()
    work_dtype = torch.uint8
    slot_nbytes = None

    @property
    def nbytes(self) -> int:
        """See :class:`internsp.schedule.encoding.Encoding`."""
        return self.parts.nbytes

    def used_in(self, dtype: torch.dtype) -> PackedShard:
        """See :class:`internsp.schedule.encoding.Encoding`. ``post`` fills any dtype."""
        return self

    @torch.no_grad()
    def encode(self, shard: Tensor, sent: Tensor, scratch: Sequence[Tensor]) -> None:
        """See :class:`internsp.schedule.encoding.Encoding`.

        Raises:
            StructureError: shapes or dtypes are not those of the shard on the meta device.
        """
        given = self.custom.pre(shard)
        returned = _tensors(self.name, self.custom, given)
        found = kinds_of(returned)
        if found != self.parts.kinds or isinstance(given, Tensor) != self.single_tensor:
            raise StructureError(
                f"{import_path(self.custom.pre)}, the pre_all_gather of {self.name}, gave "
                f"{describe(found)} and has given {describe(self.parts.kinds)} of a shard on the "
                "meta device: shapes and dtypes must not depend on values"
            )
        self.parts.write(returned, sent)

    @torch.no_grad()
    def decode(self, received: Tensor, out: Tensor) -> None:
        """See :class:`internsp.schedule.encoding.Encoding`.

        Raises:
            StructureError: ``custom.post`` returned something that is not the unsharded weight.
        """
        parts = tuple(self.parts.read(received))
        returned = self.custom.post(parts[0] if self.single_tensor else parts, out)
        if returned is None or returned is out:
            return
        wanted = kinds_of([out])
        given = kinds_of([returned]) if isinstance(returned, Tensor) else ()
        if not isinstance(returned, Tensor) or given != wanted:
            kind = describe(given) or type(returned).__name__
            raise StructureError(
                f"{self._post} returned {kind} where the unsharded weight is "
                f"{describe(wanted)} [ranks, rows, ...]: write it into the second argument, or "
                "return a tensor of this shape and dtype"
            )
        out.copy_(returned)

    def _require_filled(self, out: Tensor) -> None:
        """Check that ``custom.post`` fills ``out``, which is on the meta device."""
        received = torch.empty(len(out), self.nbytes, dtype=torch.uint8, device="meta")
        first = [len(out), *self.parts.kinds[0][0]]
        gets = f"a tensor {first}"
        if not self.single_tensor:
            gets = f"a tuple of {len(self.parts.kinds)}, the first {first}"
        try:
            with _Writes(out) as writes:
                self.decode(received, out)
        except StructureError:
            raise
        except Exception as error:
            raise StructureError(
                f"{self._post} raised {type(error).__name__} ({error}) on the meta "
                f"device, on which it is tried first. It gets {gets}, as pre_all_gather returned "
                f"of a shard, one after another for the ranks, and fills {list(out.shape)}"
            ) from error
        if writes.same_for_all is not None:
            raise StructureError(
                f"{self._post} writes {list(writes.same_for_all)} into the unsharded "
                f"weight {list(out.shape)} [ranks, rows, ...], the same for every rank. It gets "
                f"{gets}: write every rank's own rows"
            )
        if not writes.any:
            raise StructureError(
                f"{self._post} neither writes the unsharded weight into its second "
                "argument nor returns it"
            )

    @property
    def _post(self) -> str:
        post = import_path(self.custom.post)
        return f"{post}, the post_all_gather that a rule gives {self.name},"


class _Writes(TorchDispatchMode):
    """Watches what is written into one tensor.

    Attributes:
        any: something was.
        same_for_all: shape of a tensor that was copied into all of it without its first dimension.
    """

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self._out = out
        self._ranks = len(out)
        self.any = False
        self.same_for_all: torch.Size | None = None

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        named = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)),
                 **(kwargs or {})}  # fmt: skip
        storage = self._out.untyped_storage()._cdata
        for argument in func._schema.arguments:
            written = named.get(argument.name)
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            if not isinstance(written, Tensor) or written.untyped_storage()._cdata != storage:
                continue
            self.any = True
            source = named.get("src")
            if written.shape != self._out.shape or not isinstance(source, Tensor):
                continue
            # Broadcast, or expanded as `out[:] = source` does it: then its first stride is 0.
            values = [n for n, step in zip(source.shape, source.stride(), strict=True) if step]
            missing = source.ndim < written.ndim or source.shape[0] == 1 or not source.stride(0)
            if missing and math.prod(values) > 1 != self._ranks:
                self.same_for_all = torch.Size(values)
        return func(*args, **(kwargs or {}))


def _tensors(name: str, custom: CustomAllGather, returned: object) -> tuple[Tensor, ...]:
    parts = (returned,) if isinstance(returned, Tensor) else returned
    if not isinstance(parts, tuple) or not parts or not all(isinstance(p, Tensor) for p in parts):
        raise StructureError(
            f"{import_path(custom.pre)}, the pre_all_gather of {name}, gave a "
            f"{type(returned).__name__}: give a tensor, or a tuple of tensors"
        )
    return parts


def kinds_of(tensors: Iterable[Tensor]) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    """Shape and dtype of each of ``tensors``."""
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)


def describe(kinds: Iterable[tuple[torch.Size, torch.dtype]]) -> str:
    """``kinds`` in words, for errors."""
    return ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for shape, dtype in kinds)
