"""The part of a model that a call is about: its parameters and buffers, read whole and written.

:class:`ModelPart` finds them in one walk over the modules. Before any communication its ranks
compare their calls through the store, so that all ranks get an error which names a rank whose call
differs or fails.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor

from internsp.dtensor.placed import grad_dtype
from internsp.dtensor.unfinished import UnfinishedGradient
from internsp.errors import OrderError, StructureError
from internsp.failure.recovery import reporting_refusals
from internsp.modules.parameters import Scope, Weights, put, weights_of
from internsp.optim.bucket import Bucket
from internsp.optim.zero import ZeroOptimizer
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import Member, ShardedParameter

M = TypeVar("M", Member, None)


@dataclass(eq=False)
class Entry(Generic[M]):
    """One parameter or buffer, and the modules that hold it.

    Attributes:
        value: the model's parameter, or the buffer.
        member: what the parameter belongs to; of a buffer ``None``.
        scope: scope of the parameter's first owner.
        persistent: whether ``state_dict`` has it.
        names: all its names within the model that was given.
        owners: modules that hold it, each with the name of the attribute.
        full: the full tensor inside :func:`full_params`, afterwards the tensor found in its place.
        full_grad: the gradient of that tensor.
        replaced: whether another tensor was found, which has a gradient of its own or none.
    """

    value: Tensor
    member: M
    scope: Scope | None
    persistent: bool = False
    names: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    full: Tensor = field(init=False)
    full_grad: Tensor | None = None
    replaced: bool = False

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    def held(self) -> list[Tensor | None]:
        """What its owners hold now."""
        return [self._table(module).get(name) for module, name in self.owners]

    def put(self, value: Tensor) -> None:
        """Let its owners hold ``value``."""
        for module, name in self.owners:
            table = self._table(module)
            table[name] = value
            for path, copied in table.copies if isinstance(table, Weights) else ():
                if copied == name:
                    put(module, path, value)

    def _table(self, module: nn.Module) -> dict[str, Any]:
        return module._buffers if self.member is None else module._parameters


class ModelPart:
    """The part of a model that a call is about, and the consensus of the ranks on that call.

    Values have full precision: an attached :class:`ZeroOptimizer` has masters.

    Attributes:
        call: the call as text, the same on all ranks.
        parameters, buffers: its entries, each in the order of the model; ``entries``: both.
        optimizers: the attached optimizers; ``buckets``: theirs, by parameter.
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
        self._scopes = list(scopes)
        self._read(model, below)
        self.communicators: list[ISPCommunicator] = list(
            dict.fromkeys(scope.communicator for scope in scopes)
        )
        mesh = self.communicators[0].mesh
        # torch's distribute_tensor sends the values of the first rank of the parameters' mesh.
        self.mesh, self.on_first_rank = mesh, mesh.rank == int(mesh.param_mesh.mesh.flatten()[0])
        names = json.dumps([[e.name, list(e.value.shape)] for e in self.parameters]).encode()
        self.call = f"{call} of {len(self.parameters)} parameters [{zlib.crc32(names):08x}]"
        owners = [getattr(entry.value, "_owner", None) for entry in self.parameters]
        self.optimizers = [o for o in dict.fromkeys(owners) if isinstance(o, ZeroOptimizer)]
        buckets = [bucket for optimizer in self.optimizers for bucket in optimizer._buckets]
        self.buckets = {member: bucket for bucket in buckets for member in bucket.offsets}
        self._gathered: dict[Bucket, dict[Member, Tensor]] = {}

    def _read(self, model: nn.Module, below: set[nn.Module]) -> None:
        parameters: dict[Member, Entry[Member]] = {}
        buffers: dict[int, Entry[None]] = {}
        for path, module in model.named_modules():
            if module in below:
                continue
            found: dict[str, Entry[Any]] = {}
            for name, member in weights_of(module).items():
                made = Entry(member.parameter, member, module._parameters.scope)  # type: ignore[attr-defined]
                found[name] = parameters.setdefault(member, made)
            for name, value in module._buffers.items():
                if value is not None:
                    found[name] = buffers.setdefault(id(value), Entry(value, None, None))
            for name, entry in found.items():
                entry.owners.append((module, name))
                entry.names.append(f"{path}.{name}".removeprefix("."))
                entry.persistent |= name not in module._non_persistent_buffers_set
        self.parameters, self.buffers = list(parameters.values()), list(buffers.values())
        self.entries: list[Entry[Any]] = [*self.parameters, *self.buffers]

    def units(self) -> list[tuple[str, list[Entry[Any]]]]:
        """Entries by unit: the blocks, large root parameters, and the rest; last the buffers."""
        found: dict[tuple[Scope | None, str], list[Entry[Any]]] = {}
        for entry in self.parameters:
            assert entry.scope is not None, "a parameter has one"
            key = entry.member.unit.name if isinstance(entry.member, ShardedParameter) else ""
            key = entry.scope.name if entry.scope.block else key
            found.setdefault((entry.scope, key), []).append(entry)
        return [*((key, of_unit) for (_, key), of_unit in found.items()), ("buffers", self.buffers)]

    # agreed on by all ranks

    def usage_error(self, versions: Sequence[int] | None = None) -> Exception | None:
        """The error for a call at a wrong time (inside a step, after a write), or of a weight whose
        values only its class knows; else ``None``."""
        rank = self.mesh.rank
        members = [entry.member for entry in self.parameters]
        if of_class := [m.name for m in members if isinstance(m, ShardedParameter) and m.of_class]:
            return StructureError(
                f"{self.call} was called with {', '.join(of_class[:3])}, whose class alone knows "
                "values (fsdp_pre_all_gather): give a module without it, or take state_dict(), "
                "which has its shards"
            )
        for communicator in self.communicators:
            busy = communicator.events.busy
            if not busy and any(scope.unsharded is not None for scope in self._scopes):
                busy = "in a block's forward"
            if busy:
                return OrderError(
                    f"{self.call} was called on rank {rank} {busy}: call it between two steps"
                )
        changed = [] if versions is None else self.written_since(versions)
        if changed:
            return OrderError(
                f"{', '.join(changed[:3])} changed on rank {rank} in the middle of {self.call}, "
                "whose values would mix old and new ones: step, load or edit before or after it"
            )
        return None

    def versions(self) -> list[int]:
        """Versions of all parameters."""
        return [entry.member.version() for entry in self.parameters]

    def written_since(self, versions: Sequence[int]) -> list[str]:
        """Names of the parameters that were written since :meth:`versions` returned these."""
        pairs = zip(self.parameters, versions, strict=True)
        return [entry.name for entry, before in pairs if entry.member.version() != before]

    def require_same(self, topic: str, own_error: Exception | None = None) -> None:
        """Require that all ranks of the stage call this with the same ``topic``, and no error.

        See :meth:`Consensus.same`.
        """
        self.communicators[0].consensus.same("whole parameters", topic, own_error)

    def exchange(self, mine: Any) -> dict[int, Any]:
        """What each rank of the stage gives here, by rank, the first one first."""
        found = self.communicators[0].consensus.gather("whole parameters", json.dumps(mine))
        return {rank: json.loads(text) for rank, text in sorted(found.items())}

    def collective_section(self) -> Any:
        """Context for collectives: an error in it names the rank that failed first."""
        return reporting_refusals([c.recovery for c in self.communicators], self.call)

    def synchronize(self, with_grads: bool = False, own_error: Exception | None = None) -> None:
        """Agree with all ranks on the call, then wait for all outstanding communication.

        Values that were written to 16-bit parameters since the last step reach the masters.

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
            for bucket in dict.fromkeys(self.buckets.values()):
                bucket.merge_external_writes()

    def _gradient_state(self) -> tuple[Exception | None, str]:
        """The error if gradients are incomplete; which gradients exist, as text to compare."""
        there = [optimizer.unfinished for optimizer in self.optimizers]
        for entry in self.parameters:
            if entry.member not in self.buckets:
                gradient = entry.value.grad
                if isinstance(gradient, UnfinishedGradient):
                    return gradient._read_error(), ""
                there.append(gradient is not None)
        return None, f" with gradients [{zlib.crc32(bytes(there)):08x}]"

    # values

    def dtype(self, entry: Entry[Any], wanted: torch.dtype | None = None) -> torch.dtype:
        """Dtype in full precision; of a floating-point parameter the ``wanted`` one, if given."""
        bucket = self.buckets.get(entry.member)
        own = entry.value.dtype if bucket is None else bucket.master.dtype
        converts = wanted is not None and own.is_floating_point and entry.member is not None
        return wanted if converts else own  # type: ignore[return-value]

    def grad_dtype(self, member: Member) -> torch.dtype:
        """Dtype of the full gradient."""
        bucket = self.buckets.get(member)
        held = member.parameter.grad if bucket is None else bucket.gradient
        return grad_dtype(member.parameter) if held is None else held.dtype

    def full(
        self, entry: Entry[Any], dtype: torch.dtype | None = None, offload: bool = False
    ) -> Tensor:
        """The full tensor, unpadded, in memory of its own. Of a parameter collective; blocks.

        Args:
            dtype: as in :meth:`dtype`.
            offload: on the host.
        """
        if entry.member is None:
            return copy(entry.value, offload)
        shard = self._shard(entry.member)
        # A plain DTensor: the ranks have agreed already, and need not for each parameter.
        full: Tensor = entry.member.wrap(shard.to(self.dtype(entry, dtype))).full_tensor()
        memory = full.untyped_storage()
        shared = memory.data_ptr() == shard.untyped_storage().data_ptr()
        if shared or memory.nbytes() != full.nbytes or not full.is_contiguous():
            return copy(full, offload)
        return full.cpu() if offload else full

    def _shard(self, member: Member) -> Tensor:
        """This rank's shard in full precision, like ``member.storage``. Collective; blocks."""
        bucket = self.buckets.get(member)
        if bucket is None or not bucket.has_master:
            if isinstance(member, ShardedParameter):
                return member.fresh().view(member.storage.shape).to(member.device)
            local: Tensor = member.parameter._local_tensor  # type: ignore[attr-defined]
            return local.detach()
        if bucket not in self._gathered:
            self._gathered[bucket] = bucket.all_gather_slices(bucket.master)
        return self._gathered[bucket][member]

    def free(self) -> None:
        """Free the tensors that were gathered from an optimizer's slices."""
        self._gathered.clear()

    def scatter(self, entry: Entry[Any], full: Tensor | None, dtype: torch.dtype) -> Tensor:
        """This rank's part, in ``dtype``, of the ``full`` values on the first rank.

        Shaped like its local tensor, or like the buffer. Collective; blocks.
        """
        value: Any = entry.value
        mesh = self.mesh.param_mesh
        placements: Any = [Replicate()] * mesh.ndim
        if entry.member is not None:
            mesh, placements = value.device_mesh, value.placements
        if self.on_first_rank:
            assert full is not None, "the caller has checked it"
            given = full.to(self.mesh.device, dtype)
        else:
            given = torch.empty(value.shape, dtype=dtype, device=self.mesh.device)
        return distribute_tensor(given, mesh, placements)._local_tensor

    def write(self, entry: Entry[Any], part: Tensor, exact: bool = False) -> None:
        """Write this rank's ``part`` (as :meth:`scatter` returns it) as values.

        Of a parameter collective; blocks.

        Args:
            exact: write all elements. Otherwise elements that equal the installed values, which
                may have been rounded to another dtype, keep every bit.
        """
        member = entry.member
        if member is None:
            if entry.value.is_meta:
                entry.value = torch.empty_like(entry.value, device=self.mesh.device)
                entry.put(entry.value)
            entry.value.copy_(part)
            return
        if exact:
            part = part.to(self.dtype(entry))
        local: Tensor = member.parameter._local_tensor
        shard = self._shard(member)
        bucket = self.buckets.get(member)
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
        parameter: Any = member.parameter
        bucket = self.buckets.get(member)
        if part is None:
            parameter.grad = None
        elif bucket is not None:
            factor = parameter._owner._gradient_factor()
            wide = member.like_storage(part.to(bucket.reduced.dtype) / factor)
            bucket.write_slice(bucket.reduced, member, wide)
        elif parameter.grad is None:
            parameter.grad = member.wrap(member.like_storage(part.to(grad_dtype(parameter))))
        else:
            parameter.grad._local_tensor.copy_(part)


def _keep_unchanged(old: Tensor, new: Tensor) -> Tensor:
    """``new`` in the dtype of ``old``, with the bits of ``old`` where ``new`` equals its cast."""
    if new.dtype == old.dtype:
        return new
    return torch.where(new == old.to(new.dtype), old, new.to(old.dtype))


def copy(values: Tensor, offload: bool = False) -> Tensor:
    """A copy of ``values``; with ``offload`` on the host."""
    values = values.detach()
    if offload and values.device.type != "cpu":
        return values.cpu()
    return values.clone(memory_format=torch.contiguous_format)
