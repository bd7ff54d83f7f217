"""Whole parameters outside of training: read, edited in place, written back; or one unit at a time.

:func:`full_params` gives a parallel model the parameters of one process for the length of a
``with`` block (FSDP's ``summon_full_params``, DeepSpeed's ``GatheredParameters``);
:func:`iterate_full_params` streams them. Both are collective and at rest: the ranks agree through
the store on what they are about to do before anything is sent, so that a rank that differs, or
refuses, is named on all of them. ``docs/whole_parameters.md`` has examples.
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

from internsp.agreement.compare import checksum
from internsp.dtensor.placed import grad_dtype
from internsp.dtensor.unfinished import UnfinishedGradient
from internsp.errors import (
    CollectiveError,
    InternspError,
    OrderError,
    StructureError,
)
from internsp.failure.recovery import unbroken
from internsp.layers.parameters import Scope, Weights, put
from internsp.optim.bucket import Bucket
from internsp.optim.zero import ZeroOptimizer
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import Member, ShardedParameter, same_bits

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
    """Within it ``model`` holds whole, plain ``nn.Parameter``, as on one process.

    Names, ties and ``state_dict()`` are those of one process; experts of all expert ranks stand one
    after another on dimension 0. Buffers are copies. In full precision: 16-bit parameters of a
    ``ZeroOptimizer`` are its fp32 masters. All that is whole is memory of its own: nothing of a
    slot is touched. No pass and no step may begin inside.

    Collective over the ranks of the model's stage; blocks. An exception that leaves it puts the
    model back as it was before, with nothing written.

    Args:
        model: after ``parallelize``: the model, a module in it, or an ``nn.ModuleList`` of a
            pipeline's chunks.
        write: what becomes of values that are changed inside. ``"none"``: they are dropped.
            ``"shards"``: they are written back; all ranks must have made the same of them.
            ``"rank0"``: those of the stage's first rank are written on all ranks. Masters of a
            ``ZeroOptimizer`` get them unrounded; elements that did not change keep every bit.
        offload_to_cpu: whole tensors lie in the host's memory; one at a time is on the device.
        with_grads: ``.grad`` is the whole gradient, of a ``ZeroOptimizer`` the reduced one that its
            next step will take, in fp32 or wider; written back as values are.
        recurse: also the parameters of blocks below ``model``; they stay sharded otherwise.
        dtype: what floating parameters are converted to; ``None``: full precision.

    Raises:
        OrderError: in a forward, in a backward, within ``unchanged()`` (a step), or nested.
        StructureError: nothing of ``model`` is parallel; ranks wrote different values; a parameter
            was removed, or given another shape.
        GradientError: gradients are asked for and not complete.
        CollectiveError: ranks do different things, or another rank failed.
    """
    if write not in ("none", "shards", "rank0"):
        raise ValueError(f"write = {write!r}: choose one of 'none', 'shards', 'rank0'")
    what = (
        f"full_params(write={write!r}, offload_to_cpu={offload_to_cpu}, with_grads={with_grads}, "
        f"recurse={recurse}, dtype={dtype})"
    )
    part = Part(model, recurse, what)
    part.come_to_rest(with_grads)
    access = _Access(part, write, dtype, offload_to_cpu, with_grads)
    access.hand_out()
    try:
        yield
    except Exception as error:
        access.take_back()
        with suppress(InternspError):  # the cause is what the caller is told
            access.give_up(error)
        raise
    except BaseException:  # the process ends, and does not wait for other ranks
        access.take_back()
        raise
    access.take_back()
    access.write_back()


def iterate_full_params(
    model: nn.Module,
    *,
    offload_to_cpu: bool = False,
    recurse: bool = True,
    dtype: torch.dtype | None = None,
    rank0_only: bool = False,
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Whole values, one unit at a time: ``(unit, {name: values})``, in the order of the model.

    A unit is a block, or a large weight beside the blocks (embedding, head); last come the
    persistent buffers. Each value is handed out once, under its first name; of a weight that stages
    of a pipeline share (a tied head) on the first of them. The dictionary is
    emptied when the iteration goes on, so that no more than one unit is whole at a time; what the
    caller takes out of it is the caller's own. Precision as in :func:`full_params`. Collective, at
    each step of the iteration: all ranks go through all of it, and write no weight meanwhile.

    Args:
        model, offload_to_cpu, recurse, dtype: see :func:`full_params`.
        rank0_only: only the stage's first rank is handed values; others get empty dictionaries.

    Raises:
        OrderError: as :func:`full_params`; or a weight was written between two units.
        CollectiveError: a rank left the iteration early, or did something else.
    """
    what = f"iterate_full_params(recurse={recurse}, dtype={dtype}, rank0_only={rank0_only})"
    part = Part(model, recurse, what)
    part.come_to_rest()
    versions = part.versions()
    for unit, entries in part.units():
        refused = part.refusal(versions)
        part.agree(f"unit {unit or 'beside the blocks'} of {part.what}", refused)
        values: dict[str, Tensor] = {}
        with part.collective():
            for entry in entries:
                if not entry.member.counted:
                    continue
                whole = part.masters.whole(entry.member, dtype)
                if part.first or not rank0_only:
                    values[entry.name] = whole.cpu() if offload_to_cpu else whole
                del whole
            part.masters.forget()
        yield unit, values
        values.clear()
    buffers = {
        buffer.name: _copy(buffer.value, offload_to_cpu)
        for buffer in part.buffers
        if buffer.persistent and (part.first or not rank0_only)
    }
    if any(entry.persistent for entry in part.buffers):
        yield "buffers", buffers


