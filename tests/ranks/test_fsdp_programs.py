"""What programs do with FSDP2 besides training: checkpointing, parts of a model, methods.

Each program runs with torch's ``fully_shard`` and with ``internsp.fsdp``'s, and is compared by
value. docs/dev/results/fsdp2_tests.md names the tests of PyTorch that have the same subject.
"""

from __future__ import annotations

import copy
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as torchs
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import internsp.fsdp as ours
from tests.support.fsdp import (
    Block,
    Model,
    Program,
    batch,
    compare,
    loss_of,
    mesh_of,
    require_same,
    shard,
    steps,
    whole,
)
from tests.support.ranks import ranks
from tests.support.versions import since

Policy = torchs.MixedPrecisionPolicy


def gradients(model: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    return {
        prefix + n: v for n, v in whole({n: p.grad for n, p in model.named_parameters()}).items()
    }


def inputs(rank: int, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(40 + rank)
    return torch.randn(shape, generator=draw, dtype=torch.double)


# activation checkpointing, in all of torch's forms


class Checkpointing(Model):
    reentrant = False

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


def _checkpointed(kind: str, units: str) -> Program:
    def program(names: Any, rank: int) -> dict[str, Tensor]:
        model: Any = Model().double()
        for number, block in enumerate(model.blocks if kind in ("composable", "wrapper") else ()):
            if kind == "composable":
                composable_checkpoint(block)
            else:
                model.blocks[number] = checkpoint_wrapper(block)
        if kind in ("utils", "reentrant"):
            model.__class__ = Checkpointing
            model.reentrant = kind == "reentrant"
        shard(names.fully_shard, model, units, mesh_of((2,)))
        found = steps(model, rank, number=2)
        if kind == "reentrant":  # FSDP2's gradients of two forwards are wrong there (below)
            return found
        one, other = model(batch(0, 0, rank)), model(batch(0, 1, rank))  # two forwards, as in DPO
        (one.sum() - other.sum()).square().backward()
        return found | gradients(model, "two forwards ")

    program.__name__ = f"{kind} {units}"
    return program


def _leaf_between(kind: str) -> Program:
    """A frozen embedding, whose output a hook lets require gradients (peft, for checkpoints)."""

    def program(names: Any, rank: int) -> dict[str, Tensor]:
        model: Any = Model().double()
        model.__class__, model.reentrant = (Checkpointing if kind else Model), kind == "reentrant"
        model.embed.requires_grad_(False)
        model.embed.register_forward_hook(lambda _, args, output: output.requires_grad_())
        names.fully_shard(model.embed, mesh=mesh_of((2,)))
        shard(names.fully_shard, model, "blocks", mesh_of((2,)))
        return steps(model, rank, number=2)

    program.__name__ = f"leaf between {kind}"
    return program


class Force(Block):
    """Adds the gradient of an energy: a checkpoint around it recomputes it in forward, too."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            energy = torch.tanh(F.linear(place, self.up.weight, self.up.bias)).sum()
            (force,) = torch.autograd.grad(energy, place)
        return super().forward(x + self.scale * force)


def _force_within(units: str) -> Program:
    def program(names: Any, rank: int) -> dict[str, Tensor]:
        model: Any = Model().double()
        model.__class__ = Checkpointing
        for block in model.blocks:
            block.__class__ = Force
        shard(names.fully_shard, model, units, mesh_of((2,)))
        one, other = model(batch(0, 0, rank)), model(batch(0, 1, rank))
        (one.sum() - other.sum()).square().backward()
        return gradients(model, "two forwards ") | steps(model, rank, number=2)

    program.__name__ = f"force {units}"
    return program


@ranks(2)
def test_activation_checkpointing_changes_no_number(rank: int) -> None:
    kinds = ("composable", "wrapper", "utils", "reentrant")
    compare(*(_checkpointed(kind, "blocks") for kind in kinds), rank=rank)
    compare(_checkpointed("composable", "nested"), rank=rank)
    compare(*(_leaf_between(kind) for kind in ("", "utils", "reentrant")), rank=rank)
    compare(_force_within("blocks"), _force_within("nested"), rank=rank)


@ranks(2)
def test_two_forwards_with_reentrant_checkpoints_have_the_gradients_of_one_process(
    rank: int,
) -> None:
    """FSDP2's are several times too large there, and after a backward that failed its root's have
    the failed ones added, in spite of ``reset_iter_state()`` (torch 2.13)."""

    def both_forwards(model: Any) -> dict[str, Tensor]:
        one, other = model(batch(0, 0, rank)), model(batch(0, 1, rank))
        (one.sum() - other.sum()).square().backward()
        return gradients(model)

    torch.manual_seed(3)
    plain: Any = Checkpointing().double()
    plain.reentrant = True
    model = copy.deepcopy(plain)
    wanted = both_forwards(plain)
    for value in wanted.values():
        dist.all_reduce(value)
        value.div_(2)
    shard(ours.fully_shard, model, "blocks", mesh_of((2,)))

    def fail(*_: Any) -> None:
        raise KeyError("boom")

    failing = model.blocks[1].register_full_backward_hook(fail)
    with pytest.raises(KeyError):
        both_forwards(model)
    failing.remove()
    model.reset_iter_state()
    model.zero_grad()
    require_same(both_forwards(model), wanted)


# parts of a model called by themselves


class Chunked(nn.Module):
    """Its head may be left out, and called by the program chunk by chunk."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(11, 8), nn.Linear(8, 8, bias=False)
        self.norm, self.head = nn.RMSNorm(8), nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, skip_head: bool = False) -> Any:
        hidden = self.norm(self.body(self.embed(ids)))
        return hidden if skip_head else self.head(hidden)


def _chunked(grouped: bool, tied: bool = False, toggled: bool = False) -> Program:
    def program(names: Any, rank: int) -> dict[str, Tensor]:
        model: Any = Chunked(tied).double()
        lists: list[Any] = [model.embed, model.body, [model.norm, model.head]]
        if tied:
            lists = [model.body, [model.embed, model.norm, model.head]]
        elif not grouped or (names is torchs and not since("2.13")):  # it crashes there
            lists[2:] = lists[2]
        for modules in [*lists, model]:
            names.fully_shard(modules, mesh=mesh_of((2,)))
        optimizer, found = torch.optim.Adam(model.parameters(), lr=1e-2), {}
        for step in range(2):
            draw = torch.Generator().manual_seed(7 * step + rank)
            hidden = model(torch.randint(0, 11, (2, 8), generator=draw), skip_head=True)
            if toggled:
                model.head.set_reshard_after_forward(False)
                model.head.set_reshard_after_backward(False)
            pieces = []
            for chunk in hidden.detach().chunk(2, dim=1):
                piece = chunk.contiguous().requires_grad_()
                model.head(piece).square().sum().backward()
                pieces.append(piece.grad)
            if toggled:
                model.head.set_reshard_after_forward(True)
                model.head.set_reshard_after_backward(True)
                model.head.reshard()
            hidden.backward(torch.cat(pieces, dim=1))
            found |= gradients(model, f"{step} ")
            optimizer.step()
            optimizer.zero_grad()
        return found | whole(dict(model.named_parameters()))

    program.__name__ = f"chunked {grouped=} {tied=} {toggled=}"
    return program


def part_alone(names: Any, rank: int) -> dict[str, Tensor]:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).double()
    for layer in [*model, model]:
        names.fully_shard(layer, mesh=mesh_of((2,)))
    optimizer, found = torch.optim.Adam(model.parameters(), lr=1e-2), {}
    for number, part in enumerate((model, model[0], model)):
        loss = part(inputs(rank, 3, 8)).sum()
        loss.backward()
        found |= {f"loss {number}": loss.detach(), **gradients(model, f"{number} ")}
        optimizer.step()
        optimizer.zero_grad()
    return found


