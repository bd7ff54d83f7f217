"""Programs that compile modules, as torchtitan and accelerate, or the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp as torchs
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import internsp.fsdp as ours
from internsp.errors import StructureError
from internsp.modules import supported
from tests.support.fsdp import (
    WORDS,
    Model,
    batch,
    loss_of,
    mesh_of,
    require_same,
    shard,
    steps,
    whole,
)
from tests.support.ranks import ranks


class Counting:
    """A backend of torch.compile that runs what it is given, and counts forwards by graph."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []
        self.calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs.append(graph)

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph(*args)

        return run


def blocks(model: Any, **options: Any) -> None:
    """As torchtitan."""
    for block in model.blocks:
        block.compile(fullgraph=True, **options)


def checkpointed(model: Any, **options: Any) -> None:
    """As torchtitan with activation checkpointing."""
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)
    blocks(model, **options)


def replaced(model: Any, **options: Any) -> None:
    """As programs that put what ``torch.compile(block)`` returns in the block's place."""
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, **options)


def wrappers(model: Any, **options: Any) -> None:
    """As accelerate with activation checkpointing: FSDP2's hooks break the graph."""
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)
        model.blocks[number].compile(**options)


def regions(model: Any, **options: Any) -> None:
    """As accelerate's ``compile_regions_fsdp2``: every child that is no list of blocks, too."""
    blocks(model, **options)
    for name, child in model.named_children():
        if name != "blocks":
            child.compile(**options)


class Turning(nn.Module):
    """A module without weights, compiled within a block."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cos() * x


def weightless(model: Any, **options: Any) -> None:
    for block in model.blocks:
        block.norm = nn.Sequential(block.norm, Turning())
        block.norm[1].compile(**options)


SHAPES: dict[str, tuple[Callable[..., None], dict[str, Any], int]] = {
    "blocks": (blocks, {}, 3),
    "tied": (blocks, {"tied": True}, 3),
    "replaced": (replaced, {}, 3),
    "checkpointed": (checkpointed, {}, 3),
    "checkpointed units": (wrappers, {}, 3),
    "regions": (regions, {}, 6),
    "regions, tied": (regions, {"tied": True}, 6),
    "units of several modules": (regions, {}, 6),
    "weightless": (weightless, {}, 3),
}


@pytest.mark.parametrize(
    "name",
    ["checkpointed units", "replaced", "regions, tied", "units of several modules", *(
        pytest.param(name, marks=pytest.mark.thorough(4))  # each of their parts is in one above
        for name in ("blocks", "tied", "checkpointed", "regions", "weightless")
    )],
)  # fmt: skip
@ranks(2)
def test_compiled_programs_have_the_numbers_of_fsdp2(name: str, rank: int) -> None:
    prepare, options, modules = SHAPES[name]
    found = {}
    backend = Counting()
    for who, library in (("ours", ours), ("theirs", torchs)):
        torch.manual_seed(3)
        model: Any = Model(**options).double()
        prepare(model, backend=backend if library is ours else "eager")
        if name == "checkpointed units":  # and their wrappers, as accelerate
            for block in model.blocks:
                library.fully_shard(block._checkpoint_wrapped_module, mesh=mesh_of((2,)))
        units = "lists" if "several" in name else "blocks"
        shard(library.fully_shard, model, units, mesh_of((2,)))
        found[who] = steps(model, rank)
    for key, value in found["theirs"].items():
        torch.testing.assert_close(found["ours"][key], value, rtol=1e-12, atol=1e-12, msg=key)
    assert backend.calls >= modules * 3, "each forward of three steps"


def compiled_and_sharded(model: Any, library: Any, backend: Any) -> Any:
    """As accelerate without regional compilation, and transformers' ``torch_compile``."""
    made = torch.compile(model, backend=backend)
    for block in model.blocks:
        library.fully_shard(block, mesh=mesh_of((2,)))
    return library.fully_shard(made, mesh=mesh_of((2,)))


def sharded_and_compiled(model: Any, library: Any, backend: Any) -> Any:
    shard(library.fully_shard, model, "blocks", mesh_of((2,)))
    return torch.compile(model, backend=backend)


def told_to_compile(model: Any, library: Any, backend: Any) -> Any:
    shard(library.fully_shard, model, "blocks", mesh_of((2,)))
    model.compile(backend=backend)
    return model


