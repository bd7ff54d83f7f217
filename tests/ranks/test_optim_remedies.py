"""Every remedy that an error of ``internsp/optim`` and ``internsp/values`` names is run.

Each row of the table makes the mistake, reads the text, and does what the text says. The texts are
read from the source too: one that says what to do and is in no row fails the test.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import internsp
from internsp.config import WeightParallelConfig
from internsp.optim import LossScaler, ZeroOptimizer, step_together
from internsp.parallel.parallelize import initialize, parallelize
from tests.ranks.test_zero_state import Averaging
from tests.support.meshes import mesh_of
from tests.support.models import Tiny, Twin
from tests.support.pipeline import Case, batches
from tests.support.pipeline import make as make_pipeline
from tests.support.ranks import ranks
from tests.support.remedies import advice
from tests.unit.test_scaler import Lamb

ROOMS = ["optim", "values"]
AdamW, SGD = torch.optim.AdamW, torch.optim.SGD
Act = Callable[[], Any]
Pair = tuple[Act, list[Act]]


@dataclass
class Row:
    """A mistake and what the error's text says to do.

    Attributes:
        text: a part of the text as it stands in the source (a place that is filled in: ``*``).
        make: returns the mistake, and the remedies in the order of the text.
        world: number of ranks.
    """

    text: str
    make: Callable[[Path], Pair]
    world: int = 1


ROWS: dict[str, Row] = {}


def row(text: str, world: int = 1) -> Callable[[Callable[[Path], Pair]], Callable[[Path], Pair]]:
    """Decorator: a row named like the function."""

    def add(make: Callable[[Path], Pair]) -> Callable[[Path], Pair]:
        ROWS[make.__name__] = Row(text, make, world)
        return make

    return add


def two_layers() -> nn.Module:
    return Tiny(layers=2)


def tiny(make: Callable[[], nn.Module] = two_layers, **options: Any) -> Twin:
    return Twin(make, mesh_of(2 if dist.get_world_size() > 1 else 1), **options)


def train(twin: Twin, optimizer: Any, **options: Any) -> None:
    twin.ours(*twin.batch()[1], **options).backward()
    optimizer.step()
    optimizer.zero_grad()


def trains(twin: Twin, *args: Any, **options: Any) -> Act:
    """Make a ``ZeroOptimizer`` and train with it."""
    return lambda: train(twin, ZeroOptimizer(twin.communicator, *(args or (SGD,)), **options))


# the optimizer


@row("give it what parallelize() returned, and the optimizer's class")
def communicator_first(_: Path) -> Pair:
    twin = tiny()
    wrong: Any = ZeroOptimizer
    return lambda: wrong(twin.ours.parameters(), SGD), [trains(twin, lr=0.1)]


@row("give one optimizer all parameters and use param_groups")
def one_optimizer(_: Path) -> Pair:
    twin, other = tiny(), tiny()
    ZeroOptimizer(twin.communicator, SGD, lr=0.1)
    first, *rest = other.ours.parameters()
    groups = [{"params": [first], "lr": 0.2}, {"params": rest}]
    return trains(twin, lr=0.1), [trains(other, lr=0.1, param_groups=groups)]


@row("call load_state_dict() with a state_dict() whose state is empty")
def state_anew(_: Path) -> Pair:
    twin = tiny()
    optimizer: Any = ZeroOptimizer(twin.communicator, AdamW, lr=0.1)
    train(twin, optimizer)
    with pytest.raises(TypeError):
        optimizer.state[next(iter(optimizer.state))] = {}
    with pytest.raises(TypeError):  # it would be dropped
        next(iter(optimizer.state.values()))["exp_avg"] = None
    with pytest.raises(AttributeError):
        optimizer.state.clear()

    def anew() -> None:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
        assert all(values["exp_avg"] is None for values in optimizer.state.values())
        train(twin, optimizer)

    return lambda: setattr(optimizer, "state", {}), [anew]


@row("groups. Copy or save its state_dict()")
def a_copy(_: Path) -> Pair:
    twin = tiny()
    optimizer: Any = ZeroOptimizer(twin.communicator, AdamW, lr=0.1)
    train(twin, optimizer)
    with pytest.raises(TypeError, match="its copy would share buckets"):
        pickle.dumps({"optimizer": optimizer})

    def kept() -> None:
        before = copy.deepcopy(optimizer.state_dict())
        train(twin, optimizer)
        optimizer.load_state_dict(before)
        torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)

    return lambda: copy.deepcopy(optimizer), [kept]


@row("Give all ranks the same: a schedule that follows a loss", world=2)
def settings_of_all(_: Path) -> Pair:
    twin = tiny()
    optimizer = ZeroOptimizer(twin.communicator, SGD, lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    losses = [1.0, 0.5 + dist.get_rank()]  # worse on rank 1 alone

    def followed(all_ranks: bool) -> None:
        for value in losses:
            loss = torch.tensor(value)
            if all_ranks:
                optimizer.param_groups[0]["lr"] = 0.1
                dist.all_reduce(loss)
            schedule.step(loss)
        before = [p.full_tensor() for p in twin.ours.parameters()]  # type: ignore[operator]
        try:
            train(twin, optimizer)
        finally:
            after = [p.full_tensor() for p in twin.ours.parameters()]  # type: ignore[operator]
            assert all(map(torch.equal, before, after)) != all_ranks

    return partial(followed, False), [partial(followed, True)]


@row("give a positive number, or None")
def positive_norm(_: Path) -> Pair:
    twin, other = tiny(), tiny()
    return trains(twin, lr=0.1, max_grad_norm=0.0), [
        trains(twin, lr=0.1, max_grad_norm=1.0), trains(other, lr=0.1, max_grad_norm=None)
    ]  # fmt: skip


@row("Declare whole_matrix = true (of ZeroOptimizer, or of its group in param_groups)")
def whole_matrix(_: Path) -> Pair:
    twin, other = tiny(), tiny()
    parameters = list(other.ours.parameters())
    group = {"params": parameters, "optimizer": Lamb, "lr": 0.1, "whole_matrix": True}
    return trains(twin, Lamb, lr=0.1), [
        trains(twin, Lamb, lr=0.1, whole_matrix=True), trains(other, SGD, param_groups=[group])
    ]  # fmt: skip


@row("it is elementwise, leave whole_matrix out")
def elementwise(_: Path) -> Pair:
    twin = tiny()
    return trains(twin, AdamW, whole_matrix=True), [trains(twin, AdamW)]


@row("Take it without a ZeroOptimizer: *(model.parameters(), ...) in a plain loop")
def combines_parameters(_: Path) -> Pair:
    twin = tiny()
    return trains(twin, Averaging, lr=0.1), [
        lambda: train(twin, Averaging(twin.ours.parameters(), lr=0.1))
    ]


class Text(SGD):
    """Adds a text to its group in its first step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["word"] = "stepped"
        return super().step(closure)


