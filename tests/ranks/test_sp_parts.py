"""An attention sublayer whose heads are exchanged in parts, compared with one process and with the
exchange in one piece, by value in fp64."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

import model_zoo
from internsp.base.trace import Trace
from internsp.config import ActivationCheckpointConfig, SequenceConfig, WeightParallelConfig
from internsp.errors import CollectiveError, LayoutError
from internsp.layers import ParallelLinearWithCommExt
from internsp.mesh import ParallelMesh
from internsp.parallel.parallelize import parallelize
from internsp.sp import DistributedAttention, SequenceLayout
from internsp.sp.gloo import fused, messages
from internsp.sp.gloo.stages import QKV, exchange_order
from internsp.sp.heads import NO_ROTATION
from tests.support.compare import TOLERANCE, gradients
from tests.support.few import some
from tests.support.parity import Case, batch, run_case
from tests.support.ranks import ranks

EACH = {"coalesce_bytes": 0}
SIZES: dict[str, Any] = {"heads": 4, "head_dim": 4, "kv_heads": 2, "bias": True, "layers": 2}
CASES = {
    "grouped, biases, packed": Case(
        2, 2, 13, model=SIZES, weights=EACH, packed=True
    ),
    "one key head, qkv biases, full": Case(
        2, 2, 11, 2, {**SIZES, "kv_heads": 1, "bias": False, "qkv_bias": True},
        checkpoint={"mode": "full"},
    ),
    "reentrant, rolling": Case(
        2, 2, 9, 2, {}, {"gather_before": "rolling", **EACH}, {"mode": "full", "reentrant": True}
    ),
    "selective, before attention": Case(
        1, 2, 10, 2, SIZES, {"gather_before": "attention"}, {"mode": "selective"}
    ),
    "entry, a rank without tokens": Case(
        2, 2, 8, weights={"gather_before": "qkv"}, one_rank_without_tokens=True
    ),
    "fused projection": Case(
        2, 2, 9, 2, {"family": "internlm2", "heads": 4, "head_dim": 4, "kv_heads": 2}, packed=True
    ),
    "fused projection, selective": Case(
        2, 2, 9, 2, {"family": "internlm2"}, checkpoint={"mode": "selective"}
    ),
    "as a whole": Case(
        2, 2, 13, 2, {"heads": 4, "head_dim": 4, "kv_heads": 2, "bias": True},
        {"exchange_in_parts": False, **EACH}, packed=True,
    ),
    "as a whole, selective": Case(
        2, 2, 10, 2, weights={"exchange_in_parts": False}, checkpoint={"mode": "selective"}
    ),
}  # fmt: skip
FOUR = {
    "one head a rank": Case(4, 4, 14, model={"heads": 4, "head_dim": 4}, packed=True),
    "two key heads for four ranks": Case(
        2, 4, 9, 2, {"heads": 4, "head_dim": 4, "kv_heads": 2, "bias": True}
    ),
    "ranks without heads": Case(4, 4, 7, model={"heads": 2}, checkpoint={"mode": "selective"}),
    "ranks without positions": Case(2, 4, 3, 2, {"heads": 6, "kv_heads": 2, "head_dim": 2}),
}


@pytest.mark.parametrize("name", some(CASES, 5))
@ranks(2)
def test_loss_every_gradient_and_a_step_equal_one_process(name: str) -> None:
    loss, gradient = run_case(CASES[name])
    assert loss <= TOLERANCE
    assert gradient <= TOLERANCE


@pytest.mark.thorough(3)
@pytest.mark.parametrize("name", some(FOUR, 2))
@ranks(4)
def test_so_they_do_with_as_many_ranks_as_heads_and_more(name: str) -> None:
    loss, gradient = run_case(FOUR[name])
    assert loss <= TOLERANCE
    assert gradient <= TOLERANCE


# Compared with the exchange in one piece, which the cases above compare with one process.

MODEL = Case(length=13, model=SIZES).model_config()
Prepare = Callable[[nn.Module], None]


def nothing(model: nn.Module) -> None:
    """As it is."""


def build(
    mesh: ParallelMesh, in_parts: bool, before: Prepare = nothing, **more: Any
) -> tuple[nn.Module, Trace]:
    """The same model each time; ``before`` changes it before it is parallelized."""
    generator = torch.Generator().manual_seed(0)
    model = model_zoo.build(MODEL, dtype=torch.float64, generator=generator)
    before(model)
    trace = Trace(enabled=True)
    checkpoint = ActivationCheckpointConfig(mode=more.pop("mode", "none"))
    parallelize(
        model, mesh, WeightParallelConfig(**({"min_shard_elements": 24} | more)),
        sequence=SequenceConfig(exchange_in_parts=in_parts), trace=trace,
        activation_checkpoint=checkpoint,
    )  # fmt: skip
    return model, trace


def step(model: nn.Module, mesh: ParallelMesh, length: int = 13, seed: int = 0) -> Tensor:
    """A forward, and a backward into ``.grad``; the loss of this rank's tokens."""
    ids, boundaries, _ = batch(Case(length=length, packed=True, seed=seed), 1, 0)
    layout = SequenceLayout.create(
        ids, rank=mesh.sequence_rank, size=mesh.sequence, boundaries=boundaries
    )
    loss, _ = model(layout.input_ids, layout=layout, labels=layout.labels)
    if loss.requires_grad:
        loss.backward()
    return loss.detach()  # type: ignore[no-any-return]


