"""What ranks must agree on is compared in ``parallelize``, and differences are named (WP-2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import internsp
import internsp.sp.loss
from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.errors import (
    CollectiveError,
    ConfigError,
    InternspError,
    OrderError,
    StructureError,
)
from internsp.mesh import ParallelMesh
from internsp.parallel.parallelize import parallelize
from tests.support.compare import close
from tests.support.meshes import mesh_of
from tests.support.models import ALL, CUT, ROLLING, SOME, Block, Tiny, Twin, raises
from tests.support.ranks import ranks
from tests.support.sections import sections

SMALL = {"min_shard_elements": CUT, "coalesce_bytes": 0}


def tiny(width: int = 6) -> Tiny:
    torch.manual_seed(3)
    return Tiny(width=width).double()


def refused(
    rank: int, model: nn.Module, kind: type[InternspError], *words: str,
    mesh: ParallelMesh | None = None, checkpoint: Any = None, **config: Any,
) -> str:  # fmt: skip
    weights, sequence = sections(SMALL | config)
    call = partial(
        parallelize, model, mesh or mesh_of(2), weights, sequence=sequence,
        activation_checkpoint=checkpoint,
    )  # fmt: skip
    text = raises(kind, call, *words)
    left = [type(p) for p in model.parameters() if type(p) is not nn.Parameter]
    assert not left, "a refused model is as it was"
    return text


class WithExperts(Block):
    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.experts = nn.ModuleDict({"one": nn.Linear(width, width)})

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.experts["one"](x)


@ranks(2)
def test_ranks_with_different_models_values_or_settings_are_refused_on_all_of_them(
    rank: int,
) -> None:
    odd = rank == 1
    for name in ("layers.2.w1.weight", "norm.weight"):
        model = tiny()
        if odd:
            model.get_parameter(name).data[1] += 1e-7
        refused(rank, model, StructureError, name, "ranks [1]", "ranks [0]", "compare_ranks")
    rows = tiny()
    if odd:
        rows.head.weight.data[[0, 1]] = rows.head.weight.data[[1, 0]].clone()
    refused(rank, rows, StructureError, "head.weight", "other values")
    buffered = tiny()
    buffered.register_buffer("mask", torch.ones(3) * rank)
    refused(rank, buffered, StructureError, "mask")
    refused(rank, tiny(8 if odd else 6), StructureError, "embed.weight [11, 6]", "[11, 8]")
    deeper = Tiny(layers=3 if odd else 4).double()
    refused(rank, deeper, StructureError, "layers.3.norm.weight", "rank 0 and rank 1")
    frozen = tiny()
    frozen.layers[1].requires_grad_(not odd)
    refused(rank, frozen, StructureError, "layers.1.norm.weight is frozen", "is trained")
    tied = tiny()
    if odd:
        tied.head.weight = tied.embed.weight
    refused(rank, tied, StructureError, "head.weight", "the same as embed.weight")
    refused(rank, tiny(), ConfigError, "prefetch_depth = 1", "prefetch_depth = 2",
            prefetch_depth=2 if odd else 1)  # fmt: skip
    refused(rank, tiny(), ConfigError, "sequence.exchange_in_parts = True", "in_parts = False",
            exchange_in_parts=not odd)  # fmt: skip
    checkpoint = ActivationCheckpointConfig(mode="full", fraction=0.5 if odd else 1.0)
    refused(rank, tiny(), ConfigError, "fraction = 1.0", "fraction = 0.5", checkpoint=checkpoint)
    # If one rank refuses its model, all ranks do, even if the reason is that its model differs.
    without = tiny()
    if odd:
        without.layers[2].wo = nn.Identity()
        without.layers[2].other = nn.Linear(6, 6)
        del without.layers[2].wo
    refused(rank, without, StructureError, "no prefetch trigger" if odd else "layers.2")
    bounded = tiny()  # equal in all that is compared
    bounded.embed.max_norm = 1.0 if odd else None
    words = ("max_norm",) if odd else ("rank 1 refused its model (this is rank 0)", "max_norm")
    refused(rank, bounded, StructureError, *words)
    patterns = ("wo", "nothing") if odd else ("wo",)
    kind = StructureError if odd else ConfigError
    key = "gather_before_modules"
    text = refused(rank, tiny(), kind, key, gather_before_modules=patterns)
    assert "nothing" in text


@ranks(2)
def test_values_that_may_differ_between_ranks_are_not_compared(rank: int) -> None:
    """Allowed differences: values on request, meta devices, and what only some replicas hold."""
    torch.manual_seed(rank)
    parallelize(Tiny(), mesh_of(2), WeightParallelConfig(**SMALL, compare_ranks=False))
    with torch.device("meta"):
        model = Tiny()
    if rank == 0:
        model = Tiny()
    parallelize(model, mesh_of(2), WeightParallelConfig(**SMALL))
    # Ranks may hold different experts; a dense weight must be equal.
    mesh = mesh_of(1, expert=2)
    for name in ("experts", "head"):
        torch.manual_seed(5)
        model = Tiny(WithExperts)
        with torch.no_grad():
            for parameter in (*model.layers.parameters(), model.head.weight):
                own = any(parameter is p for p in model.layers[0].experts.parameters())
                if own or (name == "head" and parameter is model.head.weight):
                    parameter += rank
            for layer in model.layers:
                layer.experts.one.weight += rank
                layer.experts.expert_ranks = 2
        config = WeightParallelConfig(**SMALL)
        if name == "head":
            raises(StructureError, partial(parallelize, model, mesh, config), "head.weight")
        else:
            parallelize(model, mesh, config)


@pytest.mark.thorough(1)
@ranks(2)
def test_frozen_sets_are_agreed_upon_when_they_change(rank: int) -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=4)
    for config in ({}, ROLLING):
        twin = Twin(Tiny, mesh, **config)  # type: ignore[arg-type]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin.plain, twin.ours)]
        for names in (["layers.1.w1.weight", "norm.weight"], ["embed.weight"], []):
            for model in (twin.plain, twin.ours):
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(name not in names)
            twin.backward()
            twin.check_step(optimizers, f"frozen alike: {names}")
    _, mine = twin.batch()
    twin.ours.layers[rank].requires_grad_(False)  # type: ignore[operator, union-attr]
    raises(StructureError, lambda: twin.ours(*mine), "layers.0.w1.weight", "layers.1", "the same")
    twin.ours.requires_grad_(True)
    twin.backward()
    twin.check_gradients("after a refused frozen set")
    # On one rank only: that rank raises within bounded time.
    if rank == 0:
        twin.ours.head.requires_grad_(False)
        raises(CollectiveError, lambda: twin.ours(*mine), "head.weight", "ranks [1]", "4 s")


@pytest.mark.thorough(1)
@ranks(2)
def test_a_weight_read_whole_on_one_rank_only_is_an_error_there_and_aborts_nothing(
    rank: int,
) -> None:
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=2)
    twin = Twin(Tiny, mesh)
    weight: Any = twin.ours.get_parameter("layers.1.w1.weight")
    for _ in range(3):
        close(weight.full_tensor(), twin.plain.get_parameter("layers.1.w1.weight"), "whole")
    if rank == 0:
        for call in (weight.full_tensor, weight.detach().full_tensor):
            raises(CollectiveError, call, "full_tensor()", "layers.1.w1.weight", "ranks [1]")
        state = twin.ours.state_dict()
        raises(CollectiveError, state["head.weight"].full_tensor, "head.weight", "2 s")
        twin.ours.get_parameter("norm.weight").full_tensor()  # type: ignore[operator]
    dist.barrier()
    twin.backward()  # nothing was sent, so everything works
    twin.check_gradients("after full_tensor() on one rank")
    for name, parameter in twin.ours.named_parameters():
        close(parameter.full_tensor(), twin.plain.get_parameter(name), name)  # type: ignore[operator]
    other: Any = twin.ours.get_parameter("head.weight") if rank else weight
    raises(CollectiveError, other.full_tensor, "head.weight", "layers.1.w1.weight", "same order")


class Skips(Tiny):
    """Blocks that this rank's data skip."""

    skipped: tuple[int, ...] = ()

    def blocks(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index not in self.skipped:
                x = layer(x)
        return x


@ranks(2)
def test_blocks_that_only_some_replicas_go_through_get_the_sum_of_those(rank: int) -> None:
    """Replicas whose data use different blocks; one process adds both halves."""
    for config in ({}, {"granularity": "module"}):
        for mine in ((), (1,), (1, 2), (0, 1, 2, 3)):
            twin = Twin(Skips, mesh_of(1), unexpected_order="gather", **config)  # type: ignore[arg-type]
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin.plain, twin.ours)]
            for _ in range(3):
                (ids, labels), own = twin.batch()
                for half in range(2):
                    twin.plain.skipped = mine if half else (3,)  # type: ignore[assignment]
                    rows = slice(2 * half, 2 * half + 2)
                    twin.plain(ids[rows], labels[rows]).backward()
                twin.ours.skipped = mine if rank else (3,)  # type: ignore[assignment]
                twin.ours(*own).backward()
                twin.check_step(optimizers, f"skipped {mine} {config}")


