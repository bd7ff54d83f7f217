"""Feed-forwards in tiles: the same values, hooks fire once, the same number on every rank."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import model_zoo
from internsp.base.trace import Trace
from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.errors import ConfigError, StructureError
from internsp.mesh import ParallelMesh
from internsp.modules.tiles import ROWS, tile, tile_lengths
from internsp.parallel.parallelize import parallelize
from internsp.sp import SequenceLayout
from internsp.wp.communicator import ChunkWeights
from tests.support.compare import TOLERANCE, check, gradients
from tests.support.few import some
from tests.support.hf import ids, sums, tiny
from tests.support.models import raises
from tests.support.parity import Case, batch, run_case
from tests.support.pipeline import Case as PipelineCase
from tests.support.pipeline import batches, compare, make
from tests.support.ranks import ranks, run_ranks

EACH = {"coalesce_bytes": 0}  # every weight is gathered separately, and unsharded in its module
CASES = {
    "plain": Case(2, 1, 40, weights=EACH, checkpoint={"tiles": 2}),
    "uneven, packed, no tokens": Case(
        2, 2, 71, weights=EACH, packed=True, one_rank_without_tokens=True, checkpoint={"tiles": 3}
    ),
    "full": Case(2, 2, 67, weights=EACH, checkpoint={"tiles": 2, "mode": "full"}),
    "reentrant": Case(
        2, 2, 67, weights=EACH, checkpoint={"tiles": 2, "mode": "full", "reentrant": True}
    ),
    "selective, rolling": Case(
        2, 2, 67, 2, {"kv_heads": 1}, {"gather_before": "rolling", **EACH},
        {"tiles": 2, "mode": "selective", "fraction": 0.5},
    ),
    "module, biases, tied": Case(
        2, 1, 33, 2, {"bias": True, "tie_embeddings": True}, {"granularity": "module", **EACH},
        {"tiles": 2},
    ),
    "weights together": Case(
        2, 1, 33, weights={"coalesce_bytes": 1 << 20}, checkpoint={"tiles": 4, "mode": "full"}
    ),
    "fewer positions than tiles": Case(2, 2, 12, checkpoint={"tiles": 5}),
}  # fmt: skip


@pytest.mark.parametrize("name", some(CASES, 4))
@ranks(2)
def test_loss_every_gradient_and_a_step_equal_one_process(name: str) -> None:
    loss, gradient = run_case(CASES[name])
    assert loss <= TOLERANCE
    assert gradient <= TOLERANCE


@pytest.mark.parametrize("positions", [1, 15, 16, 130, 333])
def test_tiles_cover_all_positions_and_none_is_too_short_to_round_alike(positions: int) -> None:
    for count in (1, 2, 3, 8):
        lengths = tile_lengths(positions, count)
        assert len(lengths) == count
        assert sum(lengths) == positions
        taken = [length for length in lengths if length]
        assert all(length >= ROWS for length in taken) or len(taken) == 1
        assert all(sum(lengths[:i]) % ROWS == 0 for i in range(len(taken)))


def parallel(mesh: ParallelMesh, tiles: int, mode: str = "none", trace: Trace | None = None) -> Any:
    generator = torch.Generator().manual_seed(0)
    model = model_zoo.build(Case().model_config(), dtype=torch.float64, generator=generator)
    parallelize(
        model, mesh, WeightParallelConfig(min_shard_elements=24, overlap=False, **EACH),
        trace=trace,
        activation_checkpoint=ActivationCheckpointConfig(tiles=tiles, mode=mode),
    )  # fmt: skip
    return model


def step(model: nn.Module, mesh: ParallelMesh, length: int) -> Tensor:
    tokens, _, _ = batch(Case(length=length), 1, 0)
    layout = SequenceLayout.create(tokens, rank=mesh.sequence_rank, size=mesh.sequence)
    loss, _ = model(layout.input_ids, layout=layout, labels=layout.labels)
    loss.backward()
    return loss.detach()  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@ranks(2)
def test_the_loss_has_the_same_bits_and_hooks_fire_as_without_tiles(mode: str) -> None:
    mesh = ParallelMesh.create(weight=2, sequence=2, device_type="cpu", timeout_seconds=20)
    found = []
    for count in (1, 3):
        trace = Trace(enabled=True)
        model = parallel(mesh, count, mode, trace)
        loss = step(model, mesh, 130)
        events = sorted(
            e.line() for e in trace.events
            if e.kind in ("AG", "WAIT", "FREE", "RS", "FINISH", "EX")
        )
        found.append((loss, gradients(model), events))
    (loss, wanted, events), (tiled_loss, tiled, tiled_events) = found
    assert torch.equal(loss, tiled_loss)
    assert tiled_events == events
    for name, gradient in wanted.items():
        torch.testing.assert_close(tiled[name], gradient, atol=1e-12, rtol=1e-10)


def once_a_tile(rank: int, world: int) -> tuple[int, int]:
    """How often a tiled step unshards weights and passes gradients on: ours, and one whose tiles
    are calls of the module (fault 33)."""
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    counts = []
    for naive in (False, True):
        model = parallel(mesh, 1 if naive else 3)
        for block in model.layers if naive else ():
            inner = block.feed_forward.forward
            block.feed_forward.forward = lambda x, inner=inner: torch.cat(
                [inner(part) for part in x.split(tile_lengths(x.shape[1], 3), 1)], 1
            )
        count, kind = [0], ChunkWeights
        with pytest.MonkeyPatch.context() as patch:
            for name in ("unshard", "pre_backward", "on_grad_ready"):
                patch.setattr(kind, name, counted(getattr(kind, name), count))
            step(model, mesh, 130)
        counts.append(count[0])
    return counts[0], counts[1]


def counted(inner: Any, count: list[int]) -> Any:
    def call(self: Any, weight: Any, *args: Any) -> Any:
        count[0] += weight.unit.block >= 0  # embedding and head are in the same class
        return inner(self, weight, *args)

    return call


@pytest.mark.thorough(1)
def test_hooks_that_fire_once_a_tile_would_be_seen() -> None:
    ours, naive = run_ranks(once_a_tile, 2)[0]
    weights = 4 * 7  # of four blocks: q, k, v, o, gate, up, down
    assert ours == weights * 3
    assert naive == (4 * 4 + 4 * 3 * 3) * 3


class Talking(nn.Module):
    """A feed-forward whose ranks communicate in each call, as one with experts does."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return self.up(x).tanh()
        Talking.calls += 1
        count = torch.tensor([float(x.shape[1])])
        dist.all_reduce(count)
        return self.up(x).tanh()