def late_alone(names: Any, rank: int) -> dict[str, Tensor]:
    """Blocks that hold units run alone; a rank comes to them later than the other one."""
    model: Any = Model().double()
    shard(names.fully_shard, model, "nested", mesh_of((2,)))
    found = {}
    for late in range(2):
        loss_of(model, batch(late, 0, rank)).backward()
        for number in range(3):
            if rank == late:
                time.sleep(0.1)
            output = model.blocks[number](inputs(rank, 2, 4, 13))
            output.square().mean().backward()
            found[f"{late} {number}"] = output.detach()
        with torch.no_grad():  # the second time new values
            for parameter in model.parameters():
                parameter.mul_(0.9)
    return found | gradients(model)


def alone_again(names: Any, rank: int) -> dict[str, Tensor]:
    """A block fails before its units run, or leaves them out; the next call is whole."""
    model: Any = Model().double()
    shard(names.fully_shard, model, "nested", mesh_of((2,)))
    loss_of(model, batch(0, 0, rank)).backward()
    block, x, found = model.blocks[1], inputs(rank, 2, 4, 13), {}
    whole_forward = block.forward
    for number, forward in enumerate((None, lambda x: x * block.scale, whole_forward)):
        if rank == number % 2:
            time.sleep(0.1)
        if forward is None:
            if recovers(names):
                with pytest.raises(RuntimeError):
                    block(x[..., 1:])  # its norm refuses the size
                names.FSDPModule.reset_iter_state(model)
            continue
        block.forward = forward
        with torch.no_grad():  # new values
            for parameter in model.parameters():
                parameter.mul_(0.9)
        output = block(x)
        output.square().mean().backward()
        found[f"{number}"] = output.detach()
    return found | gradients(model)


def recovers(names: Any) -> bool:
    """Whether a forward may fail: FSDP2 has no answer to that before torch 2.13."""
    return hasattr(names.FSDPModule, "reset_iter_state")


@ranks(2)
def test_parts_of_a_model_run_alone(rank: int) -> None:
    compare(
        _chunked(False), _chunked(True), _chunked(True, toggled=True), part_alone, late_alone,
        alone_again, rank=rank,
    )  # fmt: skip
    if since("2.13"):  # FSDP2 crashes before
        compare(_chunked(True, tied=True), rank=rank)


# modules of any kind


def containers(names: Any, rank: int) -> dict[str, Tensor]:
    pair = namedtuple("pair", "x y")

    class Into(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return pair(x, torch.ones_like(x))

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, given: Any) -> Any:
            return pair(self.linear(given.x), given.y)

    class Out(nn.Module):
        def forward(self, given: Any) -> Any:
            return given.x

    model = nn.Sequential(Into(), Between(), Between(), Out()).double()
    for part in [*model, model]:
        names.fully_shard(part, mesh=mesh_of((2,)))
    model(inputs(rank, 2, 6)).sum().backward()
    return gradients(model)


