"""``unexpected_order = "learn"``: the order of the first step replaces the declared one (WP-2)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import internsp
from internsp.config import ActivationCheckpointConfig
from internsp.errors import InternspError, OrderError, StaleWeightError
from internsp.mesh import ParallelMesh
from internsp.schedule.simulate import simulate
from tests.ranks.test_pipeline_train import rows_of
from tests.support.compare import close
from tests.support.few import few
from tests.support.meshes import mesh_of
from tests.support.models import ALL, ROLLING, SOME, Block, Reordered, Tiny, Twin, raises
from tests.support.ranks import ranks

FULL = ActivationCheckpointConfig(mode="full")
HALF = ActivationCheckpointConfig(mode="full", fraction=0.5)
REENTRANT = ActivationCheckpointConfig(mode="full", reentrant=True)
COMMUNICATION = ("AG", "WAIT", "USE", "FREE", "RS", "FINISH")


class TwoStacks(Tiny):
    """An encoder and a decoder with alternating blocks, each reading the other's state."""

    def __init__(self) -> None:
        super().__init__(layers=0)
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.decoder = nn.ModuleList(Block() for _ in range(2))

    def blocks(self, x: Tensor) -> Tensor:
        y = x.flip(1)
        for encode, decode in itertools.zip_longest(self.encoder, self.decoder):
            x = encode(x)
            y = y if decode is None else decode(y + x)
        return x + y


def learner(
    order: tuple[int, ...], mesh: ParallelMesh, checkpoint: Any = None, **config: Any
) -> Twin:
    make: Any = Reordered if order else TwoStacks
    twin = Twin(make, mesh, checkpoint, unexpected_order="learn", **config)
    if order:
        twin.ours.order = twin.plain.order = order
    return twin


def sgd(twin: Twin) -> list[torch.optim.Optimizer]:
    both = (twin.plain, twin.ours)
    return [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in both]


def evaluate(twin: Twin, what: str) -> None:
    everybody, _ = twin.batch()
    with torch.no_grad():
        close(twin.ours(*everybody), twin.plain(*everybody), what)


REVERSED, SKIPPED, SWAPPED, TWICE = (3, 2, 1, 0), (1, 3), (0, 2, 1, 3), (2, 3, 2, 0, 3)
STACKS = {"blocks": ("encoder.*", "decoder.*")}
CASES: list[tuple[tuple[int, ...], Any, dict[str, Any]]] = [
    (REVERSED, HALF, SOME), (REVERSED, None, {"keep_unsharded": 1, "memory_pool": False}),
    (SKIPPED, None, ALL), (SKIPPED, REENTRANT, {"prefetch_depth": 2}), (SWAPPED, None, ROLLING),
    (SWAPPED, HALF, {"granularity": "module"}), (TWICE, None, {"overlap": False}),
    (TWICE, HALF, {"granularity": "module"}), (TWICE, FULL, ROLLING), (TWICE, REENTRANT, ALL),
    (TWICE, None, {"prefetch_depth": 0}), ((), HALF, STACKS),
]  # fmt: skip


@few("cases", CASES, 5)
@ranks(2)
def test_a_learned_order_trains_as_one_process_and_runs_as_its_plan_says(cases: list[Any]) -> None:
    mesh = mesh_of(2)
    for order, checkpoint, config in cases:
        what = f"{order} {checkpoint} {config}"
        twin = learner(order, mesh, checkpoint, **config)
        optimizers = sgd(twin)
        evaluate(twin, what)
        for step in range(3):
            assert (twin.communicator.events.order.learned is not None) == (step > 0), what
            twin.lines()
            twin.backward()
            recorded = twin.lines(*COMMUNICATION)
            twin.check_step(optimizers, f"{what}, step {step}")
            if step != 1:
                evaluate(twin, what)
        plan, overlap = twin.communicator.plan, config.get("overlap", True)
        assert plan is not None
        assert recorded == simulate(plan, overlap=overlap).lines(COMMUNICATION), what


@pytest.mark.unmeasured
def test_a_run_of_the_trainer_learns_its_order(tmp_path: Path) -> None:
    """The third step is compared with the plan of the order that the first step has used."""
    learned = {
        "weight_parallel": {"unexpected_order": "learn"}, "parallel": {"weight": 2},
        "train": {"steps": 4},
    }  # fmt: skip
    (wanted,) = rows_of(tmp_path, 1, [{"train": {"steps": 4}}])
    (found,) = rows_of(tmp_path, 2, [learned])
    for one, other in zip(wanted, found, strict=True):
        assert (other.loss, other.grad_norm) == pytest.approx((one.loss, one.grad_norm), rel=1e-5)


@ranks(2)
def test_each_block_is_gathered_ahead_in_the_learned_order() -> None:
    """In forward a block's gathers are launched in the block before, at its prefetch trigger."""
    mesh = mesh_of(2)
    for order in (REVERSED, SKIPPED):  # blocks 1 and 3 share a slot in the declared order
        twin = learner(order, mesh)
        optimizers = sgd(twin)
        for step in range(3):
            twin.lines()
            twin.backward()
            lines = [line for line in twin.lines("AG", "USE") if " forward layers." in line]
            twin.check_step(optimizers, f"step {step}")
            ahead = [
                lines.index(f"AG forward layers.{block}.q.weight")
                < lines.index(f"USE forward layers.{before}.w1.weight")
                for before, block in itertools.pairwise(order)
            ]
            assert all(ahead) == (step > 0), (order, step, lines)