@dataclass(eq=False)
class Entry:
    """One parameter, with all places that hold it.

    Attributes:
        name, names: its first, and all, within the model that was given.
        scope: of its first owner.
        whole: what the places hold meanwhile; afterwards what was found there.
        gradient: that was found with it.
        dtype, grad_dtype, digest, grad_digest: of what was handed out.
    """

    name: str
    member: Member
    scope: Scope
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    whole: Tensor = field(init=False)
    gradient: Tensor | None = None
    dtype: torch.dtype = field(init=False)
    grad_dtype: torch.dtype = field(init=False)
    digest: int = 0
    grad_digest: int | None = None


@dataclass(eq=False)
class Buffer:
    """One buffer, with all places that hold it; ``whole``: as of an :class:`Entry`."""

    name: str
    value: Tensor
    persistent: bool
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    whole: Tensor = field(init=False)
    digest: int = 0


class Part:
    """What of a model is asked for, and the ranks that must ask alike.

    Attributes:
        what: the call, in words.
        first: whether this is the stage's first rank.
    """

    def __init__(self, model: nn.Module, recurse: bool, what: str) -> None:
        scopes = dict.fromkeys(
            m._parameters.scope for m in model.modules() if isinstance(m._parameters, Weights)
        )
        if not scopes:
            raise StructureError(
                f"{what}: no parameter of this {type(model).__name__} is parallel, so that all are "
                "whole already: call parallelize() first, or give the model that it was called with"
            )
        below: set[nn.Module] = set()
        for scope in scopes:
            if not recurse and scope.block and scope.module is not model:
                inside = any(module is scope.module for module in model.modules())
                below.update(scope.module.modules() if inside else ())
        self.scopes = list(scopes)
        self.entries: list[Entry] = []
        self.buffers: list[Buffer] = []
        self._read(model, below)
        self.communicators: list[ISPCommunicator] = list(
            dict.fromkeys(scope.communicator for scope in scopes)
        )
        mesh = self.communicators[0].mesh
        # Whose values torch's distribute_tensor sends: the first of the parameters' mesh.
        self.mesh, self.first = mesh, mesh.rank == int(mesh.param_mesh.mesh.flatten()[0])
        names = json.dumps([[e.name, list(e.member.parameter.shape)] for e in self.entries])
        self.what = f"{what} of {len(self.entries)} parameters [{zlib.crc32(names.encode()):08x}]"
        self.masters = Masters(self.entries)

    def _read(self, model: nn.Module, below: set[nn.Module]) -> None:
        entries: dict[Member, Entry] = {}
        buffers: dict[int, Buffer] = {}
        for path, module in model.named_modules():
            if module in below:
                continue
            held, dot = module._parameters, f"{path}." if path else ""
            for name in held.weights if isinstance(held, Weights) else ():
                member: Any = held.weights[name]  # type: ignore[union-attr]
                made = Entry(f"{dot}{name}", member, held.scope)  # type: ignore[union-attr]
                entry = entries.setdefault(member, made)
                entry.places.append((module, name))
                entry.names.append(f"{dot}{name}")
            for name, value in module._buffers.items():
                if value is not None:
                    persistent = name not in module._non_persistent_buffers_set
                    made_buffer = Buffer(f"{dot}{name}", value, persistent)
                    buffer = buffers.setdefault(id(value), made_buffer)
                    buffer.places.append((module, name))
                    buffer.names.append(f"{dot}{name}")
                    buffer.persistent |= persistent
        self.entries, self.buffers = list(entries.values()), list(buffers.values())

    def units(self) -> list[tuple[str, list[Entry]]]:
        """Entries by unit: blocks, large weights beside them, and the rest."""
        found: dict[tuple[Scope, str], list[Entry]] = {}
        for entry in self.entries:
            cut = isinstance(entry.member, ShardedParameter)
            key = entry.member.unit.name if cut else ""  # type: ignore[union-attr]
            key = entry.scope.name if entry.scope.block else key
            found.setdefault((entry.scope, key), []).append(entry)
        return [(key, of_unit) for (_, key), of_unit in found.items()]

    def refusal(self, versions: Sequence[int] | None = None) -> Exception | None:
        """Why this rank must not go on, if it must not."""
        rank = self.mesh.rank
        for communicator in self.communicators:
            busy = communicator.busy
            if not busy and any(scope.taken is not None for scope in self.scopes):
                busy = "in a block's forward"
            if busy:
                return OrderError(
                    f"{self.what} was called on rank {rank} {busy}: call it between two steps"
                )
        if versions is not None and versions != self.versions():
            changed = [
                entry.name
                for entry, before, now in zip(self.entries, versions, self.versions(), strict=True)
                if before != now
            ]
            return OrderError(
                f"{', '.join(changed[:3])} changed on rank {rank} in the middle of {self.what}, "
                "whose values would be of two moments: step, load or edit before or after it"
            )
        return None

    def agree(self, what: str, refused: Exception | None = None) -> None:
        """All ranks of the stage come to ``what``; see :meth:`Meeting.same`."""
        self.communicators[0].meeting.same("whole parameters", what, refused)

    def versions(self) -> list[int]:
        """Of all members."""
        return [entry.member.version() for entry in self.entries]

    def collective(self) -> Any:
        """Around messages: a wait in vain names its cause."""
        return unbroken([c.recovery for c in self.communicators], self.what)

    def come_to_rest(self, with_grads: bool = False, refused: Exception | None = None) -> None:
        """All ranks agree to do the same now, and everything in flight has arrived.

        Args:
            refused: why this rank will not.
        """
        refused, present = refused or self.refusal(), ""
        if refused is None:
            for communicator in self.communicators:
                communicator.recover()  # what an earlier pass has left, or its cause
            if with_grads:
                refused, present = self._gradients()
        self.agree(f"{self.what}{present}", refused)
        with self.collective(), torch.no_grad():
            for communicator in self.communicators:
                communicator.publish()
                communicator.settle_gathers()
            self.masters.adopt()

    def _gradients(self) -> tuple[Exception | None, str]:
        """Why they cannot be shown; which there are, for the ranks to compare."""
        there = [optimizer.unfinished for optimizer in self.masters.optimizers]
        for entry in self.entries:
            if entry.member not in self.masters.buckets:
                gradient = entry.member.parameter.grad
                if isinstance(gradient, UnfinishedGradient):
                    return gradient._refused(), ""
                there.append(gradient is not None)
        return None, f" with gradients [{zlib.crc32(bytes(there)):08x}]"


