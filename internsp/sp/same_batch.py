"""Checks that the ranks of a sequence group, each with a part of the batch, have the same batch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.base.bits import bits_of
from internsp.errors import LayoutError
from internsp.mesh import ParallelMesh
from internsp.sp.attention import DistributedAttention
from internsp.sp.layout import SequenceLayout

_BLOCKING_FORWARDS = 3  # few: a program that draws data by the wrong rank does so from the start


class SameBatch:
    """Compares the sequence layouts with which the ranks of a sequence group call a model.

    Each check is one all-gather of 16 bytes a rank. The first forwards wait for its result at once:
    data drawn by the process's rank, or positions distributed in another way, are wrong from the
    first batch on. Later forwards overlap it, and its result is read at the end of the backward,
    before the optimizer steps (:meth:`confirm`), or at the next forward if there is no backward.
    With a device the host would have to wait for the result, so that only the first forwards are
    compared.

    Args:
        attentions: those of the model, which are told its layout.
    """

    def __init__(self, mesh: ParallelMesh, attentions: Sequence[DistributedAttention] = ()) -> None:
        self._attentions = attentions
        self._group, self._device = mesh.sequence_group, mesh.device
        self._single_rank = mesh.sequence == 1
        self._blocking_left = _BLOCKING_FORWARDS
        self._pending: BatchComparison | None = None

    def check(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Compare the layout among a forward's arguments, if it has one.

        Collective over the sequence group; blocks in the first forwards only.

        Raises:
            LayoutError: two ranks have different batches; raised on every rank of the group.
        """
        arguments = (*args, *kwargs.values())
        layout = next((x for x in arguments if isinstance(x, SequenceLayout)), None)
        for attention in self._attentions:
            attention.model_layout = layout
        if self._single_rank or not (self._blocking_left or self._device.type == "cpu"):
            return
        self.confirm()
        if layout is None:
            return
        described = f"ranges {layout.ranges}, documents {layout.documents.rows}"
        if any(layout.ignored):
            described += f", ignored {layout.ignored}"
        inputs: dict[str, Any] = {"ids": layout.all_ids, "tokens": layout.total_valid_tokens}
        given = {"labels": layout.all_labels, "row keys": layout.row_keys}
        inputs |= {name: tensor for name, tensor in given.items() if tensor is not None}
        self._pending = BatchComparison(inputs, described, self._group, self._device)
        if self._blocking_left:
            self._blocking_left -= 1
            self.confirm()

    def confirm(self) -> None:
        """Wait for the result of the last check, if it was not read yet. Blocks.

        Raises:
            LayoutError: as :meth:`check`.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.require_same()

    def reset(self) -> None:
        """Drop the pending result after a failed pass."""
        self._pending = None


class BatchComparison:
    """An all-gather that compares the batches of a sequence group's ranks.

    The constructor launches it and does not block. Collective over the group.

    Args:
        inputs: tensors and numbers by name.
        state: text of what else must be the same on all ranks.
    """

    def __init__(
        self, inputs: Mapping[str, Any], state: str, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        tensors = {name: x for name, x in sorted(inputs.items()) if isinstance(x, Tensor)}
        described = [f"{name} {list(x.shape)} {x.dtype}" for name, x in tensors.items()]
        described += [
            f"{k} = {v}" for k, v in sorted(inputs.items()) if isinstance(v, bool | int | None)
        ]
        described.append(state)
        digest = int.from_bytes(hashlib.sha256("\n".join(described).encode()).digest()[:7], "big")
        first = torch.tensor(digest, device=device)
        contents = torch.stack([first, *(_checksum(x).to(device) for x in tensors.values())])
        both = torch.stack([first, contents.sum()])
        self._described, self._group = described, group
        self._gathered = [torch.empty_like(both) for _ in range(dist.get_world_size(group))]
        self._work = dist.all_gather(self._gathered, both, group=group, async_op=True)

    def require_same(self) -> None:
        """Wait for the all-gather and compare its parts. Blocks.

        Raises:
            LayoutError: two ranks have different batches; raised on every rank.
        """
        assert self._work is not None, "this rank belongs to the group"
        self._work.wait()
        found = [tuple(x) for x in torch.stack(self._gathered).tolist()]
        if len(set(found)) == 1:
            return
        other = next(rank for rank, x in enumerate(found) if x != found[0])
        alike = found[other][0] == found[0][0]
        what = "other values" if alike else "inputs of other shapes or names"
        raise LayoutError(
            f"rank {other} of the sequence group was given {what} than rank 0 of it (this is rank "
            f"{dist.get_rank(self._group)}, with {', '.join(self._described):.300}): give every "
            "rank of a sequence group the same whole batch, and draw other data by mesh.data_rank, "
            "not by the process's rank"
        )


def _checksum(x: Tensor) -> Tensor:
    """int64 checksum of the bits of ``x``; for integers, weighted by position."""
    x = x.detach()
    if x.is_floating_point():
        return bits_of(x.contiguous()).sum(dtype=torch.int64)
    flat = x.reshape(-1)
    piece = max(1024, flat.numel() // 256)  # so that a long sequence needs little memory
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, flat.numel(), piece):
        part = flat[start : start + piece].to(torch.int64)
        weights = torch.arange(start + 1, start + 1 + len(part), device=x.device) * 2654435761
        total += (part * weights).sum()
    return total
