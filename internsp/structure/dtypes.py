"""Decides the dtypes in which a weight is gathered and reduced, and that of its ``.grad``. Pure.

The shard has the dtype in which the model was built. The dtype in which a weight is gathered and
computed with, and that in which its gradient is reduced, are decided here and nowhere else, for
each weight separately: fp32 adapters train over a bf16 base, and a router computes in fp32 while
everything else is cast.
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
    """The dtypes of one weight.

    Attributes:
        compute: in which it is gathered and computed with, unless autocast chooses another.
        reduce: in which its gradient is reduced; ``None``: in that in which autograd computes it.
        grad: of ``.grad`` and of accumulation, in a loop without a ``ZeroOptimizer``.
    """

    compute: torch.dtype
    reduce: torch.dtype | None
    grad: torch.dtype

    @classmethod
    def of(
        cls,
        parameter: nn.Parameter,
        config: WeightParallelConfig,
        rule_options: Mapping[str, Any],
    ) -> WeightDtypes:
        """The dtypes of ``parameter``.

        ``Tensor.grad_dtype``, where the user has set one, takes precedence over ``grad_dtype``.

        Args:
            rule_options: options that rules of the plan set for it; they precede ``config``.
        """
        dtype = parameter.dtype
        named = rule_options.get("compute_dtype", config.compute_dtype)
        compute = DTYPES[named] if named else dtype
        named = rule_options.get("reduce_dtype", config.reduce_dtype)
        reduce = DTYPES[named] if named else None
        grad = parameter.grad_dtype or dtype
        wanted = rule_options.get("grad_dtype", config.grad_dtype)
        if grad == dtype and wanted is not None:
            grad = torch.promote_types(dtype, DTYPES[wanted])
        return cls(compute, reduce, grad)
