"""A weight of which several stages of a pipeline have a copy, such as a head tied to the embedding.

Copies are ordinary parameters, each with the shards, gathers and optimizer state of its own stage.
They stay equal because they begin with the same bits, and because the stages sum their gradients at
the end of a step, shard by shard and in the same order everywhere, so that the optimizers of all
copies compute the same. Norms and checkpoints contain one copy, the first stage's. Before each step
the copies are compared (:meth:`TiedWeights.digest`): if one was written or stepped differently, the
step is refused before it runs.

The weights are found in a model by :func:`find_tied`; all ranks must find the same ones, which
:func:`make_tied_weights` checks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from internsp.base.bits import bits_of, same_bits
from internsp.errors import OrderError, StructureError
from internsp.failure.objects import Objects
from internsp.mesh import ParallelMesh
from internsp.pipeline.chunks import Chunk
from internsp.pipeline.stage import ISPPipelineStage
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import Member, ShardedParameter
from internsp.wp.tied import StepGradients

TrackOps = Callable[[list[dist.P2POp]], list[dist.P2POp]]
CopyNames = Mapping[int, str]
"""By stage, the name of its copy in its chunk."""

_LOWEST = torch.iinfo(torch.int64).min


def find_tied(model: nn.Module, chunks: Sequence[nn.Module]) -> dict[str, CopyNames]:
    """Parameters that are the same object in several chunks, by their names in the model.

    Args:
        chunks: the chunks of all stages, before ``parallelize``.
    """
    found: dict[int, dict[int, str]] = {}
    for stage, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            found.setdefault(id(parameter), {})[stage] = name
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[key]: tie for key, tie in found.items() if len(tie) > 1}


def copy_shared_modules(chunks: Sequence[Chunk]) -> None:
    """Copy modules that several of ``chunks`` share into the later of these chunks, in each.

    ``parallelize`` is called for each chunk, so that no module can be in two of them.
    """
    seen: set[nn.Module] = set()
    for chunk in chunks:
        if not seen.isdisjoint(chunk.modules()):
            # All modules in one call, so that blocks of one chunk still share what they shared.
            copied = copy.deepcopy(chunk._modules)
            chunk._modules.update(copied)
        seen.update(chunk.modules())


def make_tied_weights(
    declared: Mapping[str, CopyNames] | Sequence[CopyNames],
    stages: Sequence[ISPPipelineStage],
    rank_of: Callable[[int], int],
    count: int,
    mesh: ParallelMesh,
    track: TrackOps | None,
) -> TiedWeights:
    """Compare the tied weights that the ranks declare, and return them as one object.

    Collective over the ranks of a pipeline.

    Args:
        declared: copies of each weight, by its name in the model; without names, the name of the
            first copy is used.
        stages: this rank's stages.
        rank_of: returns the pipeline rank of a stage.
        count: number of stages.
        track: see :class:`TiedWeights`.

    Raises:
        StructureError: on every rank: ranks declare different weights, a stage has no such
            parameter, or copies have different shapes, dtypes or sharding.
        OrderError: an optimizer was made before the pipeline.
    """
    if not isinstance(declared, Mapping):
        declared = {one[min(one)]: one for one in declared if one}
    weights: list[TiedWeight] = []

    def read() -> tuple[list[str], list[dict[int, str]]]:
        forms: list[dict[int, str]] = []
        for number in (number for one in declared.values() for number in one):
            if not 0 <= number < count:
                raise StructureError(
                    f"tied names stage {number} on rank {mesh.rank}: stages are 0 to {count - 1}"
                )
        for name, one in declared.items():
            copies = tuple(TiedCopy(stage, rank_of(stage), one[stage]) for stage in sorted(one))
            weights.append(TiedWeight(name, copies))
            forms.append({})
            for stage in (stage for stage in stages if stage.stage_index in one):
                member, form = _copy_in(stage.submod, one[stage.stage_index])
                forms[-1][stage.stage_index] = form
                if member is not None:
                    weights[-1].own_copies.append((stage.communicator, member))
        if any(c.state.consumer.is_optimizer for weight in weights for c, _ in weight.own_copies):
            raise OrderError(
                f"rank {mesh.rank} has a ZeroOptimizer for a chunk with tied weights already: make "
                "the Pipeline first, which finds tied weights, then the optimizers"
            )
        return [str(weight) for weight in weights], forms

    _compare(Objects(mesh.pipeline_group).on_every(read), weights, mesh)
    return TiedWeights(mesh, weights, track)


def _copy_in(chunk: nn.Module, name: str) -> tuple[Member | None, str]:
    """A chunk's copy, and what must be equal for all copies, as text."""
    try:
        parameter: Any = chunk.get_parameter(name)
    except AttributeError:
        return None, "is not there"
    member: Member | None = getattr(parameter, "_member", None)
    if member is None:
        return None, "is not parallel (a rule of the plan ignores it)"
    shape = f"{list(member.parameter.shape)} {member.dtype}"
    if not isinstance(member, ShardedParameter):
        return member, f"is replicated, {shape}"
    dim, size, axis = member.layout.dim, member.layout.size, member.axis.name
    return member, f"is sharded on dimension {dim} of {shape} over {size} ranks ({axis})"


