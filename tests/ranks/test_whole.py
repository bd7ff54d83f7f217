"""Unsharded parameters outside of training, by value against one process (FEATURES part D)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import internsp
from internsp.errors import CollectiveError, GradientError, OrderError, StructureError
from internsp.optim import ZeroOptimizer
from internsp.pipeline import SchedulerHook
from tests.support.experts import Case as Experts
from tests.support.experts import Pair
from tests.support.meshes import mesh_of
from tests.support.models import ALL, Block, Tiny, Twin, raises
from tests.support.pipeline import Case as PipelineCase
from tests.support.pipeline import batches, compare, make
from tests.support.ranks import ranks
from tests.support.zero import Case, batch, setup, share


class Full(Tiny):
    """With a buffer that modules share, a frozen weight, and a direct weight of the root."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__(layers=3, tied=tied)
        self.extra = nn.Parameter(torch.randn(7, 6))
        self.register_buffer("seen", torch.arange(5.0))
        for layer in self.layers:
            layer.register_buffer("table", self.get_buffer("seen"), persistent=False)
        self.layers[1].w1.weight.requires_grad_(False)  # type: ignore[union-attr]

    def blocks(self, x: Tensor) -> Tensor:
        return super().blocks(x + self.extra[:5])


def same(ours: nn.Module, plain: nn.Module, what: str) -> None:
    """Names, ties, types and bits of parameters, buffers and ``state_dict`` are one process's."""
    for read in (nn.Module.named_parameters, nn.Module.named_buffers):
        found, wanted = list(read(ours)), list(read(plain))
        assert [n for n, _ in found] == [n for n, _ in wanted], what
        for (name, mine), (_, theirs) in zip(found, wanted, strict=True):
            assert type(mine) is type(theirs), f"{what}: {name}"
            assert mine.requires_grad == theirs.requires_grad, f"{what}: {name}"
            assert mine.dtype == theirs.dtype, f"{what}: {name}"
            assert torch.equal(mine, theirs), f"{what}: {name}"
            assert mine.is_contiguous()
            assert mine.untyped_storage().nbytes() == mine.nbytes, f"{what}: {name} is padded"
    states = ours.state_dict(), plain.state_dict()
    assert list(states[0]) == list(states[1]), what
    assert all(torch.equal(states[0][n], states[1][n]) for n in states[1]), what


def step(twin: Twin, what: str) -> None:
    """Run a step of both, equal up to rounding; then copy our bits to the one process."""
    twin.backward()
    twin.check_step(
        [torch.optim.SGD(m.parameters(), lr=0.05, foreach=False) for m in (twin.plain, twin.ours)],
        what,
    )
    with torch.no_grad():
        for name, p in twin.plain.named_parameters():
            mine: Any = twin.ours.get_parameter(name)
            p.copy_(DTensor(mine._local_tensor, mine._spec, requires_grad=False).full_tensor())


