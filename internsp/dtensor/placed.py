"""Makes and reads ``DTensor`` placed like a parameter, without communication or torch's checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from internsp.dtensor.mixed import without_torch_function
from internsp.errors import LayoutError

_grad_dtype: Any = Tensor.grad_dtype.__get__  # type: ignore[union-attr]


def dtensor_over(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """``local``, wherever it lies, as a ``DTensor`` of ``shape``; no copy, no message.

    ``from_local`` copies what lies in host memory to the device of ``mesh``: a parameter of its own
    beside the offloaded shard.
    """
    meta = TensorMeta(torch.Size(shape), strides(shape), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), meta)
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def dtensor_like(parameter: nn.Parameter, local: Tensor) -> DTensor:
    """``local`` as a ``DTensor`` with the placements of ``parameter``, in its own dtype.

    Not by ``from_local``, which takes ten times as long, for every gradient of every step; nor by
    ``DTensor()``, whose ``__init__`` does nothing except keep the compiler out.
    """
    return DTensor.__new__(
        DTensor, local, spec_with_dtype(parameter, local.dtype), requires_grad=False
    )


def spec_with_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> Any:
    """The ``DTensorSpec`` of ``parameter``, with another dtype."""
    spec = parameter._spec  # type: ignore[attr-defined]
    meta = spec.tensor_meta
    if dtype is meta.dtype:
        return spec
    return DTensorSpec(spec.mesh, spec.placements, meta._replace(dtype=dtype))


def grad_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The dtype of the parameter's ``.grad``, which the user may change by
    ``parameter.grad_dtype``."""
    # Without __torch_function__, as for requires_grad; `None` (any dtype) means its own dtype.
    chosen: torch.dtype | None = without_torch_function(_grad_dtype, (), (parameter,), {})
    return chosen or parameter._local_tensor.dtype  # type: ignore[attr-defined]


def local_values(name: str, values: Tensor, parameter: nn.Parameter) -> Tensor | None:
    """The local part of ``values``, or ``None`` when they are an unsharded plain tensor.

    Raises:
        LayoutError: they do not fit ``parameter``.
    """
    placements = parameter.placements  # type: ignore[attr-defined]
    if values.shape != parameter.shape:
        raise LayoutError(
            f"{name} has shape {list(parameter.shape)}, the given values {list(values.shape)}"
        )
    if not isinstance(values, DTensor):
        return None
    if values.placements != placements:
        raise LayoutError(
            f"{name} is placed {placements}, the given values {values.placements}: redistribute "
            "them first"
        )
    return values._local_tensor


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements."""
    return torch.empty(shape, device="meta").stride()