class Spare(Skips):
    """Blocks that this rank has no data for run all the same: unused, or times zero."""

    idle: tuple[int, ...] = ()
    keep = False

    def blocks(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index in self.skipped:
                continue
            y = layer(x)
            if index not in self.idle:
                x = y
            elif self.keep:
                x = x + 0 * y
        return x


FIRST, LAST = ((1,), "layers.2 after layers.0"), ((2, 3), " after layers.1")


@pytest.mark.parametrize(
    ("skipped", "name", "config", "gradients"),
    [
        pytest.param(*LAST, SOME, True, id="at the end"),
        pytest.param(*FIRST, ROLLING, False, id="evaluation"),
        pytest.param(*LAST, ALL, False, id="the end of an evaluation"),
    ],
)
@ranks(2)
def test_ranks_of_a_weight_group_that_run_different_blocks_all_raise(
    rank: int, skipped: tuple[int, ...], name: str, config: dict[str, Any], gradients: bool
) -> None:
    """Without an abort of gloo, whose messages would have other sizes, and without a hang."""
    twin = Twin(Skips, mesh_of(2), unexpected_order="gather", **config)
    twin.backward()
    twin.ours.skipped = skipped if rank else ()  # type: ignore[assignment]
    _, mine = twin.batch()

    def step() -> None:
        for _ in range(2):  # the rank in order learns of it in its next pass at the latest
            with torch.set_grad_enabled(gradients):
                loss = twin.ours(*mine)
            if gradients:
                loss.backward()

    raises(InternspError, step, name)


class Images(Tiny):
    """Blocks of two sizes, the first ones for images, which not every rank has."""

    image = True

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.vision = nn.ModuleList(Block(10) for _ in range(2))

    def blocks(self, x: Tensor) -> Tensor:
        if self.image:
            y = F.pad(x, (0, 4))
            for layer in self.vision:
                y = layer(y)
            x = x + y[..., :6]
        return super().blocks(x)


@ranks(2)
def test_images_on_one_rank_only_are_refused_by_name_before_gloo_gets_a_wrong_size(
    rank: int,
) -> None:
    order: Any = {"unexpected_order": "gather", "blocks": ("vision.*", "layers.*")}
    twin = Twin(Images, mesh_of(2), **(ALL | order))
    for model in (twin.plain, twin.ours):
        model.image = False  # type: ignore[assignment]
    twin.backward()
    twin.check_gradients("no rank has an image")
    twin.ours.image = rank == 0  # type: ignore[assignment]
    words = "layers.0, in another order than expected", "times zero"
    raises(CollectiveError, lambda: twin.ours(*twin.batch()[1]), *words[: 1 + rank])


@pytest.mark.parametrize(
    "config",
    [SOME, pytest.param(ROLLING, marks=pytest.mark.thorough(1))],
    ids=["some", "rolling"],
)
@ranks(2)
def test_a_block_that_a_rank_has_no_data_for_runs_with_other_data(
    rank: int, config: dict[str, Any]
) -> None:
    """In the declared order its output may be left unused; in another one it counts times zero."""
    twin = Twin(Spare, mesh_of(2), unexpected_order="gather", **config)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin.plain, twin.ours)]
    for skipped, keep in (((), False), ((1,), True), ((), True), ((0, 3), True)):
        for model in (twin.plain, twin.ours):
            model.skipped, model.keep = skipped, keep  # type: ignore[assignment]
        (ids, labels), own = twin.batch()
        for half in range(2):
            twin.plain.idle = (2,) if half else ()  # type: ignore[assignment]
            rows = slice(2 * half, 2 * half + 2)
            twin.plain(ids[rows], labels[rows]).backward()
        twin.ours.idle = (2,) if rank else ()  # type: ignore[assignment]
        twin.ours(*own).backward()
        twin.check_step(optimizers, f"skipped {skipped}, kept {keep}")