class TextAtFirst(Text):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.defaults["word"] = ""
        for group in self.param_groups:
            group.setdefault("word", "")


@row("could not be saved: give it one among the class's defaults")
def added_to_the_group(_: Path) -> Pair:
    twin = tiny()
    return trains(twin, Text, lr=0.1), [trains(twin, TextAtFirst, lr=0.1)]


@row("unfreeze some (requires_grad_(True)), or give those that will be trained later in")
def nothing_trained(_: Path) -> Pair:
    twin, other = tiny(), tiny()
    for each in (twin, other):
        each.ours.requires_grad_(False)

    def later() -> None:
        zero = ZeroOptimizer(other.communicator, SGD, param_groups=other.ours.parameters(), lr=0.1)
        other.ours.head.requires_grad_(True)
        train(other, zero)

    return trains(twin, lr=0.1), [
        lambda: (twin.ours.requires_grad_(True), trains(twin, lr=0.1)()), later
    ]  # fmt: skip


@row("param_groups holds dictionaries and parameters: give one of the two")
def one_of_the_two(_: Path) -> Pair:
    twin, other = tiny(), tiny()
    first, *rest = twin.ours.parameters()
    return trains(twin, lr=0.1, param_groups=[{"params": rest}, first]), [
        trains(twin, lr=0.1, param_groups=[{"params": rest}, {"params": first}]),
        trains(other, lr=0.1, param_groups=list(other.ours.parameters())),
    ]


@row("take the parameters from the model after parallelize()")
def after_parallelize(_: Path) -> Pair:
    model = Tiny(layers=2)
    before = list(model.parameters())
    communicator = parallelize(model, mesh_of(1), WeightParallelConfig(min_shard_elements=20))
    make = partial(ZeroOptimizer, communicator, SGD, lr=0.1)
    return lambda: make(param_groups=before), [lambda: make(param_groups=model.parameters())]