def each(model: nn.Module, change: Callable[[Tensor], Any], but: str = "") -> None:
    """Change every parameter in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != but:
                change(parameter)


@ranks(4)
def test_the_parameters_are_those_of_one_process_and_training_goes_on() -> None:
    """F4 (unpadded, offloaded), F7, F8 (tied), F9 (originals as Parameters), F11 (before a
    forward), F12: on each mesh, before any forward and after steps, which stay exact.
    """
    for weight, tied, config in ((1, True, {}), (2, True, ALL), (4, False, {})):
        twin = Twin(partial(Full, tied), mesh_of(weight), **config)
        for model in (twin.ours, twin.plain):  # casts have made copies of it
            for layer in model.layers:
                layer.table = model.seen
        what = f"weight {weight}, tied {tied}"
        for moment in ("before a forward", "after a step"):
            at_rest = {n: p.data_ptr() for n, p in twin.ours.named_parameters()}
            for offload in (False, True):
                with internsp.full_params(twin.ours, offload_to_cpu=offload):
                    same(twin.ours, twin.plain, f"{what}, {moment}")
                    if tied:
                        assert twin.ours.head.weight is twin.ours.embed.weight
                    assert twin.ours.layers[0].table is twin.ours.seen  # type: ignore[union-attr]
                    held = list(twin.ours.parameters())
                    each(twin.ours, lambda p: p.fill_(7))  # to be discarded
                    twin.ours.get_buffer("seen").fill_(7)
            gone = [weakref.ref(p) for p in held]
            del held
            assert all(p() is None for p in gone), "whole values outlive the context"
            assert {n: p.data_ptr() for n, p in twin.ours.named_parameters()} == at_rest
            twin.check_parameters(f"{what}, {moment}, back", 0.0)
            assert torch.equal(twin.ours.get_buffer("seen"), torch.arange(5.0).double())
            step(twin, f"{what}, {moment}")


@ranks(2)
def test_without_recursion_the_blocks_below_stay_sharded() -> None:
    """F1: recurse, or only the given module's parameters; a module in a block may be given."""
    twin = Twin(Full, mesh_of(2))

    def whole() -> set[str]:
        return {n for n, p in twin.ours.named_parameters() if not isinstance(p, DTensor)}

    every = set(dict(twin.plain.named_parameters()))
    below = {n for n in every if n.startswith("layers.")}
    first = {n for n in every if n.startswith("layers.0.")}
    layers: Any = twin.ours.layers
    for model, recurse, names in (
        (twin.ours, True, every), (twin.ours, False, every - below), (layers, False, set()),
        (layers, True, below), (layers[0], False, first), (layers[0], True, first),
        (layers[0].w1, False, {"layers.0.w1.weight", "layers.0.w1.bias"}),
    ):  # fmt: skip
        with internsp.full_params(model, recurse=recurse, write="shards"):
            assert whole() == names
            for name in names:
                assert torch.equal(twin.ours.get_parameter(name), twin.plain.get_parameter(name))
                for side in (twin.ours, twin.plain):
                    side.get_parameter(name).data.mul_(1.5)
            raises(OrderError, lambda: twin.ours(*twin.batch()[1]), "full_params")
        assert whole() == set()
        twin.check_parameters(f"recurse {recurse}", 0.0)
    step(twin, "after all of them")


@ranks(4)
def test_equal_writes_reach_every_shard_and_different_ones_none(rank: int) -> None:
    """F2: writes are compared, F4: offloaded ones too; different writes are never mixed."""
    for weight in (2, 4):
        twin = Twin(Full, mesh_of(weight))
        step(twin, "before")
        with internsp.full_params(twin.ours, write="shards", offload_to_cpu=weight == 4):
            for model in (twin.ours, twin.plain):
                each(model, lambda p: p.mul_(1.25).add_(0.1))
                model.get_buffer("seen").mul_(2)
        twin.check_parameters(f"weight {weight}, written", 0.0)
        assert torch.equal(twin.ours.get_buffer("seen"), twin.plain.get_buffer("seen"))
        step(twin, f"weight {weight}, after a write")

        def differently(twin: Twin = twin, name: str = "layers.1.w2.weight") -> None:
            with internsp.full_params(twin.ours, write="shards"):
                each(twin.ours, lambda p: p.mul_(3))
                if rank == 2:  # the last row, which is rank 3's where there are four
                    twin.ours.get_parameter(name).data[-1, -1] += 1e-9

        raises(StructureError, differently, "layers.1.w2.weight", "ranks [2]", f"rank {rank})")
        twin.check_parameters(f"weight {weight}, nothing written", 0.0)

        def a_buffer(twin: Twin = twin) -> None:
            with internsp.full_params(twin.ours, write="shards"):
                if rank == 1:
                    twin.ours.get_buffer("seen").add_(1)

        raises(StructureError, a_buffer, "buffer seen", "ranks [1] wrote one", "[0, 2, 3] left")
        assert torch.equal(twin.ours.get_buffer("seen"), twin.plain.get_buffer("seen"))
        twin.ours.get_buffer("seen").add_(rank)  # as running statistics are: each rank's own
        with internsp.full_params(twin.ours, write="shards"):
            pass
        assert twin.ours.get_buffer("seen")[0] == rank
        step(twin, f"weight {weight}, after refused writes")


