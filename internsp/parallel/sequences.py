"""Sequence parallelism of a model: its attention over several ranks, and the head's logits.

The weights of any model can be sharded from outside. What a model computes from tokens of other
ranks cannot: the model itself must do that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from internsp.base.in_flight import Reporter
from internsp.base.trace import Trace
from internsp.config import SequenceConfig, WeightParallelConfig
from internsp.errors import ConfigError, InternspError, StructureError
from internsp.failure.comm_context import CommContext
from internsp.mesh import ParallelMesh
from internsp.modules.supported import require_supported
from internsp.sp import DistributedAttention
from internsp.sp.exchange import ExchangeGroup
from internsp.sp.hf import examine
from internsp.sp.hf.attach import attach
from internsp.sp.mixing import Refused, mixes_positions
from internsp.sp.ring import RingGroup

_MAX_LISTED = 8


def supports(
    model: nn.Module,
    mesh: ParallelMesh,
    config: WeightParallelConfig | None = None,
    sequence: SequenceConfig | None = None,
) -> list[Refused]:
    """Why :func:`parallelize` would refuse ``model`` on ``mesh``: **empty** if it would not.

    Changes nothing and sends no message. Under a sequence degree above 1 every attention must
    support sequence parallelism (``docs/howto/sequences_in_my_model.md``); the list has every
    module that does not, with its name and the reason. With ranks that own experts it has the
    experts whose tokens cannot be sent to their owners.
    """
    config = config or WeightParallelConfig()
    found = []
    try:
        require_supported(model, config.rules, config.compile)
    except InternspError as error:
        found.append(Refused("", str(error)))
    if mesh.expert > 1:
        from internsp.parallel.experts import find_unowned

        found += find_unowned(model, config, mesh.expert)
    return found + find_refused(model, mesh, sequence or SequenceConfig())


def find_refused(model: nn.Module, mesh: ParallelMesh, config: SequenceConfig) -> list[Refused]:
    """The modules that mix tokens but would see only this rank's tokens.

    Empty if the mesh does not shard sequences, or with ``own_attention``.
    """
    if mesh.sequence == 1 or config.own_attention:
        return []
    if examine.find_pretrained_model(model) is not None:
        return examine.refusals(model)
    found = [
        Refused(name, reason) for name, module in model.named_modules()
        if not isinstance(module, DistributedAttention)
        and (reason := mixes_positions(module)) is not None
    ]  # fmt: skip
    if found or any(isinstance(module, DistributedAttention) for module in model.modules()):
        return found
    composite = {
        type(module).__name__: name for name, module in reversed(list(model.named_modules()))
        if name and any(True for _ in module.children())
    }  # fmt: skip
    like = {c: n for c, n in composite.items() if "att" in f"{c} {n}".lower()} or composite
    like = like or {type(model).__name__: ""}
    reason = "it is no internsp.DistributedAttention and holds none"
    return [Refused(name, f"{kind}: {reason}") for kind, name in like.items()]


def require_sequence_attention(
    model: nn.Module, mesh: ParallelMesh, config: SequenceConfig
) -> None:
    """Check that the model supports sequence parallelism if the mesh shards sequences.

    Raises:
        StructureError: some modules do not; lists them with the reasons.
        ConfigError: ``own_attention`` allows what no module needs.
    """
    if mesh.sequence > 1 and config.own_attention:
        if not find_refused(model, mesh, SequenceConfig()):
            raise ConfigError(
                "sequence.own_attention = True has no effect: every attention of the "
                "model exchanges tokens between the ranks of a sequence by internsp, and nothing "
                f"else would be refused; leave it out (this is rank {mesh.rank})"
            )
    found = find_refused(model, mesh, config)
    if not found:
        return
    lines = [f"  {refused}" for refused in found[:_MAX_LISTED]]
    if len(found) > _MAX_LISTED:
        lines.append(f"  and {len(found) - _MAX_LISTED} more (internsp.supports lists them all)")
    raise StructureError(
        f"the mesh cuts sequences over {mesh.sequence} ranks, and these modules would compute with "
        "their own rank's tokens only:\n" + "\n".join(lines) + "\nCompute attention by an "
        "internsp.DistributedAttention; or make the mesh with sequence = 1; or, for a model "
        "without attention or one that exchanges tokens itself, set "
        f"sequence.own_attention = true (this is rank {mesh.rank})"
    )


def attach_sequences(
    model: nn.Module,
    mesh: ParallelMesh,
    trace: Trace,
    mean: bool,
    config: SequenceConfig,
    overlap: bool,
    split: bool,
    context: CommContext,
) -> None:
    """Attach every attention of ``model`` to its groups of the sequence ranks.

    Args:
        mean: gradients are averaged over ranks later, not summed.
        overlap: as ``weight_parallel.overlap``.
        split: backward runs in two parts, input gradients and weight gradients.
        context: of the model's collectives: counts exchanges, and names one that fails.
    """
    # A backward in two parts runs the node that makes both gradients twice, and would send twice.
    parts = config.exchange_in_parts and not split
    reporter = replace(context.reporter("sequences"), pairs=mesh.pairs)
    heads: Any = ExchangeGroup.of(mesh.heads_group, trace, reporter) if mesh.sequence > 1 else None
    ring: Any = ExchangeGroup.of(mesh.ring_group, trace, reporter)
    for name, module in model.named_modules():
        if isinstance(module, DistributedAttention):
            module.attach(
                heads, trace, name, ring=ring, axes=mesh.sequence_axes,
                form=config.ring_form, inner=config.inner_ring, in_parts=parts,
                overlap=overlap,
            )  # fmt: skip
    if mesh.sequence > 1:
        group = ExchangeGroup.of(mesh.sequence_group, trace, reporter)
        around = RingGroup(ring, config.ring_form, config.inner_ring) if mesh.ring > 1 else None
        attach(model, mesh, mean, group, heads if mesh.sequence > mesh.ring else None, around)
    if config.head_output != "local":
        options: Any = model.loss_options  # of set_head_output
        # Not counted: sequences of unequal length have losses of unequally many chunks.
        reporter = Reporter(naming=context.naming)
        options["group"] = ExchangeGroup.of(mesh.sequence_group, None, reporter)


def set_head_output(model: nn.Module, mesh: ParallelMesh, config: SequenceConfig) -> None:
    """Pass ``sequence.head_output`` to the model, whose loss exchanges the logits.

    Raises:
        StructureError: the model takes no such option.
    """
    if config.head_output == "local":
        return
    if not isinstance(getattr(model, "loss_options", None), dict):
        raise StructureError(
            f"sequence.head_output = {config.head_output!r} is carried out by the model's "
            f"own loss, but a {type(model).__name__} has no dictionary loss_options to take it: "
            "give it one and call internsp.token_loss(..., **self.loss_options) in its forward, "
            f"or leave head_output = 'local' (this is rank {mesh.rank})"
        )
    ours = {"output": config.head_output, "group": mesh.sequence_group}
    model.loss_options = {**model.loss_options, **ours}  # type: ignore[assignment, dict-item]