def refuses(twin: Twin, order: tuple[int, ...], *words: str) -> None:
    """A forward of ours in ``order`` raises an error that contains ``words``."""
    _, mine = twin.batch()
    twin.ours.order = order
    raises(OrderError, lambda: twin.ours(*mine), *words)


@ranks(2)
def test_ranks_that_differ_in_the_first_step_all_learn_the_first_difference(rank: int) -> None:
    twin, usual = learner((0, 1, 2, 3), mesh_of(2)), (0, 1, 2, 3)
    word = "after 1 blocks come rank 0 layers.1, rank 1 layers.2"
    refuses(twin, (0, 2, 1, 3) if rank else usual, word, "'gather'")
    word = "after 2 blocks come rank 0 layers.2, rank 1 the end"
    refuses(twin, (0, 1) if rank else usual, word)
    twin.ours.order = (0, 0, 1, 1, 1, 2, 3) if rank else (0, 0, 0, 1, 2, 2, 3)  # one place each
    twin.ours(*twin.batch()[1]).backward()
    twin.zero_grad()
    twin.ours.order = twin.plain.order = (0, 1, 1, 2, 3)
    optimizers = sgd(twin)
    for step in range(3):
        twin.backward()
        twin.check_step(optimizers, f"step {step}")
    assert twin.communicator.events.order.learned is not None


@ranks(2)
def test_another_order_later_is_an_error_and_without_gradients_gathered_as_it_comes(
    rank: int,
) -> None:
    mesh = mesh_of(2)
    for config in (ROLLING, {"granularity": "module"}, {}):
        twin = learner(SWAPPED, mesh, **config)
        optimizers = sgd(twin)
        for step in range(2):
            twin.backward()
            twin.check_step(optimizers, f"step {step}")
        for order, word in (((0, 1, 2, 3), "layers.1"), ((0, 2), "layers.1"), ((3,), "layers.3")):
            refuses(twin, order, word, "unexpected_order = 'gather'")
            twin.plain.order = order
            evaluate(twin, f"{order}")
            twin.ours.order = twin.plain.order = SWAPPED
            twin.backward()
            twin.check_step(optimizers, f"after {order}")
    twin.ours.order = REVERSED if rank else SWAPPED  # on one rank only: the other one raises, too
    _, mine = twin.batch()
    words = ("layers.3", "which the first step has shown")
    raises(InternspError, lambda: twin.ours(*mine).backward(), *words[: 1 + rank])


@ranks(2)
def test_a_graph_of_before_the_order_was_learned_is_refused() -> None:
    twin = learner(SKIPPED, mesh_of(2))
    _, mine = twin.batch()
    loss = twin.ours(*mine)
    loss.backward(retain_graph=True)
    sgd(twin)[1].step()
    twin.ours(*mine).backward()
    raises(StaleWeightError, loss.backward, "changed")


@pytest.mark.unmeasured
@few("cases", [(REVERSED, True), (TWICE, True), (REVERSED, False), (SKIPPED, False)], 2)
@ranks(4)
def test_replicas_exchange_in_the_learned_order_while_backward_runs(cases: list[Any]) -> None:
    mesh = mesh_of(2)
    for order, zero in cases:
        what = f"{order} zero={zero}"
        twin = learner(order, mesh, HALF)
        plain, ours = sgd(twin)
        if zero:
            ours = internsp.ZeroOptimizer(twin.communicator, torch.optim.SGD, lr=0.01, momentum=0.9)
        for step in range(3):
            twin.lines()
            with twin.communicator.unchanged():
                for number in range(2):
                    with twin.communicator.replica_sync(number == 1):
                        twin.backward()
            plain.step()
            ours.step()
            plain.zero_grad()
            ours.zero_grad()
            exchanged = twin.lines("EX", "RS")
            twin.check_parameters(f"{what}, step {step}")
        if order == REVERSED:  # backward goes from block 0 to block 3
            found = [line for line in exchanged if line.startswith("EX") and ".q." in line]
            found = found or [line for line in exchanged if line.startswith("EX") and "." in line]
            assert [line.split(".")[1][0] for line in found] == ["0", "1", "2", "3"], exchanged
            first = next(at for at, line in enumerate(exchanged) if line.startswith("EX"))
            assert first < exchanged.index("RS backward embed.weight", len(exchanged) // 2)


@ranks(2)
def test_blocks_that_a_program_calls_itself_are_one_forward_in_a_learned_order() -> None:
    """Each weight is reduced once, as in the model's own forward."""
    twin = learner(REVERSED, mesh_of(2))
    optimizers = sgd(twin)
    for _ in range(2):  # the second forward has the order of the first
        twin.backward()
        twin.check_step(optimizers, "learned")
    for step in range(2):
        twin.lines()
        before = twin.communicator.events.forwards
        for model, (ids, _) in zip((twin.plain, twin.ours), twin.batch(), strict=True):
            x = model.embed(ids)
            for number in REVERSED:
                x = model.layers[number](x)
            model.head(x).square().sum().backward()
        forwards = twin.communicator.events.forwards - before
        assert forwards == 1, forwards
        reduced = [line.split()[-1] for line in twin.lines("RS") if "layers" in line]
        assert len(reduced) == len(set(reduced)), reduced
        twin.check_step(optimizers, f"called by the program, step {step}")
