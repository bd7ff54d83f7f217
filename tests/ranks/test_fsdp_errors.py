"""Wrong calls of ``internsp.fsdp``: FSDP2's exception types; refusals that say what to write."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp as torchs
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import internsp.fsdp as ours
from internsp.errors import ConfigError, GradientError, StructureError
from tests.support.fsdp import Model, batch, loss_of, mesh_of, shard, steps
from tests.support.ranks import ranks
from tests.support.versions import since


def _refused(name: str, *args: Any) -> Callable[[], Any]:
    return lambda: getattr(_model(), name)(*args)


def _model(**options: Any) -> Any:
    model = Model()
    shard(ours.fully_shard, model, "blocks", mesh_of((2,)), **options)
    return model


REFUSED: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "all-gather": (StructureError, "own_communicator.md", _refused("set_custom_all_gather", 0)),
    "reduce-scatter": (StructureError, "communicator=", _refused("set_custom_reduce_scatter", 0)),
    "memory": (
        StructureError, "leave it out",
        _refused("set_allocate_memory_from_process_group_for_comm", True),
    ),
    "float8": (StructureError, "ignored_params", lambda: _eight()(torch.tensor(1))),
    "compiled within": (
        StructureError, "blocks.0.up is compiled", lambda: _compiled("blocks.0.up")(batch(0, 0, 0))
    ),
    "compiled and then wrapped": (
        StructureError, "the checkpoint wrapper around one",
        lambda: _compiled("blocks.0", wrap=True)(batch(0, 0, 0)),
    ),
    "jvp": (StructureError, "transform of torch.func", lambda: _jvp()),
    "gradient hook": (GradientError, "read .grad when", lambda: _hooked()(batch(0, 0, 0))),
    "step in backward": (GradientError, "gradient hook", lambda: _stepped()(batch(0, 0, 0))),
    "step in a later one": (GradientError, "gradient hook", lambda: _stepped(1)(batch(0, 0, 0))),
    "gradient hook before": (StructureError, "after it", lambda: _hooked_before()),
    "adapter": (StructureError, "0.up.bias was added", lambda: _added()(batch(0, 0, 0))),
    "part of a whole unit": (StructureError, "call the unit itself", lambda: _part_of_whole()),
    "theirs inside": (StructureError, "install", lambda: _mixed_up()(batch(0, 0, 0))),
    "near ranks of some": (StructureError, "near_ranks=1", lambda: _near_of_some()),
    "torch's register": (
        StructureError, "import it from internsp.fsdp",
        lambda: torchs.register_fsdp_forward_method(_model(), "forward") or _registered(),
    ),
}  # fmt: skip
if since("2.12"):
    REFUSED["symmetric"] = StructureError, "leave it out", _refused("set_symm_mem_for_comm")


def _eight() -> Any:
    model = nn.Embedding(8, 8, _weight=torch.zeros(8, 8).to(torch.float8_e4m3fn))
    return ours.fully_shard(model, mesh=mesh_of((2,)))


def _compiled(name: str, wrap: bool = False) -> Any:
    model = Model()
    model.get_submodule(name).compile()
    if wrap:
        model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    shard(ours.fully_shard, model, "blocks", mesh_of((2,)))
    return model


def _jvp() -> None:
    model = ours.fully_shard(nn.Linear(4, 4), mesh=mesh_of((2,)))
    torch.func.jvp(lambda x: model(torch.ones(4)), (torch.ones(4),), (torch.ones(4),))


def _stepped(after: int = 0) -> Any:
    """FSDP2 trains nothing then, without a word."""
    from torch.distributed.optim import _apply_optimizer_in_backward  # warns of torch.jit

    model = _model()
    for _ in range(after):
        model(batch(0, 0, 0)).sum().backward()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return model


def _hooked() -> Any:
    model = _model()
    model.head.weight.register_hook(print)
    return model


def _hooked_before() -> None:
    model = Model()
    model.head.weight.register_post_accumulate_grad_hook(print)
    ours.fully_shard(model, mesh=mesh_of((2,)))


def _added() -> Any:
    model = _model()
    model.blocks[0].up = nn.Sequential(model.blocks[0].up)
    model.blocks[0].up.bias = nn.Parameter(torch.zeros(3))
    return model


def _part_of_whole() -> None:
    model = _model()
    model(batch(0, 0, 0))
    model.blocks[0].unshard()
    model.blocks[0].up(torch.ones(13))


def _mixed_up() -> Any:
    model = Model()
    torchs.fully_shard(model.blocks[0], mesh=mesh_of((2,)))
    return ours.fully_shard(model, mesh=mesh_of((2,)))


def _near_of_some() -> None:
    some = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
    ours.fully_shard(nn.Linear(2, 2), mesh=some, reshard_after_forward=1)


def _registered() -> None:
    model = _model()
    torchs.register_fsdp_forward_method(model, "forward")
    model.forward(batch(0, 0, 0))


@ranks(2)
def test_what_is_not_done_is_refused_with_the_line_to_write() -> None:
    for name, (kind, text, call) in REFUSED.items():
        with pytest.raises(kind) as caught:
            call()
        assert text in str(caught.value), f"{name}: {caught.value}"


def _sharded(names: Any, **options: Any) -> Any:
    model = Model(blocks=2)
    shard(names.fully_shard, model, "blocks", options.pop("mesh", mesh_of((2,))), **options)
    return model


def _alone(module: Any = None, **options: Any) -> Callable[[Any], Any]:
    made = module or (lambda: nn.Linear(4, 4))
    return lambda names: names.fully_shard(made(), **{"mesh": mesh_of((2,))} | options)


def _parts(*orders: Any, run: int = -1) -> Callable[[Any], Any]:
    """Shards parts of a model in this order, running one of them after the first."""

    def call(names: Any) -> None:
        whole: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        parts = {"a": whole[0], "b": whole[1], "ab": [*whole], "all": whole}
        for number, order in enumerate(orders):
            names.fully_shard(parts[order], mesh=mesh_of((2,)))
            if number == run:
                parts[order](torch.ones(1, 4))
        whole[1](whole(torch.ones(1, 4)))

    return call


def _own(value: Tensor) -> nn.Module:
    module = nn.Module()
    module.own = nn.Parameter(value)
    return module


def _meta(names: Any) -> None:
    with torch.device("meta"):
        model = _sharded(names)
    model(batch(0, 0, 0))


def _tied(names: Any) -> None:
    model = Model(tied=True)
    for part in (model.embed, model.head, model):
        names.fully_shard(part, mesh=mesh_of((2,)))
    model(batch(0, 0, 0))


def _dtypes(names: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    names.fully_shard([*model], mesh=mesh_of((2,)))
    names.fully_shard(model, mesh=mesh_of((2,)))
    model(torch.ones(1, 4))


def _reset(names: Any) -> None:
    model = _sharded(names)
    model(batch(0, 0, 0))
    model.blocks[0].reset_iter_state()


def _loss(names: Any) -> Any:
    model = _sharded(names)
    return model, loss_of(model, batch(0, 0, 0))


def _again(names: Any) -> None:
    _, loss = _loss(names)
    loss.backward()
    loss.backward()


def _loaded(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any], Any]:
    def call(names: Any) -> None:
        model = _sharded(names)
        state = model.state_dict()
        change(state)
        model.load_state_dict(state)

    return call


BAD: dict[str, Callable[[Any], Any]] = {
    "mesh of three": lambda n: _alone(
        mesh=init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c"))
    )(n),
    "mesh of two without names": lambda n: _alone(mesh=init_device_mesh("cpu", (2, 1)))(n),
    "no mesh": _alone(mesh="cpu"),
    "list": _alone(nn.ModuleList),
    "dictionary": _alone(nn.ModuleDict),
    "nothing": _alone(list),
    "no module": _alone(int),
    "other argument": _alone(other=1),
    "scalar": _alone(lambda: _own(torch.tensor(1.0))),
    "not contiguous": _alone(lambda: _own(torch.ones(4, 6).t())),
    "placement": _alone(shard_placement_fn=lambda _: 1),
    "dimension": _alone(shard_placement_fn=lambda _: Shard(2)),
    "uneven": _alone(
        lambda: nn.Linear(5, 4), shard_placement_fn=lambda p: Shard(p.ndim - 1)
    ),
    "near ranks": _alone(reshard_after_forward=3),
    "reshard": _alone(reshard_after_forward="x"),
    "ignored": _alone(ignored_params=3),
    "policy": lambda n: _sharded(n, mp_policy=3)(batch(0, 0, 0)),
    "twice": lambda n: n.fully_shard(_sharded(n), mesh=mesh_of((2,))),
    "copy": lambda n: copy.deepcopy(_sharded(n)),
    "part after the whole": _parts("all", "a"),
    "whole after a forward of a part": _parts("a", "all", run=0),
    "several roots": _parts("ab"),
    "dtypes": _dtypes,
    "meta": _meta,
    "backward again": _again,
    "gradients by autograd": lambda n: torch.autograd.grad(
        (both := _loss(n))[1], [*both[0].parameters()]
    ),
    "mixed": lambda n: _sharded(n).head.weight + torch.ones(19, 13),
    "shape": _loaded(lambda state: state.update({"head.weight": torch.zeros(3, 3)})),
    "missing": _loaded(lambda state: state.pop("head.weight")),
    "unsharded": _loaded(lambda state: state.update(Model(blocks=2).state_dict())),
    "set_reshard_after_forward": lambda n: _sharded(n).set_reshard_after_forward(3),
    "forward prefetch": lambda n: _sharded(n).set_modules_to_forward_prefetch([nn.Linear(2, 2)]),
    "backward prefetch": lambda n: _sharded(n).set_modules_to_backward_prefetch([nn.Linear(2, 2)]),
    "buffers": lambda n: _sharded(n).set_reduce_scatter_max_input_buffers(True),
    "no buffers": lambda n: _sharded(n).set_reduce_scatter_max_input_buffers(0),
    "hook": lambda n: _sharded(n, mesh=mesh_of((2, 1))).set_all_reduce_hook(print, stream=1),
    "streams": lambda n: n.share_comm_ctx([nn.Linear(2, 2)]),
    "method": lambda n: n.register_fsdp_forward_method(_sharded(n), "none"),
}  # fmt: skip
"""What FSDP2 raises itself, or torch within it."""
if since("2.12"):
    BAD["tied"] = _tied
if since("2.13"):  # FSDP2 has no such method before
    BAD["reset of a part"] = _reset


@ranks(2)
def test_bad_input_raises_what_it_does_under_fsdp2() -> None:
    for name, call in BAD.items():
        kinds = []
        for names in (torchs, ours):
            with pytest.raises(Exception) as caught:  # noqa: PT011 - the type is what is compared
                call(names)
            kinds.append(caught.type)
        assert issubclass(kinds[1], kinds[0]), f"{name}: {kinds}"
    if not since("2.12"):  # FSDP2 unties them in silence before
        with pytest.raises(ValueError, match="is shared with a module"):
            _tied(ours)


@ranks(2)
def test_what_a_refusal_says_to_write_works(rank: int) -> None:
    wanted = steps(_model().double(), rank, number=1)
    ours.install(prefetch_depth=2)  # for torch's name, and of all modules
    try:
        torch.manual_seed(3)
        model = Model().double()
        shard(torchs.fully_shard, model, "blocks", mesh_of((2,)))
        found = steps(model, rank, number=1)
        assert "messages" in ours.report(model), "after a forward there is a plan"
    finally:
        ours.uninstall()
    assert torchs.fully_shard is not ours.fully_shard
    assert list(found) == list(wanted)
    narrow: Any = nn.Linear(2, 2)
    narrow.narrow = nn.Parameter(torch.zeros(8, 8).to(torch.float8_e4m3fn), requires_grad=False)
    ours.fully_shard(narrow, mesh=mesh_of((2,)), ignored_params={narrow.narrow})
    narrow(torch.ones(1, 2)).sum().backward()
    assert not isinstance(narrow.narrow, DTensor)
    quick = Model().double()
    shard(ours.fully_shard, quick, "blocks", mesh_of((2,)))
    with pytest.raises(ValueError, match="has no plan"):
        ours.report(quick)
    with pytest.raises(ConfigError, match="policies say that"):
        ours.options(quick, compute_dtype="bfloat16")
    ours.options(quick, gather_before="rolling")
    loss_of(quick, batch(0, 0, rank)).backward()
    with pytest.raises(ConfigError, match="before the first forward"):
        ours.options(quick, prefetch_depth=2)
    replicas = Model().double()
    shard(ours.fully_shard, replicas, "blocks", mesh_of((2, 1)))
    loss_of(replicas, batch(0, 0, rank)).backward()
