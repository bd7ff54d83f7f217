"""Weights sharded on any dimension by rule: reads, gradients and steps are one process's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from internsp.config import WeightParallelConfig
from internsp.errors import LayoutError
from internsp.optim import ZeroOptimizer
from internsp.parallel.parallelize import parallelize
from tests.support.compare import close
from tests.support.few import some
from tests.support.meshes import mesh_of
from tests.support.models import Block, Tiny, Twin, raises
from tests.support.ranks import ranks
from tests.support.versions import since


class Grouped(Block):
    """A block with a stack of matrices ``[3, 6, 5]``, as experts have; records what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, 6, 5) / 3)
        self.read: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.read = {"stack": self.stack.detach().clone(), "w1": self.w1.weight.detach().clone()}
        inner = torch.einsum("...i,gij->...gj", x, self.stack)
        # As a grouped kernel does: one matrix for each group, transposed and not.
        back = sum(inner[..., g, :] @ self.stack[g].T for g in range(3))
        return super().forward(x + back)


RULES = {
    "layers.*.stack": 2, "layers.*.w1.weight": 1, "layers.*.w2.weight": -1, "embed": 1,
}  # fmt: skip
LAST = {**RULES, "layers.*.stack": -3}
CASES: list[tuple[int, int, dict[str, int], dict[str, Any], bool]] = [
    (2, 2, RULES, {}, False),  # 5 columns over two ranks: 3 and 2
    (4, 4, LAST, {"gather_before": "rolling"}, True),  # 3 over four: one has none
    (4, 2, RULES, {"coalesce_bytes": 65536, "accumulation": "full"}, True),
    (2, 1, RULES, {"compute_dtype": "float64"}, False),
]


@pytest.mark.thorough(4)
@pytest.mark.parametrize(("world_size", "weight", "rules", "config", "zero"), some(CASES, 2))
@ranks()
def test_weights_cut_on_any_dimension_train_as_on_one_process(
    world_size: int, weight: int, rules: dict[str, int], config: dict[str, Any], zero: bool
) -> None:
    plan = [{"match": match, "shard_dim": dim} for match, dim in rules.items()]
    twin = Twin(lambda: Tiny(Grouped, layers=3), mesh_of(weight), rules=plan, **config)
    theirs = torch.optim.AdamW(twin.plain.parameters(), lr=0.02)
    ours: Any
    if zero:
        ours = ZeroOptimizer(twin.communicator, torch.optim.AdamW, lr=0.02)
    else:
        ours = torch.optim.AdamW(twin.ours.parameters(), lr=0.02)
    for step in range(3):
        twin.backward()
        for one, other in zip(twin.ours.layers, twin.plain.layers, strict=True):  # type: ignore[arg-type]
            for name, wanted in other.read.items():
                close(one.read[name], wanted, f"{name} as it is read in step {step}")
        if not zero:
            twin.check_gradients(f"step {step}")
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    twin.communicator.wait_until_ready()
    twin.check_parameters("after the steps")
    for name, parameter in twin.plain.named_parameters():
        found = dict(twin.ours.named_parameters())[name]
        assert found.stride() == parameter.stride(), name  # that of the unsharded tensor
        whole = found.full_tensor()  # type: ignore[operator]
        assert whole.stride() == parameter.stride() or not since("2.13"), name
        close(whole, parameter.detach(), f"{name}, gathered by DTensor")


@pytest.mark.parametrize("laid", ["gradient", "state", "closure", "named closure"])
@ranks(2)
def test_a_fused_step_is_right_whatever_the_strides_of_gradient_and_state(laid: str) -> None:
    """torch's fused kernels take elements at equal offsets for the same element."""
    plan = [{"match": match, "shard_dim": dim} for match, dim in RULES.items()]
    twin = Twin(lambda: Tiny(Grouped, layers=2), mesh_of(2), rules=plan)
    models = twin.plain, twin.ours
    theirs, ours = (torch.optim.AdamW(m.parameters(), lr=0.02, fused=True) for m in models)
    embed: Any = twin.ours.embed.weight

    def backward() -> None:
        if laid != "state":  # a term of the weight itself: autograd chooses the strides
            for model in models:
                model.embed.weight.square().sum().backward()  # type: ignore[operator, union-attr]
        twin.backward()

    for step in range(2):
        if laid == "state" and step:  # as loaded from a full state dict
            for value in (v for v in ours.state[embed].values() if v.dim()):
                value._local_tensor = value._local_tensor.contiguous()
                assert value._local_tensor.stride() != embed._local_tensor.stride()
        if laid == "closure":
            ours.step(backward)  # type: ignore[arg-type]
        elif laid == "named closure":
            ours.step(closure=backward)  # type: ignore[arg-type]
        else:
            backward()
            ours.step()
        theirs.step()
        for optimizer in (theirs, ours):
            optimizer.zero_grad()
        twin.check_parameters(f"after step {step}")


@ranks(2)
def test_a_dimension_that_a_weight_lacks_is_refused_by_name() -> None:
    plan: Any = [{"match": "layers.*.w1.weight", "shard_dim": 2}]
    config = WeightParallelConfig(min_shard_elements=20, rules=plan)
    raises(
        LayoutError, lambda: parallelize(Tiny(layers=2), mesh_of(2), config),
        "cannot shard dimension 2 of layers.0.w1.weight, of shape [13, 6]",
    )  # fmt: skip
