"""A subclass of ``DTensor`` is asked what an operation does, by the torch that is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from internsp.dtensor import asked as module
from tools.bench.model import process_group


@pytest.mark.parametrize("asked", [module.asked, module._asked_by_mode])
def test_every_call_from_python_asks_the_subclass_once(asked: Callable[[type], type]) -> None:
    seen: list[str] = []

    class Asked(DTensor):
        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.__name__)
            return None if "foreach" in func.__name__ else args[0]

    kind: Any = asked(Asked)
    with process_group("fake", 2):
        mesh = init_device_mesh("cpu", (2,))
        plain = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        of_it: Tensor = DTensor.__new__(kind, torch.ones(2, 3), plain._spec, requires_grad=False)
        of_it.zero_()
        assert seen.pop() == "zero_.default"
        _ = of_it + plain
        assert seen.pop() == "add.Tensor"
        of_it.data.mul_(2)
        assert (seen.pop(), seen.pop()) == ("mul_.Tensor", "detach.default")
        torch._foreach_zero_([plain, of_it])
        assert seen.pop() == "_foreach_zero_.default"
        assert of_it.shape == (4, 3)
    assert seen == []