def talk(rank: int, world: int, lengths: tuple[int, int], by_length: bool) -> tuple[int, bool]:
    """Calls of the module, and whether all ranks took part; perhaps tiles by the rank's length."""
    module, count = Talking(), 4
    if by_length:
        count = -(-lengths[rank] // 32)
    tile(module, "feed_forward", count)
    x = torch.ones(1, lengths[rank], 6, dtype=torch.float64, requires_grad=True)
    module(x).sum().backward()
    calls: list[Any] = [None, None]
    dist.all_gather_object(calls, Talking.calls)
    return Talking.calls, calls[0] == calls[1]


def test_ranks_of_uneven_length_run_as_many_tiles() -> None:
    found = run_ranks(talk, 2, (95, 130), False)
    assert found == [(4, True), (4, True)]


def test_a_tile_count_that_differs_between_ranks_would_be_seen() -> None:
    with pytest.raises(Exception, match=r"(?i)timed out|connection|closed|rank"):
        run_ranks(talk, 2, (95, 130), True, timeout=6)


class Live(torch.autograd.Function):
    """The identity; counts the bytes of its inputs while its graph is alive."""

    bytes = most = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Live.bytes += x.nbytes
        Live.most = max(Live.most, Live.bytes)
        ctx.token = Token()
        weakref.finalize(ctx.token, Live.freed, x.nbytes)
        return x.view_as(x)

    @staticmethod
    def freed(size: int) -> None:
        Live.bytes -= size

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Token:
    pass


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(Live.apply(self.up(x)).tanh(), 0.3))


