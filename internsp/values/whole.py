"""Full (unsharded) parameters between steps: read, edit and write them back, or stream them.

:func:`full_params` gives a parallel model full parameters for the length of a ``with`` block (like
FSDP's ``summon_full_params`` and DeepSpeed's ``GatheredParameters``); :func:`iterate_full_params`
yields them unit by unit. Both are collective. Before any communication the ranks compare their
calls through the store, so that all ranks get an error which names a rank whose call differs or
fails. ``docs/howto/load_and_export.md`` has examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from internsp.base.bits import checksum, same_bits
from internsp.errors import CollectiveError, InternspError, OrderError, StructureError
from internsp.values.part import Entry, ModelPart, copy

Write = Literal["none", "shards", "rank0"]


@contextmanager
def full_params(
    model: nn.Module,
    *,
    write: Write = "none",
    offload_to_cpu: bool = False,
    with_grads: bool = False,
    recurse: bool = True,
    dtype: torch.dtype | None = None,
) -> Iterator[None]:
    """Context in which ``model`` holds full, plain ``nn.Parameter``, as on one process.

    Names, ties and ``state_dict()`` are those of one process; experts of all expert ranks follow
    one another on dimension 0. Buffers are copies. Values have full precision: 16-bit parameters of
    a ``ZeroOptimizer`` are its fp32 masters. Full tensors have memory of their own and use no slot.
    No forward, backward or step may begin inside.

    Collective over the ranks of the model's stage; blocks. An exception that leaves the context
    restores the model, with nothing written.

    Args:
        model: after ``parallelize``: the model, a module in it, or an ``nn.ModuleList`` of a
            pipeline's chunks.
        write: what happens to values that are changed inside. ``"none"``: they are dropped.
            ``"shards"``: they are written back; all ranks must have written the same values.
            ``"rank0"``: the values of the stage's first rank are written on all ranks. Masters of a
            ``ZeroOptimizer`` get them unrounded; elements that did not change keep every bit.
        offload_to_cpu: keep full tensors in host memory, with one at a time on the device.
        with_grads: ``.grad`` is the full gradient, for a ``ZeroOptimizer`` the reduced gradient of
            its next step, in fp32 or wider; it is written back like values.
        recurse: whether parameters of blocks below ``model`` are included; otherwise they stay
            sharded.
        dtype: dtype to which floating-point parameters are converted; ``None``: full precision.

    Raises:
        OrderError: called in a forward, in a backward, within ``unchanged()`` (a step), or nested.
        StructureError: no parameter of ``model`` is parallel; ranks wrote different values; a
            parameter was removed, or given another shape.
        GradientError: gradients are requested but not complete.
        CollectiveError: the ranks' calls differ, or another rank failed.
    """
    if write not in ("none", "shards", "rank0"):
        raise ValueError(f"write = {write!r}: choose one of 'none', 'shards', 'rank0'")
    call = (
        f"full_params(write={write!r}, offload_to_cpu={offload_to_cpu}, with_grads={with_grads}, "
        f"recurse={recurse}, dtype={dtype})"
    )
    part = ModelPart(model, recurse, call)
    part.synchronize(with_grads)
    context = _FullParams(part, write, dtype, offload_to_cpu, with_grads)
    context.install()
    try:
        yield
    except BaseException as error:
        context.restore()
        if write != "none" and isinstance(error, Exception):  # else the process ends: do not wait
            with suppress(InternspError):  # the caller gets the cause instead
                context.exchange_changes(failed=f"{type(error).__name__}: {error}")
        raise
    context.restore()
    context.write_back()


def iterate_full_params(
    model: nn.Module,
    *,
    offload_to_cpu: bool = False,
    recurse: bool = True,
    dtype: torch.dtype | None = None,
    rank0_only: bool = False,
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield full values unit by unit, as ``(unit, {name: values})`` in the order of the model.

    A unit is a block, or a large root parameter (embedding, head); the persistent buffers come
    last. Each value is yielded once, under its first name; a tied weight of a pipeline on the first
    of its stages. The dictionary is cleared when the iteration continues, so that only one unit is
    unsharded at a time; the caller may keep values that it takes out. Precision is as in
    :func:`full_params`. Each step of the iteration is collective: all ranks must iterate to the
    end, and must not write weights meanwhile.

    Args:
        model, offload_to_cpu, recurse, dtype: see :func:`full_params`.
        rank0_only: only the stage's first rank gets values; the others get empty dictionaries.

    Raises:
        OrderError: as for :func:`full_params`; or a weight was written between two units.
        CollectiveError: a rank left the iteration early, or made another call.
    """
    call = f"iterate_full_params(recurse={recurse}, dtype={dtype}, rank0_only={rank0_only})"
    part = ModelPart(model, recurse, call)
    part.synchronize()
    versions = part.versions()
    kept = part.on_first_rank or not rank0_only
    *units, (_, buffers) = part.units()
    for unit, entries in units:
        own_error = part.usage_error(versions)
        part.require_same(f"unit {unit or 'outside of the blocks'} of {part.call}", own_error)
        values: dict[str, Tensor] = {}
        with part.collective_section():
            for entry in entries:
                if not entry.member.counted:
                    continue
                full = part.full(entry, dtype, offload_to_cpu and kept)
                if kept:
                    values[entry.name] = full
                del full
            part.free()
        yield unit, values
        values.clear()
    persistent = [entry for entry in buffers if entry.persistent]
    if persistent:
        given = persistent if kept else []
        yield "buffers", {entry.name: part.full(entry, offload=offload_to_cpu) for entry in given}


