"""Full (unsharded) parameters between steps: read, edit and write them back, or stream them.

:func:`full_params` gives a parallel model full parameters for the length of a ``with`` block (like
FSDP's ``summon_full_params`` and DeepSpeed's ``GatheredParameters``); :func:`iterate_full_params`
yields them unit by unit. Both are collective. Before any communication the ranks compare their
calls through the store, so that all ranks get an error which names a rank whose call differs or
fails. ``docs/whole_parameters.md`` has examples.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from internsp.base.bits import checksum, same_bits
from internsp.dtensor.placed import grad_dtype
from internsp.dtensor.unfinished import UnfinishedGradient
from internsp.errors import (
    CollectiveError,
    InternspError,
    OrderError,
    StructureError,
)
from internsp.failure.recovery import reporting_refusals
from internsp.modules.parameters import Scope, Weights, put
from internsp.optim.bucket import Bucket
from internsp.optim.zero import ZeroOptimizer
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import Member, ShardedParameter

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
    except Exception as error:
        context.restore()
        with suppress(InternspError):  # the caller gets the cause instead
            context.report_error(error)
        raise
    except BaseException:  # the process ends: do not wait for other ranks
        context.restore()
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
    for unit, entries in part.units():
        own_error = part.usage_error(versions)
        part.require_same(f"unit {unit or 'outside of the blocks'} of {part.call}", own_error)
        values: dict[str, Tensor] = {}
        with part.collective_section():
            for entry in entries:
                if not entry.member.counted:
                    continue
                full = part.masters.full(entry.member, dtype)
                if part.on_first_rank or not rank0_only:
                    values[entry.name] = full.cpu() if offload_to_cpu else full
                del full
            part.masters.free()
        yield unit, values
        values.clear()
    buffers = {
        buffer.name: _copy(buffer.value, offload_to_cpu)
        for buffer in part.buffers
        if buffer.persistent and (part.on_first_rank or not rank0_only)
    }
    if any(entry.persistent for entry in part.buffers):
        yield "buffers", buffers


@dataclass(eq=False)
class ParameterEntry:
    """One parameter and the modules that hold it.

    Attributes:
        name, names: its first name and all its names, within the model that was given.
        scope: scope of its first owner.
        owners: modules that hold it, each with the name of the attribute.
        full: the full parameter inside the context, afterwards the tensor found in its place.
        full_grad: the gradient found with that tensor.
        replaced: whether another tensor was found, which has a gradient of its own or none.
        dtype, grad_dtype, digest, grad_digest: dtypes and checksums of ``full`` and its gradient
            when they were installed.
    """

    name: str
    member: Member
    scope: Scope
    names: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    full: Tensor = field(init=False)
    full_grad: Tensor | None = None
    replaced: bool = False
    dtype: torch.dtype = field(init=False)
    grad_dtype: torch.dtype = field(init=False)
    digest: int = 0
    grad_digest: int | None = None


@dataclass(eq=False)
class BufferEntry:
    """One buffer and the modules that hold it; attributes as of :class:`ParameterEntry`."""

    name: str
    value: Tensor
    persistent: bool
    names: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    full: Tensor = field(init=False)
    digest: int = 0


class ModelPart:
    """The part of a model that a call is about, and the consensus of the ranks on that call.

    Attributes:
        call: the call as text, the same on all ranks.
        on_first_rank: whether this is the stage's first rank.
    """

    def __init__(self, model: nn.Module, recurse: bool, call: str) -> None:
        scopes = dict.fromkeys(
            m._parameters.scope for m in model.modules() if isinstance(m._parameters, Weights)
        )
        if not scopes:
            raise StructureError(
                f"{call}: no parameter of this {type(model).__name__} is parallel, so that all are "
                "full already: call parallelize() first, or give the model that it was called with"
            )
        below: set[nn.Module] = set()
        for scope in scopes:
            if not recurse and scope.block and scope.module is not model:
                inside = any(module is scope.module for module in model.modules())
                below.update(scope.module.modules() if inside else ())
        self.scopes = list(scopes)
        self.entries: list[ParameterEntry] = []
        self.buffers: list[BufferEntry] = []
        self._read(model, below)
        self.communicators: list[ISPCommunicator] = list(
            dict.fromkeys(scope.communicator for scope in scopes)
        )
        mesh = self.communicators[0].mesh
        # torch's distribute_tensor sends the values of the first rank of the parameters' mesh.
        self.mesh, self.on_first_rank = mesh, mesh.rank == int(mesh.param_mesh.mesh.flatten()[0])
        names = json.dumps([[e.name, list(e.member.parameter.shape)] for e in self.entries])
        self.call = f"{call} of {len(self.entries)} parameters [{zlib.crc32(names.encode()):08x}]"
        self.masters = Masters(self.entries)

    def _read(self, model: nn.Module, below: set[nn.Module]) -> None:
        entries: dict[Member, ParameterEntry] = {}
        buffers: dict[int, BufferEntry] = {}
        for path, module in model.named_modules():
            if module in below:
                continue
            held, dot = module._parameters, f"{path}." if path else ""
            for name in held.weights if isinstance(held, Weights) else ():
                member: Any = held.weights[name]  # type: ignore[union-attr]
                made = ParameterEntry(f"{dot}{name}", member, held.scope)  # type: ignore[union-attr]
                entry = entries.setdefault(member, made)
                entry.owners.append((module, name))
                entry.names.append(f"{dot}{name}")
            for name, value in module._buffers.items():
                if value is not None:
                    persistent = name not in module._non_persistent_buffers_set
                    made_buffer = BufferEntry(f"{dot}{name}", value, persistent)
                    buffer = buffers.setdefault(id(value), made_buffer)
                    buffer.owners.append((module, name))
                    buffer.names.append(f"{dot}{name}")
                    buffer.persistent |= persistent
        self.entries, self.buffers = list(entries.values()), list(buffers.values())

    def units(self) -> list[tuple[str, list[ParameterEntry]]]:
        """Entries by unit: the blocks, large root parameters, and the rest."""
        found: dict[tuple[Scope, str], list[ParameterEntry]] = {}
        for entry in self.entries:
            sharded = isinstance(entry.member, ShardedParameter)
            key = entry.member.unit.name if sharded else ""  # type: ignore[union-attr]
            key = entry.scope.name if entry.scope.block else key
            found.setdefault((entry.scope, key), []).append(entry)
        return [(key, of_unit) for (_, key), of_unit in found.items()]

    def usage_error(self, versions: Sequence[int] | None = None) -> Exception | None:
        """The error for a call at a wrong time: inside a step, or after a write; else ``None``."""
        rank = self.mesh.rank
        for communicator in self.communicators:
            busy = communicator.events.busy
            if not busy and any(scope.unsharded is not None for scope in self.scopes):
                busy = "in a block's forward"
            if busy:
                return OrderError(
                    f"{self.call} was called on rank {rank} {busy}: call it between two steps"
                )
        if versions is not None and versions != self.versions():
            changed = [
                entry.name
                for entry, before, now in zip(self.entries, versions, self.versions(), strict=True)
                if before != now
            ]
            return OrderError(
                f"{', '.join(changed[:3])} changed on rank {rank} in the middle of {self.call}, "
                "whose values would mix old and new ones: step, load or edit before or after it"
            )
        return None

    def require_same(self, topic: str, own_error: Exception | None = None) -> None:
        """Require that all ranks of the stage call this with the same ``topic``, and no error.

        See :meth:`Consensus.same`.
        """
        self.communicators[0].consensus.same("whole parameters", topic, own_error)

    def versions(self) -> list[int]:
        """Versions of all parameters."""
        return [entry.member.version() for entry in self.entries]

    def collective_section(self) -> Any:
        """Context for collectives: an error in it names the rank that failed first."""
        return reporting_refusals([c.recovery for c in self.communicators], self.call)

    def synchronize(self, with_grads: bool = False, own_error: Exception | None = None) -> None:
        """Agree with all ranks on the call, then wait for all outstanding communication.

        Args:
            own_error: why this rank refuses.
        """
        own_error, present = own_error or self.usage_error(), ""
        if own_error is None:
            for communicator in self.communicators:
                communicator.events.recover()  # reset after a failed pass, or raise its cause
            if with_grads:
                own_error, present = self._gradient_state()
        self.require_same(f"{self.call}{present}", own_error)
        with self.collective_section(), torch.no_grad():
            for communicator in self.communicators:
                communicator.wait_until_ready()
                communicator.state.wait_for_gathers()
            self.masters.update_from_parameters()

    def _gradient_state(self) -> tuple[Exception | None, str]:
        """The error if gradients are incomplete; which gradients exist, as text to compare."""
        there = [optimizer.unfinished for optimizer in self.masters.optimizers]
        for entry in self.entries:
            if entry.member not in self.masters.buckets:
                gradient = entry.member.parameter.grad
                if isinstance(gradient, UnfinishedGradient):
                    return gradient._read_error(), ""
                there.append(gradient is not None)
        return None, f" with gradients [{zlib.crc32(bytes(there)):08x}]"


class Masters:
    """Full-precision values of parameters: an attached :class:`ZeroOptimizer` has masters."""

    def __init__(self, entries: Iterable[ParameterEntry]) -> None:
        self.buckets: dict[Member, tuple[ZeroOptimizer, Bucket]] = {}
        owners = [getattr(entry.member.parameter, "_owner", None) for entry in entries]
        self.optimizers = [o for o in dict.fromkeys(owners) if isinstance(o, ZeroOptimizer)]
        for optimizer in self.optimizers:
            for bucket in optimizer._buckets:
                self.buckets.update(dict.fromkeys(bucket.offsets, (optimizer, bucket)))
        self._gathered: dict[Bucket, dict[Member, Tensor]] = {}

    def update_from_parameters(self) -> None:
        """Copy writes to 16-bit parameters since the last step into masters. No communication."""
        for bucket in dict.fromkeys(bucket for _, bucket in self.buckets.values()):
            bucket.merge_external_writes()

    def shard(self, member: Member) -> Tensor:
        """This rank's shard in full precision, like ``member.storage``. Collective; blocks."""
        bucket = self.buckets.get(member, (None, None))[1]
        if bucket is None or not bucket.has_master:
            if isinstance(member, ShardedParameter):
                return member.fresh().view(member.storage.shape).to(member.device)
            local: Tensor = member.parameter._local_tensor  # type: ignore[attr-defined]
            return local.detach()
        if bucket not in self._gathered:
            self._gathered[bucket] = bucket.all_gather_slices(bucket.master)
        return self._gathered[bucket][member]

    def full(self, member: Member, dtype: torch.dtype | None) -> Tensor:
        """The full tensor on the device, unpadded, in memory of its own. Collective; blocks."""
        shard = self.shard(member)
        cast = shard if dtype is None or not shard.is_floating_point() else shard.to(dtype)
        # A plain DTensor: the ranks have agreed already, and need not for each parameter.
        full: Tensor = member.wrap(cast).full_tensor()
        memory = full.untyped_storage()
        shared = memory.data_ptr() == shard.untyped_storage().data_ptr()
        if shared or memory.nbytes() != full.nbytes or not full.is_contiguous():
            return _copy(full)
        return full

    def dtype(self, member: Member) -> torch.dtype:
        """Dtype of the parameter in full precision."""
        bucket = self.buckets.get(member, (None, None))[1]
        return member.dtype if bucket is None else bucket.master.dtype

    def write(self, member: Member, part: Tensor, exact: bool = False) -> None:
        """Write ``part``, shaped like this rank's local tensor, as values. Collective; blocks.

        Args:
            exact: write all elements. Otherwise elements that equal the installed values, which
                may have been rounded to another dtype, keep every bit.
        """
        if exact:
            part = part.to(self.dtype(member))
        local: Tensor = member.parameter._local_tensor  # type: ignore[attr-defined]
        shard = self.shard(member)
        bucket = self.buckets.get(member, (None, None))[1]
        if bucket is not None and bucket.has_master:
            rows = member.local(shard)
            rows.copy_(_keep_unchanged(rows, part.to(rows.device)))
            bucket.write_slice(bucket.master, member, shard)
            local.copy_(rows)
        else:
            local.copy_(_keep_unchanged(local, part.to(local.device)))
        member.invalidate()

    def write_gradient(self, member: Member, part: Tensor | None) -> None:
        """Write ``part``, shaped like this rank's local tensor, as gradient; ``None`` drops it."""
        parameter = member.parameter
        optimizer, bucket = self.buckets.get(member, (None, None))
        if optimizer is None or bucket is None:
            if part is None:
                parameter.grad = None
            elif parameter.grad is None:
                made = member.like_storage(part.to(grad_dtype(parameter)))
                parameter.grad = member.wrap(made)
            else:
                parameter.grad._local_tensor.copy_(part)  # type: ignore[attr-defined]
            return
        if part is None:
            parameter.grad = None
            return
        assert bucket.gradient is not None, "gradients were installed, so they are in slices"
        wide = member.like_storage(part.to(bucket.gradient.dtype) / optimizer._gradient_factor())
        bucket.write_slice(bucket.gradient, member, wide)

    def free(self) -> None:
        """Free the tensors that were gathered from an optimizer's slices."""
        self._gathered.clear()


