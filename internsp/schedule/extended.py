"""A weight of a class with functions of its own around the all-gather: FSDP2's extensions.

``fsdp_pre_all_gather`` of a shard of the class returns tensors to send, and metadata that stays on
this rank; ``fsdp_post_all_gather`` makes the unsharded weight of what all ranks have sent: a plain
tensor, or one of a class that holds plain ones (8-bit codes and their scale). They are in the
weight's bytes in its slot, one after another, and what a module reads is a tensor of that class
over them. Nothing is called on the meta device, and a trained shard is never unpacked: the
gradient of the unsharded weight is the shard's (straight-through).
:mod:`internsp.schedule.packed` has the functions of a rule, for plain weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from internsp.base.bits import plain_parts
from internsp.errors import InternspError, StructureError
from internsp.schedule.chunk import aligned
from internsp.schedule.layout import ShardLayout
from internsp.schedule.packed import Parts, describe, kinds_of


@dataclass(frozen=True, eq=False)
class ExtendedGather:
    """The functions of one weight's class.

    Attributes:
        sharded: the parameter, a ``DTensor`` whose local tensor is this rank's shard of the class.
        pre: returns the tensors to send, and metadata for ``post``.
        post: makes the unsharded weight of those of all ranks, one after another in dimension 0.
    """

    sharded: nn.Parameter
    pre: Callable[[], tuple[Sequence[Tensor], object]]
    post: Callable[[tuple[Tensor, ...], object], Tensor]

    @torch.no_grad()
    def encoding(
        self, name: str, layout: ShardLayout, dtype: torch.dtype, compute_dtype: torch.dtype
    ) -> ExtendedShard:
        """See :meth:`internsp.schedule.packed.CustomAllGather.encoding`. Tries both functions, with
        this rank's tensors in the place of those of all.

        Raises:
            StructureError: a function fails, or the unsharded weight is of a class from which plain
                tensors cannot be taken.
        """
        try:
            sent, metadata = self.pre()
            rows = [part.reshape(-1, *part.shape[1:]) for part in sent]
            made = self.post(tuple(torch.cat([part] * layout.size) for part in rows), metadata)
        except InternspError:
            raise
        except Exception as error:
            raise StructureError(
                f"fsdp_pre_all_gather or fsdp_post_all_gather of {name} failed "
                f"({type(error).__name__}: {error}): return a tuple of tensors to send, and "
                "metadata, from the first, the weight and a tuple of tensors from the second"
            ) from error
        plain = tuple(plain_parts(made))
        for tensor in plain:
            if type(tensor) is not Tensor or not tensor.is_contiguous():
                raise StructureError(
                    f"fsdp_post_all_gather of {name} made a {type(made).__name__}, in which a "
                    f"{type(tensor).__name__} is not a plain contiguous tensor, as those are that "
                    "a slot holds: give the class __tensor_flatten__ and __tensor_unflatten__, and "
                    "contiguous tensors"
                )
        return ExtendedShard(name, self, Parts.of(sent), Parts.of(plain))


@dataclass(eq=False)
class ExtendedShard:
    """A shard as the tensors that its class sends.

    Attributes:
        name: of the weight, for errors.
        functions: of its class.
        parts: the tensors that are sent.
        held: the plain tensors that make up the unsharded weight, as they lie in its slot.
        unsharded: the weight, over its bytes in the slot; made by :meth:`decode`.
    """

    name: str
    functions: ExtendedGather
    parts: Parts
    held: Parts
    unsharded: Tensor | None = None
    scratch = ()
    work_dtype = torch.uint8
    _metadata: object = None

    @property
    def sent(self) -> str:
        """The tensors that are sent, in words: the same on all ranks."""
        return describe(self.parts.kinds)

    @property
    def nbytes(self) -> int:
        """See :class:`internsp.schedule.encoding.Encoding`."""
        return self.parts.nbytes

    @property
    def slot_nbytes(self) -> int:
        """See :class:`internsp.schedule.encoding.Encoding`."""
        return aligned(self.held.nbytes)

    def used_in(self, dtype: torch.dtype) -> ExtendedShard:
        """See :class:`internsp.schedule.encoding.Encoding`. The class decides on the dtype."""
        return self

    @torch.no_grad()
    def encode(self, shard: Tensor, sent: Tensor, scratch: Sequence[Tensor]) -> None:
        """See :class:`internsp.schedule.encoding.Encoding`. ``shard`` stands for the program's.

        Raises:
            StructureError: shapes or dtypes are not those of the first call.
        """
        tensors, self._metadata = self.functions.pre()
        self._write(self.parts, tensors, sent, "fsdp_pre_all_gather")

    @torch.no_grad()
    @torch.inference_mode(False)  # training may read what an evaluation has gathered
    def decode(self, received: Tensor, out: Tensor) -> None:
        """See :class:`internsp.schedule.encoding.Encoding`.

        Raises:
            StructureError: shapes or dtypes are not those of the first call.
        """
        gathered = [part.reshape(-1, *part.shape[2:]) for part in self.parts.read(received)]
        made = self.functions.post(tuple(gathered), self._metadata)
        self._write(self.held, [*plain_parts(made)], out, "fsdp_post_all_gather")
        self.unsharded = _over(made, map(_alone, self.held.read(out)))

    def _write(self, parts: Parts, tensors: Sequence[Tensor], flat: Tensor, function: str) -> None:
        if kinds_of(tensors) != parts.kinds:
            raise StructureError(
                f"{function} of {self.name} gave {describe(kinds_of(tensors))} and has given "
                f"{describe(parts.kinds)} at first: shapes and dtypes must not change"
            )
        parts.write(tensors, flat)


def _alone(part: Tensor) -> Tensor:
    """``part`` of a slot with a storage that begins where it does, as classes check, and a version
    counter at 0 that the next gather into these bytes does not raise."""
    start = part.storage_offset() * part.element_size()
    storage = part.untyped_storage()[start : start + part.nbytes]
    return part.new_empty(0).set_(storage, 0, part.shape, part.stride()).data  # set_ has raised it


def _over(value: Tensor, plain: Iterator[Tensor]) -> Tensor:
    """A tensor like ``value``, made up of ``plain``."""
    if not is_traceable_wrapper_subclass(value):
        return next(plain)
    names, context = value.__tensor_flatten__()
    inner = {name: _over(getattr(value, name), plain) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())
