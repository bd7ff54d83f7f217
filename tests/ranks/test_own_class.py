"""``parallelize`` of weights whose classes have all-gather functions of their own (QLoRA's base).

A frozen base of codes under trained adapters is compared with one process that computes with the
values of the codes, trained classes with :mod:`internsp.fsdp`, which is compared with FSDP2
elsewhere; in fp64, with slots that are filled with NaN before each gather.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import internsp
import internsp.fsdp as ours
from internsp.app.config.load import Config
from internsp.app.session.own import Custom
from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.errors import ConfigError, LayoutError, StructureError
from internsp.mesh import MeshShape, ParallelMesh
from internsp.parallel.parallelize import examine, initialize, parallelize
from internsp.schedule.chunk import aligned
from tests.ranks.test_fsdp_extensions import CLASSES, build
from tests.support import fsdp
from tests.support.compare import check, close
from tests.support.extensions import Held, Quantized, Rounded
from tests.support.hf import packed_batch, plain_batch, tiny
from tests.support.meshes import mesh_of
from tests.support.models import raises
from tests.support.ranks import ranks
from tests.support.sections import sections


class Adapted(nn.Module):
    """A frozen linear layer, of codes or of their values, with an adapter."""

    def __init__(self, layer: nn.Linear, coded: bool) -> None:
        super().__init__()
        codes: Any = Quantized.of(layer.weight.detach())
        values = codes._codes.double() * codes._scales[:, None]
        self.weight = nn.Parameter(codes if coded else values, requires_grad=False)
        self.down = nn.Linear(layer.in_features, 2, bias=False).double()
        self.up = nn.Linear(2, layer.out_features, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + self.up(self.down(x))  # type: ignore[no-any-return]


def adapted(model: nn.Module, coded: bool) -> nn.Module:
    """``model`` with adapters in the place of its blocks' linear layers, and the rest frozen."""
    torch.manual_seed(3)
    model.requires_grad_(False)
    for module in [*model.modules()]:
        for name, layer in [*module.named_children()]:
            if isinstance(layer, nn.Linear) and layer.out_features % 2 == 0:
                setattr(module, name, Adapted(layer, coded))
    return model


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def pair(mesh: Any, **settings: Any) -> tuple[nn.Module, nn.Module, Any]:
    """A model on one process, the same on ``mesh``, and its communicator."""
    checkpoint = settings.pop("checkpoint", None)
    torch.manual_seed(1)
    model = fsdp.Model(12, blocks=3).double()
    plain, mine = adapted(copy.deepcopy(model), False), adapted(model, True)
    given = {"blocks": ("blocks.*",), "gather_before": "qkv", "min_shard_elements": 16}
    config = WeightParallelConfig(**given | settings)
    communicator = parallelize(mine, mesh, config, activation_checkpoint=checkpoint)
    communicator.state.pool.poison = True
    return plain, mine, communicator


def compare_steps(
    plain: nn.Module, mine: nn.Module, mesh: Any, make: Callable[[nn.Module], Any], micro: int = 1
) -> None:
    """Losses, every gradient and parameter of three steps of what ``make`` makes."""
    optimizers = [make(plain), make(mine)]
    for step in range(3):
        for part in range(micro):
            losses = [fsdp.loss_of(plain, fsdp.batch(step, part, r)) for r in range(mesh.data)]
            sum(losses).backward()  # type: ignore[union-attr]
            found = fsdp.loss_of(mine, fsdp.batch(step, part, mesh.data_rank))
            close(found.detach(), losses[mesh.data_rank].detach(), f"loss {step}")
            found.backward()
        if not isinstance(optimizers[1], internsp.ZeroOptimizer):
            check(*({n: p.grad for n, p in trained(m).items()} for m in (mine, plain)), "gradients")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check(trained(mine), trained(plain), "parameters")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model).values(), lr=1e-2)


FULL = ActivationCheckpointConfig(mode="full")
SETTINGS: dict[str, dict[str, Any]] = {
    "recomputed, coalesced": {"checkpoint": FULL, "coalesce_bytes": 65536},
    "alone": {"coalesce_bytes": 0, "keep_unsharded": 1},
    "rolling": {"gather_before": "rolling"},
    "quantized rest, hosted": {"offload": ("weights",)},
}