@row("add them (to param_groups, or later by add_param_group), or freeze them")
def in_no_group(_: Path) -> Pair:
    twins = [tiny() for _ in range(3)]
    first, *rest = twins[0].ours.parameters()

    def later() -> None:
        own, *others = twins[1].ours.parameters()
        own.requires_grad_(False)
        zero = ZeroOptimizer(twins[1].communicator, SGD, param_groups=others, lr=0.1)
        train(twins[1], zero)
        own.requires_grad_(True)
        zero.add_param_group({"params": own})
        train(twins[1], zero)

    def frozen() -> None:
        own, *others = twins[2].ours.parameters()
        own.requires_grad_(False)
        trains(twins[2], lr=0.1, param_groups=others)()

    return trains(twins[0], lr=0.1, param_groups=rest), [
        trains(twins[0], lr=0.1, param_groups=[first, *rest]), later, frozen
    ]  # fmt: skip


@row("freeze what is not to be stepped (requires_grad_(False)), add others by add_param_group")
def taken_out_of_a_group(_: Path) -> Pair:
    twin = tiny()
    zero = ZeroOptimizer(twin.communicator, SGD, lr=0.1)
    twin.ours(*twin.batch()[1]).backward()
    held = zero.param_groups[0]["params"]
    zero.param_groups[0]["params"] = held[:-1]

    def freeze() -> None:
        zero.param_groups[0]["params"] = held
        held[-1].requires_grad_(False)
        zero.zero_grad()
        before = held[-1].detach().clone()
        train(twin, zero)
        assert torch.equal(held[-1].to_local(), before.to_local())

    def add() -> None:
        other = tiny()
        *rest, last = other.ours.parameters()
        last.requires_grad_(False)
        later = ZeroOptimizer(other.communicator, SGD, param_groups=rest, lr=0.1)
        later.add_param_group({"params": [last.requires_grad_(True)]})
        train(other, later)

    return zero.step, [freeze, add]


@row("takes gradients from backward only; change the loss instead")
def set_gradient(_: Path) -> Pair:
    twin = tiny()
    zero = ZeroOptimizer(twin.communicator, SGD, lr=0.1)
    weight: Any = twin.ours.head.weight

    def change_loss() -> None:
        (0.5 * twin.ours(*twin.batch()[1])).backward()
        zero.step()

    return lambda: setattr(weight, "grad", torch.zeros_like(weight)), [change_loss]


@row("Use optimizer.gather_gradients() to look at gradients, max_grad_norm to clip, zero_grad()")
def read_gradient(_: Path) -> Pair:
    twin = tiny()
    zero = ZeroOptimizer(twin.communicator, SGD, lr=0.1)
    weight: Any = twin.ours.head.weight
    twin.ours(*twin.batch()[1]).backward()

    def clip() -> None:
        zero.max_grad_norm = 0.5
        zero.step()

    def look() -> None:
        assert zero.gather_gradients()["head.weight"].any()

    return lambda: weight.grad.sum(), [look, clip, zero.zero_grad]


class Complex(Tiny):
    def __init__(self, real: bool) -> None:
        super().__init__(layers=2)
        turn = torch.tensor([0.5 + 1j, 1.0])
        self.turn = nn.Parameter(torch.view_as_real(turn).clone() if real else turn)

    def blocks(self, x: Tensor) -> Tensor:
        return super().blocks(x + self.turn.abs().sum())


@row("hold its torch.view_as_real in the module, or take a torch optimizer in a plain loop")
def complex_parameter(_: Path) -> Pair:
    def made(real: bool) -> tuple[nn.Module, Any]:
        model = Complex(real)
        return model, parallelize(model, mesh_of(1), WeightParallelConfig(min_shard_elements=20))

    def step(model: nn.Module, optimizer: Any) -> None:
        model(torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.long)).backward()
        optimizer.step()

    model, communicator = made(False)
    real, of_real = made(True)
    return lambda: ZeroOptimizer(communicator, SGD, lr=0.1), [
        lambda: step(real, ZeroOptimizer(of_real, SGD, lr=0.1)),
        lambda: step(model, SGD(model.parameters(), lr=0.1)),
    ]