def close(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> None:
    assert found.keys() == wanted.keys()
    assert any(value is not None for value in wanted.values())
    for name, value in wanted.items():  # as shards: torch 2.11 cannot tell how DTensors differ
        one, other = (v.to_local() if isinstance(v, DTensor) else v for v in (found[name], value))
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10, msg=name)


def meshed(weight: int = 2, sequence: int = 2) -> ParallelMesh:
    return ParallelMesh.create(
        weight=weight, sequence=sequence, device_type="cpu", timeout_seconds=20
    )


def attentions(model: nn.Module) -> list[DistributedAttention]:
    return [module for module in model.modules() if isinstance(module, DistributedAttention)]


@ranks(2)
def test_messages_and_waits_are_those_of_the_order_and_none_is_left() -> None:
    mesh = meshed()
    model, trace = build(mesh, True)
    for _ in range(2):
        trace.clear()
        step(model, mesh)
    wanted = exchange_order(mesh.sequence_rank, 2)
    stages = {"forward": [wanted.heads, wanted.output]}
    stages["backward"] = [wanted.output_gradient, wanted.heads_gradient]
    for module in attentions(model):
        for phase, lists in stages.items():
            events = [e for e in trace.events if e.unit == module.unit and e.phase == phase]
            seen = [(e.kind, e.weight) for e in events if e.kind in ("A2A", "A2A_WAIT")]
            names = {"SEND": "A2A", "WAIT": "A2A_WAIT"}
            assert seen == [(names[a.kind], a.what) for x in lists for a in x if a.kind in names]
    own = messages.peer_exchanges(attentions(model)[0].group)  # type: ignore[arg-type]
    assert len(own._in_flight) <= 1  # at most the next expected one


@ranks(2)
def test_a_step_has_the_same_bits_without_overlap() -> None:
    mesh = meshed()
    found = []
    for overlap in (True, False):
        model, _ = build(mesh, True, overlap=overlap)
        found.append((step(model, mesh), gradients(model)))
    assert torch.equal(found[0][0], found[1][0])
    for name, value in found[0][1].items():
        assert value is not None
        assert torch.equal(value.to_local(), found[1][1][name].to_local()), name  # type: ignore[union-attr, attr-defined]


def hook_on(path: str, only: int | None) -> Prepare:
    """A forward hook on a module of the first block, on one rank or on all; it records shapes."""

    def prepare(model: nn.Module) -> None:
        model.seen = []  # type: ignore[assignment]
        if only is None or dist.get_rank() == only:
            module = model.get_submodule(path)
            module.register_forward_hook(lambda *given: model.seen.append(tuple(given[2].shape)))  # type: ignore[union-attr, operator]

    return prepare


