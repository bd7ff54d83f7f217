"""Parameters that a forward reads past their modules: ``full_tensor()`` and its kin (WP-9).

In a forward ``module.weight`` is an unsharded view. A reference to the parameter itself, as
``model.named_parameters()`` gives, is a ``DTensor`` even there. torch takes the gradient of its
``full_tensor()`` for equal on all ranks, and keeps this rank's rows of it. In a forward each rank
has its own, since it has its own data; the parameter's gradient is their sum.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from internsp.base.autograd import in_backward
from internsp.errors import StructureError
from internsp.modules.parameters import OpenForwards, ParameterHandle, view
from internsp.wp.parameter import Member, ReplicatedParameter


class ForwardReads:
    """Reads parameters of one chunk in its forwards.

    Args:
        communicator: the chunk's (:class:`internsp.wp.communicator.ISPCommunicator`).
        opened: counts the forwards of the chunk that run.
        split: a pipeline's schedule splits the chunk's backward.
    """

    def __init__(self, communicator: Any, opened: OpenForwards, split: bool) -> None:
        self._communicator, self._opened, self._split = communicator, opened, split

    def full_tensor(self, member: Member) -> Tensor | None:
        """The unsharded parameter, whose gradient is summed over ranks; ``None`` past a forward.

        Collective over the weight group. The backward of a sharded parameter's is a reduce-scatter
        over all ranks that hold a part of it; all of them must reach it.

        Raises:
            StructureError: the sum is not known (see :meth:`_require_sum`).
        """
        if not self._runs(member):
            return None
        self._require_sum(member)
        if isinstance(member, ReplicatedParameter):
            return view(_ReplicaHandle((member,)))
        from internsp.modules.whole import read_whole  # few programs need it

        mesh = self._communicator.mesh
        return read_whole(member, mesh, mesh.shape.stage_size if self._communicator.mean else 1)

    def refuse(self, member: Member, what: str) -> None:
        """Refuse other reads in a forward, whose gradient no rank would sum.

        Args:
            what: the call, in words.

        Raises:
            StructureError: in a forward, on more than one rank.
        """
        if self._runs(member):
            raise StructureError(
                f"{what} in a forward, on rank {self._communicator.mesh.rank}: its gradient would "
                "be this rank's alone, where that of all ranks is needed. Read the weight from its "
                "module (self.weight is the unsharded tensor there), or compute from "
                "full_tensor() of the parameter; detach() it where no gradient is needed"
            )

    def _runs(self, member: Member) -> bool:
        """Whether a forward of the chunk runs, or a recompute, and there are ranks to sum over."""
        if member.parameter.device_mesh.size() == 1:  # type: ignore[attr-defined]
            return False
        inside: bool = self._communicator.events.inside
        return inside or self._opened.number > 0 or in_backward()

    def _require_sum(self, member: Member) -> None:
        """Check that the sum over the parameter's mesh is its gradient.

        Raises:
            StructureError: it is not, or cannot be had where backward comes to it.
        """
        why = ""
        if member.tensor is not None:
            why = "its layer is tensor parallel, and tensor ranks may have equal or own gradients"
        elif self._split:
            why = "the pipeline's schedule splits backward, where no rank may wait for others"
        elif member.tied:
            why = "other stages of the pipeline hold it, too"
        if why:
            raise StructureError(
                f"full_tensor() of {member.name} in a forward, on rank "
                f"{self._communicator.mesh.rank}: {why}, so that its gradient cannot be summed. "
                "Read the weight from its module (self.weight is the unsharded tensor there), or "
                "detach() it where no gradient is needed"
            )


class _ReplicaHandle(ParameterHandle):
    """A replicated parameter in its own dtype, and a copy: its gradient is as that of any use."""

    def unshard(self) -> list[Tensor]:
        super().unshard()
        local: Tensor = self.weights[0].parameter._local_tensor  # type: ignore[attr-defined]
        return [local.detach().clone()]