def _compare(gathered: Sequence[Any], weights: Sequence[TiedWeight], mesh: ParallelMesh) -> None:
    declared = [names for names, _ in gathered]
    for rank, names in enumerate(declared):
        if names != declared[0]:
            raise StructureError(
                f"pipeline ranks tie different weights: {declared[0]} and {names} (pipeline ranks "
                f"0 and {rank}; this is rank {mesh.rank}): make the same model on every rank"
            )
    for number, weight in enumerate(weights):
        forms = {stage: form for _, own in gathered for stage, form in own[number].items()}
        found = [forms.get(each.stage, "is on no rank") for each in weight.copies]
        wrong = any(form.startswith(("is not ", "is on ")) for form in found)
        if wrong or len(set(found)) > 1:
            parts = [f"{each} {form}" for each, form in zip(weight.copies, found, strict=True)]
            raise StructureError(
                f"stages share {weight.name}, but {', '.join(parts)} (this is rank {mesh.rank}): "
                "copies of one weight must be sharded alike. Name all of them where a rule of the "
                "plan names one, or untie them"
            )


class TiedCopy(NamedTuple):
    """A copy of a tied weight: its stage, its pipeline rank, and its name in its chunk."""

    stage: int
    rank: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} of stage {self.stage}"


@dataclass(eq=False)
class TiedWeight:
    """One weight of which several stages have copies.

    Attributes:
        name: its name in the model.
        copies: all copies, by ascending stage; norms and checkpoints contain the first.
        own_copies: this rank's copies, by ascending stage, each with its chunk's communicator.
    """

    name: str
    copies: tuple[TiedCopy, ...]
    own_copies: list[tuple[ISPCommunicator, Member]] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        """Pipeline ranks that have copies, ascending."""
        return sorted({each.rank for each in self.copies})

    @property
    def own_gradients(self) -> list[tuple[StepGradients, Member]]:
        """This rank's copies, each with what holds its gradient."""
        return [(c.state.consumer.tied, member) for c, member in self.own_copies]

    def __str__(self) -> str:
        return " and ".join(map(str, self.copies))


