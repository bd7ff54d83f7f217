"""Checks in ``parallelize`` that all ranks have the same model: one small all-gather of objects.

It runs before the model is changed. A rank that refuses its model, or has another configuration,
model or initial values, would otherwise show much later, as a hang, an aborted process or wrong
numbers. All ranks compare the data of all ranks, so that all raise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from internsp.base.bits import checksum, plain_parts
from internsp.config import ActivationCheckpointConfig, SequenceConfig, WeightParallelConfig
from internsp.errors import ConfigError, InternspError, LayoutError, StructureError
from internsp.failure.objects import Objects
from internsp.mesh import ParallelMesh
from internsp.structure.assign import experts_among
from internsp.structure.rules import Rules, match_rules, own_rules

if TYPE_CHECKING:
    from internsp.parallel.build import Examined

Facts = dict[str, list[str]]
"""Lines of text that must be the same on all ranks of a stage, by subject."""


def require_same_model(
    model: nn.Module,
    mesh: ParallelMesh,
    config: WeightParallelConfig,
    sequence: SequenceConfig,
    checkpoint: ActivationCheckpointConfig | None,
    split: bool,
    examine: Callable[[], Examined],
) -> Examined:
    """Check that all ranks have the same model and configuration.

    Collective over the mesh's model group; blocks. With ``weight_parallel.compare_ranks`` it reads
    every parameter and buffer once, to compare initial values.

    Args:
        split: whether backward computes weight gradients separately (zero bubble's B and W).
        examine: examines this rank's model; raises if the model is not supported.

    Returns:
        What ``examine`` returned on this rank.

    Raises:
        Exception: what ``examine`` raised on this rank.
        StructureError: ``examine`` raised on another rank, or models or initial values differ.
        ConfigError: configurations differ.
    """
    ranks = mesh.model_ranks
    refusal: Exception | None = None
    try:
        examined = examine()
    except Exception as error:  # noqa: BLE001 - raised below, once the other ranks know of it
        refusal = error
    if len(ranks) > 1:
        sent = {"tensors of fsdp_pre_all_gather": _sent(examined) if refusal is None else []}
        facts = _facts(model, config, sequence, checkpoint, split)
        mine = {
            "refused": str(refusal) if refusal is not None else None,
            "digests": {subject: _digest(lines) for subject, lines in (facts | sent).items()},
            "values": _checksums(model) if config.compare_ranks and refusal is None else None,
            "part": (mesh.expert_rank, mesh.tensor_rank),
        }
        everyone = Objects(mesh.model_group).gather(mine)
        different = _difference(everyone, facts, mesh, ranks)
        for rank, report in zip(ranks, everyone, strict=True):
            if refusal is None and different is None and report["refused"] is not None:
                different = StructureError(
                    f"rank {rank} refused its model (this is rank {mesh.rank}): "
                    f"{report['refused']}"
                )
        if refusal is None and different is None:  # nor is any rank's refusal, then
            different = _difference(everyone, sent, mesh, ranks)
        if refusal is None and different is not None:
            raise different
        if refusal is None and config.compare_ranks:
            rules = match_rules(model, config.rules)
            _compare_values(everyone, _named_tensors(model), config, rules, mesh, ranks)
    if refusal is not None:
        raise refusal
    return examined


def token_count_check(mesh: ParallelMesh) -> Callable[[tuple[Any, ...], Mapping[str, Any]], None]:
    """Checks in the first forward with a graph that all ranks have equal shapes, for a mean loss
    (design.md 6). What is generated or evaluated has no gradient, and may differ.

    Returns:
        A function of a forward's arguments. Its first call with a graph is collective over the
        stage and blocks; it raises a :class:`LayoutError` on every rank if token counts differ.
    """
    checked: list[bool] = []

    def check(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if checked or not torch.is_grad_enabled():
            return
        checked.append(True)
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        counts = Objects(mesh.stage_group).gather(tensors[0].numel() if tensors else 0)
        if len(set(counts)) > 1:
            raise LayoutError(
                f"reduction = 'mean' needs equally many tokens on every rank, but the ranks "
                f"got {counts} (this is rank {mesh.rank}); divide a sum by the number of "
                "valid tokens over all ranks instead (reduction = 'sum')"
            )

    return check


def _facts(
    model: nn.Module,
    config: WeightParallelConfig,
    sequence: SequenceConfig,
    checkpoint: ActivationCheckpointConfig | None,
    split: bool,
) -> Facts:
    settings = [
        f"{name}.{key} = {value!r}"
        for name, section in (
            ("weight_parallel", config), ("sequence", sequence),
            ("activation_checkpoint", checkpoint),
        )
        for key, value in (section.model_dump().items() if section is not None else ())
    ]  # fmt: skip
    try:
        settings += [f"a rule of the model's own: {rule.model_dump()}" for rule in own_rules(model)]
    except StructureError as error:  # examine() has raised the same on this rank
        settings.append(str(error))
    settings.append(f"separate weight gradients = {split}")
    first: dict[int, str] = {}
    parameters, trained = [], []
    for name, p in model.named_parameters(remove_duplicate=False):
        shared = first.setdefault(id(p), name)
        line = f"{name} {list(p.shape)} {p.dtype}"
        if isinstance(p, DTensor):
            line += f" placed {p.placements}"
        if hasattr(p, "fsdp_pre_all_gather"):
            line += f" of {type(p).__name__}"
        parameters.append(line if shared == name else f"{line}, the same as {shared}")
        trained.append(f"{name} {'is trained' if p.requires_grad else 'is frozen'}")
    buffers = [f"{name} {list(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    return {
        "configuration": settings, "parameters": parameters, "frozen parameters": trained,
        "buffers": buffers,
    }  # fmt: skip


def _sent(examined: Examined) -> list[str]:
    """What classes of weights send; equally many bytes may be of other tensors."""
    weights = (weight for unit in examined.plan.units for weight in unit.weights)
    found = ((weight.name, getattr(weight.encoding, "sent", "")) for weight in weights)
    return [f"{name} {sent}" for name, sent in found if sent]


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _difference(
    everyone: list[dict[str, Any]], facts: Facts, mesh: ParallelMesh, ranks: list[int]
) -> InternspError | None:
    """The error for the first subject in which ranks differ; all ranks then gather its lines."""
    for subject, lines in facts.items():
        if len({report["digests"][subject] for report in everyone}) == 1:
            continue
        first, *others = Objects(mesh.model_group).gather(lines)
        index = next(i for i, other in enumerate(others, 1) if other != first)
        kind = ConfigError if subject == "configuration" else StructureError
        return kind(
            f"the ranks were given different {subject}: "
            f"{_first_difference(first, others[index - 1])} (rank {ranks[0]} and rank "
            f"{ranks[index]}; this is rank {mesh.rank}): call parallelize() with the same model "
            "and configuration on every rank"
        )
    return None


def _first_difference(one: list[str], other: list[str]) -> str:
    """Text with the first lines in which two lists differ."""
    for a, b in zip(one, other, strict=False):
        if a != b:
            return f"{a!r} and {b!r}"
    longer = one if len(one) > len(other) else other
    return f"{longer[min(len(one), len(other))]!r} and nothing"


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _checksums(model: nn.Module) -> list[int | None]:
    """A checksum of each parameter's and buffer's bytes; ``None`` for those without bytes to read.

    These are on the meta device, or of a class that does not tell its plain tensors.
    """
    return [_checksum(tensor) for _, tensor in _named_tensors(model)]


def _checksum(tensor: Tensor) -> int | None:
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return None
    own = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if not own or isinstance(tensor, DTensor):
        return checksum(tensor)
    if not is_traceable_wrapper_subclass(tensor):
        return None
    return crc32(str([_checksum(part) for part in plain_parts(tensor)]).encode())


def _compare_values(
    everyone: list[dict[str, Any]],
    tensors: Sequence[tuple[str, Tensor]],
    config: WeightParallelConfig,
    rules: Rules,
    mesh: ParallelMesh,
    ranks: list[int],
) -> None:
    """Raise if initial values differ between ranks that hold the same tensor.

    Expert ranks hold different experts, and tensor ranks different shards of a ``DTensor``; all
    other tensors must be the same on all ranks.

    Raises:
        StructureError: values differ.
    """
    experts = experts_among((name for name, _ in tensors), config, rules) if mesh.expert > 1 else ()
    for index, (name, tensor) in enumerate(tensors):
        own = name in experts
        sharded = isinstance(tensor, DTensor) and any(p.is_shard() for p in tensor.placements)
        holders: dict[tuple[Any, int], list[int]] = {}  # ranks, by (shard, checksum)
        for rank, report in zip(ranks, everyone, strict=True):
            value = report["values"][index]
            if value is not None:
                expert, part = report["part"]
                key = (expert if own else 0, part if sharded else 0)
                holders.setdefault((key, value), []).append(rank)
        alike: dict[Any, list[int]] = {}
        for (key, _), members in holders.items():
            if key in alike:
                raise StructureError(
                    f"{name} starts with other values on ranks {members} than on ranks "
                    f"{alike[key]} (this is rank {mesh.rank}): seed every rank alike before the "
                    "model is made, broadcast or load its values before parallelize(), or set "
                    "weight_parallel.compare_ranks = false if they are written afterwards"
                )
            alike[key] = members