@pytest.mark.thorough(4)
@ranks(4)
def test_with_rank0_what_the_first_rank_wrote_is_written_everywhere(rank: int) -> None:
    """F3: rank 0's values win; it is the first rank of the stage, here and in the document."""
    for weight in (1, 2, 4):
        twin = Twin(Full, mesh_of(weight))
        step(twin, "before")
        with internsp.full_params(twin.ours, write="rank0"):
            same(twin.ours, twin.plain, "every rank sees whole values")
            each(twin.ours, lambda p: p.add_(rank + 1), but="layers.0.q.bias")
            twin.ours.get_buffer("seen").add_(rank + 1)
        each(twin.plain, lambda p: p.add_(1), but="layers.0.q.bias")
        twin.plain.get_buffer("seen").add_(1)
        twin.check_parameters(f"weight {weight}", 0.0)
        assert torch.equal(twin.ours.get_buffer("seen"), twin.plain.get_buffer("seen"))
        step(twin, f"weight {weight}, after")
    mesh = mesh_of(1, pipeline=2)
    stage = mesh.pipeline_rank
    twin = Twin(Tiny, mesh, seed=stage)  # a different model for each stage
    with internsp.full_params(twin.ours, write="rank0"):
        each(twin.ours, lambda p: p.add_(rank + 1))
    each(twin.plain, lambda p: p.add_(2 * stage + 1))  # written by rank 0, and by rank 2
    twin.check_parameters("two stages", 0.0)
    found = [
        sum(map(len, (v for _, v in internsp.iterate_full_params(twin.ours, rank0_only=True))))
    ]
    assert found == [len(list(twin.plain.parameters())) if rank in (0, 2) else 0]


@ranks(2)
def test_whole_gradients_are_shown_and_what_is_made_of_them_is_stepped_with(rank: int) -> None:
    """F5: gradients, of a plain loop and of a ZeroOptimizer; written back, discarded."""
    twin = Twin(Full, mesh_of(2))
    twin.backward()
    for write in ("none", "shards", "rank0"):
        with internsp.full_params(twin.ours, write=write, with_grads=True):  # type: ignore[arg-type]
            for name, p in twin.plain.named_parameters():
                mine = twin.ours.get_parameter(name).grad
                assert (mine is None) == (p.grad is None), name
                if p.grad is not None and mine is not None:
                    torch.testing.assert_close(mine, p.grad, atol=1e-12, rtol=1e-10)
                    mine.mul_(0.5 + (rank if write == "rank0" else 0))
                    if write != "none":
                        p.grad.mul_(0.5)
            if write == "rank0":
                for model in (twin.ours, twin.plain):
                    model.get_parameter("layers.2.q.weight").grad = None
        twin.check_gradients(f"write {write}")
    with internsp.full_params(twin.ours, write="shards"):
        twin.ours.extra = nn.Parameter(twin.ours.extra.detach().clone())
    twin.plain.extra.grad = None
    twin.check_gradients("another parameter, which has none")
    twin.check_step(
        [torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin.plain, twin.ours)], "a plain loop"
    )
    with twin.communicator.no_sync():
        twin.backward()
        show = partial(internsp.full_params, twin.ours, with_grads=True)
        raises(GradientError, lambda: show().__enter__(), "not complete")


@ranks(2)
def test_gradients_of_an_optimizer_and_of_a_wide_dtype_are_those_that_are_stepped_with(
    rank: int,
) -> None:
    """F5: reduced gradients of a ZeroOptimizer; fp32 gradients of 16-bit weights."""
    wide = Twin(Tiny, mesh_of(2), dtype=torch.bfloat16, grad_dtype="float32")
    wide.ours(*wide.batch()[1]).backward()
    kept: Any = wide.ours.head.weight.grad
    with internsp.full_params(wide.ours, write="rank0", with_grads=True):
        mine = wide.ours.head.weight.grad
        assert mine is not None
        assert mine.dtype == torch.float32
        assert torch.equal(mine, kept.full_tensor())
        mine.mul_(1 + 2**-12)
        wanted = mine.clone()
    assert torch.equal(kept.full_tensor(), wanted)

    for weight in (1, 2):
        case = Case(weight=weight, optimizer="sgd", max_grad_norm=None)
        s = setup(case)
        ids, labels = batch(0, 2)
        s.model(share(ids, rank), share(labels, rank)).backward()
        reduced = s.optimizer.gather_gradients()
        with internsp.full_params(s.model, write="shards", with_grads=True):
            values = {}
            for name, p in s.model.named_parameters():
                assert (p.grad is None) == (name not in reduced), name
                if p.grad is not None:
                    assert torch.equal(p.grad, reduced[name])
                    p.grad = None if name == "norm.weight" else p.grad * 2
                values[name] = p.detach().clone(), p.grad
        with internsp.full_params(s.model, with_grads=True):
            assert s.model.norm.weight.grad is None
        s.optimizer.step()
        with internsp.full_params(s.model):
            for name, p in s.model.named_parameters():
                before, gradient = values[name]
                decay = 0.01 if p.ndim >= 2 else 0.0
                if gradient is not None:
                    before = before - 1e-2 * (gradient + decay * before)
                torch.testing.assert_close(p.detach(), before, atol=1e-12, rtol=1e-12)


