"""Compares gradients and parameters on several ranks with those of one process, by value.

A parity test compares the gradient of every parameter after a backward, and every parameter after
steps with these gradients. It uses :func:`check`, or :func:`gaps` where the parent process
evaluates the results of its ranks. A missing or additional name, a gradient on one side only, a
different shape and a NaN all count as differences.

In fp64 the allowed difference is ``TOLERANCE`` of the largest element of the full tensor, or of
``FLOOR`` of the largest element of all tensors in the comparison, whichever is more: a gradient
that is zero except for rounding (queries of one-token documents) has no scale by itself. Each rank
compares its own shard: the ranks together compare every element, and nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

TOLERANCE = 1e-10
FLOOR = 1e-4

Values = Mapping[str, Tensor | None]


def parameters(*models: nn.Module) -> dict[str, Tensor]:
    """Every parameter by name; for a list of models (a pipeline's chunks) those of all of them."""
    return {name: p.detach() for model in models for name, p in model.named_parameters()}


def gradients(*models: nn.Module) -> dict[str, Tensor | None]:
    """Every parameter's gradient by name, None where there is none."""
    found: dict[str, Tensor | None] = {}
    for name, p in (pair for model in models for pair in model.named_parameters()):
        found[name] = p.grad
        if isinstance(p.grad, DTensor) and isinstance(p, DTensor):
            assert p.grad.placements == p.placements, f"the gradient of {name} is cut otherwise"
    return found


def gap(found: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    """The largest difference over the largest element; infinite for NaN or another shape.

    Args:
        found: the full tensor, or a ``DTensor``, of which this rank's shard is compared.
        wanted: the full tensor of one process.
        floor: the divisor where the largest element is smaller than this.
    """
    if found.shape != wanted.shape:
        return math.inf
    part = local_part(wanted, found) if isinstance(found, DTensor) else wanted.detach()
    mine: Tensor = found.to_local() if isinstance(found, DTensor) else found
    if mine.shape != part.shape:
        return math.inf
    if not part.numel():
        return 0.0
    apart = float((mine.detach() - part).abs().max())
    if apart == 0.0:
        return 0.0
    scale = max(float(wanted.detach().abs().max()), floor)
    return apart / scale if math.isfinite(apart) and scale else math.inf


def gaps(found: Values, wanted: Values, floor: float | None = None) -> dict[str, float]:
    """The gap of every name; infinite where only one side has the name or a value.

    Args:
        floor: by default ``FLOOR`` of the largest element of all wanted tensors.
    """
    if floor is None:
        sizes = [float(v.detach().abs().max()) for v in wanted.values() if v is not None]
        floor = FLOOR * max(sizes, default=0.0)
    result = {}
    for name in [*wanted, *(n for n in found if n not in wanted)]:
        one, other = found.get(name), wanted.get(name)
        alike = one is other is None and (name in found) == (name in wanted)
        both = one is not None and other is not None
        result[name] = gap(one, other, floor) if both else (0.0 if alike else math.inf)  # type: ignore[arg-type]
    return result


def differences(
    found: Values, wanted: Values, tolerance: float = TOLERANCE, floor: float | None = None
) -> list[str]:
    """A line for every name whose gap is above ``tolerance``."""
    lines = []
    for name, apart in gaps(found, wanted, floor).items():
        one, other = found.get(name), wanted.get(name)
        if apart <= tolerance:
            continue
        if one is None or other is None:
            lines.append(f"{name}: only {'one process has' if one is None else 'we have'} it")
        elif one.shape != other.shape:
            lines.append(f"{name} has shape {list(one.shape)} in place of {list(other.shape)}")
        else:
            lines.append(f"{name} differs by {apart:.3g} of its largest element")
    return lines


def check(found: Values, wanted: Values, what: str = "", tolerance: float = TOLERANCE) -> None:
    """Assert that there are no :func:`differences`."""
    wrong = differences(found, wanted, tolerance)
    more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    assert not wrong, f"{what}: {'; '.join(wrong[:5])}{more}"


def close(found: Any, wanted: Any, what: str, tolerance: float = TOLERANCE) -> None:
    """Assert that one tensor equals that of one process (absolute difference below 1e-3)."""
    assert found.shape == wanted.shape, f"{what}: {list(found.shape)} for {list(wanted.shape)}"
    apart = gap(found, wanted, 1e-3)
    assert apart <= tolerance, f"{what} differs by {apart:.3g} of its largest element"


def after_a_step(ours: Iterable[nn.Module], plain: nn.Module) -> dict[str, float]:
    """Gaps of the parameters after an SGD step with the present gradients. Collective."""
    ours = list(ours)
    for model in (*ours, plain):
        torch.optim.SGD(model.parameters(), lr=0.05, foreach=False).step()
    found = parameters(*ours)
    return gaps(found, on_all_stages(found, parameters(plain)))


def on_all_stages(names: Iterable[str], wanted: Values) -> dict[str, Tensor | None]:
    """The tensors of ``wanted`` that belong to this rank's chunks. Collective.

    A rank of a pipeline holds some of a model's parameters; every parameter must be on some rank.
    """
    own = list(names)
    everyone: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    missing = set(wanted) - {name for each in everyone for name in each}
    assert not missing, f"no stage has {sorted(missing)}"
    return {name: wanted[name] for name in own}


def local_part(whole: Tensor, like: Any) -> Tensor:
    """This rank's shard of ``whole``, computed by DTensor from the placements of ``like``."""
    part = whole.detach()
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            pieces = part.chunk(like.device_mesh.size(axis), placement.dim)
            rank = like.device_mesh.get_local_rank(axis)
            empty = part.narrow(placement.dim, 0, 0)
            part = pieces[rank] if rank < len(pieces) else empty
    return part