def most_bytes(count: int) -> int:
    torch.manual_seed(0)
    module = nn.Sequential(Wide(), Wide(), Wide())
    for each in module if count > 1 else ():
        tile(each, "wide", count)
    gc.collect()
    Live.bytes = Live.most = 0
    module(torch.randn(2, 256, 4, requires_grad=True)).square().sum().backward()
    assert Live.bytes == 0
    return Live.most


def test_the_activations_of_one_tile_live_at_a_time() -> None:
    whole = 2 * 256 * 64 * 4
    assert most_bytes(1) == 3 * whole
    assert most_bytes(4) == whole // 4


def test_what_a_tile_draws_is_drawn_again_in_backward() -> None:
    """Dropout: the gradient belongs to the same forward, and later random numbers do not change."""
    torch.manual_seed(0)
    module = Wide().double()
    plain = copy.deepcopy(module)
    tile(module, "wide", 2)
    x = torch.randn(1, 32, 4, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    y = module(x)
    state = torch.get_rng_state()
    y.square().sum().backward()
    assert torch.equal(state, torch.get_rng_state())
    other = x.detach().clone().requires_grad_()
    torch.manual_seed(1)
    wanted = torch.cat([plain(part) for part in other.split(16, 1)], 1)
    wanted.square().sum().backward()
    assert torch.equal(y, wanted)
    torch.testing.assert_close(x.grad, other.grad, atol=1e-12, rtol=0)
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-12, rtol=0)


class Reader(nn.Module):
    def __init__(self, other: Tensor) -> None:
        super().__init__()
        self.inner, self.hidden = nn.Linear(4, 4), [other]

    def forward(self, x: Tensor, more: Any = None) -> Any:
        y = self.inner(x) * self.hidden[0]
        y = y.detach() if more == "cut" else y
        return (y, y) if more == "two" else y[:, :1] if more == "short" else y


def test_a_module_that_cannot_be_tiled_says_so() -> None:
    x = torch.randn(1, 32, 4, requires_grad=True)
    lost = Reader(torch.ones(4, requires_grad=True))
    tile(lost, "mlp", 2)
    raises(StructureError, lambda: lost(x).sum().backward(), "mlp", "gradient would be lost")
    fine = Reader(torch.ones(4))
    tile(fine, "mlp", 2)
    raises(StructureError, lambda: fine(x, "two"), "returned tuple")
    raises(StructureError, lambda: fine(x, "short"), "returned [1, 1, 4] for [1, 16, 4]")
    raises(StructureError, lambda: fine(x, x), "a second tensor")
    raises(StructureError, lambda: fine(None), "no tensor")
    y = fine(x)
    raises(Exception, lambda: torch.autograd.grad(y.sum(), x, create_graph=True), "create_graph")
    for _ in range(2):  # a graph that is kept
        x.grad = None
        y.sum().backward(retain_graph=True)
    weight = fine.inner.weight.detach()
    torch.testing.assert_close(x.grad, weight.sum(0).expand_as(x))  # type: ignore[arg-type]
    # No gradient passes through it.
    x.grad, fine.inner.weight.grad = None, None
    fine(x, "cut").sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))  # type: ignore[arg-type]
    assert fine.inner.weight.grad is None


