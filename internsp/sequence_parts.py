"""What a model itself must do where sequences are cut: attention over ranks, and the head's logits.

Weights of any model can be cut from outside; what a model computes with other ranks' tokens cannot.
"""

from __future__ import annotations

from torch import nn

from internsp.config import WeightParallelConfig
from internsp.errors import StructureError
from internsp.mesh import ParallelMesh
from internsp.sp import DistributedAttention

_LISTED = 8


def require_cut_attention(
    model: nn.Module, mesh: ParallelMesh, config: WeightParallelConfig
) -> None:
    """Where sequences are cut, attention is ours, or the user has said that he sees to it.

    Raises:
        StructureError: there is none; lists the modules that may hold the attention. Or one is
            torch's own, which knows this rank's tokens only.
    """
    if mesh.sequence == 1 or config.cuts_own_sequences:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            raise StructureError(
                f"{name} is a {type(module).__name__}, and the mesh cuts sequences over "
                f"{mesh.sequence} ranks: it would attend to this rank's tokens only. Compute "
                "attention by an internsp.DistributedAttention, or make the mesh with sequence = 1 "
                f"(this is rank {mesh.rank})"
            )
    if any(isinstance(module, DistributedAttention) for module in model.modules()):
        return
    composite = {
        type(module).__name__: name for name, module in reversed(list(model.named_modules()))
        if name and any(True for _ in module.children())
    }  # fmt: skip
    like = [f"{n} ({c})" for c, n in composite.items() if "att" in f"{c} {n}".lower()]
    named = like or [f"{n} ({c})" for c, n in composite.items()]
    raise StructureError(
        f"the mesh cuts sequences over {mesh.sequence} ranks, but no module of this model is an "
        "internsp.DistributedAttention: every rank would attend to its own tokens only. Compute "
        f"attention by one in {', '.join(named[:_LISTED]) or type(model).__name__}; or make the "
        "mesh with sequence = 1; or, for a model without attention or one that exchanges tokens "
        f"itself, set weight_parallel.cuts_own_sequences = true (this is rank {mesh.rank})"
    )


def take_head_output(model: nn.Module, mesh: ParallelMesh, config: WeightParallelConfig) -> None:
    """Hand ``weight_parallel.head_output`` to the model, whose loss exchanges the logits.

    Raises:
        StructureError: the model takes no such option.
    """
    if config.head_output == "local":
        return
    if not isinstance(getattr(model, "loss_options", None), dict):
        raise StructureError(
            f"weight_parallel.head_output = {config.head_output!r} is carried out by the model's "
            f"own loss, but a {type(model).__name__} has no dictionary loss_options to take it: "
            "give it one and call internsp.token_loss(..., **self.loss_options) in its forward, "
            f"or leave head_output = 'local' (this is rank {mesh.rank})"
        )
    ours = {"output": config.head_output, "group": mesh.sequence_group}
    model.loss_options = {**model.loss_options, **ours}  # type: ignore[assignment, dict-item]