@ranks(2)
def test_a_block_without_a_gradient_on_one_rank_is_refused_in_another_order_than_declared(
    rank: int,
) -> None:
    twin = Twin(Spare, mesh_of(2), unexpected_order="gather")
    twin.ours.skipped = (1,)  # type: ignore[assignment]
    twin.ours.idle = (2,) if rank else ()  # type: ignore[assignment]
    loss = twin.ours(*twin.batch()[1])
    raises(OrderError, loss.backward, "backward of layers.2", "backward of layers.0", "times zero")
    twin.ours.idle = ()  # type: ignore[assignment]
    twin.plain.skipped = (1,)  # type: ignore[assignment]
    twin.backward()
    twin.check_gradients("the ranks have recovered together")


@ranks(2)
def test_parameters_added_after_parallelize_are_refused_by_name() -> None:
    def adapter(model: Any) -> None:
        model.layers[1].adapter = nn.Linear(6, 6).double()

    def parameter(model: Any) -> None:
        model.layers[1].w1.scale = nn.Parameter(torch.ones(1))

    def layer(model: Any) -> None:
        model.layers.append(Block().double())

    def replaced(model: Any) -> None:
        model.head = nn.Linear(6, 11, bias=False).double()

    changes: tuple[tuple[Callable[[Any], None], str], ...] = (
        (adapter, "layers.1.adapter.weight"), (parameter, "layers.1.w1.scale"),
        (layer, "layers.4.norm.weight"), (replaced, "head.weight"),
    )  # fmt: skip
    for change, name in changes:
        twin = Twin(Tiny, mesh_of(2))
        twin.backward()
        change(twin.ours)
        raises(StructureError, partial(twin.ours, *twin.batch()[1]), name, "after parallelize")
    twin = Twin(Tiny, mesh_of(2))
    for model in (twin.plain, twin.ours):
        model.layers[0].wo = nn.Sequential(model.layers[0].wo, nn.Dropout(0.0))  # type: ignore[index, union-attr, operator, assignment]
    twin.backward()
    twin.check_gradients("a module without parameters was added")