@pytest.mark.thorough(5)
@ranks(4)
def test_sixteen_bit_weights_are_shown_and_written_in_full_precision(rank: int) -> None:
    """F6: the fp32 masters of a ZeroOptimizer; the next step does not undo what was written."""
    for weight, zero, write in ((2, None, "shards"), (1, 2, "rank0"), (4, None, "rank0")):
        case = Case(
            weight=weight, zero=zero, optimizer="sgd", dtype=torch.bfloat16, max_grad_norm=None,
            options={"momentum": 0.0},
        )  # fmt: skip
        s = setup(case)
        s.model.side.weight.data.mul_(1.0)

        def backward(number: int, s: Any = s) -> None:
            ids, labels = batch(number, 4)
            s.model(share(ids, rank), share(labels, rank)).backward()

        def shown(s: Any = s, **options: Any) -> dict[str, Tensor]:
            with internsp.full_params(s.model, **options):
                return {n: p.detach().clone() for n, p in s.model.named_parameters()}

        for number in range(2):
            backward(number)
            s.optimizer.step()
        masters = shown()
        used = {n for n in masters if not n.startswith("side")}
        assert {v.dtype for v in masters.values()} == {torch.float32}
        finer = [n for n in used if not torch.equal(masters[n], masters[n].bfloat16().float())]
        assert len(finer) > len(used) / 2, "masters hold more than 16 bits"
        for name, p in s.model.named_parameters():
            assert torch.equal(p.full_tensor(), masters[name].bfloat16()), name  # type: ignore[operator]
        # Below the precision of bf16, in one element of each: all other bits stay.
        with internsp.full_params(s.model, write=write):  # type: ignore[arg-type]
            each(s.model, lambda p: p.view(-1)[-1].mul_(1 + 2**-12))
        written = {n: v.clone() for n, v in masters.items()}
        for value in written.values():
            value.view(-1)[-1].mul_(1 + 2**-12)
        found = shown()
        assert all(torch.equal(found[n], written[n]) for n in written), "masters were written"
        with internsp.full_params(s.model, write=write, dtype=torch.bfloat16):  # type: ignore[arg-type]
            each(s.model, lambda p: p.view(-1)[0].fill_(0.5))
            assert {p.dtype for p in s.model.parameters()} == {torch.bfloat16}
        for value in written.values():
            value.view(-1)[0].fill_(0.5)
        found = shown()
        assert all(torch.equal(found[n], written[n]) for n in written), "unchanged bits stay"
        backward(3)
        gradients = s.optimizer.gather_gradients()
        s.optimizer.step()
        found = shown()
        for name in used:
            decay = 0.01 if found[name].ndim >= 2 else 0.0
            gradient = gradients[name] + decay * written[name]
            wanted = written[name] - 1e-2 * gradient
            torch.testing.assert_close(found[name], wanted, atol=1e-7, rtol=1e-6)
        s.model.head.weight.data.fill_(0.25)  # written otherwise: it is the truth, and exact
        assert torch.equal(shown()["head.weight"], torch.full_like(found["head.weight"], 0.25))
        assert {v.dtype for v in shown(dtype=torch.float64).values()} == {torch.float64}


