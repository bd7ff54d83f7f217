"""A weight of which several stages of a pipeline have a copy: a head tied to the embedding.

Copies are parameters like any other, each with the shards, gathers and optimizer state of its own
stage. They stay one weight because they begin with the same bits, and because the stages add up
their gradients at the end of a step, shard with shard and everywhere in one order, so that every
copy's optimizer makes the same of it. One copy, the first stage's, counts: in norms, and in what is
saved. Before each step the copies are compared (:meth:`TiedWeights.digest`): what writes one of
them, or steps them differently, is told and does no further harm.

Such weights are found in a model (:func:`shared_by`), and agreed upon by all ranks (:func:`tie`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from internsp.dtensor.placed import dtensor_like, grad_dtype
from internsp.errors import OrderError, StructureError
from internsp.mesh import ParallelMesh
from internsp.pipeline.chunks import Chunk
from internsp.pipeline.stage import ISPPipelineStage
from internsp.wp.parameter import Member, ShardedParameter, bits_of, same_bits

Watch = Callable[[list[dist.P2POp]], list[dist.P2POp]]
Tie = Mapping[int, str]
"""Of each stage that has the weight, what its chunk calls it."""

_LOWEST = torch.iinfo(torch.int64).min


def shared_by(model: Any, chunks: Sequence[nn.Module]) -> dict[str, Tie]:
    """Parameters that are the same object in several chunks, by their names in the model.

    Args:
        chunks: of all stages, before any was made parallel.
    """
    found: dict[int, dict[int, str]] = {}
    for stage, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            found.setdefault(id(parameter), {})[stage] = name
    whole = isinstance(model, nn.Module)
    names = {id(p): name for name, p in model.named_parameters()} if whole else {}
    ties = {key: tie for key, tie in found.items() if len(tie) > 1}
    return {names.get(key, next(iter(tie.values()))): tie for key, tie in ties.items()}


def separate(chunks: Sequence[Chunk]) -> None:
    """Of modules that several of ``chunks`` hold, give the later ones copies, in place.

    Each chunk is made parallel by itself, so that one process cannot have a module in two.
    """
    taken: set[nn.Module] = set()
    for chunk in chunks:
        if not taken.isdisjoint(chunk.modules()):
            # Together, so that what blocks of one chunk share they go on sharing.
            copied = copy.deepcopy(chunk._modules)
            chunk._modules.update(copied)
        taken.update(chunk.modules())


def tie(
    said: Mapping[str, Tie] | Sequence[Tie],
    stages: Sequence[ISPPipelineStage],
    rank_of: Callable[[int], int],
    count: int,
    mesh: ParallelMesh,
    watch: Watch | None,
) -> TiedWeights:
    """What all ranks say, if it is the same and fits. Collective over the ranks of a pipeline.

    Args:
        said: by the whole model's names; without, the first stage's are taken.
        stages: of this rank.
        rank_of: the pipeline rank that has a stage, of which there are ``count``.

    Raises:
        StructureError: on every rank: ranks say different things, a stage has no such parameter,
            or copies are not of one form.
        OrderError: an optimizer was made before the pipeline.
    """
    if not isinstance(said, Mapping):
        said = {one[min(one)]: one for one in said if one}
    weights, facts = [], {}
    for number in (number for one in said.values() for number in one):
        if not 0 <= number < count:
            raise StructureError(
                f"tied names stage {number} on rank {mesh.rank}: stages are 0 to {count - 1}"
            )
    for name, one in said.items():
        places = tuple(Place(stage, rank_of(stage), one[stage]) for stage in sorted(one))
        weight = TiedWeight(name, places)
        for stage in (stage for stage in stages if stage.stage_index in one):
            member = _member(stage.submod, one[stage.stage_index])
            if isinstance(member, str):
                facts[name, stage.stage_index] = member
                continue
            facts[name, stage.stage_index] = _form(member)
            weight.own.append((stage.communicator, member))
        weights.append(weight)
    mine = ([str(weight) for weight in weights], facts)
    everyone: list[Any] = [None] * mesh.pipeline_group.size()
    dist.all_gather_object(everyone, mine, group=mesh.pipeline_group)
    _compare(everyone, weights, mesh)
    early = [c for weight in weights for c, _ in weight.own if c.plain is None]
    if early:
        raise OrderError(
            f"rank {mesh.rank} has a ZeroOptimizer for a chunk with tied weights already: make the "
            "Pipeline first, which says what is tied, then the optimizers"
        )
    return TiedWeights(mesh, weights, watch)


def _member(chunk: nn.Module, name: str) -> Member | str:
    try:
        parameter: Any = chunk.get_parameter(name)
    except AttributeError:
        return "is not there"
    member: Member | None = getattr(parameter, "_member", None)
    return "is not parallel (a rule of the plan ignores it)" if member is None else member


def _form(member: Member) -> str:
    """What must be the same of all copies, in words."""
    shape = f"{list(member.parameter.shape)} {member.dtype}"
    if not isinstance(member, ShardedParameter):
        return f"is replicated, {shape}"
    dim, size, axis = member.layout.dim, member.layout.size, member.axis.name
    return f"is cut on dimension {dim} of {shape} over {size} ranks ({axis})"


def _compare(everyone: Sequence[Any], weights: Sequence[TiedWeight], mesh: ParallelMesh) -> None:
    ties = [each for each, _ in everyone]
    for rank, each in enumerate(ties):
        if each != ties[0]:
            raise StructureError(
                f"pipeline ranks tie different weights: {ties[0]} and {each} (pipeline ranks 0 and "
                f"{rank}; this is rank {mesh.rank}): make the same model on every rank"
            )
    forms: dict[tuple[str, int], str] = {}
    for _, facts in everyone:
        forms |= facts
    for weight in weights:
        found = [forms.get((weight.name, place.stage), "is on no rank") for place in weight.places]
        wrong = any(form.startswith(("is not ", "is on ")) for form in found)
        if wrong or len(set(found)) > 1:
            told = [f"{place} {form}" for place, form in zip(weight.places, found, strict=True)]
            raise StructureError(
                f"stages share {weight.name}, but {', '.join(told)} (this is rank {mesh.rank}): "
                "copies of one weight must be cut alike. Name all of them where an option or a "
                "rule of the plan names one (weight_parallel.embedding_cut = \"vocabulary\" for a "
                "tied head), or untie them"
            )


class StepGradients(Protocol):
    """This rank's part of what one step of a pipeline adds to gradients: in ``.grad``, or a
    ``ZeroOptimizer``'s."""

    def trains(self, member: Member) -> bool:
        """Whether it takes gradients of ``member``."""

    def begin(self, member: Member) -> None:
        """A step begins: put aside what earlier ones have left."""

    def finish(self) -> None:
        """The chunk's last micro-batch is over: all is reduced when this returns. Collective over
        the stage."""

    def take(self, member: Member) -> tuple[Tensor, bool]:
        """What this step has added, flat, fp32 or wider, on the device, as long on all stages; and
        whether some rank of the stage has used the weight."""

    def give(self, member: Member, total: Tensor | None) -> None:
        """In its place the sum over all stages, added to what was put aside."""

    def forget(self) -> None:
        """The step has failed: keep nothing of it."""

    def values(self, member: Member) -> list[Tensor]:
        """All that holds this rank's part of the weight, to be read and written."""