@row("Or give it to an elementwise optimizer: in a group of param_groups with")
def no_matrix(_: Path) -> Pair:
    twin = tiny()
    matrices = [p for p in twin.ours.parameters() if p.ndim == 2]
    rest = {"params": [p for p in twin.ours.parameters() if p.ndim != 2], "optimizer": AdamW}
    return trains(twin, torch.optim.Muon, lr=0.1), [
        trains(twin, torch.optim.Muon, lr=0.1, param_groups=[{"params": matrices}, rest])
    ]


@row("from where matrices cannot be sent yet: do not offload it")
def offloaded_matrix(_: Path) -> Pair:
    twin, other = tiny(offload=("optimizer",)), tiny()

    def muon(twin: Twin) -> Act:
        matrices = [p for p in twin.ours.parameters() if p.ndim == 2]
        rest = {"params": [p for p in twin.ours.parameters() if p.ndim != 2], "optimizer": AdamW}
        return trains(twin, torch.optim.Muon, lr=0.1, param_groups=[{"params": matrices}, rest])

    return muon(twin), [muon(other)]


class Stack(Tiny):
    def __init__(self) -> None:
        super().__init__(layers=2)
        self.stack = nn.Parameter(torch.ones(2, 6, 6))

    def blocks(self, x: Tensor) -> Tensor:
        return super().blocks(x @ self.stack.sum(0))


@row("it on dimension 0 (a rule with shard_dim = 0, docs/howto/rules.md)", world=2)
def stack_on_another_dimension(_: Path) -> Pair:
    def made(dim: int) -> Act:
        twin = tiny(Stack, rules=[{"match": "stack", "shard_dim": dim}])
        rest = [p for p in twin.ours.parameters() if p.ndim != 3]
        groups = [
            {"params": [twin.ours.get_parameter("stack")]}, {"params": rest, "optimizer": AdamW}
        ]  # fmt: skip
        return trains(twin, torch.optim.Muon, lr=0.1, param_groups=groups)

    return made(1), [made(0)]


@row("take their parts, or ZeroOptimizer.state_dict(), which gathers them")
def slices(_: Path) -> Pair:
    twin = tiny()
    zero = ZeroOptimizer(twin.communicator, AdamW)
    train(twin, zero)
    own = zero.local_state_dict()["state"]["head.weight"]["exp_avg"]
    index = next(
        i for i, p in enumerate(zero.param_groups[0]["params"]) if p is twin.ours.head.weight
    )
    return lambda: own + 1, [
        lambda: [part + 1 for part in own.parts.values()],
        lambda: zero.state_dict()["state"][index]["exp_avg"] + 1,
    ]


def _swapped(*args: Any, **options: Any) -> Callable[[Path], Pair]:
    def make(folder: Path) -> Pair:
        twin = tiny()
        zero = ZeroOptimizer(twin.communicator, *args, **options)
        train(twin, zero)
        state = zero.local_state_dict()
        mine: list[Any] = [None, None]
        parts = {
            name: {kind: v.parts for kind, v in entry.items() if hasattr(v, "parts")}
            for name, entry in state["state"].items()
        }
        dist.all_gather_object(mine, parts)
        for name, entry in state["state"].items():
            for kind, value in entry.items():
                shifted = {tuple(o + 1 for o in at): v for at, v in value.parts.items()} if (
                    hasattr(value, "parts")
                ) else {}  # fmt: skip
                if shifted:
                    value.parts = mine[1 - dist.get_rank()].get(name, {}).get(kind) or shifted

        def through_dcp() -> None:
            dcp.save({"o": zero.local_state_dict()}, checkpoint_id=folder)
            loaded = {"o": zero.local_state_dict()}
            dcp.load(loaded, checkpoint_id=folder)
            zero.load_local_state_dict(loaded["o"])

        return lambda: zero.load_local_state_dict(state), [through_dcp]

    return make


ROWS["slices of another rank"] = Row(
    "this rank has *: save and load it through torch.distributed.checkpoint",
    _swapped(AdamW), 2,
)  # fmt: skip
ROWS["a matrix of another rank"] = Row(
    "not where this rank's matrix begins: save and load it through",
    _swapped(torch.optim.Adafactor), 2,
)  # fmt: skip