@ranks(2)
def test_it_is_refused_where_a_pass_or_a_step_runs_and_none_begins_inside(rank: int) -> None:
    """F10: only between steps; in a step, nested, or with a forward inside a clear error each."""
    twin = Twin(Full, mesh_of(2))
    open_it: Callable[[], Any] = lambda: internsp.full_params(twin.ours).__enter__()  # noqa: E731

    def in_forward(*_: Any) -> None:
        raises(OrderError, open_it, "in the model's forward", f"rank {rank}")

    handle = twin.ours.layers[1].register_forward_hook(in_forward)  # type: ignore[operator]
    loss = twin.ours(*twin.batch()[1])
    seen = []
    loss.register_hook(lambda _: seen.append(raises(OrderError, open_it, "in a backward")))
    loss.backward()
    assert seen
    handle.remove()
    with twin.communicator.unchanged():
        raises(OrderError, open_it, "within unchanged()")
    twin.ours.zero_grad()
    sgd = torch.optim.SGD(twin.ours.parameters(), lr=0.1)
    with internsp.full_params(twin.ours, write="shards"):
        raises(OrderError, open_it, "inside full_params(write='shards'")
        ids, labels = twin.batch()[1]
        inside: list[Callable[[], Any]] = [
            lambda: twin.ours(ids, labels), lambda: twin.ours.forward(ids, labels),
            lambda: twin.ours.layers[0](torch.zeros(1, 6).double()),  # type: ignore[operator]
            lambda: twin.ours.head(torch.zeros(1, 6).double()), sgd.step,
            lambda: next(internsp.iterate_full_params(twin.ours)),
        ]  # fmt: skip
        for call in inside:
            raises(OrderError, call, "inside full_params(write='shards'")
        each(twin.ours, lambda p: p.mul_(2))
    each(twin.plain, lambda p: p.mul_(2))
    step(twin, "after all refusals")

    s = setup(Case(weight=2))
    with internsp.full_params(s.model):
        raises(OrderError, s.optimizer.step, "inside full_params")
        raises(OrderError, s.optimizer.zero_grad, "inside full_params")

    def otherwise() -> None:
        with internsp.full_params(twin.ours, write="shards"):
            each(twin.ours, lambda p: p.mul_(2))
            twin.communicator.replicated.sharded[0].parameter.data.mul_(1.5)

    raises(OrderError, otherwise, "the shard of extra was written")
    twin.plain.extra.data.mul_(1.5)
    step(twin, "after a shard was written inside")
    raises(StructureError, lambda: internsp.full_params(twin.plain).__enter__(), "parallelize()")
    raises(ValueError, lambda: internsp.full_params(twin.ours, write="all").__enter__(), "'all'")  # type: ignore[arg-type]


@pytest.mark.unmeasured
@ranks(2)
def test_an_exception_puts_everything_back_on_all_ranks(rank: int) -> None:
    """Consistent after exceptions, of all ranks or one; after a failed forward; refused alone."""
    mesh = mesh_of(2, timeout=4)
    twin = Twin(Full, mesh)

    def fails(on: tuple[int, ...], write: Any) -> None:
        with internsp.full_params(twin.ours, write=write):
            each(twin.ours, lambda p: p.mul_(2))
            twin.ours.get_buffer("seen").mul_(2)
            if rank in on:
                raise KeyError("mine")

    for write in ("none", "shards", "rank0"):
        for on in ((0, 1), (0,), (1,)):
            if rank in on:
                raises(KeyError, partial(fails, on, write), "mine")
            elif write == "none":
                fails(on, write)
            else:
                raises(CollectiveError, partial(fails, on, write), f"rank {on[0]} left", "mine")
            twin.check_parameters(f"{write}, failed on {on}", 0.0)
            assert torch.equal(twin.ours.get_buffer("seen"), twin.plain.get_buffer("seen"))
            step(twin, f"{write}, failed on {on}")

    handle = twin.ours.layers[2].register_forward_hook(lambda *_: 1 / 0)  # type: ignore[operator]
    raises(ZeroDivisionError, lambda: twin.ours(*twin.batch()[1]))
    handle.remove()
    with internsp.full_params(twin.ours):
        same(twin.ours, twin.plain, "after a failed forward")

    def shapes(value: Callable[[nn.Parameter], Any], *words: str) -> None:
        def change() -> None:
            with internsp.full_params(twin.ours, write="shards"):
                if rank == 0:
                    value(twin.ours.layers[1].q.weight)  # type: ignore[union-attr, arg-type]

        kind = StructureError if rank == 0 else CollectiveError
        raises(kind, change, "layers.1.q.weight", "rank 0", *words)
        twin.check_parameters("nothing was written", 0.0)

    def longer(p: nn.Parameter) -> None:
        p.data = torch.zeros(7, 6).double()

    shapes(longer, "[7, 6]", "[6, 6]")
    shapes(lambda _: delattr(twin.ours.layers[1].q, "weight"), "was removed")  # type: ignore[arg-type]
    shapes(lambda p: p.requires_grad_(False), "frozen or thawed")
    step(twin, "after wrong shapes")

    def alone() -> None:
        if rank == 0:
            with internsp.full_params(twin.ours):
                pass

    if rank == 0:
        raises(CollectiveError, alone, "full_params(write='none'", "ranks [1]")
    dist.barrier()
    other = partial(internsp.full_params, twin.ours, write="rank0" if rank else "shards")
    raises(CollectiveError, lambda: other().__enter__(), f"rank {rank} reached", f"rank {1 - rank}")
    step(twin, "after calls that differed")