@ranks(2)
def test_a_base_of_codes_trains_adapters_as_on_one_process() -> None:
    mesh = mesh_of(2)
    for name, settings in SETTINGS.items():
        plain, mine, communicator = pair(mesh, **settings)
        weight = mine.blocks[1].up.weight
        assert type(weight._local_tensor) is Quantized, name
        compare_steps(plain, mine, mesh, adamw, micro=2)
        lies = communicator.parameters_of[mine.blocks[1].up, "weight"]
        assert aligned(lies.slot_nbytes) == aligned(36 * 12 + 36 * 8), "codes and scales alone"


@ranks(2)
def test_a_zero_optimizer_steps_the_adapters() -> None:
    for degrees in ((2,), (1,)):
        mesh = mesh_of(*degrees)
        plain, mine, communicator = pair(mesh)

        def make(
            model: nn.Module, plain: nn.Module = plain, communicator: Any = communicator
        ) -> Any:
            if model is plain:
                return adamw(model)
            return internsp.ZeroOptimizer(communicator, torch.optim.AdamW, lr=1e-2)

        compare_steps(plain, mine, mesh, make)


@ranks(2)
def test_a_class_that_is_trained_is_refused_by_a_zero_optimizer_also_later() -> None:
    text = "blocks.0.up.weight has fsdp_pre_all_gather, and what its class holds is not known"
    for late in (False, True):
        _, mine, communicator = pair(mesh_of(2))
        mine.blocks[0].up.weight.requires_grad_(not late)
        groups = [{"params": [*mine.parameters()]}]
        make = partial(
            internsp.ZeroOptimizer, communicator, torch.optim.SGD, param_groups=groups, lr=1
        )
        if not late:
            raises(ConfigError, make, text)
            continue
        make()
        mine.blocks[0].up.weight.requires_grad_(True)
        raises(ConfigError, partial(mine, fsdp.batch(0, 0, 0)), text)


@pytest.mark.thorough(4)
@ranks(4)
def test_replicas_and_more_ranks_than_rows_are_right() -> None:
    for degrees in ((2,), (4,)):
        mesh = mesh_of(*degrees)
        plain, mine, _ = pair(mesh)
        compare_steps(plain, mine, mesh, adamw)


@ranks(2)
def test_sequences_are_sharded_over_an_unmodified_model_of_transformers() -> None:
    mesh = mesh_of(2, 2)
    model = tiny("llama")
    plain, mine = adapted(copy.deepcopy(model), False), adapted(model, True)
    weights, sequence = sections({"min_shard_elements": 32, "coalesce_bytes": 0})
    communicator = parallelize(mine, mesh, weights, sequence=sequence)
    communicator.state.pool.poison = True
    for make in (plain_batch, packed_batch):
        losses = [m(**make(0)).loss for m in (mine, plain)]
        close(losses[0].detach(), losses[1].detach(), "loss", 1e-5)
        for loss, model in zip(losses, (mine, plain), strict=True):
            loss.backward()
            torch.optim.SGD(trained(model).values(), lr=0.05, foreach=False).step()
        check(*({n: p.grad for n, p in trained(m).items()} for m in (mine, plain)), "", 1e-5)
        check(trained(mine), trained(plain), "parameters", 1e-5)
        for model in (mine, plain):
            model.zero_grad()


@ranks(2)
def test_trained_classes_have_the_numbers_of_one_import(rank: int) -> None:
    config = WeightParallelConfig(
        blocks=("blocks.*",), gather_before="qkv", reduction="mean", compare_ranks=False,
        min_shard_elements=1,
    )  # fmt: skip
    for kind in CLASSES:
        found = []
        for door in ("fully_shard", "parallelize"):
            torch.manual_seed(5)
            model = build(kind)
            if door == "fully_shard":
                fsdp.shard(ours.fully_shard, model, "blocks", fsdp.mesh_of((2,)))
            else:
                communicator = parallelize(model, mesh_of(2), config)
                communicator.state.pool.poison = True
                model.set_requires_gradient_sync = lambda now: None
            found.append(fsdp.steps(model, rank))
        fsdp.require_same(found[1], found[0])