def unused_output(names: Any, rank: int) -> dict[str, Tensor]:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Any:
            return self.one(x), self.other(x)

    model, found = Two().double(), {}
    names.fully_shard(model.one, mesh=mesh_of((2,)))
    names.fully_shard(model, mesh=mesh_of((2,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(4):
        one, other = model(inputs(rank, 2, 6))
        ((one * other).sum() if step < 2 else one.sum()).backward()
        found |= gradients(model, f"{step} ")
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return found


def several_runs(names: Any, rank: int) -> dict[str, Tensor]:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 5)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: Tensor) -> Any:
            x = self.inner(x) + self.inner(2 * x)
            with torch.no_grad():
                y = self.inner(x)
            return self.outer(self.frozen(x) + y)

    model, found = Again().double(), {}
    for part in (model.inner, model.frozen, model):
        names.fully_shard(part, mesh=mesh_of((2,)))
    for step in range(3):
        model.frozen.requires_grad_(step == 2)
        model(inputs(rank, 2, 4)).sum().backward()
        found |= gradients(model, f"{step} ")
    return found


def deeply_nested(names: Any, rank: int) -> dict[str, Tensor]:
    class Nest(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.inner = Nest(depth - 1) if depth else None

        def forward(self, x: Tensor) -> Any:
            x = torch.tanh(self.linear(x))
            return x if self.inner is None else self.inner(x) + self.linear(x)

    model, found = Nest(4).double(), {}
    for part in reversed([m for m in model.modules() if isinstance(m, Nest)]):
        names.fully_shard(part, mesh=mesh_of((2,)))
    for step in range(2):
        model(inputs(rank, 2, 6)).sum().backward()
        found |= gradients(model, f"{step} ")
    return found


def other_parameters(names: Any, rank: int) -> dict[str, Tensor]:
    """An LSTM, which keeps its weights in a list, too; integers; a dimension other than 0."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 2)
            table = torch.arange(7) if since("2.12") else torch.arange(7.0).double()
            self.table = nn.Parameter(table, requires_grad=False)

        def forward(self, x: Tensor) -> Any:
            return self.out(self.lstm(x)[0]) * self.table[3]

    model, found = Mixed().double(), {}

    def longest(parameter: nn.Parameter) -> Any:
        dim = parameter.shape.index(max(parameter.shape))
        return Shard(dim) if parameter.shape[dim] % 2 == 0 else None

    for part in (model.lstm, model):
        names.fully_shard(part, mesh=mesh_of((2,)), shard_placement_fn=longest)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    together = (0, 1) if isinstance(names, Alone) else (rank,)
    for step in range(2):
        for each in together:
            (model(inputs(each, 2, 3, 6)).square().sum() / len(together)).backward()
        found |= gradients(model, f"{step} ")
        optimizer.step()
        optimizer.zero_grad()
    return found | whole(dict(model.named_parameters()))


class Alone:
    """In the place of a module with FSDP2's names: one process with all ranks' inputs."""

    def fully_shard(self, module: nn.Module, **_: Any) -> None:
        """Nothing."""


def eight_bits(names: Any, rank: int) -> dict[str, Tensor]:
    """Frozen weights in eight bits, also cast before they are gathered."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            codes = torch.randn(7, 6).to(torch.float8_e4m3fn)
            self.codes = nn.Parameter(codes, requires_grad=False)
            self.linear = nn.Linear(7, 6)

        def forward(self, x: Tensor) -> Any:
            return self.linear(x @ self.codes.to(x.dtype).T)

    model, found = nn.Sequential(Scaled(), Scaled()), {}
    for part, policy in zip(model, (Policy(), Policy(torch.bfloat16)), strict=True):
        names.fully_shard(part, mesh=mesh_of((2,)), mp_policy=policy)
    names.fully_shard(model, mesh=mesh_of((2,)))
    for step in range(2):
        found[f"output {step}"] = model(inputs(rank, 2, 6).float()).float()
        found[f"output {step}"].sum().backward()
        found |= gradients(model, f"{step} ")
    return found


def fewer_rows(names: Any, rank: int) -> dict[str, Tensor]:
    """A score has one row: the second rank has none of it."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1)).double()
    for part in (model[0], model):
        names.fully_shard(part, mesh=mesh_of((2,)))
    optimizer, found = torch.optim.Adam(model.parameters(), lr=1e-2), {}
    for step in range(3):
        model(inputs(rank, 2, 6)).sum().backward()
        found |= gradients(model, f"{step} ")
        optimizer.step()
        optimizer.zero_grad()
    return found | whole(dict(model.named_parameters()))


@dataclass
class Given:
    inner: Any


def dataclasses_are_cast(names: Any, rank: int) -> dict[str, Tensor]:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, given: Given) -> Any:
            x = given.inner.y
            assert x.dtype == torch.float32
            return Given(pair(self.linear(x), self.linear(2 * x)))

    pair = namedtuple("pair", "x y")
    model = nn.Sequential(Layer(), Layer()).double()
    policy = Policy(torch.float32, output_dtype=torch.double)
    for part in (*model, model):
        names.fully_shard(part, mesh=mesh_of((2,)), mp_policy=policy)
    out = model(Given(pair(torch.ones(1), inputs(rank, 2, 6)))).inner
    assert out.y.dtype == torch.double
    (out.x + out.y).sum().backward()
    return gradients(model)


class Recording(nn.Linear):
    """Notes the sizes of what it is given and gives, by which dtypes are told apart."""

    def __init__(self, seen: list[int], size: int = 5) -> None:
        super().__init__(size, size)
        self.seen = seen

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        self.seen += [each.element_size() for each in (x, *others)]
        out = super().forward(x.to(self.weight.dtype))
        self.seen.append(out.element_size())
        return out


def casts_within(names: Any, rank: int) -> dict[str, Tensor]:
    """Policies of submodules: with and without a cast of inputs, outputs, and beside the root's."""

    class Outer(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.seen: list[int] = []
            self.one, self.other = Recording(self.seen), Recording(self.seen)
            self.again = again

        def forward(self, x: Tensor) -> Any:
            self.seen.append(x.element_size())
            x = checkpoint(self.one, x, use_reentrant=False) if self.again else self.one(x)
            self.seen.append(x.element_size())
            return self.other(x, torch.ones(2, 5)).float()

    half = torch.float16
    policies = [
        (Policy(), Policy(half), Policy()),
        (Policy(), Policy(half, cast_forward_inputs=False), Policy()),
        (Policy(half, output_dtype=torch.float32), Policy(), Policy()),
        (Policy(half), Policy(half), Policy(half)),
        (Policy(half), Policy(half, cast_forward_inputs=False), Policy(half)),
    ]
    found = {}
    for number, (one, other, whole_model) in enumerate(policies):
        for again in (False, True):
            model = Outer(again)
            names.fully_shard(model.one, mesh=mesh_of((2,)), mp_policy=one)
            names.fully_shard(model.other, mesh=mesh_of((2,)), mp_policy=other)
            names.fully_shard(model, mesh=mesh_of((2,)), mp_policy=whole_model)
            model(inputs(rank, 2, 5).float()).sum().backward()
            found |= gradients(model, f"{number} {again} ")
            if since("2.13") or (number, again) != (2, True):  # recomputed without the cast before
                found[f"{number} {again} sizes"] = torch.tensor(model.seen)
    return found


def norms_in_sixteen_bits(names: Any, rank: int) -> dict[str, Tensor]:
    """Norms between layers; a batch norm in fp32, whose output is cast."""
    found = {}
    for dtype in (torch.bfloat16, torch.float16):
        policy = Policy(dtype)
        for norm in (nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm1d(8)):
            model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 8))
            own = Policy(output_dtype=dtype) if isinstance(norm, nn.BatchNorm1d) else policy
            if own is not policy:
                norm.register_forward_pre_hook(lambda module, args: args[0].float())
            for part, its in zip((*model, model), (policy, own, policy, policy), strict=True):
                names.fully_shard(part, mesh=mesh_of((2,)), mp_policy=its)
            out = model(inputs(rank, 4, 8).float())
            assert out.dtype == dtype
            out.sum().backward()
            found |= gradients(model, f"{dtype} {type(norm).__name__} ")
    return found


def widened(names: Any, rank: int) -> dict[str, Tensor]:
    """A model that is cast after fully_shard: its policy stays."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
    policy = Policy(torch.bfloat16, torch.bfloat16)
    for part in (*model, model):
        names.fully_shard(part, mesh=mesh_of((2,)), mp_policy=policy)
    model.to(torch.float32)
    out = model(inputs(rank, 4, 8).float())
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    return gradients(model)


def _local(gradient: Any) -> Tensor:
    return gradient._local_tensor  # type: ignore[no-any-return]


def scaled(names: Any, rank: int) -> dict[str, Tensor]:
    """torch's GradScaler; in the second step one rank's gradient is infinite."""
    model = Model().double()
    shard(names.fully_shard, model, "blocks", mesh_of((2,)))
    optimizer, found = torch.optim.Adam(model.parameters(), lr=1e-2), {}
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        scaler.scale(loss_of(model, batch(step, 0, rank))).backward()
        if step == 1 and rank == 1:
            _local(model.head.weight.grad)[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        found |= gradients(model, f"{step} ") if step != 1 else {}
        scaler.step(optimizer)
        scaler.update()
        found[f"{step} scale"] = torch.tensor(scaler.get_scale())
        optimizer.zero_grad()
    return found | whole(dict(model.named_parameters()))


def without_inputs(names: Any, rank: int) -> dict[str, Tensor]:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.linear = nn.Parameter(torch.ones(5)), nn.Linear(5, 5)

        def forward(self) -> Any:
            return self.linear(self.start).sum() * self.start.sum()

    model, found = Alone().double(), {}
    for part in (model.linear, model):
        names.fully_shard(part, mesh=mesh_of((2,)))
    for step in range(2):
        (model() * (rank + 1)).backward()
        found |= gradients(model, f"{step} ")
    return found


def beside_ddp(names: Any, rank: int) -> dict[str, Tensor]:
    """The second of three layers is sharded, DistributedDataParallel has the others."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).double()
    names.fully_shard(model[1], mesh=mesh_of((2,)))
    ignored = [name for name, _ in model.named_parameters() if name.startswith("1.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    parallel, found = DistributedDataParallel(model), {}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    for step in range(3):
        parallel(inputs(rank, 3, 6)).sum().backward()
        found |= gradients(model, f"{step} ")
        optimizer.step()
        optimizer.zero_grad()
    return found | whole(dict(model.named_parameters()))


def frozen_of_another_dtype(names: Any, rank: int) -> dict[str, Tensor]:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.scale = nn.Parameter(torch.full((6,), 2.0).double(), requires_grad=False)

        def forward(self, x: Tensor) -> Any:
            return self.linear(x) * self.scale.float()

    model = Scaled()
    names.fully_shard(model, mesh=mesh_of((2,)))
    model(inputs(rank, 2, 6).float()).sum().backward()
    return gradients(model)


def filled_by_the_first_rank(names: Any, rank: int) -> dict[str, Tensor]:
    full = Model().double().state_dict()
    with torch.device("meta"):
        model: Any = Model().double()
    shard(names.fully_shard, model, "blocks", mesh_of((2,)))
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full if rank == 0 else {}, options=options)
    return steps(model, rank, number=1)


def nothing_to_shard(names: Any, rank: int) -> dict[str, Tensor]:
    class Plus(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x + 1

    model = Plus()
    names.fully_shard(model, mesh=mesh_of((2,)))
    return {"output": model(inputs(rank, 3))}


@ranks(2)
def test_modules_of_any_kind_have_the_same_gradients(rank: int) -> None:
    compare(
        containers, unused_output, several_runs, deeply_nested, nothing_to_shard, fewer_rows,
        without_inputs, beside_ddp, frozen_of_another_dtype, filled_by_the_first_rank, rank=rank,
    )  # fmt: skip
    compare(eight_bits, rank=rank, tolerance=0.02)  # a gradient travels as bf16 here and there


def moved(lstm: nn.LSTM) -> None:
    """What cuDNN does in a forward with weights that are new: it moves them into one buffer."""
    weights: Any = lstm._flat_weights
    if any(weight is None or isinstance(weight, DTensor) for weight in weights):
        return
    buffer = torch.cat([weight.detach().flatten() for weight in weights])
    pieces = buffer.split([weight.numel() for weight in weights])
    for weight, piece in zip(weights, pieces, strict=True):
        weight.data = piece.view(weight.shape)


@pytest.mark.parametrize("moves", [False, True])
@ranks(2)
def test_an_lstm_trains_as_in_one_process(rank: int, moves: bool) -> None:
    """FSDP2 keeps a moved weight's tensor, and computes with its first values in later steps."""
    results = []
    with pytest.MonkeyPatch.context() as patch:
        if moves:
            patch.setattr(nn.LSTM, "flatten_parameters", moved)
        for names in (ours, Alone()):
            torch.manual_seed(5)
            results.append(other_parameters(names, rank))
    require_same(results[0], results[1], 1e-12)


@ranks(2)
def test_policies_cast_what_fsdp2_casts(rank: int) -> None:
    compare(scaled, rank=rank)
    if since("2.12"):  # FSDP2 does not gather for outputs in dataclasses before
        compare(dataclasses_are_cast, rank=rank, tolerance=1e-6)
    # A gradient travels in 16 bits, and is summed in those by FSDP2.
    compare(casts_within, norms_in_sixteen_bits, widened, rank=rank, tolerance=0.02)


@ranks(2)
def test_a_weight_that_is_tied_after_fully_shard_is_one(rank: int) -> None:
    """FSDP2 (torch 2.13) goes on with two, of which one is never stepped."""
    torch.manual_seed(5)
    plain = Model(tied=True).double()
    torch.manual_seed(5)
    model: Any = Model().double()
    shard(ours.fully_shard, model, "blocks", mesh_of((2,)))
    model.head.weight = model.embed.weight
    for each, batches in ((plain, (0, 1)), (model, (rank,))):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for step in range(2):
            for number in batches:
                (loss_of(each, batch(step, 0, number)) / len(batches)).backward()
            optimizer.step()
            optimizer.zero_grad()
    require_same(whole(dict(model.named_parameters())), whole(dict(plain.named_parameters())))


# methods


def whole_weights(names: Any, rank: int) -> dict[str, Tensor]:
    model: Any = Model().double()
    shard(names.fully_shard, model, "blocks", mesh_of((2,)))
    found = {}

    def look(when: str) -> None:
        block = model.blocks[1]
        block.unshard()
        assert not isinstance(block.up.weight, DTensor)
        assert isinstance(model.blocks[0].up.weight, DTensor), "it is not recursive"
        found[f"{when} whole"] = block.up.weight.detach().clone()
        with torch.no_grad():
            found[f"{when} part"] = block.up(inputs(rank, 2, 13))
            block.up.weight.zero_()
        block.reshard()
        assert isinstance(block.up.weight, DTensor)
        handle = model.blocks[0].unshard(async_op=True)
        handle.wait()
        found[f"{when} awaited"] = model.blocks[0].up.weight.detach().clone()

    look("before")
    loss_of(model, batch(0, 0, rank)).backward()
    found |= gradients(model, "first ")
    look("after")
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    model.blocks[1].unshard()  # and no reshard(): the forward does it
    loss_of(model, batch(0, 1, rank)).backward()
    assert isinstance(model.blocks[1].up.weight, DTensor)
    return found | gradients(model, "second ")


def taken_back(names: Any, rank: int) -> dict[str, Tensor]:
    """A unit that is unsharded ahead and then not may be written, and any other unit."""
    model: Any = Model().double()
    shard(names.fully_shard, model, "blocks", mesh_of((2,)))
    found = {}
    for step in range(2):
        handle = model.blocks[0].unshard(async_op=True)
        if step or names is torchs:  # FSDP2 goes on with old weights otherwise
            handle.wait()
        model.blocks[0].reshard()
        model.blocks[1].unshard(async_op=True)
        with torch.no_grad():
            for part in (model.blocks[0], model.blocks[2], model.head):
                for parameter in part.parameters():
                    parameter.mul_(0.75)
        loss_of(model, batch(step, 0, rank)).backward()
        found |= gradients(model, f"{step} ")
    return found


def read_elsewhere(names: Any, rank: int) -> dict[str, Tensor]:
    """A forward reads whole weights of other units, with gradients: equal on all ranks."""

    class Reads(Model):
        def forward(self, ids: Tensor) -> Any:
            one, other = self.blocks[0].up.weight, self.blocks[1].scale
            extra = one.full_tensor().square().sum() + other.full_tensor().sum()
            return super().forward(ids).square().mean() + extra

    found = {}
    for sizes in ((2,), (2, 1)):
        model: Any = Reads().double()
        shard(names.fully_shard, model, "blocks", mesh_of(sizes))
        model(batch(0, 0, rank)).backward()
        found |= gradients(model, f"{sizes} ")
    return found


def other_forwards(names: Any, rank: int) -> dict[str, Tensor]:
    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(6, 9)
            self.scale = nn.Parameter(torch.ones(9))

        def features(self, x: Tensor) -> Any:
            return self.scale * self.project(x).relu()

        def forward(self, x: Tensor) -> Any:
            return self.features(x).sum(1)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vision, self.out = Vision(), nn.Linear(9, 4)

        def forward(self, x: Tensor) -> Any:
            return self.out(self.vision.features(x))

        def twice(self, x: Tensor) -> Any:
            return self(x) + self.out(self.vision.features(2 * x))

    model: Any = Both().double()
    for part in (model.vision, model.out, model):
        names.fully_shard(part, mesh=mesh_of((2,)))
    names.register_fsdp_forward_method(model.vision, "features")
    names.register_fsdp_forward_method(model, "twice")
    names.register_fsdp_forward_method(nn.Linear(2, 2), "no such method")
    with pytest.raises(ValueError, match="does not have a method"):
        names.register_fsdp_forward_method(model, "no such method")
    found = {}
    for name in ("forward", "twice"):
        call = model if name == "forward" else model.twice
        call(inputs(rank, 3, 6)).square().sum().backward()
        found |= gradients(model, f"{name} ")
        model.zero_grad()
    return found


def divided(names: Any, rank: int) -> dict[str, Tensor]:
    model: Any = Model().double()
    shard(names.fully_shard, model, "blocks", mesh_of((2,)))
    model.set_gradient_divide_factor(3.0)
    for block in model.blocks:
        block.set_gradient_divide_factor(5.0)
    return steps(model, rank, number=1, micro=2)


def hooked(names: Any, rank: int) -> dict[str, Tensor]:
    model: Any = Model().double()
    shard(names.fully_shard, model, "blocks", mesh_of((2,)))
    model.set_all_reduce_hook(lambda mean: mean.mul_(3.0))
    model.blocks[1].set_all_reduce_hook(lambda mean: dist.all_reduce(mean))
    return steps(model, rank, number=2, micro=2)


def stepped_in_backward(names: Any, rank: int) -> dict[str, Tensor]:
    """Hooks on parameters, some with optimizers of their own; the last one clips the others."""
    model: Any = Model().double()
    shard(names.fully_shard, model, "blocks", mesh_of((2,)))
    own = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.blocks.parameters()}
    rest = [model.embed.weight, *model.norm.parameters(), model.head.weight]
    others = torch.optim.SGD(rest, lr=0.1)
    calls: dict[Any, int] = {}
    found = {}

    def hook(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        calls[parameter] = calls.get(parameter, 0) + 1
        if parameter in own:
            own[parameter].step()
            parameter.grad = None
        elif {*rest} <= {*calls}:
            nn.utils.clip_grad_norm_(rest, 0.1)
            others.step()
            others.zero_grad()

    handles = [p.register_post_accumulate_grad_hook(hook) for p in (*own, *rest)]
    model.spare.weight.register_post_accumulate_grad_hook(hook)  # never called
    for step in range(5):
        if step == 3:
            rest[2].register_post_accumulate_grad_hook(lambda p: calls.update({p: 5}))
            handles[0].remove()
            handles[1].remove()
        calls.clear()
        model.set_requires_gradient_sync(step != 1)
        loss = loss_of(model, batch(step, 0, rank))
        if step == 4:
            rest[1].register_post_accumulate_grad_hook(hook)
        loss.backward()
        found[f"calls {step}"] = torch.tensor([calls.get(p, 0) for p in model.parameters()])
    return found | gradients(model, "left ") | whole(dict(model.named_parameters()))


def hooked_where_used(names: Any, rank: int) -> dict[str, Tensor]:
    """A second backward leaves parts out that have a gradient: their hooks do not run again."""
    model: Any = Model().double()
    del model.spare  # every parameter has a gradient after the first backward
    shard(names.fully_shard, model, "blocks", mesh_of((2,)))
    for part in (model.blocks[0], model.blocks[2], model.norm, model.head):
        for parameter in part.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    model.blocks[1].set_all_reduce_hook(lambda mean: mean.add_(1.0))
    middle: list[Tensor] = []
    model.blocks[0].register_forward_hook(lambda module, args, output: middle.append(output))
    loss_of(model, batch(0, 0, rank)).backward(retain_graph=True)
    first = gradients(model, "first ")
    middle[0].square().mean().backward()
    return first | gradients(model)


def exchanged_once(names: Any, rank: int) -> dict[str, Tensor]:
    model: Any = Model().double()
    shard(names.fully_shard, model, "blocks", mesh_of((2, 1)))
    found = {}
    for micro in range(3):
        model.set_requires_all_reduce(micro == 2)
        model.set_is_last_backward(micro == 2)
        loss_of(model, batch(0, micro, rank)).backward()
    found |= gradients(model)
    model.zero_grad(set_to_none=False)
    loss_of(model, batch(1, 0, rank)).backward()
    return found | gradients(model, "next ")


def _some_units(setter: str, sizes: tuple[int, ...], off: Callable[[Any], list[Any]]) -> Program:
    """Two backwards in which some units only sum. The last one leaves block 1 out, where FSDP2
    does not keep the sum of it for a later step."""
    skips = setter == "set_requires_gradient_sync"

    def program(names: Any, rank: int) -> dict[str, Tensor]:
        model: Any = Model(blocks=4).double()
        shard(names.fully_shard, model, "blocks", mesh_of(sizes))
        blocks, found = [*model.blocks], {}
        for step in range(2):  # the second adds to what .grad has
            for micro in range(3):
                for unit in off(model):
                    getattr(unit, setter)(micro == 2, recurse=False)
                run = blocks[:1] + blocks[2:] if skips and micro == 2 else blocks
                model.blocks = nn.ModuleList(run)
                loss_of(model, batch(step, micro, rank)).backward()
                model.blocks = nn.ModuleList(blocks)
                found |= {} if micro < 2 else gradients(model, f"{step} ")
        return found

    program.__name__ = f"{setter} {sizes} of some units"
    return program


SOME_UNITS = [
    _some_units(setter, sizes, off)
    for setter, sizes in (
        ("set_requires_gradient_sync", (2,)), ("set_requires_gradient_sync", (2, 1)),
        ("set_requires_all_reduce", (2, 1)), ("set_requires_all_reduce", (2,)),
    )
    for off in (lambda model: [model], lambda model: [*model.blocks[1:3]])
]  # fmt: skip


@ranks(2)
def test_some_units_may_sum_while_others_reduce(rank: int) -> None:
    compare(*SOME_UNITS, rank=rank)


def prefetched(names: Any, rank: int) -> dict[str, Tensor]:
    model: Any = Model(blocks=4).double()
    shard(names.fully_shard, model, "blocks", mesh_of((2,)))
    blocks = [*model.blocks]
    model.set_modules_to_forward_prefetch(blocks[:1])
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 3])
        block.set_modules_to_backward_prefetch(
            [blocks[-1]] if number == 0 else blocks[:number][::-1]
        )
        if since("2.13"):
            block.set_reduce_scatter_max_input_buffers(3)
    if since("2.13"):
        model.set_separate_reduce_scatter_group(True)
    model.set_force_sum_reduction_for_comms(True)
    model.set_unshard_in_backward(True)
    model._set_unshard_async_op(True)
    names.share_comm_ctx([model])
    return steps(model, rank, number=2)


def failed(names: Any, rank: int) -> dict[str, Tensor]:
    model: Any = Model().double()
    shard(names.fully_shard, model, "lists", mesh_of((2,)))
    armed = [recovers(names)]

    def fail(*_: Any) -> None:
        if armed[0]:
            raise KeyError("boom")

    model.blocks[1].up.register_forward_pre_hook(fail)
    if armed[0]:
        with pytest.raises(KeyError):
            model(batch(0, 0, rank))
        armed[0] = False
        model.reset_iter_state()
    loss_of(model, batch(0, 1, rank)).backward()
    return gradients(model)


def offloaded(names: Any, rank: int) -> dict[str, Tensor]:
    model: Any = Model().double()
    policy = names.CPUOffloadPolicy(pin_memory=False)
    shard(names.fully_shard, model, "blocks", mesh_of((2,)), offload_policy=policy)
    return steps(model, rank, number=2, micro=2)


def assigned(names: Any, rank: int) -> dict[str, Tensor]:
    full = Model().double().state_dict()
    with torch.device("meta"):
        model: Any = Model().double()
    shard(names.fully_shard, model, "blocks", mesh_of((2,)))
    shards = {
        name: nn.Parameter(distribute_tensor(full[name], value.device_mesh, value.placements))
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(shards, assign=True)
    return steps(model, rank, number=1)


def cast(names: Any, rank: int) -> dict[str, Tensor]:
    model: Any = Model()
    shard(names.fully_shard, model, "blocks", mesh_of((2,)))
    return steps(model.to(torch.float64), rank, number=1)


def evaluated_first(names: Any, rank: int) -> dict[str, Tensor]:
    """The first forward, an evaluation, makes the communicator (FSDP2 cannot train after it)."""
    quiet = torch.no_grad if names is torchs else torch.inference_mode
    model: Any = Model().double()
    shard(names.fully_shard, model, "nested", mesh_of((2,)))
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), {}
    for step in range(2):
        with quiet():
            found[f"evaluated {step}"] = loss_of(model, batch(9, 0, rank)).clone()
        loss_of(model, batch(step, 0, rank)).backward()
        found |= gradients(model, f"{step} ")
        optimizer.step()
        optimizer.zero_grad()
    return found


@ranks(2)
def test_methods_of_an_fsdp_module_do_what_torchs_do(rank: int) -> None:
    compare(
        whole_weights, taken_back, read_elsewhere, other_forwards, divided, hooked, exchanged_once,
        prefetched, failed, offloaded, assigned, cast, evaluated_first, stepped_in_backward,
        hooked_where_used,
        rank=rank,
    )  # fmt: skip


def _tensor_parallel(names: Any, rank: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = nn.Sequential(
        nn.LayerNorm(5), *(nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 5)),) * 1
    ).double()
    plan = {"1.0": ColwiseParallel(), "1.2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    for part in (model[1], model):
        names.fully_shard(part, mesh=mesh["dp"])
    optimizer, found = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False), {}
    for _ in range(3):
        loss = model(inputs(rank // 2, 3, 5)).square().sum()
        loss.backward()
        found = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    places = {n: torch.tensor([str(p.placements) == _PLACES.get(n, str(p.placements))])
              for n, p in model.named_parameters()}  # fmt: skip
    assert all(places.values())
    assert model[1][0].weight.device_mesh == mesh
    model[1].unshard()  # over data ranks
    shown = model[1][0].weight
    assert (shown.device_mesh, shown.placements) == (mesh["tp"], (Shard(0),))
    found["unsharded"] = shown.to_local().clone()
    model[1].reshard()
    return found | whole(dict(model.named_parameters()))


_PLACES = {"1.0.weight": "(_StridedShard(dim=0, sf=2), Shard(dim=0))"}


@ranks(4)
def test_a_mesh_of_tensor_ranks_has_the_numbers_of_fsdp2(rank: int) -> None:
    compare(_tensor_parallel, _clipped_in_two_dimensions, _three_dimensions, rank=rank)


def _clipped_in_two_dimensions(names: Any, rank: int) -> dict[str, Tensor]:
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), {}
    for kind in (2.0, 1.0, torch.inf):
        model: Any = nn.Sequential(
            nn.Linear(5, 12, bias=False), nn.ReLU(), nn.Linear(12, 5, bias=False)
        ).double()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for part in (model[0], model):
            names.fully_shard(part, mesh=mesh["dp"])
        model(inputs(rank // 2, 3, 5)).square().sum().backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1, kind, foreach=True)
        found |= {f"{kind} norm": norm.full_tensor(), **gradients(model, f"{kind} ")}
    return found


def _three_dimensions(names: Any, rank: int) -> dict[str, Tensor]:
    """Replicas, and tensor ranks beside them."""
    axes = ("replicas", "ranks", "tp")
    mesh, found = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=axes), {}
    model: Any = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 5)).double()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for part in (model[0], model):
        names.fully_shard(part, mesh=mesh["replicas", "ranks"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    for step in range(3):
        model(inputs(rank // 2, 3, 5)).square().sum().backward()
        found |= gradients(model, f"{step} ")
        optimizer.step()
        optimizer.zero_grad()
    return found | whole(dict(model.named_parameters()))


def _on_part(tensor: bool, hook: bool) -> Program:
    """Two models on a mesh of some ranks; without a hook, stage 1 runs when stage 0 is ready."""

    def program(names: Any, rank: int) -> dict[str, Tensor]:
        axes, sizes = ("pp", "dp", "tp"), (2, 1, 2) if tensor else (2, 2, 1)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
        stage, found = mesh.get_local_rank("pp"), {}
        for number in range(2):  # as the stages of a schedule in the form of a V
            model: Any = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 5)).double()
            if tensor:
                parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
                parallelize_module(model, mesh["tp"], {"2": RowwiseParallel()})
            data = mesh["dp"] if number else DeviceMesh.from_group(mesh.get_group("dp"), "cpu")
            for part in (model[0], model):
                names.fully_shard(part, mesh=mesh["dp"] if tensor else data)
                if hook:
                    among = mesh.get_group("pp")
                    part.set_all_reduce_hook(partial(dist.all_reduce, group=among))
            if stage and not hook:
                dist.recv(torch.zeros(1), rank - 2)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
            for _ in range(2):
                model(inputs(rank // 2 if tensor else rank, 3, 5)).square().sum().backward()
                found |= gradients(model, f"{len(found)} ")
                optimizer.step()
                optimizer.zero_grad()
            if not stage and not hook:
                dist.send(torch.zeros(1), rank + 2)
        return found

    program.__name__ = f"part of the ranks {tensor=} {hook=}"
    return program


@ranks(4)
def test_a_mesh_of_some_ranks_has_the_numbers_of_fsdp2(rank: int) -> None:
    compare(_on_part(False, False), _on_part(True, False), _on_part(False, True), rank=rank)


def test_every_public_method_of_torchs_module_has_an_answer() -> None:
    """A method that a newer torch adds is looked at before it can do torch's part alone."""
    known = {
        "reset_iter_state", "reshard", "set_all_reduce_hook",
        "set_allocate_memory_from_process_group_for_comm", "set_custom_all_gather",
        "set_custom_reduce_scatter", "set_force_sum_reduction_for_comms",
        "set_gradient_divide_factor", "set_is_last_backward", "set_modules_to_backward_prefetch",
        "set_modules_to_forward_prefetch", "set_post_optim_event",
        "set_reduce_scatter_divide_factor", "set_reduce_scatter_max_input_buffers",
        "set_reduce_scatter_unused_params", "set_requires_all_reduce",
        "set_requires_gradient_sync", "set_reshard_after_backward", "set_reshard_after_forward",
        "set_separate_reduce_scatter_group", "set_symm_mem_for_comm", "set_unshard_in_backward",
        "unshard",
    }  # fmt: skip
    found = {name for name in vars(torchs.FSDPModule) if name[0] != "_"}
    assert found <= known
    assert found == known or not since("2.13"), "a name that torch has no more"
