"""A parameter is made over its shard where the shard lies, whatever device its mesh is of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from internsp.wp.parameter import ModelParameter
from tools.bench.model import process_group


def test_a_shard_in_host_memory_is_the_parameters_own_on_a_mesh_of_devices() -> None:
    """``meta`` stands for a device: offloaded weights are on the host, their mesh is not."""
    with process_group("fake", 2):
        mesh = DeviceMesh("meta", [0, 1], _init_backend=False)
        axis: Any = SimpleNamespace(param_mesh=mesh, placements=lambda weight, tensor: [weight])
        whole, host = nn.Parameter(torch.ones(4, 3)), torch.zeros(2, 3)
        member = ModelParameter("w", whole, axis, (4, 3), torch.device("meta"))
        member._register(host, Shard(0), (4, 3), True)
        parameter: Any = member.parameter
        assert parameter.device == host.device
        assert parameter._local_tensor.data_ptr() == host.data_ptr()
        with torch.no_grad():
            host.add_(1)
        assert parameter._local_tensor.tolist() == host.tolist()