@pytest.mark.thorough(20)
@ranks(2)
def test_compiled_blocks_compute_the_same() -> None:
    mesh = mesh_of(2)
    plain, mine, _ = pair(mesh, compile=True)
    compare_steps(plain, mine, mesh, adamw)


@ranks(2)
def test_a_state_dict_has_the_shards_and_is_loaded_from_another_model(tmp_path: Path) -> None:
    mesh = mesh_of(2)
    _, first, _ = pair(mesh)
    _, second, _ = pair(mesh)
    for name, parameter in first.named_parameters():
        if name in trained(first):
            parameter.data.add_(1.0)
    ids = fsdp.batch(0, 0, mesh.rank)
    wanted = first(ids).detach()
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(ids).detach(), wanted)
    adapters = {name: p for name, p in first.state_dict().items() if name in trained(first)}
    dcp.save(adapters, checkpoint_id=tmp_path / "adapters")
    _, third, _ = pair(mesh)
    into = {name: p for name, p in third.state_dict().items() if name in adapters}
    dcp.load(into, checkpoint_id=tmp_path / "adapters")
    assert torch.equal(third(ids).detach(), wanted)


@ranks(2)
def test_whole_values_of_the_class_are_loaded_into_shards() -> None:
    """Of a model that is not sharded: this rank's rows of them are of the class, too."""
    torch.manual_seed(2)
    whole = adapted(fsdp.Model(12, blocks=3).double(), True)
    _, mine, _ = pair(mesh_of(2))
    ids = fsdp.batch(0, 0, mesh_of(2).rank)
    assert not torch.allclose(mine(ids), whole(ids))
    mine.load_state_dict(whole.state_dict())
    close(mine(ids).detach(), whole(ids).detach(), "outputs")


def _refuses(kind: type[Exception], text: str, change: Any = None, **settings: Any) -> None:
    model = adapted(fsdp.Model(12, blocks=2).double(), True)
    if change is not None:
        change(model)
    mesh, own = settings.pop("mesh", mesh_of(2)), settings.pop("communicator", None)
    config = {"blocks": ("blocks.*",), "gather_before": "qkv"} | settings
    call = partial(parallelize, model, mesh, WeightParallelConfig(**config), communicator=own)
    raises(kind, call, text)
    assert type(model.blocks[0].up.weight) is not nn.Parameter, "the model is as it was"


def _parts(parameter: Any) -> tuple[Tensor, Tensor]:
    return parameter._codes, parameter._scales


def _other_codes(model: Any) -> None:
    _parts(model.blocks[1].up.weight)[0].add_(mesh_of(2).rank)


def _on_meta(model: Any) -> None:
    codes, scales = (part.to("meta") for part in _parts(model.blocks[1].up.weight))
    model.blocks[1].up.weight = nn.Parameter(Quantized(codes, scales), False)


def _uneven(model: Any) -> None:
    model.head.weight = nn.Parameter(Held(model.head.weight.detach()))


class Sends(Held):
    """What each rank sends, or does, in the place of the values."""

    how = ""

    def fsdp_pre_all_gather(self, mesh: Any, *given: Any) -> Any:
        second = mesh.get_local_rank() == 1
        if self.how == "fails" and second:
            raise ValueError("no scale")
        return (self._data.half() if second else self._data.bfloat16(),), None

    def fsdp_post_all_gather(self, gathered: Any, *given: Any, out: Any = None) -> Any:
        columns = self.how == "columns"
        return gathered[0].t().contiguous().t() if columns else gathered[0].double(), gathered


def _sending(how: str, kind: type[Held] = Sends) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        Sends.how = how
        weight = model.blocks[0].norm.weight.new_ones(4, 12).cumsum(0)
        model.blocks[0].extra = nn.Parameter(kind(weight))

    return change


@ranks(2)
def test_ranks_whose_classes_send_other_tensors_are_refused_on_all(rank: int) -> None:
    """Equally many bytes, of another dtype, were gathered and read as this rank's."""
    text = "'blocks.0.extra bfloat16 [2, 12]' and 'blocks.0.extra float16 [2, 12]'"
    _refuses(StructureError, text, _sending(""))
    other = Rounded if rank else Held
    text = "'blocks.0.extra [4, 12] torch.float64 of Held' and 'blocks.0.extra [4, 12] torch"
    _refuses(StructureError, text, _sending("", other), compare_ranks=False)