class OwnLoss(Tiny):
    """A user-defined model that supports ``sequence.head_output``, with another option."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_options: Any = {"chunk_tokens": 4}

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = self.norm(self.blocks(self.embed(ids)))
        assert labels is not None
        return internsp.token_loss(hidden, self.head, labels, **self.loss_options)[0]


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attention = nn.Sequential(nn.Linear(6, 6))
        self.wo = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.wo(self.self_attention(x))


@ranks(2)
def test_a_sequence_degree_needs_an_attention_that_knows_of_it(rank: int) -> None:
    mesh = mesh_of(1, 2)
    foreign = Tiny(Attends)
    words = ("self_attention: Sequential", "DistributedAttention", "sequence.own_attention")
    refused(rank, foreign, StructureError, *words, mesh=mesh)
    twin = Twin(Tiny, mesh, own_attention=True)  # no attention: every token for itself
    twin.backward()
    twin.check_gradients("a model without attention")
    for output in ("gather", "vocabulary"):
        refused(rank, Tiny(), StructureError, "loss_options", "Tiny", head_output=output)
    for output, exchange in (
        ("gather", "gather_logits"), ("vocabulary", "vocabulary_parallel_cross_entropy"),
    ):  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            exchanged: list[Tensor] = []
            usual = getattr(internsp.sp.loss, exchange)

            def counted(*args: Any, usual: Any = usual, exchanged: Any = exchanged) -> Any:
                exchanged.append(args[0])
                return usual(*args)

            patch.setattr(internsp.sp.loss, exchange, counted)
            own = Twin(OwnLoss, mesh, own_attention=True, head_output=output)
            own.backward()
            own.check_gradients(f"{output} in a user's own loss")
            assert own.ours.loss_options["chunk_tokens"] == 4, "the user's own options stay"
            # Two rows of five tokens in chunks of two positions, which backward recomputes.
            assert len(exchanged) == 6


@pytest.mark.thorough(1)
@pytest.mark.parametrize("key", ["gather_before_modules", "expert_parameters", "blocks"])
@ranks(1)
def test_every_single_pattern_must_match_something(rank: int, key: str) -> None:
    right = {
        "gather_before_modules": ("wo",), "expert_parameters": ("layers.*.w1",),
        "blocks": ("layers.*",),
    }[key]
    mesh = mesh_of(1, expert_weight=1 if key == "expert_parameters" else None)
    parallelize(tiny(), mesh, WeightParallelConfig(**SMALL, **{key: right}))
    wrong = (*right, "nowhere")
    refused(rank, tiny(), StructureError, "nowhere", "candidates", "w", mesh=mesh,
            **{key: wrong})  # fmt: skip


@ranks(2)
def test_an_error_while_parts_are_made_leaves_the_model_as_it_was() -> None:
    def no_link(*_: Any) -> Any:
        raise RuntimeError("no link")

    mesh, model = mesh_of(2), Tiny()
    held = dict(model.named_parameters())
    config = WeightParallelConfig(min_shard_elements=1)
    raises(RuntimeError, lambda: parallelize(model, mesh, config, collectives=no_link), "no link")
    assert all(p is held[name] for name, p in model.named_parameters())
    assert not any(hasattr(p, "replaced") for p in held.values())
    parallelize(model, mesh, config)
    assert all(p is not held[name] for name, p in model.named_parameters())