class PlainGradients:
    """Gradients of a plain loop, in ``.grad``."""

    def __init__(self) -> None:
        self._before: dict[Member, Any] = {}

    def trains(self, member: Member) -> bool:
        """See :class:`StepGradients`."""
        return member.requires_grad

    def begin(self, member: Member) -> None:
        """See :class:`StepGradients`."""
        self._before[member] = member.parameter.grad
        member.parameter.grad = None

    def finish(self) -> None:
        """See :class:`StepGradients`: it is, when a backward is over."""

    def take(self, member: Member) -> tuple[Tensor, bool]:
        """See :class:`StepGradients`."""
        gradient: Any = member.parameter.grad
        wide, device = torch.promote_types(member.dtype, torch.float32), member.device
        if gradient is None:
            local = member.parameter._local_tensor  # type: ignore[attr-defined]
            return torch.zeros(local.numel(), dtype=wide, device=device), False
        return gradient._local_tensor.to(device, wide).reshape(-1), True

    def give(self, member: Member, total: Tensor | None) -> None:
        """See :class:`StepGradients`."""
        before, parameter = self._before.pop(member), member.parameter
        if total is None:
            parameter.grad = before
            return
        local = parameter._local_tensor  # type: ignore[attr-defined]
        made = total.view(local.shape).to(local.device, grad_dtype(parameter), copy=True)
        if before is None:
            parameter.grad = dtensor_like(parameter, made)
        else:
            before._local_tensor.add_(made)
            parameter.grad = before

    def forget(self) -> None:
        """See :class:`StepGradients`."""
        for member, before in self._before.items():
            member.parameter.grad = before
        self._before.clear()

    def values(self, member: Member) -> list[Tensor]:
        """See :class:`StepGradients`."""
        return [member.parameter._local_tensor]  # type: ignore[attr-defined]