@row("unfreeze them (requires_grad_(True)) before local_state_dict(), load, and freeze them again")
def state_of_frozen(folder: Path) -> Pair:
    def made() -> tuple[Any, ZeroOptimizer]:
        twin = tiny()
        head: Any = twin.ours.head.requires_grad_(False)
        zero = ZeroOptimizer(
            twin.communicator, AdamW, param_groups=list(twin.ours.parameters())
        )
        return (twin, head), zero

    (twin, head), zero = made()
    head.requires_grad_(True)
    train(twin, zero)
    dcp.save({"o": zero.local_state_dict()}, checkpoint_id=folder)
    (_, fresh), other = made()

    def load() -> None:
        state = {"o": other.local_state_dict()}
        dcp.load(state, checkpoint_id=folder)
        other.load_local_state_dict(state["o"])

    def remedy() -> None:
        fresh.requires_grad_(True)
        load()
        fresh.requires_grad_(False)
        assert other.state[fresh.weight]["exp_avg"].any()

    return load, [remedy]


class Switched(SGD):
    """Whole matrices, with a ``train()`` that changes its group."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.defaults["mode"] = False
        for group in self.param_groups:
            group.setdefault("mode", False)

    def train(self) -> None:
        for group in self.param_groups:
            group["mode"] = True


@row("its owner during a step only; take the class's elementwise form")
def switched_matrices(_: Path) -> Pair:
    twin, other = tiny(), tiny()
    made = [
        ZeroOptimizer(each.communicator, Switched, lr=0.1, whole_matrix=whole)
        for each, whole in ((twin, True), (other, False))
    ]
    return made[0].train, [lambda: (made[1].train(), train(other, made[1]))]


@row("must be above 1, backoff_factor=*")
def growth(_: Path) -> Pair:
    return partial(LossScaler, growth_factor=1.0), [partial(LossScaler, growth_factor=1.5)]


@row("step_together was given no optimizer: pass those of all chunks of this pipeline rank")
def no_optimizer(_: Path) -> Pair:
    twin = tiny()
    zero = ZeroOptimizer(twin.communicator, SGD, lr=0.1)
    twin.ours(*twin.batch()[1]).backward()
    return partial(step_together, []), [partial(step_together, [zero])]


@row("call internsp.step_together with the optimizers of all chunks, or set max_grad_norm = None")
def one_chunk_of_two(_: Path) -> Pair:
    def made(bound: float | None) -> list[ZeroOptimizer]:
        case = Case("Interleaved1F1B", pipeline=1, chunks=2)
        pipeline, _ = make_pipeline(case)
        optimizers = [
            ZeroOptimizer(each, SGD, lr=0.1, max_grad_norm=bound) for each in pipeline.communicators
        ]
        pipeline.step(batches(case, pipeline.mesh))
        return optimizers

    clipped, free = made(1.0), made(None)
    return clipped[1].step, [lambda: step_together(clipped), lambda: [each.step() for each in free]]


@row("the same max_grad_norm and skip_not_finite, and one LossScaler object")
def two_scalers(_: Path) -> Pair:
    twins = [(tiny(), tiny()) for _ in range(2)]
    scaler = LossScaler()

    def step(pair: tuple[Twin, Twin], scalers: list[LossScaler]) -> None:
        zeros = [
            ZeroOptimizer(twin.communicator, SGD, lr=0.1, max_grad_norm=1.0, loss_scaler=each)
            for twin, each in zip(pair, scalers, strict=True)
        ]
        for twin, zero in zip(pair, zeros, strict=True):
            zero.scale(twin.ours(*twin.batch()[1])).backward()
        step_together(zeros)

    return lambda: step(twins[0], [scaler, LossScaler()]), [lambda: step(twins[1], [scaler] * 2)]


# whole values


def files(folder: Path, twin: Twin, name: str = "model") -> Path:
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    save_file(dict(twin.plain.state_dict()), folder / f"{name}.safetensors")
    return folder


@row("give a mapping to the first rank of a stage and None to the others, or a folder to all", 2)
def mapping_on_all(folder: Path) -> Pair:
    twin = tiny()
    whole, first = dict(twin.plain.state_dict()), dist.get_rank() == 0
    if first:
        files(folder / "w", twin)
    dist.barrier()
    return lambda: internsp.load_weights(twin.ours, whole), [
        lambda: internsp.load_weights(twin.ours, whole if first else None),
        lambda: internsp.load_weights(twin.ours, folder / "w"),
    ]


@row("Map names with rename=, or set strict=False")
def other_names(_: Path) -> Pair:
    twin = tiny()
    named = {f"m.{n}": v for n, v in twin.plain.state_dict().items()}
    load = partial(internsp.load_weights, twin.ours, named)
    return load, [partial(load, rename=lambda name: f"m.{name}"), partial(load, strict=False)]


@row("has several indexes: give one folder for each")
def several_indexes(folder: Path) -> Pair:
    twin = tiny()
    files(folder / "a", twin)
    for name in ("one", "two"):
        (folder / "a" / f"{name}.safetensors.index.json").write_text('{"weight_map": {}}')
    one = files(folder / "b", twin)
    load = partial(internsp.load_weights, twin.ours)
    return lambda: load(folder / "a"), [lambda: load(one)]


class Table(Tiny):
    def __init__(self) -> None:
        super().__init__(layers=2)
        self.register_buffer("table", torch.ones(3), persistent=False)


class Resetting(Table):
    def reset_buffers(self) -> None:
        self.table = torch.ones(3)


def on_meta(make: Callable[[], nn.Module], real: bool = False) -> Any:
    with torch.device("meta"):
        model = make()
    if real:
        model.register_buffer("table", torch.ones(3), persistent=False)
    return model, parallelize(model, mesh_of(1), WeightParallelConfig(min_shard_elements=20))


@row("_init_weights of the model computes them: add one, or build these modules on a real")
def unknown_buffers(_: Path) -> Pair:
    return partial(on_meta, Table), [partial(on_meta, Resetting), partial(on_meta, Table, True)]


@row("call internsp.initialize, internsp.load_weights or load_state_dict before the first forward")
def no_values(_: Path) -> Pair:
    ids = torch.ones(2, 3, dtype=torch.long)
    make = partial(Tiny, layers=2)
    values = make().state_dict()
    (model, _), (one, communicator), (two, _), (three, _) = (on_meta(make) for _ in range(4))

    def initialized() -> None:
        initialize(communicator, lambda name, full, generator: full.fill_(0.1), 0)
        one(ids)

    return lambda: model(ids), [
        initialized,
        lambda: (internsp.load_weights(two, values), two(ids)),
        lambda: (three.load_state_dict(values), three(ids)),
    ]


class Odd(SGD):
    """Cannot be made from its groups' settings."""

    def __init__(self, params: Any, needed: float, **options: Any) -> None:
        super().__init__(params, lr=needed, **options)