def _keep_unchanged(old: Tensor, new: Tensor) -> Tensor:
    """``new`` in the dtype of ``old``, with the bits of ``old`` where ``new`` equals its cast."""
    if new.dtype == old.dtype:
        return new
    return torch.where(new == old.to(new.dtype), old, new.to(old.dtype))


def _copy(values: Tensor, offload: bool = False) -> Tensor:
    """A copy of ``values``; with ``offload`` on the host."""
    values = values.detach()
    if offload and values.device.type != "cpu":
        return values.cpu()
    return values.clone(memory_format=torch.contiguous_format)


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
        part, masters = self.part, self.part.masters
        with part.collective_section():
            for _, entries in part.units():
                for entry in entries:
                    full = masters.full(entry.member, self.dtype)
                    full = full.cpu() if self.offload else full
                    entry.full = nn.Parameter(full, entry.member.requires_grad)
                    entry.dtype = full.dtype
                    entry.digest = checksum(full) if self._compares else 0
                masters.free()
            if self.with_grads:
                self._install_gradients()
        for buffer in part.buffers:
            buffer.full = _copy(buffer.value, self.offload)
            buffer.digest = checksum(buffer.full) if self._compares else 0
            for module, name in buffer.owners:
                module._buffers[name] = buffer.full
        for entry in part.entries:
            for module, name in entry.owners:
                held: Any = module._parameters
                held[name] = entry.full
                for path, copied in held.copies:
                    if copied == name:
                        put(module, path, entry.full)
        for communicator in part.communicators:
            communicator.events.hold_full_params(part.call.partition(" of ")[0])

    def _install_gradients(self) -> None:
        reduced: dict[str, Tensor] = {}
        for optimizer in self.part.masters.optimizers:
            reduced |= optimizer.gather_gradients() if optimizer.unfinished else {}
        for entry in self.part.entries:
            parameter = entry.member.parameter
            if entry.member in self.part.masters.buckets:
                full = reduced.pop(entry.member.name, None)
            else:
                kept = parameter.grad
                full = None if kept is None else kept.full_tensor()  # type: ignore[attr-defined]
            if full is not None:
                if full.dtype != entry.full.dtype:
                    entry.full.grad_dtype = full.dtype
                entry.full.grad = _copy(full, self.offload)
                entry.grad_digest = checksum(entry.full.grad) if self._compares else 0
            entry.grad_dtype = grad_dtype(parameter) if full is None else full.dtype

    def restore(self) -> None:
        """Put the sharded parameters back, and record the tensors found in their place."""
        for communicator in self.part.communicators:
            communicator.events.hold_full_params("")
        for entry in self.part.entries:
            found = [module._parameters.get(name) for module, name in entry.owners]
            for module, name in entry.owners:
                held: Any = module._parameters
                held[name] = entry.member.parameter
                held.restore_copies(module)
            self._record_found(entry, found)
        for buffer in self.part.buffers:
            found_buffers = [module._buffers.get(name) for module, name in buffer.owners]
            for module, name in buffer.owners:
                module._buffers[name] = buffer.value
            self._record_found(buffer, found_buffers)

    def _record_found(
        self, entry: ParameterEntry | BufferEntry, found: Sequence[Tensor | None]
    ) -> None:
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
        if isinstance(entry, ParameterEntry):
            entry.full_grad = value.grad if value.is_leaf else None
            entry.replaced = value is not installed

    def _why_unwritable(self, entry: ParameterEntry | BufferEntry, value: Tensor | None) -> str:
        """Why ``value`` cannot be written back, as text; empty if it can."""
        installed = entry.full
        if value is None:
            return "was removed"
        if isinstance(value, DTensor) or value.device.type == "meta":
            return f"was replaced by a {'DTensor' if isinstance(value, DTensor) else 'meta tensor'}"
        original = entry.member.parameter if isinstance(entry, ParameterEntry) else entry.value
        if value.shape != original.shape:
            return f"was given the shape {list(value.shape)} in place of {list(original.shape)}"
        if not isinstance(entry, ParameterEntry):
            return ""
        if value.requires_grad != entry.member.requires_grad:
            return "was frozen or thawed, which is to be done outside of the context"
        gradient = value.grad if value.is_leaf else None
        if not self.with_grads or gradient is None:
            return ""
        if gradient.shape != original.shape:
            return f"was given a gradient of shape {list(gradient.shape)}"
        # An optimizer has slices only for gradients that a backward has computed.
        missing = entry.grad_digest is None and installed.grad is not gradient
        if missing and entry.member in self.part.masters.buckets:
            return "was given a gradient, of which its ZeroOptimizer has none"
        return ""

    def report_error(self, error: Exception) -> None:
        """Report that an exception has left the context on this rank: no rank writes anything."""
        if self.write != "none":
            self._exchange_changes({"failed": f"{type(error).__name__}: {error}"})

    @torch.no_grad()
    def write_back(self) -> None:
        """Write changed values and gradients on all ranks. Collective; blocks."""
        if self.write == "none":
            return
        if self._error is None:
            self._error = self._written_shard_error()
        if self._error is not None:
            self._exchange_changes({"failed": str(self._error)})
            raise self._error
        part, masters = self.part, self.part.masters
        changed, gradients, buffers = self._exchange_changes(
            self._changes() if self._compares else {}
        )
        with part.collective_section():
            for _, entries in part.units():
                for entry in entries:
                    if entry.name in changed:
                        local = self._local_values(entry, entry.full, entry.dtype)
                        masters.write(entry.member, local)
                    if entry.name in gradients:
                        gradient = None
                        if gradients[entry.name] is not None:
                            gradient = self._local_values(entry, entry.full_grad, entry.grad_dtype)
                        masters.write_gradient(entry.member, gradient)
                masters.free()
            for buffer in part.buffers:
                if buffer.name in buffers:
                    buffer.value.copy_(self._full_buffer(buffer))

    def _written_shard_error(self) -> InternspError | None:
        versions = self.part.versions()
        for entry, before, now in zip(self.part.entries, self._versions, versions, strict=True):
            if before != now:
                return OrderError(
                    f"the shard of {entry.name} was written on rank {self.part.mesh.rank} inside "
                    f"{self.part.call}, whose end would undo it: write into the full parameters "
                    "that the model holds; nothing was written back"
                )
        return None

    def _changes(self) -> dict[str, Any]:
        """Names and checksums of tensors that differ from the installed ones, by kind."""
        found: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS}
        for entry in self.part.entries:
            digest: int | None = checksum(entry.full)
            if digest != entry.digest:
                found["parameters"][entry.name] = digest
            digest = None if entry.full_grad is None else checksum(entry.full_grad)
            if digest != entry.grad_digest if self.with_grads else entry.replaced:
                found["gradients"][entry.name] = digest if self.with_grads else None
        for buffer in self.part.buffers:
            digest = checksum(buffer.full)
            if digest != buffer.digest:
                found["buffers"][buffer.name] = digest
        return found

    def _exchange_changes(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Exchange the ranks' changes; returns what to write, by kind.

        Returns:
            For each of ``_KINDS`` checksums by name (``None``: the gradient is dropped).

        Raises:
            StructureError: the ranks have written different values.
            CollectiveError: another rank has failed.
        """
        part = self.part
        consensus = part.communicators[0].consensus
        found = consensus.gather("whole parameters", json.dumps(mine))
        by_rank = {rank: json.loads(text) for rank, text in sorted(found.items())}
        for rank, other in by_rank.items():
            if "failed" in other and "failed" not in mine:
                raise CollectiveError(
                    f"rank {rank} left {part.call} by an error, so that nothing was written on "
                    f"rank {part.mesh.rank} either: {other['failed']}"
                )
        if "failed" in mine:
            return []
        if self.write == "shards":
            for kind in _KINDS:
                self._compare(kind, {rank: other[kind] for rank, other in by_rank.items()})
        return [next(iter(by_rank.values()))[kind] for kind in _KINDS]  # the first rank's

    def _compare(self, kind: str, by_rank: dict[int, dict[str, Any]]) -> None:
        for name in dict.fromkeys(name for names in by_rank.values() for name in names):
            by_value: dict[Any, list[int]] = {}
            for rank, names in by_rank.items():
                by_value.setdefault(names.get(name, "as it was"), []).append(rank)
            if len(by_value) > 1:
                groups = [
                    f"ranks {ranks} {'left it as it was' if value == 'as it was' else 'wrote one'}"
                    for value, ranks in by_value.items()
                ]
                raise StructureError(
                    f"{_KINDS[kind]}{name} was given different values by the ranks inside "
                    f"{self.part.call}: {', '.join(groups)} (this is rank {self.part.mesh.rank}). "
                    "Nothing was written back: write the same on all ranks, or set write='rank0'"
                )

    def _local_values(
        self, entry: ParameterEntry, full: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """This rank's part of new values, shaped like its local tensor."""
        device = self.part.mesh.device
        if self.write == "shards":
            assert full is not None, "every rank has reported the same checksum"
            return entry.member.part_of(full.to(device))
        parameter: Any = entry.member.parameter
        given = torch.empty(parameter.shape, dtype=dtype, device=device)
        if self.part.on_first_rank:
            assert full is not None, "this rank has reported its checksum"
            given.copy_(full)
        made = distribute_tensor(given, parameter.device_mesh, parameter.placements)
        return made._local_tensor

    def _full_buffer(self, buffer: BufferEntry) -> Tensor:
        value = buffer.full.to(self.part.mesh.device, buffer.value.dtype)
        if self.write == "shards":
            return value
        mesh = self.part.mesh.param_mesh
        return distribute_tensor(value, mesh, [Replicate()] * mesh.ndim)._local_tensor


_KINDS = {"parameters": "", "gradients": "the gradient of ", "buffers": "buffer "}


def _same_tensor(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return same_bits(one.detach(), other.detach())