class Masters:
    """Full precision: what an attached :class:`ZeroOptimizer` has of the parameters."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.buckets: dict[Member, tuple[ZeroOptimizer, Bucket]] = {}
        owners = [getattr(entry.member.parameter, "_owner", None) for entry in entries]
        self.optimizers = [o for o in dict.fromkeys(owners) if isinstance(o, ZeroOptimizer)]
        for optimizer in self.optimizers:
            for bucket in optimizer._buckets:
                self.buckets.update(dict.fromkeys(bucket.offsets, (optimizer, bucket)))
        self._gathered: dict[Bucket, dict[Member, Tensor]] = {}

    def adopt(self) -> None:
        """What was written into 16-bit parameters since the last step is the truth. No message."""
        for bucket in dict.fromkeys(bucket for _, bucket in self.buckets.values()):
            bucket.adopt()

    def shard(self, member: Member) -> Tensor:
        """This rank's part, like ``member.storage``, in full precision. Collective; blocks."""
        bucket = self.buckets.get(member, (None, None))[1]
        if bucket is None or not bucket.has_master:
            if isinstance(member, ShardedParameter):
                return member.fresh().view(member.storage.shape).to(member.device)
            local: Tensor = member.parameter._local_tensor  # type: ignore[attr-defined]
            return local.detach()
        if bucket not in self._gathered:
            self._gathered[bucket] = bucket.gathered(bucket.master)
        return self._gathered[bucket][member]

    def whole(self, member: Member, dtype: torch.dtype | None) -> Tensor:
        """All of it, on the device, unpadded, in memory of its own. Collective; blocks."""
        shard = self.shard(member)
        cast = shard if dtype is None or not shard.is_floating_point() else shard.to(dtype)
        # Of a plain DTensor: the ranks have met already, and need not do so for each parameter.
        whole: Tensor = member.wrap(cast).full_tensor()
        memory = whole.untyped_storage()
        shared = memory.data_ptr() == shard.untyped_storage().data_ptr()
        if shared or memory.nbytes() != whole.nbytes or not whole.is_contiguous():
            return _copy(whole)
        return whole

    def dtype(self, member: Member) -> torch.dtype:
        """Of full precision."""
        bucket = self.buckets.get(member, (None, None))[1]
        return member.dtype if bucket is None else bucket.master.dtype

    def write(self, member: Member, part: Tensor, exact: bool = False) -> None:
        """Make ``part``, like this rank's local tensor, the values. Collective; blocks.

        Args:
            exact: else elements that are still what was handed out keep every bit.
        """
        if exact:
            part = part.to(self.dtype(member))
        local: Tensor = member.parameter._local_tensor  # type: ignore[attr-defined]
        shard = self.shard(member)
        bucket = self.buckets.get(member, (None, None))[1]
        if bucket is not None and bucket.has_master:
            rows = member.local(shard)
            rows.copy_(_merged(rows, part.to(rows.device)))
            bucket.put(bucket.master, member, shard)
            local.copy_(rows)
        else:
            local.copy_(_merged(local, part.to(local.device)))
        member.invalidate()

    def write_gradient(self, member: Member, part: Tensor | None) -> None:
        """Make ``part``, like this rank's local tensor, the gradient; ``None`` drops it."""
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
        assert bucket.gradient is not None, "gradients were handed out, so they are in slices"
        wide = member.like_storage(part.to(bucket.gradient.dtype) / optimizer._unit())
        bucket.put(bucket.gradient, member, wide)

    def forget(self) -> None:
        """Free what was gathered of an optimizer's slices."""
        self._gathered.clear()