class TiedWeights:
    """All tied weights of a pipeline, the same list on all of its ranks.

    Args:
        track: see :meth:`internsp.pipeline.messages.Messages.track`: ends waits for messages of a
            rank that has failed.
    """

    def __init__(
        self, mesh: ParallelMesh, weights: Sequence[TiedWeight], track: TrackOps | None = None
    ) -> None:
        self._mesh, self.weights, self._track = mesh, list(weights), track
        for weight in self.weights:
            mine = [each for each in weight.copies if each.rank == mesh.pipeline_rank]
            for each, (_, member) in zip(mine, weight.own_copies, strict=True):
                member.tied, member.counted = weight.name, each is weight.copies[0]

    def __len__(self) -> int:
        return len(self.weights)

    # gradients

    @contextmanager
    def sum_gradients(self) -> Iterator[None]:
        """Context for a step, which sums the gradients of copies over the stages at its end.

        Blocks at the end. If the step raises, the copies' gradients are those from before it.
        """
        trained = [w for w in self.weights if any(s.trains(m) for s, m in w.own_gradients)]
        copies = [pair for weight in trained for pair in weight.own_gradients]
        stores = list(dict.fromkeys(store for store, _ in copies))
        try:
            for store, member in copies:
                store.begin_step(member)
            yield
            with torch.no_grad():
                for store in stores:
                    store.finish()
                for weight in trained:
                    self._sum_weight(weight)
        except BaseException:
            for store in stores:
                store.discard_step()
            raise

    def _sum_weight(self, weight: TiedWeight) -> None:
        """Sum this step's gradient over all copies, with one flat message to each other rank.

        The message is the rank's own sum, and one element, 1 if it has a gradient.
        """
        sums = [store.local_sum(member) for store, member in weight.own_gradients]
        used = any(has_sum for _, has_sum in sums)
        packed = torch.cat([sums[0][0], sums[0][0].new_full((1,), used)])
        for values, _ in sums[1:]:
            packed[:-1] += values
        found = {self._mesh.pipeline_rank: packed, **self._exchange_sums(weight, packed)}
        # By ascending rank, so that the sum has the same bits on all ranks.
        total = found[weight.ranks[0]]
        for rank in weight.ranks[1:]:
            total = total + found[rank]
        used = used or bool(total[-1] > 0)
        for store, member in weight.own_gradients:
            store.set_total(member, total[:-1] if used else None)

    def _exchange_sums(self, weight: TiedWeight, packed: Tensor) -> dict[int, Tensor]:
        peers = [rank for rank in weight.ranks if rank != self._mesh.pipeline_rank]
        if not peers:
            return {}
        state = weight.own_copies[0][0].state
        nbytes = len(peers) * packed.nbytes
        event = state.trace.record("EX", weight.name, "", "finish", nbytes, in_flight=True)
        state.collectives.counters.reduced_bytes += nbytes
        state.collectives.counters.reductions += 1
        received = send_and_receive(self._mesh.pipeline_group, packed, peers, peers, self._track)
        state.trace.finish(event)
        return received

    # values

    def digest(self) -> Tensor:
        """Digests of this rank's copies, ``[weights, 4]``, int64; a MAX all-reduce compares ranks.

        The columns are the largest digest of the values, the largest negated digest, and the same
        two for whether the copies are trained; the lowest int64 where this rank has no copy. Their
        maxima over all ranks are the argument of :meth:`differences`. No communication; waits for
        an optimizer's parameter all-gather.
        """
        found = torch.full((len(self), 4), _LOWEST, device=self._mesh.device)
        for row, weight in zip(found, self.weights, strict=True):
            for store, member in weight.own_gradients:
                trained = int(store.trains(member))
                bits = _digest(member).to(row.device)
                mine = torch.stack([bits, -bits, *row.new_tensor([trained, -trained]).unbind()])
                torch.maximum(row, mine, out=row)
        return found

    def differences(self, largest: Tensor) -> list[str]:
        """Which weights have copies that differ, as text.

        Args:
            largest: maxima of :meth:`digest` over all ranks of a pipeline.
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
        """Copy values and master values of the first copy to the others. Collective; blocks."""
        group, rank = self._mesh.pipeline_group, self._mesh.pipeline_rank
        for weight in (weight for weight in self.weights if weight.own_copies):
            first, device = weight.copies[0].rank, weight.own_copies[0][1].device
            held = [(m, store.values(m)) for store, m in weight.own_gradients]
            for number, mine in enumerate(held[0][1]):
                values = mine.to(device).contiguous()
                if rank == first:
                    others = [other for other in weight.ranks if other != first]
                    send_and_receive(group, values, others, ())
                else:
                    values = send_and_receive(group, values, (), [first])[first]
                for member, tensors in held:
                    there = tensors[number]
                    given = values.view(there.shape).to(there.device)
                    if not same_bits(there.contiguous(), given):
                        there.copy_(given)
                        member.invalidate()


def _digest(member: Member) -> Tensor:
    """Digest of the bits of this rank's part, as a tensor, so that the host does not wait."""
    member.wait_until_ready()
    local = member.parameter._local_tensor.detach()  # type: ignore[attr-defined]
    bits = bits_of(local.reshape(-1))
    return bits.sum(dtype=torch.int64) >> 1  # so that its negative exists, and none is the lowest


def send_and_receive(
    group: dist.ProcessGroup,
    values: Tensor,
    destinations: Collection[int],
    sources: Collection[int],
    track: TrackOps | None = None,
) -> dict[int, Tensor]:
    """Send ``values`` to ``destinations``, and receive a tensor like it from each of ``sources``.

    Both are ranks of ``group``. Blocks (on a device: the current stream).

    Args:
        track: see :meth:`internsp.pipeline.messages.Messages.track`.

    Returns:
        The received tensors by source.
    """
    received = {rank: torch.empty_like(values) for rank in sources}
    ops = [dist.P2POp(dist.irecv, t, group=group, group_peer=r) for r, t in received.items()]
    ops += [dist.P2POp(dist.isend, values, group=group, group_peer=rank) for rank in destinations]
    if ops:
        for work in dist.batch_isend_irecv(ops if track is None else track(ops)):
            work.wait()
    return received
