"""Pure: the dtypes of one weight's life: gathered, reduced, and that of its ``.grad``.

At rest a weight has the dtype in which the model was built. What it is gathered and computed with
in, and what its gradient travels in, is decided here and nowhere else, for each weight by itself:
fp32 adapters train over a bf16 base, a router computes in fp32 where all else is cast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from internsp.config import WeightParallelConfig

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class WeightDtypes:
    """Of one weight.

    Attributes:
        compute: what it is gathered and computed with in; autocast may still decide otherwise.
        reduce: what its gradient travels in; ``None``: as it comes, in that of the weight's use.
        grad: what ``.grad`` is kept and accumulated in, in a loop without a ``ZeroOptimizer``.
    """

    compute: torch.dtype
    reduce: torch.dtype | None
    grad: torch.dtype

    @classmethod
    def of(
        cls,
        parameter: nn.Parameter,
        config: WeightParallelConfig,
        own: bool,
        said: Mapping[str, Any],
    ) -> WeightDtypes:
        """What the options say of ``parameter``.

        ``Tensor.grad_dtype``, where the user has set one, decides over ``grad_dtype``.

        Args:
            own: it computes and travels in its own dtype (``weight_parallel.own_dtype``).
            said: what rules of the plan say of it, before all options.
        """
        dtype = parameter.dtype
        named = said.get("compute_dtype", None if own else config.compute_dtype)
        compute = DTYPES[named] if named else dtype
        named = said.get("reduce_dtype", None if own else config.reduce_dtype)
        reduce = DTYPES[named] if named else None
        grad = parameter.grad_dtype or dtype
        wanted = said.get("grad_dtype", config.grad_dtype)
        if grad == dtype and wanted is not None:
            grad = torch.promote_types(dtype, DTYPES[wanted])
        return cls(compute, reduce, grad)