class _FullParams:
    """The state of one :func:`full_params`: installs full parameters, and writes changes back."""

    def __init__(
        self,
        part: ModelPart,
        write: Write,
        dtype: torch.dtype | None,
        offload: bool,
        with_grads: bool,
    ) -> None:
        self.part, self.write, self.dtype, self.offload = part, write, dtype, offload
        self.with_grads = with_grads
        self._versions = part.versions()
        # Whether this rank looks for changes at the end.
        self._compares = write == "shards" or (write == "rank0" and part.on_first_rank)
        self._error: InternspError | None = None

    @torch.no_grad()
    def install(self) -> None:
        """Gather all full tensors, then put them into the modules."""
        part = self.part
        with part.collective_section():
            for _, entries in part.units():
                for entry in entries:
                    full = part.full(entry, self.dtype, self.offload)
                    if entry.member is not None:
                        full = nn.Parameter(full, entry.member.requires_grad)
                    entry.full = full
                part.free()
            if self.with_grads:
                self._install_gradients()
        self._installed = self._checksums()
        for entry in part.entries:
            entry.put(entry.full)
        for communicator in part.communicators:
            communicator.events.hold_full_params(part.call.partition(" of ")[0])

    def _install_gradients(self) -> None:
        reduced: dict[str, Tensor] = {}
        for optimizer in self.part.optimizers:
            reduced |= optimizer.gather_gradients() if optimizer.unfinished else {}
        for entry in self.part.parameters:
            if entry.member in self.part.buckets:
                full = reduced.pop(entry.member.name, None)
            else:
                kept: Any = entry.value.grad
                full = None if kept is None else kept.full_tensor()
            if full is not None:
                if full.dtype != entry.full.dtype:
                    entry.full.grad_dtype = full.dtype
                entry.full_grad = entry.full.grad = copy(full, self.offload)

    def restore(self) -> None:
        """Put the sharded parameters back, and record the tensors found in their place."""
        for communicator in self.part.communicators:
            communicator.events.hold_full_params("")
        for entry in self.part.entries:
            found = entry.held()
            entry.put(entry.value)
            self._record_found(entry, found)

    def _record_found(self, entry: Entry[Any], found: Sequence[Tensor | None]) -> None:
        """Record the tensor found for ``entry``: the installed one, or its replacement.

        ``load_state_dict(assign=True)``, for example, replaces it.
        """
        installed = entry.full
        others = [value for value in found if value is not installed]
        value = others[0] if others else installed
        reason = self._why_unwritable(entry, value)
        if not reason and any(not _same_tensor(other, value) for other in others[1:]):
            reason = f"was given different values in the {len(found)} modules that share it"
        if reason or value is None:
            self._error = self._error or StructureError(
                f"{entry.name} {reason} on rank {self.part.mesh.rank} inside {self.part.call}: "
                "write full values into it (copy_, .data =); nothing was written back"
            )
            return
        entry.full = value.detach()
        if entry.member is not None:
            entry.full_grad = value.grad if value.is_leaf else None
            entry.replaced = value is not installed

    def _why_unwritable(self, entry: Entry[Any], value: Tensor | None) -> str:
        """Why ``value`` cannot be written back, as text; empty if it can."""
        if value is None:
            return "was removed"
        if isinstance(value, DTensor) or value.device.type == "meta":
            return f"was replaced by a {'DTensor' if isinstance(value, DTensor) else 'meta tensor'}"
        shape = entry.value.shape
        if value.shape != shape:
            return f"was given the shape {list(value.shape)} in place of {list(shape)}"
        if entry.member is None:
            return ""
        if value.requires_grad != entry.member.requires_grad:
            return "was frozen or thawed, which is to be done outside of the context"
        gradient = value.grad if value.is_leaf else None
        if not self.with_grads or gradient is None:
            return ""
        if gradient.shape != shape:
            return f"was given a gradient of shape {list(gradient.shape)}"
        # An optimizer has slices only for gradients that a backward has computed.
        missing = entry.full_grad is None and entry.full.grad is not gradient
        if missing and entry.member in self.part.buckets:
            return "was given a gradient, of which its ZeroOptimizer has none"
        return ""

    @torch.no_grad()
    def write_back(self) -> None:
        """Write changed values and gradients on all ranks. Collective; blocks."""
        if self.write == "none":
            return
        part = self.part
        written = part.written_since(self._versions)
        if written and self._error is None:
            self._error = OrderError(
                f"the shard of {written[0]} was written on rank {part.mesh.rank} inside "
                f"{part.call}, whose end would undo it: write into the full parameters "
                "that the model holds; nothing was written back"
            )
        if self._error is not None:
            self.exchange_changes(failed=str(self._error))
            raise self._error
        now = self._checksums().items()
        changed = self.exchange_changes({w: c for w, c in now if c != self._installed[w]})
        with part.collective_section():
            for _, entries in part.units():
                for entry in entries:
                    if _values_of(entry) in changed:
                        dtype = part.dtype(entry, self.dtype)
                        part.write(entry, self._own_part(entry, entry.full, dtype))
                    if _gradient_of(entry) in changed:
                        own = None
                        if changed[_gradient_of(entry)] is not None:
                            dtype = part.grad_dtype(entry.member)
                            own = self._own_part(entry, entry.full_grad, dtype)
                        part.write_gradient(entry.member, own)
                part.free()

    def _checksums(self) -> dict[str, int | None]:
        """Checksums by what errors call the tensors; ``None``: there is no gradient.

        Without ``with_grads`` it counts alone whether the parameter has lost its gradient.
        """
        found: dict[str, int | None] = {}
        for entry in self.part.entries if self._compares else ():
            found[_values_of(entry)] = checksum(entry.full)
            gradient = None if entry.full_grad is None else checksum(entry.full_grad)
            lost = None if entry.replaced else 0
            found[_gradient_of(entry)] = gradient if self.with_grads else lost
        return found

    def exchange_changes(
        self, mine: Mapping[str, int | None] = {}, failed: str = ""
    ) -> dict[str, int | None]:
        """Exchange the ranks' changes, or why this rank has ``failed``; returns what to write.

        Raises:
            StructureError: the ranks have written different values.
            CollectiveError: another rank has failed.
        """
        part = self.part
        by_rank = part.exchange([mine, failed])
        if failed:
            return {}
        for rank, (_, why) in by_rank.items():
            if why:
                raise CollectiveError(
                    f"rank {rank} left {part.call} by an error, so that nothing was written on "
                    f"rank {part.mesh.rank} either: {why}"
                )
        changes = {rank: changed for rank, (changed, _) in by_rank.items()}
        if self.write == "shards":
            self._require_equal(changes)
        first: dict[str, int | None] = next(iter(changes.values()))
        return first

    def _require_equal(self, by_rank: dict[int, dict[str, int | None]]) -> None:
        for what in dict.fromkeys(what for changed in by_rank.values() for what in changed):
            by_value: dict[Any, list[int]] = {}
            for rank, changed in by_rank.items():
                by_value.setdefault(changed.get(what, "as it was"), []).append(rank)
            if len(by_value) > 1:
                groups = [
                    f"ranks {ranks} {'left it as it was' if value == 'as it was' else 'wrote one'}"
                    for value, ranks in by_value.items()
                ]
                raise StructureError(
                    f"{what} was given different values by the ranks inside "
                    f"{self.part.call}: {', '.join(groups)} (this is rank {self.part.mesh.rank}). "
                    "Nothing was written back: write the same on all ranks, or set write='rank0'"
                )

    def _own_part(self, entry: Entry[Any], full: Tensor | None, dtype: torch.dtype) -> Tensor:
        """This rank's part of new values."""
        if self.write == "rank0":
            return self.part.scatter(entry, full, dtype)
        assert full is not None, "every rank has reported the same checksum"
        full = full.to(self.part.mesh.device)
        return full if entry.member is None else entry.member.part_of(full)


def _values_of(entry: Entry[Any]) -> str:
    """What errors call its values."""
    return entry.name if entry.member is not None else f"buffer {entry.name}"


def _gradient_of(entry: Entry[Any]) -> str:
    return f"the gradient of {entry.name}"


def _same_tensor(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return same_bits(one.detach(), other.detach())