@ranks(2)
def test_states_are_loaded_inside_and_other_objects_are_taken_by_value() -> None:
    """F8: tied weights have one value, however it was set; ``assign=True``, LSTM's own list."""
    twin = Twin(partial(Full, True), mesh_of(2))
    torch.manual_seed(5)
    other = Full(True).double()
    state = other.state_dict()
    with internsp.full_params(twin.ours, write="shards"):
        twin.ours.load_state_dict(state)
    twin.plain.load_state_dict(state)
    step(twin, "loaded")
    for assign in (True, False):
        copies = {n: v * 0.5 for n, v in state.items()}  # of a tied weight, two
        with internsp.full_params(twin.ours, write="rank0"):
            twin.ours.load_state_dict(copies, assign=assign)
        twin.plain.load_state_dict(copies)
        twin.check_parameters(f"assign {assign}", 0.0)
        step(twin, f"assign {assign}")

    def apart() -> None:
        with internsp.full_params(twin.ours, write="shards"):
            for number, module in enumerate((twin.ours.embed, twin.ours.head)):
                value = torch.full((11, 6), float(number), dtype=torch.float64)
                module.weight = nn.Parameter(value)  # type: ignore[assignment]

    raises(StructureError, apart, "embed.weight", "2 modules that share it")
    step(twin, "after one tied weight was given two values")

    class Recurrent(Block):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(6, 6, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.rnn(x)[0])

    rnn = Twin(partial(Tiny, Recurrent, 2), mesh_of(2))
    with internsp.full_params(rnn.ours, write="shards"):
        lstm: Any = rnn.ours.layers[0].rnn  # type: ignore[union-attr]
        assert lstm._flat_weights[0] is lstm.weight_ih_l0
        assert lstm.weight_ih_l0.shape == (24, 6)
        with torch.no_grad():
            lstm._flat_weights[0].mul_(2)
            rnn.plain.layers[0].rnn.weight_ih_l0.mul_(2)  # type: ignore[union-attr, operator]
    step(rnn, "an LSTM")


@pytest.mark.thorough(4)
@pytest.mark.parametrize("world_size", [4])
@ranks()
def test_experts_of_all_ranks_stand_one_after_another(world_size: int, rank: int) -> None:
    """F1 to F3 on the experts' axis, with other degrees, and with different experts per rank."""
    cases = (Experts(weight=2, expert_weight=1), Experts(weight=2, expert_weight=1, expert=2),
             Experts(weight=1, expert_weight=2, expert=2), Experts(weight=4, expert=4,
             expert_weight=1))  # fmt: skip
    for case in cases:
        pair = Pair(case)
        for write in ("shards", "rank0"):
            with internsp.full_params(pair.ours, write=write):  # type: ignore[arg-type]
                same(pair.ours, pair.plain, f"{case}")
                more = 0 if write == "shards" else rank
                each(pair.ours, lambda p, more=more: p.mul_(1.5).add_(more))  # type: ignore[misc]
            each(pair.plain, lambda p: p.mul_(1.5))
            assert pair.furthest_parameter() == 0.0, f"{case}, {write}"
        pair.backward(0)
        assert pair.furthest_gradient() < 1e-10, f"{case}"
        with internsp.full_params(pair.ours, with_grads=True):
            for name, p in pair.plain.named_parameters():
                mine = pair.ours.get_parameter(name).grad
                torch.testing.assert_close(mine, p.grad, atol=1e-11, rtol=1e-9)