class Outer(nn.Module):
    """Calls the model from code that is compiled."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.set_requires_gradient_sync = model, model.set_requires_gradient_sync

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids).cos()  # type: ignore[no-any-return]


def called_by_compiled(model: Any, library: Any, backend: Any) -> Any:
    shard(library.fully_shard, model, "blocks", mesh_of((2,)))
    outer = Outer(model)
    outer.compile(backend=backend)
    return outer


@pytest.mark.parametrize(
    "prepare",
    [compiled_and_sharded, sharded_and_compiled, *(
        pytest.param(prepare, marks=pytest.mark.thorough(4))
        for prepare in (told_to_compile, called_by_compiled)
    )],
)  # fmt: skip
@ranks(2)
def test_a_compiled_model_has_the_numbers_and_graphs_of_fsdp2(
    prepare: Callable[..., Any], rank: int
) -> None:
    found, backends = [], []
    for library in (ours, torchs):
        torch._dynamo.reset()
        torch.manual_seed(3)
        backends.append(Counting())
        made = prepare(Model(tied=True).double(), library, backends[-1])
        found.append(steps(made, rank, micro=2))
    require_same(*found)
    graphs, calls = {len(b.graphs) for b in backends}, {b.calls for b in backends}
    assert len(graphs) == len(calls) == 1
    assert calls.pop() >= 18, "blocks, steps and micro-batches"


@ranks(2)
def test_a_model_that_is_compiled_after_the_first_forward_runs_and_says_so(rank: int) -> None:
    torch.manual_seed(3)
    model: Any = Model().double()
    shard(ours.fully_shard, model, "blocks", mesh_of((2,)))
    with torch.no_grad():
        wanted = model(batch(0, 0, rank))
    backend = Counting()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(batch(0, 0, rank)), wanted)
    assert backend.calls == 0
    assert "compiles nothing of it" in ours.report(model)


@ranks(2)
def test_backward_in_compiled_code_is_refused(rank: int) -> None:
    model: Any = Model().double()
    shard(ours.fully_shard, model, "blocks", mesh_of((2,)))

    @torch.compile(backend="eager")
    def step(ids: Tensor) -> None:
        loss_of(model, ids).backward()

    with pytest.raises(StructureError, match=r"calls backward\(\) is compiled"):
        step(batch(0, 0, rank))


@ranks(2)
def test_what_is_compiled_says_so_and_keeps_its_options(rank: int) -> None:
    model = Model()
    backend = Counting()
    model.blocks[0].compile(backend=backend, fullgraph=True)
    model.blocks[1].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    model.blocks[1].compile(backend=backend, fullgraph=True)  # hooks are outside of the graph
    shard(ours.fully_shard, model, "blocks", mesh_of((2,)))
    loss_of(model, batch(0, 0, rank)).backward()
    assert "compile() of 2 modules" in ours.report(model)
    model.blocks[0].up.forward = lambda x: torch._dynamo.graph_break() or x  # type: ignore[method-assign]
    with pytest.raises(torch._dynamo.exc.Unsupported):
        loss_of(model, batch(1, 0, rank))


@ranks(2)
def test_compiled_experts_are_refused_where_torch_is_wrong(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supported, "TORCH_ASKS", False)  # torch 2.11
        model = Model()
        model.blocks[0].up.dispatch = None  # type: ignore[assignment]  # as `Experts` has
        model.blocks[0].compile(backend="eager")
        shard(ours.fully_shard, model, "blocks", mesh_of((2,)))
        with pytest.raises(StructureError, match="compiled blocks with experts"):
            model(batch(0, 0, rank))


@ranks(2)
def test_a_module_that_is_compiled_after_the_first_forward_is_refused(rank: int) -> None:
    model = Model()
    shard(ours.fully_shard, model, "blocks", mesh_of((2,)))
    loss_of(model, batch(0, 0, rank)).backward()
    model.blocks[1].compile(backend="eager")
    with pytest.raises(StructureError, match=r"blocks\.1 is compiled"):
        model(batch(1, 0, rank))


@ranks(2)
def test_a_failed_first_forward_leaves_modules_compiled(rank: int) -> None:
    model = Model()
    model.blocks[0].compile(backend="eager")
    model.blocks[1].up.compile()
    shard(ours.fully_shard, model, "blocks", mesh_of((2,)))
    with pytest.raises(StructureError, match="is compiled by torch"):
        model(batch(0, 0, rank))
    assert model.blocks[0]._compiled_call_impl is not None


def _over_tensor_ranks(fully_shard: Any, compiles: bool, rank: int) -> dict[str, Tensor]:
    """Blocks whose inputs come as collectives that are in flight."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    blocks = [
        nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        for _ in range(2)
    ]
    model: Any = nn.Sequential(nn.Embedding(WORDS, 8), *blocks).double()
    embeds = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(model, mesh["tp"], {"0": embeds})
    for block in blocks:
        plan = {
            "0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1)),
            "3": RowwiseParallel(output_layouts=Shard(1)),
        }  # fmt: skip
        parallelize_module(block, mesh["tp"], plan)
        if compiles:
            block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    draw = torch.Generator().manual_seed(rank // 2)
    model(torch.randint(0, WORDS, (2, 4), generator=draw)).square().sum().backward()
    return whole({name: parameter.grad for name, parameter in model.named_parameters()})


@ranks(4)
def test_compiled_blocks_over_tensor_ranks_have_the_gradients_of_eager_ones(rank: int) -> None:
    """FSDP2 of torch 2.13 gives zeros to the embedding; torch alone raises within backward."""
    wanted = _over_tensor_ranks(torchs.fully_shard, False, rank)
    require_same(_over_tensor_ranks(ours.fully_shard, True, rank), wanted)


class Noting(nn.Linear):
    """Fills a list of its caller's, as blocks with auxiliary losses do."""

    def forward(self, x: Tensor, noted: list[Tensor]) -> Tensor:  # type: ignore[override]
        noted.append(x.square().sum())
        return super().forward(x)


class Listing(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        noted: list[Tensor] = []
        for block in self:
            x = block(x, noted)
        return x.sum() + torch.stack(noted).sum()


@ranks(2)
def test_a_list_that_compiled_blocks_fill_is_the_callers(rank: int) -> None:
    """FSDP2 of torch 2.13 hands a copy of it to each block, so that some of it is lost."""
    found, x = [], torch.full((2, 6), 1.0 + rank, dtype=torch.double)
    for sharded, compiles in ((False, False), (True, False), (True, True)):
        torch.manual_seed(3)
        model: Any = Listing(*(Noting(6, 6) for _ in range(3))).double()
        for part in (*model, model) if sharded else ():
            if compiles and part is not model:
                part.compile(backend="aot_eager")
            ours.fully_shard(part, mesh=mesh_of((2,)))
        loss = model(x)
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found.append({"loss": loss.detach()} | whole(gradients))
    require_same({"loss": found[1]["loss"]}, {"loss": found[0]["loss"]})
    require_same(found[2], found[1])
