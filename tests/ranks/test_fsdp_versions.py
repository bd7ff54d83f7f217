"""``internsp.fsdp`` with the names that FSDP2's classes have in older torch, without that torch.

The names of later ones are hidden from internsp, and from nothing else, before it is imported. What
an older torch does in another way is found under that torch alone (docs/reference/supported.md).
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torchs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.support.fsdp import Model, batch, loss_of, mesh_of, require_same, shard, steps, whole
from tests.support.ranks import ranks
from tests.support.versions import since

LATER: dict[str, dict[type, str]] = {
    "2.13": {
        torchs.FSDPModule: "reset_iter_state set_reduce_scatter_max_input_buffers "
        "set_reduce_scatter_unused_params set_separate_reduce_scatter_group",
        FSDPState: "_cast_forward_inputs _cast_output_dtype _force_complete_incomplete_states "
        "_reset_iter_state",
        FSDPParamGroup: "_reset_iter_state _set_separate_reduce_scatter_group "
        "_validate_reduce_scatter_max_input_buffers reduce_scatter_max_input_buffers "
        "reduce_scatter_unused_params",
        FSDPCommContext: "_last_post_reduce_events reduce_scatter_max_input_buffers",
        FSDPParam: "_build_spmd_sharding_spec _get_unsharded_dtensor_spec unsharded_zero_grad_data",
    },
    "2.12": {
        torchs.FSDPModule: "set_symm_mem_for_comm",
        FSDPState: "_fsdp_param_groups _validate_no_duplicate_params",
        FSDPParamGroup: "_num_param_groups _param_group_index set_symm_mem",
        FSDPCommContext: "reduce_scatter_states",
        FSDPParam: "_dp_dim_indices _init_shard_mesh _init_sharding_spec _init_sharding_spec_plain "
        "_init_sharding_spec_spmd _init_sharding_spec_tp _orig_param_uid _shard_mesh "
        "_unsharded_dtensor_spec",
    },
}
"""The methods and attributes that came with a version."""


def hide(kind: Any, names: set[str]) -> None:
    """Let code of internsp not find ``names`` in what is of ``kind``, and torch's own find them."""
    plain = kind.__getattribute__

    def found(self: Any, name: str) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        if name in names and caller.startswith("internsp."):
            raise AttributeError(f"{kind.__name__} of an older torch has no {name}")
        return plain(self, name)

    kind.__getattribute__ = found


def as_in(version: str) -> Any:
    """``internsp.fsdp``, imported with the classes of torch ``version``."""
    later: dict[Any, set[str]] = {}
    for came, classes in LATER.items():
        for kind, names in classes.items():
            later.setdefault(kind, set()).update(names.split() if came > version else ())
    for name in later.pop(torchs.FSDPModule):
        delattr(torchs.FSDPModule, name)
    for kind, hidden in later.items():
        hide(kind, hidden)
    if version < "2.12":

        def spec(param: Any) -> Any:
            if not param.is_dtensor:
                raise AttributeError("_tp_spec")
            return param._unsharded_dtensor_spec

        FSDPParam._tp_spec = property(spec)  # type: ignore[assignment]
    for name in [name for name in sys.modules if name.startswith("internsp.fsdp")]:
        del sys.modules[name]
    return importlib.import_module("internsp.fsdp")


def tensor_parallel(names: Any, rank: int) -> dict[str, torch.Tensor]:
    """A layer that ``parallelize_module`` has sharded before ``fully_shard``, and one that it has
    not."""
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    parallelize_module(model[0], mesh["tp"], ColwiseParallel())
    for part in (model[0], model):
        names.fully_shard(part, mesh=mesh["dp"])
    model(torch.full((2, 6), 1.0 + rank, dtype=torch.double)).square().sum().backward()
    return whole({name: p.grad for name, p in model.named_parameters()})


@pytest.mark.skipif(not since("2.13"), reason="this torch has fewer names itself")
@pytest.mark.parametrize("version", ["2.11", "2.12"])
@ranks(2, fresh=True)
def test_one_import_needs_no_name_that_an_older_torch_has_not(version: str, rank: int) -> None:
    results = []
    for make in (lambda: torchs, lambda: as_in(version)):
        names: Any = make()
        torch.manual_seed(3)
        model: Any = Model().double()
        shard(names.fully_shard, model, "nested", mesh_of((2,)))
        found = steps(model, rank, micro=2, clip=0.1)
        block = model.blocks[0]
        block.unshard()
        found["whole"] = block.up.weight.detach().clone()
        block.unshard(async_op=True).wait()
        block.reshard()
        block.set_gradient_divide_factor(3.0)
        loss_of(model, batch(9, 0, rank)).backward()
        found |= whole({name: p.grad for name, p in model.named_parameters()})
        results.append(found | tensor_parallel(names, rank))
    require_same(results[1], results[0])
    names.FSDPModule.reset_iter_state(model)
    assert "messages" in names.report(model), "the library trained it"