@ranks(2)
def test_functions_that_fail_are_told_on_all_ranks_by_the_weights_name() -> None:
    _refuses(StructureError, "of blocks.0.extra failed (ValueError: no scale)", _sending("fails"))
    strides = "fsdp_post_all_gather of blocks.0.extra gave strides [1, 4]"
    _refuses(StructureError, strides, _sending("columns"))


@ranks(2)
def test_quantize_does_nothing_for_what_a_class_sends() -> None:
    rule = {"match": "blocks.*.up.weight", "quantize": "int8"}
    _refuses(StructureError, "is not a sharded parameter in a block, plain", rules=[rule])
    _refuses(ConfigError, "classes say what every weight of the blocks", quantize="int8")


@ranks(2)
def test_what_cannot_be_had_is_refused_by_name() -> None:
    slots = "is a Quantized with fsdp_pre_all_gather, of which no slices are kept"
    _refuses(StructureError, slots, near_ranks=2)
    _refuses(StructureError, slots, memory_pool=False)
    rule = {"match": "blocks.0.up.weight"}
    _refuses(LayoutError, "shards are rows", rules=[rule | {"shard_dim": 1}])
    functions = {"pre_all_gather": torch.sign, "post_all_gather": torch.sign}
    _refuses(StructureError, "has already (fsdp_pre_all_gather)", rules=[rule | functions])
    _refuses(StructureError, "blocks.1.up.weight starts with other values", _other_codes)
    _refuses(StructureError, "which only ranks can call, on values", _on_meta)
    # Of 19 rows the second rank has 9 and sends two tensors: FSDP2 hangs on the first.
    _refuses(StructureError, "of a shard [9, 12], which is padded to [10, 12]", _uneven)
    model = adapted(fsdp.Model(12).double(), True)
    config = WeightParallelConfig(blocks=("blocks.*",), gather_before="qkv")
    assert not internsp.supports(model, mesh_of(2), config), "by parallelize"
    plans = partial(examine, model, config, None, MeshShape(2, weight=2))
    raises(StructureError, plans, "which only ranks can call, on values: no plan")
    raises(ConfigError, partial(Custom(model).check, Config()), "loop of your own")
    tensor = ParallelMesh.create(tensor=2, device_type="cpu")
    local = Held(model.head.weight.detach())
    placed = DTensor.from_local(local, tensor.tensor_mesh, [Shard(0)])
    model.head.weight = nn.Parameter(placed)
    call = partial(parallelize, model, tensor, config)
    raises(StructureError, call, "head.weight is a tests.support.extensions.Held, not a plain")


@torch.no_grad()
def _row_to_zero(parameter: Any) -> None:
    parameter[7].zero_()


@ranks(2)
def test_values_that_only_the_class_knows_are_no_whole_parameters() -> None:
    """Also of models of one import: both would have read a placeholder."""
    mesh = mesh_of(2)
    _, mine, communicator = pair(mesh)
    model = build("quantized")
    fsdp.shard(ours.fully_shard, model, "blocks", fsdp.mesh_of((2,)))
    model(fsdp.batch(0, 0, mesh.rank))
    for each in (mine, model):
        for call in (internsp.full_params, internsp.iterate_full_params):

            def enter(each: Any = each, call: Any = call) -> Any:
                found = call(each)
                return found.__enter__() if hasattr(found, "__enter__") else [*found]

            raises(StructureError, enter, "blocks.0", "whose class alone knows values")
    raises(StructureError, partial(_row_to_zero, mine.blocks[0].up.weight), "across the shards")
    with internsp.full_params(mine.blocks[0].norm):
        assert mine.blocks[0].norm.weight.shape == (12,)
    raises(
        StructureError, partial(initialize, communicator, torch.nn.init.zeros_, 0), "cannot fill"
    )
    source = {} if mesh.rank == 0 else None
    load = partial(internsp.load_weights, mine, source, strict=False)
    raises(StructureError, load, "whose class alone knows values")