@pytest.mark.thorough(1)
@ranks(2)
def test_a_pipeline_that_splits_backward_and_a_model_of_transformers_take_tiles() -> None:
    case = PipelineCase(
        "ZBVZeroBubble", chunks=2, length=40, weights=EACH, checkpoint={"tiles": 2}
    )
    pipeline, plain = make(case)
    losses = pipeline.step(batches(case, pipeline.mesh))
    found = compare(case, pipeline, plain, losses)
    assert max(found.loss, found.gradient) <= TOLERANCE
    mesh = ParallelMesh.create(weight=2, sequence=2, device_type="cpu", timeout_seconds=20)
    options = {"num_key_value_heads": 2, "max_position_embeddings": 128}
    plain = tiny("llama", **options)
    ours = copy.deepcopy(plain)
    config = WeightParallelConfig(min_shard_elements=32, **EACH)
    parallelize(
        ours, mesh, config,
        activation_checkpoint=ActivationCheckpointConfig(tiles=2, tiled_modules=["mlp"]),
    )
    given = {"input_ids": ids(0, 1, 67), "use_cache": False}
    sums(plain, given).backward()
    sums(ours, given, slice(0, 34) if mesh.rank == 0 else slice(34, 67)).backward()
    check(gradients(ours), gradients(plain), "of transformers", 1e-5)


@ranks(1)
def test_what_cannot_be_tiled_in_a_model_is_refused_by_name() -> None:
    mesh = ParallelMesh.create(device_type="cpu", timeout_seconds=20)

    def parallelized(weights: dict[str, Any], **options: Any) -> None:
        model = model_zoo.build(Case().model_config(), dtype=torch.float64)
        checkpoint = ActivationCheckpointConfig(**options)
        config = WeightParallelConfig(**weights)
        parallelize(model, mesh, config, activation_checkpoint=checkpoint)

    raises(ConfigError, lambda: parallelized({}, tiles="auto"), "give a number")
    wrong = {"tiles": 2, "tiled_modules": ("feedforward",)}
    raises(StructureError, lambda: parallelized({}, **wrong), "did you mean")
    sharded = {"gather_before": "mlp", "min_shard_elements": 0}
    raises(ConfigError, lambda: parallelized(sharded, tiles=2), "trigger w1")
    compiled = {"compile": True, "gather_before": "qkv"}
    raises(ConfigError, lambda: parallelized(compiled, tiles=2), "compile")
    plan = [{"match": "layers.*.feed_forward.w?", "unit": "each"}]
    raises(StructureError, lambda: parallelized({"rules": plan}, tiles=2), "gathered by itself")
    parallelized({}, tiles=2, tiled_modules=("w2",))
    for option in ("auxiliary", "z_loss", "capacity_factor"):  # none of them is that of a tile
        options = {"family": "mixtral", "experts": 4, option: 1.5, "balance_rate": 0.0}
        mixture = model_zoo.build(Case().model_config().model_copy(update=options))
        tiles = ActivationCheckpointConfig(tiles=2)
        one_by_one = partial(parallelize, mixture, mesh, activation_checkpoint=tiles)
        raises(ConfigError, one_by_one, f"{option} of layers.0.feed_forward.router")
    theirs = tiny("mixtral")
    theirs.config.output_router_logits = True  # their loss, of all tokens
    refused = partial(parallelize, theirs, mesh, activation_checkpoint=tiles)
    raises(ConfigError, refused, "output_router_logits of model.layers.0.mlp follow")
    theirs.config.output_router_logits = False
    refused()


class Viewed(nn.Linear):
    """Views its input by rows, as the mixtures of transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(-1, x.shape[-1])).view(x.shape)


def test_a_tile_of_several_rows_can_be_viewed() -> None:
    torch.manual_seed(0)
    whole = Viewed(8, 8).double()
    tiled = copy.deepcopy(whole)
    tile(tiled, "mlp", 2)
    values = torch.randn(3, 2 * ROWS, 8, dtype=torch.float64)
    given, same = (values.clone().requires_grad_() for _ in range(2))
    for module, x in ((whole, given), (tiled, same)):
        module(x).square().sum().backward()
    check({"input": same.grad}, {"input": given.grad}, "input")
    check(gradients(tiled), gradients(whole), "weights")