@pytest.mark.parametrize("only", [None, 0, 1])
@pytest.mark.parametrize("path", ["wq", "wv", "wo", "attend"])
@ranks(2)
def test_a_hook_of_a_users_sees_what_it_would_on_one_rank_too(path: str, only: int | None) -> None:
    mesh = meshed()
    wanted, _ = build(mesh, False)
    model, _ = build(mesh, True, hook_on(f"layers.0.attention.{path}", only))
    assert torch.allclose(step(model, mesh), step(wanted, mesh), atol=1e-12)
    close(gradients(model), gradients(wanted))
    length = 7 if dist.get_rank() == 0 else 6
    shapes = {"wq": (1, length, 16), "wv": (1, length, 8), "wo": (1, length, 12)}
    here = only is None or dist.get_rank() == only
    assert model.seen == [shapes.get(path, (1, length, 4, 4))] * here


class Adapter(nn.Module):
    """A linear layer and a small one added to it, as in LoRA."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        sizes: Any = base.in_features, base.out_features
        self.beside = nn.Linear(*sizes, bias=False, dtype=torch.float64)
        nn.init.constant_(self.beside.weight, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base(x) + self.beside(x)
        return made


class Doubled(ParallelLinearWithCommExt):
    """A user-defined layer."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def adapt(model: nn.Module) -> None:
    for block in model.layers:  # type: ignore[union-attr]
        for name in ("wq", "wo"):
            setattr(block.attention, name, Adapter(getattr(block.attention, name)))  # type: ignore[union-attr]
    for name, p in model.named_parameters():
        p.requires_grad_("beside" in name)


def double(model: nn.Module) -> None:
    for block in model.layers:  # type: ignore[union-attr]
        for name in ("wk", "wo"):
            getattr(block.attention, name).__class__ = Doubled  # type: ignore[union-attr]


def patch(model: nn.Module) -> None:
    """Its forward is replaced, as by a library that quantizes or counts."""
    for block in model.layers:  # type: ignore[union-attr]
        linear = block.attention.wv  # type: ignore[union-attr]
        inner = linear.forward
        linear.forward = lambda x, inner=inner: inner(x) * 3  # type: ignore[union-attr, misc]