class Gated(Tiny):
    def __init__(self) -> None:
        super().__init__(layers=2)
        self.gate = nn.Parameter(torch.tensor(0.7))

    def blocks(self, x: Tensor) -> Tensor:
        return super().blocks(x) + self.gate


@row("of them are like the parameter (*): load DTensor, as its state_dict() has them")
def plain_moment(_: Path) -> Pair:
    twin = tiny(Gated)
    optimizer: Any = Odd(twin.ours.parameters(), 0.1, momentum=0.9)
    train(twin, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    gate: Any = twin.ours.gate
    optimizer.state[gate]["momentum_buffer"] = torch.tensor(0.5, dtype=torch.float64)
    return lambda: train(twin, optimizer), [
        lambda: (optimizer.load_state_dict(state), train(twin, optimizer))
    ]


@row("choose one of 'none', 'shards', 'rank0'")
def write_words(_: Path) -> Pair:
    twin = tiny()

    def use(write: Any) -> None:
        with internsp.full_params(twin.ours, write=write):
            pass

    return partial(use, "all"), [partial(use, word) for word in ("none", "shards", "rank0")]


def whole_of(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    with internsp.full_params(model, **options):
        return dict(model.named_parameters())


@row("full already: call parallelize() first, or give the model that it was called with")
def not_parallel(_: Path) -> Pair:
    model = Tiny(layers=2)

    def first() -> None:
        parallelize(model, mesh_of(1), WeightParallelConfig(min_shard_elements=20))
        whole_of(model)

    twin = tiny()
    return lambda: whole_of(model), [first, lambda: whole_of(twin.ours)]


@row("was called on rank * *: call it between two steps")
def within_a_step(_: Path) -> Pair:
    twin = tiny()

    def inside() -> None:
        with twin.communicator.unchanged():
            whole_of(twin.ours)

    return inside, [lambda: whole_of(twin.ours)]


@row("step, load or edit before or after it")
def written_meanwhile(_: Path) -> Pair:
    twin = tiny()

    def edit() -> None:
        with torch.no_grad():
            twin.ours.head.weight.mul_(0.5)  # type: ignore[operator]

    def meanwhile() -> None:
        for _ in internsp.iterate_full_params(twin.ours):
            edit()

    def before_and_after() -> None:
        edit()
        list(internsp.iterate_full_params(twin.ours))
        edit()

    return meanwhile, [before_and_after]


@row("was frozen or thawed, which is to be done outside of the context")
def frozen_inside(_: Path) -> Pair:
    twin = tiny()

    def inside() -> None:
        with internsp.full_params(twin.ours, write="shards"):
            twin.ours.head.weight.requires_grad_(False)  # type: ignore[operator]

    return inside, [
        lambda: (twin.ours.head.requires_grad_(False), whole_of(twin.ours, write="shards"))  # type: ignore[operator]
    ]


@row("write full values into it (copy_, .data =); nothing was written back")
def another_shape(_: Path) -> Pair:
    twin = tiny()
    head: Any = twin.ours.head

    def write(change: Act) -> Act:
        def act() -> None:
            with internsp.full_params(twin.ours, write="shards"), torch.no_grad():
                change()

        return act

    def put(shape: tuple[int, ...]) -> None:
        head.weight = nn.Parameter(torch.zeros(shape, dtype=torch.float64))

    return write(partial(put, (2, 2))), [
        write(lambda: head.weight.copy_(torch.zeros_like(head.weight))),
        write(lambda: setattr(head.weight, "data", torch.ones_like(head.weight))),
    ]


@row("whose end would undo it: write into the full parameters that the model holds")
def shard_inside(_: Path) -> Pair:
    twin = tiny()
    shard: Any = twin.ours.head.weight

    def inside(which: Act) -> None:
        with internsp.full_params(twin.ours, write="shards"), torch.no_grad():
            which().mul_(0.5)

    return lambda: inside(lambda: shard), [lambda: inside(lambda: twin.ours.head.weight)]


@row("Nothing was written back: write the same on all ranks, or set write='rank0'", world=2)
def written_differently(_: Path) -> Pair:
    twin = tiny()

    def write(value: float, how: Any = "shards") -> None:
        with internsp.full_params(twin.ours, write=how), torch.no_grad():
            twin.ours.head.weight.fill_(value)  # type: ignore[operator]

    own = float(dist.get_rank())
    return partial(write, own), [partial(write, 0.5), partial(write, own, "rank0")]


def check_row(name: str, folder: Path) -> None:
    mistake, remedies = ROWS[name].make(folder)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - its text is compared
        mistake()
    pattern = ".*".join(map(re.escape, ROWS[name].text.split("*")))
    assert re.search(pattern, str(caught.value), re.DOTALL), str(caught.value)
    assert remedies
    for remedy in remedies:
        remedy()


@pytest.mark.slow(15)
@pytest.mark.parametrize("name", [name for name, each in ROWS.items() if each.world == 1])
@ranks(1)
def test_a_remedy_that_an_error_names_works(name: str, tmp_path: Path) -> None:
    check_row(name, tmp_path)


@pytest.mark.parametrize("name", [name for name, each in ROWS.items() if each.world == 2])
@ranks(2)
def test_a_remedy_for_several_ranks_works(name: str, tmp_path: Path) -> None:
    check_row(name, tmp_path)


NOT_RUN = {
    "which other ranks would step parts: keep a torch optimizer": "ranks/test_own_class",
    "give a module without it, or take state_dict()": "ranks/test_own_class",
    "past what its ZeroOptimizer waits for: give it weight.detach()":
        "ranks/test_compiled_functions",
    "pip install 'internsp[weights]'": "an installation",
    "call it, name rank": "",
    "one group of tensor ranks: take a torch optimizer in a plain loop":
        "four ranks: ranks/test_fsdp_two_axes",
}


def test_every_text_that_says_what_to_do_is_in_the_table() -> None:
    known = [text.replace("*", "") for text in (*(each.text for each in ROWS.values()), *NOT_RUN)]
    missing = [
        f"{place}: {text}"
        for place, text, _ in advice(ROOMS)
        if not any(part in re.sub(r"\{[^{}]*\}", "", text) for part in known)
    ]
    assert not missing, "\n".join(missing)
