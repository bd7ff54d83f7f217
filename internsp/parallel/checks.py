"""What is checked at each forward of a model, in one list; and before reads of single weights."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from internsp.errors import StructureError
from internsp.failure.consensus import Consensus
from internsp.failure.recovery import StageRecovery
from internsp.mesh import ParallelMesh, WeightAxis
from internsp.parallel.compare import token_count_check
from internsp.wp.checks import RootCheck
from internsp.wp.parameter import Member, ShardedParameter, trained


class RootChecks:
    """The checks of each forward, in this order on every rank: a
    :class:`internsp.wp.checks.RootCheck`. They come after the recovery from a failed pass, and
    before the first gather.

    =======================================  ======================================================
    what must hold                           asks other ranks
    =======================================  ======================================================
    no parameter was added                   no
    no value is missing                      no
    the same parameters are frozen           by the store, after a change
    parts of the same batch                  16 bytes; confirmed as backward ends
    equal token counts                       once, with a graph, a mean and ``compare_ranks``
    =======================================  ======================================================

    Args:
        known: ``(module, name)`` of every parameter that the model has.
        unfilled: parameters that were on the meta device.
        batch: compares the batches of ranks that share one; ``None`` if none do.
        mean: ranks must have equally many tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: ParallelMesh,
        members: Sequence[Member],
        known: Container[tuple[nn.Module, str]],
        unfilled: Sequence[Member],
        consensus: Consensus,
        batch: RootCheck | None,
        mean: bool,
    ) -> None:
        self._added = AddedParameterCheck(model, known)
        self._missing = None
        if unfilled or any(buffer.is_meta for buffer in model.buffers()):
            from internsp.values.meta import MissingValueCheck

            self._missing = MissingValueCheck(model, unfilled, mesh.rank)
        self._frozen = FrozenParameterCheck(members, consensus)
        self._batch = batch
        self._counts = token_count_check(mesh) if mean else None

    def check(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """See the class. Raises the error of the first check that fails."""
        self._added.check()
        if self._missing is not None:
            self._missing.check()
        self._frozen.check()
        if self._batch is not None:
            self._batch.check(args, kwargs)
        if self._counts is not None:
            self._counts(args, kwargs)

    def confirm(self) -> None:
        """See :class:`internsp.wp.checks.RootCheck`."""
        if self._batch is not None:
            self._batch.confirm()

    def reset(self) -> None:
        """See :class:`internsp.wp.checks.RootCheck`."""
        if self._batch is not None:
            self._batch.reset()


class AddedParameterCheck:
    """Compares the modules of a parallel model at each forward (0.3 us for each module).

    Args:
        known: ``(module, name)`` of every parameter that the model had in ``parallelize``.
    """

    def __init__(self, model: nn.Module, known: Container[tuple[nn.Module, str]]) -> None:
        self._model = model
        self._known = known
        # `_modules` and `_parameters` of each module, and what they held at the last check.
        self._held: tuple[list[Any], list[Any]] = [], []
        self._seen: tuple[list[Any], list[int]] | None = None

    def check(self) -> None:
        """Called at each forward of the model.

        Raises:
            StructureError: a parameter was added.
        """
        if self._seen is not None and self._now() == self._seen:
            return
        for path, module in self._model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and (module, name) not in self._known:
                    raise StructureError(
                        f"{path}.{name} was added after parallelize(), so that no rank would "
                        "share its gradient: build the whole model first, adapters included"
                    )
        modules = [*self._model.modules()]
        self._held = [m._modules for m in modules], [m._parameters for m in modules]
        self._seen = self._now()

    def _now(self) -> tuple[list[Any], list[int]]:
        """The children of each module, and how many parameters it has: without a loop in Python."""
        children, parameters = self._held
        return [*map(tuple, map(dict.values, children))], [*map(len, parameters)]


def register_read_checks(weights: Sequence[ShardedParameter], recovery: StageRecovery) -> None:
    """Make ``full_tensor()`` of a weight on some ranks only raise there, and abort no group.

    Sets ``weight.meet``, which ``full_tensor()`` calls before its all-gather, and its backward
    before the sum over all ranks.
    """

    def among(axis: WeightAxis, of: str, grid: Tensor) -> Consensus | None:
        name, ranks = f"{recovery.shared_name}/{axis.name}/{of}", grid.flatten().tolist()
        return recovery.among(name, ranks) if len(ranks) > 1 else None

    for axis in dict.fromkeys(weight.axis for weight in weights):
        replica, grid = axis.replica_rank, axis.param_mesh.mesh
        meet = partial(_meet, among(axis, str(replica), grid[replica]), among(axis, "all", grid))
        for weight in weights:
            if weight.axis is axis:
                weight.meet = meet


def _meet(
    replica: Consensus | None, all_ranks: Consensus | None, what: str, everyone: bool = False
) -> None:
    consensus = all_ranks if everyone else replica
    if consensus is not None:
        consensus.same("reads", what)


class FrozenParameterCheck:
    """Checks, whenever ``requires_grad`` changes, that all ranks freeze the same parameters.

    Which reductions are launched depends on it.

    Args:
        members: all parameters of a chunk; all ranks start with the same frozen parameters.
    """

    def __init__(self, members: Sequence[Member], consensus: Consensus) -> None:
        self._members, self._consensus = list(members), consensus
        self._agreed = trained(self._members)

    def check(self) -> None:
        """Called at each forward. Uses the store, and blocks, only after a change.

        Raises:
            StructureError: the ranks freeze different parameters.
            CollectiveError: some rank changed nothing, or runs no further forward.
        """
        now = trained(self._members)
        if now == self._agreed:
            return
        changed = [
            m.name for m, a, b in zip(self._members, self._agreed, now, strict=True) if a != b
        ]
        what = f"a forward with requires_grad changed for {', '.join(changed)}"
        remedy = "freeze and unfreeze the same parameters on all ranks"
        self._consensus.same("frozen", what, kind=StructureError, remedy=remedy)
        self._agreed = now