class Passing(nn.Module):
    """A wrapper that forwards attributes of the layer inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x).tanh()
        return made


def wrap_in(*names: str) -> Prepare:
    def prepare(model: nn.Module) -> None:
        for block in model.layers:  # type: ignore[union-attr]
            for name in names:
                setattr(block.attention, name, Passing(getattr(block.attention, name)))  # type: ignore[union-attr]

    return prepare


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


def parametrize(model: nn.Module) -> None:
    for block in model.layers:  # type: ignore[union-attr]
        for linear in (block.attention.wq, block.attention.wo):  # type: ignore[union-attr]
            nn.utils.parametrize.register_parametrization(linear, "weight", Halved())  # type: ignore[arg-type]


def checkpoint_inside(model: nn.Module) -> None:
    for block in model.layers:  # type: ignore[union-attr]
        for name in ("wq", "wo"):
            inner = getattr(block.attention, name)  # type: ignore[union-attr]
            setattr(block.attention, name, checkpoint_wrapper(inner))  # type: ignore[union-attr]


def write_into_results(model: nn.Module) -> None:
    for block in model.layers:  # type: ignore[union-attr]
        block.attention.register_forward_hook(lambda *given: given[2].mul_(2))  # type: ignore[union-attr]


def freeze(*names: str) -> Prepare:
    def prepare(model: nn.Module) -> None:
        for name, p in model.named_parameters():
            p.requires_grad_(not any(part in name for part in names))

    return prepare


CHANGES = {
    "adapters": adapt, "own layers": double, "other forwards": patch, "wq frozen": freeze("wq"),
    "wrapped": wrap_in("wq", "wv"), "out-projection wrapped": wrap_in("wo"),
    "parametrized": parametrize, "checkpoints inside": checkpoint_inside,
    "results written into": write_into_results,
    "values frozen": freeze("wv.", "wo.bias"), "all but biases frozen": freeze("weight"),
    "first block frozen": freeze("layers.0", "embed"), "attention frozen": freeze("attention"),
}  # fmt: skip


@pytest.mark.parametrize("name", some(CHANGES, 6))
@ranks(2)
def test_changed_models_compute_as_with_the_exchange_as_a_whole(name: str) -> None:
    mesh = meshed()
    wanted, _ = build(mesh, False, CHANGES[name])
    model, _ = build(mesh, True, CHANGES[name])
    for seed in range(2):
        losses = [step(each, mesh, seed=seed) for each in (model, wanted)]
        torch.testing.assert_close(*losses, atol=1e-12, rtol=1e-10)
    close(gradients(model), gradients(wanted))


@pytest.mark.thorough(2)
@pytest.mark.unmeasured
@pytest.mark.parametrize("mode", some(["selective", "none", "full"], 1))
@ranks(2)
def test_lengths_that_vary_and_evaluations_between_change_nothing(mode: str) -> None:
    mesh = meshed()
    found = []
    for in_parts in (False, True):
        model, _ = build(mesh, in_parts, mode=mode)
        losses = []
        for index, length in enumerate((13, 9, 13, 5, 13)):
            if index % 2:
                with torch.no_grad():
                    losses.append(step(model, mesh, 7, index))
            losses.append(step(model, mesh, length, index))
        found.append((torch.stack(losses), gradients(model)))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-12, rtol=1e-10)
    close(found[1][1], found[0][1])


@ranks(2)
def test_training_goes_on_with_receives_that_an_evaluation_in_inference_mode_posted() -> None:
    mesh = meshed()
    model, _ = build(mesh, True)
    wanted, _ = build(mesh, True)
    for seed in range(3):
        losses = [step(each, mesh, seed=seed) for each in (model, wanted)]
        torch.testing.assert_close(*losses, atol=0.0, rtol=0.0)
        with torch.inference_mode():  # the second one expects a forward after it
            assert torch.equal(step(model, mesh, seed=9), step(model, mesh, seed=9))
    close(gradients(model), gradients(wanted))


@ranks(2)
def test_what_an_attention_of_ones_own_returns_may_be_written_into() -> None:
    ids = torch.zeros(1, 6, dtype=torch.long)
    layout = SequenceLayout.create(ids, rank=dist.get_rank(), size=2)
    found = []
    for in_parts in (False, True):
        attend = DistributedAttention(2, 2, 4)
        attend.attach(dist.group.WORLD, in_parts=in_parts)
        torch.manual_seed(dist.get_rank())
        given = [torch.randn(1, 3, 2, 4, dtype=torch.float64).requires_grad_() for _ in QKV]
        out = attend(*given, layout)
        out = out.mul_(2) if in_parts else out * 2
        out.square().sum().backward()
        found.append([out.detach(), *(x.grad for x in given)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10)


def own_sublayer(out_features: int = 16) -> nn.Module:
    """An attention of four heads of four, between linear layers, attached to all ranks."""
    torch.manual_seed(0)
    made = nn.Module()
    made.projections = nn.ModuleList(
        ParallelLinearWithCommExt(16, out_features, False, dtype=torch.float64) for _ in QKV
    )
    made.out = ParallelLinearWithCommExt(16, 16, False, dtype=torch.float64)
    made.attend = DistributedAttention(4, 4, 4)
    made.attend.attach(dist.group.WORLD, unit="mine", in_parts=True)
    return made


def run_own(own: Any, x: Tensor, turn: Any = NO_ROTATION) -> Tensor:
    made: Tensor = own.attend.sublayer(x, own.projections, (turn,) * 3, own.out)
    return made


@ranks(2)
def test_sizes_and_dtypes_that_do_not_fit_are_refused_by_name() -> None:
    x = torch.randn(1, 3, 16, dtype=torch.float64)
    # Rows beyond those of the heads would be ignored silently.
    with pytest.raises(LayoutError, match=r"projection of q of mine has 24 rows .* give it 16"):
        run_own(own_sublayer(24), x)
    own = own_sublayer()
    own.out = ParallelLinearWithCommExt(20, 16, False, dtype=torch.float64)
    with pytest.raises(LayoutError, match=r"out-projection of mine has 20 .* give it 16"):
        run_own(own, x)
    # gloo aborts a process that receives more bytes than it expects.
    narrow = (Tensor.float, Tensor.double)
    with pytest.raises(LayoutError, match=r"q of mine became torch\.float32 where torch\.float64"):
        run_own(own_sublayer(), x, narrow)


@ranks(2)
def test_projections_may_have_another_dtype_than_their_input() -> None:
    own = own_sublayer()
    x = torch.randn(1, 3, 16)
    projections = [lambda x, p=p: p(x.double()) for p in own.projections]
    rotations = (NO_ROTATION,) * 3
    found = own.attend.sublayer(x, projections, rotations, own.out)
    torch.testing.assert_close(found, run_own(own, x.double()), atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("steps", [8, pytest.param(60, marks=pytest.mark.thorough(4))])
@pytest.mark.unmeasured
@ranks(2)
def test_blocks_that_are_left_out_leave_no_more_receives_posted_than_stages_of_a_kind(
    steps: int,
) -> None:
    chosen, losses = torch.Generator().manual_seed(1), []
    blocks = [own_sublayer() for _ in range(4)]
    for number, block in enumerate(blocks):
        block.attend.unit = f"block {number}"  # type: ignore[union-attr]
    whole = own_sublayer()
    whole.attend.parts = None  # type: ignore[union-attr]
    most = 0
    for step in range(steps):
        x = torch.randn(1, 3, 16, dtype=torch.float64, requires_grad=True)
        y, z = x, x
        for block in blocks:
            if torch.rand(1, generator=chosen) < 0.5:
                y, z = y + run_own(block, y), z + run_own(whole, z)
        losses = [torch.autograd.grad(one.square().sum(), x)[0] for one in (y, z)]
        torch.testing.assert_close(*losses, atol=1e-12, rtol=1e-10, msg=f"step {step}")
        flying = messages.peer_exchanges(blocks[0].attend.group)._in_flight  # type: ignore[union-attr, arg-type]
        most = max(most, len(flying))
    assert 0 < most <= 4


@pytest.mark.thorough(1)
@ranks(2)
def test_two_models_on_one_mesh_and_a_graph_that_is_run_twice() -> None:
    mesh = meshed(1)
    wanted, _ = build(mesh, False)
    one, _ = build(mesh, True)
    two, _ = build(mesh, True)
    ids, _, _ = batch(Case(length=13), 1, 0)
    layout = SequenceLayout.create(ids, rank=mesh.sequence_rank, size=2)
    losses = [
        model(layout.input_ids, layout=layout, labels=layout.labels)[0]
        for model in (one, two, wanted)
    ]
    for model_loss in losses:  # in another order than that of their forwards, and one twice
        model_loss.backward(retain_graph=True)
    losses[0].backward()
    close(gradients(two), gradients(wanted))
    close(gradients(one), {n: 2 * g for n, g in gradients(wanted).items() if g is not None})


@pytest.mark.thorough(1)
@ranks(2)
def test_after_an_error_that_all_ranks_met_the_next_step_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = meshed()
    wanted, _ = build(mesh, False)
    model, _ = build(mesh, True)
    step(model, mesh)
    model.zero_grad()

    def broken(*_: Any) -> Tensor:
        raise MemoryError("no memory for attention")

    with monkeypatch.context() as patched:
        patched.setattr(DistributedAttention, "_local", broken)
        with pytest.raises(MemoryError):
            step(model, mesh)
    for _ in range(2):
        model.zero_grad()
        step(model, mesh)
    step(wanted, mesh)
    close(gradients(model), gradients(wanted))


@ranks(2)
def test_after_an_error_and_the_end_of_its_model_another_model_is_right() -> None:
    """What the failed exchange has sent is in flight while the model goes."""
    mesh = meshed()
    wanted, _ = build(mesh, False)
    step(wanted, mesh)
    for _ in range(8):
        model, _ = build(mesh, True)
        attend = attentions(model)[0]
        q, k = (
            torch.ones(8, 64, heads, attend.head_dim, dtype=torch.float64)
            for heads in (attend.heads, attend.kv_heads)
        )
        with pytest.raises(LayoutError, match=r"became torch\.float32"):
            attend(q, k, k.float())
        del model, attend
        gc.collect()
    model, _ = build(mesh, True)
    step(model, mesh)
    close(gradients(model), gradients(wanted))


@ranks(2)
def test_a_rank_whose_peer_has_gone_is_told_which_attention_it_waited_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Module()
    model.attend = attend = DistributedAttention(2, 2, 4)
    group = dist.new_group([0, 1])
    attend.attach(group, unit="layers.3.attention", in_parts=True)
    given = [torch.ones(1, 3, 2, 4, dtype=torch.float64) for _ in QKV]
    attend(*given)
    if dist.get_rank() == 1:
        from internsp.failure.guard import close_connections

        close_connections(group)
        return
    for _ in range(3):  # it waits; then it starts on a connection known to be gone
        with pytest.raises(CollectiveError, match=r"layers\.3\.attention"):
            attend(*given)


# Deliberate faults: each must be detected.


def shifted(shape: messages.ExchangeShape, rank: int) -> slice:
    """A peer's positions are stored in another peer's range."""
    return REAL_AT(shape, (rank + 1) % 2)


def own_only(parts: Any, role: str, *rest: Any) -> None:
    """Gradients of the peers' heads are dropped."""