class Place(NamedTuple):
    """Where a copy is: its stage, the pipeline rank that has it, and what its chunk calls it."""

    stage: int
    rank: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} of stage {self.stage}"


@dataclass(eq=False)
class TiedWeight:
    """One weight of several stages.

    Attributes:
        name: in the whole model.
        places: of all copies, by ascending stage; the first one counts.
        own: this rank's copies, by ascending stage, each with its chunk's communicator.
    """

    name: str
    places: tuple[Place, ...]
    own: list[tuple[Any, Member]] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        """Pipeline ranks that have copies, ascending."""
        return sorted({place.rank for place in self.places})

    @property
    def trained(self) -> bool:
        """Whether this rank's copies are."""
        return any(c.step_gradients.trains(member) for c, member in self.own)

    def __str__(self) -> str:
        return " and ".join(map(str, self.places))


class TiedWeights:
    """All of a pipeline, the same list on all of its ranks.

    Args:
        watch: makes waits for messages within a step end when their sender has failed.
    """

    def __init__(
        self, mesh: ParallelMesh, weights: Sequence[TiedWeight], watch: Watch | None = None
    ) -> None:
        self._mesh, self.weights, self._watch = mesh, list(weights), watch
        for weight in self.weights:
            mine = [place for place in weight.places if place.rank == mesh.pipeline_rank]
            for place, (communicator, member) in zip(mine, weight.own, strict=True):
                if communicator.step_gradients is None:  # no ZeroOptimizer yet
                    communicator.step_gradients = PlainGradients()
                member.tied, member.counted = weight.name, place is weight.places[0]

    def __len__(self) -> int:
        return len(self.weights)

    # gradients

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Around a step: the gradients that it adds to copies are summed over the stages.

        Blocks at the end. A step that raises leaves of them what was there before it.
        """
        trained = [weight for weight in self.weights if weight.trained]
        copies = [(c.step_gradients, m) for weight in trained for c, m in weight.own]
        stores: list[StepGradients] = list(dict.fromkeys(store for store, _ in copies))
        try:
            for store, member in copies:
                store.begin(member)
            yield
            with torch.no_grad():
                for store in stores:
                    store.finish()
                for weight in trained:
                    self._sum(weight)
        except BaseException:
            for store in stores:
                store.forget()
            raise

    def _sum(self, weight: TiedWeight) -> None:
        """One flat message to each other rank: this rank's sum, and whether there is one."""
        taken = [c.step_gradients.take(member) for c, member in weight.own]
        used = any(there for _, there in taken)
        packed = torch.cat([taken[0][0], taken[0][0].new_full((1,), used)])
        for part, _ in taken[1:]:
            packed[:-1] += part
        found = {self._mesh.pipeline_rank: packed, **self._swapped(weight, packed)}
        # By ascending rank, so that the sum has the same bits on all of them.
        total = found[weight.ranks[0]]
        for rank in weight.ranks[1:]:
            total = total + found[rank]
        used = used or bool(total[-1] > 0)
        for communicator, member in weight.own:
            communicator.step_gradients.give(member, total[:-1] if used else None)

    def _swapped(self, weight: TiedWeight, packed: Tensor) -> dict[int, Tensor]:
        peers = [rank for rank in weight.ranks if rank != self._mesh.pipeline_rank]
        if not peers:
            return {}
        state = weight.own[0][0].state
        nbytes = len(peers) * packed.nbytes
        event = state.trace.record("EX", weight.name, "", "finish", nbytes, in_flight=True)
        state.counters.reduced_bytes += nbytes
        state.counters.reductions += 1
        received = swap(self._mesh.pipeline_group, packed, peers, peers, self._watch)
        state.trace.finish(event)
        return received

    # values

    def digest(self) -> Tensor:
        """``[weights, 4]``: of this rank's copies the largest digest of their values and of its
        negative, and the same of whether they are trained; very low where it has none.

        The largest over all ranks are for :meth:`apart`. No message; waits for what an optimizer
        still publishes.
        """
        found = torch.full((len(self), 4), _LOWEST, device=self._mesh.device)
        for row, weight in zip(found, self.weights, strict=True):
            for communicator, member in weight.own:
                trained = int(communicator.step_gradients.trains(member))
                bits = _digest(member).to(row.device)
                mine = torch.stack([bits, -bits, *row.new_tensor([trained, -trained]).unbind()])
                torch.maximum(row, mine, out=row)
        return found

    def apart(self, largest: Tensor) -> list[str]:
        """Which weights are not the same in all places, in words.

        Args:
            largest: of :meth:`digest`, over all ranks of a pipeline.
        """
        lines = []
        for weight, facts in zip(self.weights, largest.tolist(), strict=True):
            high, low, trained, frozen = facts
            if high != -low:
                lines.append(f"{weight} have different values")
            if trained != -frozen:
                lines.append(f"of {weight} some are frozen and others trained")
        return lines

    @torch.no_grad()
    def equalize(self) -> None:
        """Copy the first place's values, and master values, to the others. Collective; blocks."""
        group, rank = self._mesh.pipeline_group, self._mesh.pipeline_rank
        for weight in (weight for weight in self.weights if weight.own):
            first, device = weight.places[0].rank, weight.own[0][1].device
            held = [(m, c.step_gradients.values(m)) for c, m in weight.own]
            for number, mine in enumerate(held[0][1]):
                values = mine.to(device).contiguous()
                if rank == first:
                    swap(group, values, [other for other in weight.ranks if other != first], ())
                else:
                    values = swap(group, values, (), [first])[first]
                for member, tensors in held:
                    there = tensors[number]
                    given = values.view(there.shape).to(there.device)
                    if not same_bits(there.contiguous(), given):
                        there.copy_(given)
                        member.invalidate()


def _digest(member: Member) -> Tensor:
    """Of the bits of this rank's part, as a tensor: nothing waits for it."""
    member.publish()
    local = member.parameter._local_tensor.detach()  # type: ignore[attr-defined]
    bits = bits_of(local.reshape(-1))
    return bits.sum(dtype=torch.int64) >> 1  # so that its negative exists, and none is the lowest


def swap(
    group: dist.ProcessGroup,
    values: Tensor,
    to: Collection[int],
    of: Collection[int],
    watch: Watch | None = None,
) -> dict[int, Tensor]:
    """Send ``values`` to the ranks ``to`` of ``group`` and receive as much from each of ``of``.

    Blocks (on a device: the current stream).

    Args:
        watch: see :meth:`internsp.pipeline.messages.Messages.watch`.
    """
    received = {rank: torch.empty_like(values) for rank in of}
    ops = [dist.P2POp(dist.irecv, t, group=group, group_peer=r) for r, t in received.items()]
    ops += [dist.P2POp(dist.isend, values, group=group, group_peer=rank) for rank in to]
    if ops:
        for work in dist.batch_isend_irecv(ops if watch is None else watch(ops)):
            work.wait()
    return received