@pytest.mark.unmeasured
@ranks(2)
def test_units_are_streamed_one_at_a_time_and_are_those_of_one_process(rank: int) -> None:
    """F4, F6, F9 of the iterator: every value once, one unit alive, consensus at each unit."""
    twin = Twin(partial(Full, True), mesh_of(2, timeout=4))
    step(twin, "before")
    found: dict[str, Tensor] = {}
    before: list[weakref.ref[Tensor]] = []
    order = []
    for unit, values in internsp.iterate_full_params(twin.ours):
        assert all(value() is None for value in before), f"{unit}: an earlier unit is alive"
        before = [weakref.ref(value) for value in values.values()]
        found |= {name: value.clone() for name, value in values.items()}
        order.append((unit, len(values)))
        for value in values.values():
            value.fill_(3)  # separate memory
        del value
    wanted = {n: p.detach() for n, p in twin.plain.named_parameters()}
    wanted["seen"] = twin.plain.get_buffer("seen")
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert [u for u, _ in order if u.startswith("layers.")] == ["layers.0", "layers.1", "layers.2"]
    assert order[-1] == ("buffers", 1)
    twin.check_parameters("untouched", 0.0)

    def written() -> None:
        for unit, _ in internsp.iterate_full_params(twin.ours):
            if unit == "layers.1":
                twin.ours.layers[0].q.weight.data.mul_(2)  # type: ignore[union-attr, operator]

    raises(OrderError, written, "layers.0.q.weight", "in the middle of iterate_full_params")
    twin.plain.layers[0].q.weight.data.mul_(2)  # type: ignore[union-attr, operator]
    step(twin, "after a write in the middle")
    if rank == 0:
        raises(CollectiveError, lambda: list(internsp.iterate_full_params(twin.ours)), "ranks [1]")
    dist.barrier()
    stream = internsp.iterate_full_params(twin.ours)
    next(stream)
    if rank == 0:
        raises(CollectiveError, lambda: next(stream), "unit", "waited", "ranks [1]")
    dist.barrier()
    step(twin, "after an iteration that a rank left")

    case = Case(weight=2, dtype=torch.bfloat16)
    s = setup(case)
    ids, labels = batch(0, 2)
    s.model(share(ids, rank), share(labels, rank)).backward()
    s.optimizer.step()
    with internsp.full_params(s.model):
        masters = {n: p.detach().clone() for n, p in s.model.named_parameters()}
    streamed = {n: v for _, u in internsp.iterate_full_params(s.model) for n, v in u.items()}
    assert set(streamed) == set(masters)
    assert all(torch.equal(streamed[n], masters[n]) for n in masters)
    assert isinstance(s.optimizer, ZeroOptimizer)


@ranks(2)
def test_a_pipelines_chunks_are_whole_between_its_steps(rank: int) -> None:
    """F1, F2, F10 with several chunks per rank: all at once, not inside a step."""
    case = PipelineCase(schedule="Interleaved1F1B", chunks=2, layers=4, micro_batches=2)
    refused = []

    class Look(SchedulerHook):
        def after_forward(self, action: Any, output: Any) -> None:
            show = internsp.full_params(pipeline.chunks[0]).__enter__
            refused.append(raises(OrderError, show, "within unchanged()"))

    pipeline, plain = make(case, hooks=[Look()])
    names = [n for chunk in pipeline.chunks for n, _ in chunk.named_parameters()]
    chunks = nn.ModuleList(pipeline.chunks)
    for write in ("shards", "rank0"):
        with internsp.full_params(chunks, write=write):  # type: ignore[arg-type]
            for chunk in pipeline.chunks:
                for name, p in chunk.named_parameters():
                    assert torch.equal(p, plain.get_parameter(name))
                    p.data.mul_(1.25)
        each(plain, lambda p: p.mul_(1.25))
    losses = pipeline.step(batches(case, pipeline.mesh))
    assert refused
    found = compare(case, pipeline, plain, losses)
    assert max(found.loss, found.gradient) < 1e-10
    streamed = {n.partition(".")[2] for _, u in internsp.iterate_full_params(chunks) for n in u}
    assert streamed == set(names)