REAL_AT, EMPTY = messages.ExchangeShape.positions, torch.empty


def poisoned(*sizes: Any, **options: Any) -> Tensor:
    made = EMPTY(*sizes, **options)
    if made.is_floating_point():
        made.detach().fill_(torch.nan)
    return made


def the_order_of_heads_is_wrong(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(messages.ExchangeShape, "positions", shifted)


def the_peers_gradients_are_dropped(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(messages.ExchangeShape, "peer_heads", lambda *_: [])


def nothing_is_turned_back(patched: pytest.MonkeyPatch) -> None:
    real = fused.FusedSublayer.project
    patched.setattr(
        fused.FusedSublayer, "project",
        lambda self, x, linears, rotations: real(
            self, x, linears, [(forward, forward) for forward, _ in rotations]
        ),
    )  # fmt: skip


def sums_of_shared_heads_are_lost(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(messages.ExchangeShape, "has_shared_heads", lambda *_: False)


def nothing_is_waited_for(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(messages.PeerExchange, "wait", lambda stage: None)


FAULTS = [
    the_order_of_heads_is_wrong, the_peers_gradients_are_dropped, nothing_is_turned_back,
    nothing_is_waited_for,
]  # fmt: skip


def seen(
    mesh: ParallelMesh, length: int, fault: Callable[[pytest.MonkeyPatch], None],
    patched: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Gradients are right without the fault and wrong with it."""
    wanted, _ = build(mesh, False)
    step(wanted, mesh, length)
    # Receive buffers that are not waited for must hold NaN, not earlier contents.
    patched.setattr(messages.torch, "empty", poisoned)
    model, _ = build(mesh, True)
    step(model, mesh, length)
    close(gradients(model), gradients(wanted))
    fault(patched)
    model.zero_grad()
    step(model, mesh, length)
    with pytest.raises(AssertionError):
        close(gradients(model), gradients(wanted))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@ranks(2)
def test_a_fault_that_is_put_in_is_seen(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        seen(meshed(1), 12, fault, patched)


@pytest.mark.thorough(1)
@ranks(4)
def test_a_key_head_of_several_ranks_has_the_sum_of_their_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        seen(meshed(1, 4), 13, sums_of_shared_heads_are_lost, patched)