def _merged(old: Tensor, new: Tensor) -> Tensor:
    """``new`` in the precision of ``old``, which stays where ``new`` is no more than its cast."""
    if new.dtype == old.dtype:
        return new
    return torch.where(new == old.to(new.dtype), old, new.to(old.dtype))


def _copy(values: Tensor, offload: bool = False) -> Tensor:
    """``values`` in memory of their own, on the host if asked for."""
    values = values.detach()
    if offload and values.device.type != "cpu":
        return values.cpu()
    return values.clone(memory_format=torch.contiguous_format)


class _Access:
    """One :func:`full_params`: what was handed out, and what comes of it."""

    def __init__(
        self,
        part: Part,
        write: Write,
        dtype: torch.dtype | None,
        offload: bool,
        with_grads: bool,
    ) -> None:
        self.part, self.write, self.dtype, self.offload = part, write, dtype, offload
        self.with_grads = with_grads
        self._versions = part.versions()
        # Whose values are looked at when all is over.
        self._looks = write == "shards" or (write == "rank0" and part.first)
        self._problem: InternspError | None = None

    @torch.no_grad()
    def hand_out(self) -> None:
        """Gather everything, then put it into the modules."""
        part, masters = self.part, self.part.masters
        with part.collective():
            for _, entries in part.units():
                for entry in entries:
                    whole = masters.whole(entry.member, self.dtype)
                    whole = whole.cpu() if self.offload else whole
                    entry.whole = nn.Parameter(whole, entry.member.requires_grad)
                    entry.dtype = whole.dtype
                    entry.digest = checksum(whole) if self._looks else 0
                masters.forget()
            if self.with_grads:
                self._hand_out_gradients()
        for buffer in part.buffers:
            buffer.whole = _copy(buffer.value, self.offload)
            buffer.digest = checksum(buffer.whole) if self._looks else 0
            for module, name in buffer.places:
                module._buffers[name] = buffer.whole
        for entry in part.entries:
            for module, name in entry.places:
                held: Any = module._parameters
                held[name] = entry.whole
                for path, copied in held.copies:
                    if copied == name:
                        put(module, path, entry.whole)
        for communicator in part.communicators:
            communicator.whole_in = part.what.partition(" of ")[0]

    def _hand_out_gradients(self) -> None:
        reduced: dict[str, Tensor] = {}
        for optimizer in self.part.masters.optimizers:
            reduced |= optimizer.gather_gradients() if optimizer.unfinished else {}
        for entry in self.part.entries:
            parameter = entry.member.parameter
            if entry.member in self.part.masters.buckets:
                whole = reduced.pop(entry.member.name, None)
            else:
                kept = parameter.grad
                whole = None if kept is None else kept.full_tensor()  # type: ignore[attr-defined]
            if whole is not None:
                if whole.dtype != entry.whole.dtype:
                    entry.whole.grad_dtype = whole.dtype
                entry.whole.grad = _copy(whole, self.offload)
                entry.grad_digest = checksum(entry.whole.grad) if self._looks else 0
            entry.grad_dtype = grad_dtype(parameter) if whole is None else whole.dtype

    def take_back(self) -> None:
        """Put the parameters back, and note what was found in their places."""
        for communicator in self.part.communicators:
            communicator.whole_in = ""
        for entry in self.part.entries:
            found = [module._parameters.get(name) for module, name in entry.places]
            for module, name in entry.places:
                held: Any = module._parameters
                held[name] = entry.member.parameter
                held.restore_copies(module)
            self._note(entry, found)
        for buffer in self.part.buffers:
            found_here = [module._buffers.get(name) for module, name in buffer.places]
            for module, name in buffer.places:
                module._buffers[name] = buffer.value
            self._note(buffer, found_here)

    def _note(self, entry: Entry | Buffer, found: Sequence[Tensor | None]) -> None:
        """What was found for what was handed out: itself, or what stands there now.

        ``load_state_dict(assign=True)``, for one, puts other tensors there.
        """
        handed = entry.whole
        others = [value for value in found if value is not handed]
        value = others[0] if others else handed
        wrong = self._wrong(entry, value)
        if not wrong and any(not _equal(other, value) for other in others[1:]):
            wrong = f"was given different values in the {len(found)} places that share it"
        if wrong or value is None:
            self._problem = self._problem or StructureError(
                f"{entry.name} {wrong} on rank {self.part.mesh.rank} inside {self.part.what}: "
                "write whole values into it (copy_, .data =); nothing was written back"
            )
            return
        entry.whole = value.detach()
        if isinstance(entry, Entry):
            mine = value.grad if value.is_leaf else None
            entry.gradient = handed.grad if mine is None and value is not handed else mine

    def _wrong(self, entry: Entry | Buffer, value: Tensor | None) -> str:
        """Why ``value`` cannot be written back, in words."""
        handed = entry.whole
        if value is None:
            return "was removed"
        if isinstance(value, DTensor) or value.device.type == "meta":
            return f"was replaced by a {'DTensor' if isinstance(value, DTensor) else 'meta tensor'}"
        cut: Tensor = entry.member.parameter if isinstance(entry, Entry) else entry.value
        if value.shape != cut.shape:
            return f"was given the shape {list(value.shape)} in place of {list(cut.shape)}"
        if not isinstance(entry, Entry):
            return ""
        if value.requires_grad != entry.member.requires_grad:
            return "was frozen or thawed, which is to be done outside"
        gradient = value.grad if value.is_leaf else None
        if not self.with_grads or gradient is None:
            return ""
        if gradient.shape != cut.shape:
            return f"was given a gradient of shape {list(gradient.shape)}"
        # An optimizer steps with what backward has used, and has no slice for more.
        none = entry.grad_digest is None and handed.grad is not gradient
        if none and entry.member in self.part.masters.buckets:
            return "was given a gradient, of which its ZeroOptimizer has none"
        return ""

    def give_up(self, error: Exception) -> None:
        """An exception has left it on this rank: no rank writes anything."""
        if self.write != "none":
            self._meet({"failed": f"{type(error).__name__}: {error}"})

    @torch.no_grad()
    def write_back(self) -> None:
        """Write what was changed, on all ranks alike. Collective; blocks."""
        if self.write == "none":
            return
        if self._problem is None:
            self._problem = self._written_otherwise()
        if self._problem is not None:
            self._meet({"failed": str(self._problem)})
            raise self._problem
        part, masters = self.part, self.part.masters
        changed, gradients, buffers = self._meet(self._changes() if self._looks else {})
        with part.collective():
            for _, entries in part.units():
                for entry in entries:
                    if entry.name in changed:
                        piece = self._piece(entry, entry.whole, entry.dtype)
                        masters.write(entry.member, piece)
                    if entry.name in gradients:
                        gradient = None
                        if gradients[entry.name] is not None:
                            gradient = self._piece(entry, entry.gradient, entry.grad_dtype)
                        masters.write_gradient(entry.member, gradient)
                masters.forget()
            for buffer in part.buffers:
                if buffer.name in buffers:
                    buffer.value.copy_(self._everywhere(buffer))

    def _written_otherwise(self) -> InternspError | None:
        versions = self.part.versions()
        for entry, before, now in zip(self.part.entries, self._versions, versions, strict=True):
            if before != now:
                return OrderError(
                    f"the shard of {entry.name} was written on rank {self.part.mesh.rank} inside "
                    f"{self.part.what}, whose end would undo it: write into the whole parameters "
                    "that the model holds; nothing was written back"
                )
        return None

    def _changes(self) -> dict[str, Any]:
        """What is not as it was handed out: checksums by name."""
        found: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS}
        for entry in self.part.entries:
            digest: int | None = checksum(entry.whole)
            if digest != entry.digest:
                found["parameters"][entry.name] = digest
            digest = None if entry.gradient is None else checksum(entry.gradient)
            if self.with_grads and digest != entry.grad_digest:
                found["gradients"][entry.name] = digest
        for buffer in self.part.buffers:
            digest = checksum(buffer.whole)
            if digest != buffer.digest:
                found["buffers"][buffer.name] = digest
        return found

    def _meet(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """What is to be written, by kind: names and checksums (``None``: a gradient is dropped).

        Raises:
            StructureError: the ranks have written different values.
            CollectiveError: another rank cannot go on.
        """
        part = self.part
        meeting = part.communicators[0].meeting
        found = meeting.meet("whole parameters", json.dumps(mine))
        said = {rank: json.loads(text) for rank, text in sorted(found.items())}
        for rank, other in said.items():
            if "failed" in other and "failed" not in mine:
                raise CollectiveError(
                    f"rank {rank} left {part.what} by an error, so that nothing was written on "
                    f"rank {part.mesh.rank} either: {other['failed']}"
                )
        if "failed" in mine:
            return []
        if self.write == "shards":
            for kind in _KINDS:
                self._compare(kind, {rank: other[kind] for rank, other in said.items()})
        return [next(iter(said.values()))[kind] for kind in _KINDS]  # of the stage's first rank

    def _compare(self, kind: str, said: dict[int, dict[str, Any]]) -> None:
        for name in dict.fromkeys(name for names in said.values() for name in names):
            by_value: dict[Any, list[int]] = {}
            for rank, names in said.items():
                by_value.setdefault(names.get(name, "as it was"), []).append(rank)
            if len(by_value) > 1:
                groups = [
                    f"ranks {ranks} {'left it as it was' if value == 'as it was' else 'wrote one'}"
                    for value, ranks in by_value.items()
                ]
                raise StructureError(
                    f"{_KINDS[kind]}{name} was given different values by the ranks inside "
                    f"{self.part.what}: {', '.join(groups)} (this is rank {self.part.mesh.rank}). "
                    "Nothing was written back: write the same on all ranks, or set write='rank0'"
                )

    def _piece(self, entry: Entry, whole: Tensor | None, dtype: torch.dtype) -> Tensor:
        """This rank's part of new values, like its local tensor."""
        device = self.part.mesh.device
        if self.write == "shards":
            assert whole is not None, "every rank has reported the same checksum"
            return entry.member.part_of(whole.to(device))
        parameter: Any = entry.member.parameter
        given = torch.empty(parameter.shape, dtype=dtype, device=device)
        if self.part.first:
            assert whole is not None, "this rank has reported its checksum"
            given.copy_(whole)
        made = distribute_tensor(given, parameter.device_mesh, parameter.placements)
        return made._local_tensor

    def _everywhere(self, buffer: Buffer) -> Tensor:
        value = buffer.whole.to(self.part.mesh.device, buffer.value.dtype)
        if self.write == "shards":
            return value
        mesh = self.part.mesh.param_mesh
        return distribute_tensor(value, mesh, [Replicate()] * mesh.ndim)._local_tensor


_KINDS = {"parameters": "", "gradients": "the gradient of ", "buffers": "buffer "}


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return same_bits(one.detach(), other.detach())
