"""Models from the meta device: buffers recomputed, weights streamed, by value."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import internsp
from internsp.config import WeightParallelConfig
from internsp.errors import CollectiveError, ConfigError, LayoutError, StructureError
from internsp.values import load
from tests.support.alive import Alive
from tests.support.compare import check
from tests.support.meshes import mesh_of
from tests.support.models import VOCABULARY, Block, Tiny, raises
from tests.support.ranks import ranks
from tests.support.zero import Case, setup

CONFIG = WeightParallelConfig(min_shard_elements=20)
READ = load._Files.read


class Rotary(nn.Module):
    """Frequencies from its own method; some are random, and depend on the name only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", torch.empty(3), persistent=False)
        self.register_buffer("phase", torch.empty(6), persistent=False)
        self.register_buffer("flags", torch.empty(6, dtype=torch.bool), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.inverse.copy_(1 / 10 ** (torch.arange(3) / 3))
            self.phase.uniform_()
            self.flags.copy_(torch.arange(6) % 2 == 0)


class Turned(Block):
    """With buffers of several kinds; its own reset also writes its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.norm2 = nn.BatchNorm1d(6, affine=False)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("mask", torch.ones(6), persistent=False)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.fill_(9)
            self.mask.fill_(1.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.where(self.rotary.flags, self.rotary.phase, 1.0) * self.mask * self.scale
        return super().forward(x + torch.cat([self.rotary.inverse] * 2) + self.norm2.running_var)


def build(device: str, tied: bool = False) -> Tiny:
    torch.manual_seed(4)
    with torch.device(device):
        return Tiny(Turned, layers=2, tied=tied).double()


def fill(name: str, whole: Tensor, generator: torch.Generator) -> None:
    whole.normal_(generator=generator)


@ranks(4)
def test_buffers_from_meta_are_computed_by_their_modules_alike_on_every_mesh() -> None:
    found: list[dict[str, Tensor]] = []
    ids = torch.arange(VOCABULARY)[None]
    outputs = []
    for weight in (1, 2, 4):
        model = build("meta")
        communicator = internsp.parallelize(model, mesh_of(weight), CONFIG)
        raises(StructureError, partial(model, ids), "embed.weight", "load_weights")
        internsp.initialize(communicator, fill, 7)
        with internsp.full_params(model):
            found.append(dict(model.named_buffers()))
            found[-1] |= {n: p.detach().clone() for n, p in model.named_parameters()}
        outputs.append(model(ids).detach())
    wanted = build("cpu").state_dict()
    for values in found:
        assert not any(value.is_meta for value in values.values())
        assert all(torch.equal(values[name], found[0][name]) for name in values)
        for layer in ("layers.0", "layers.1"):
            inverse = values[f"{layer}.rotary.inverse"]
            assert torch.equal(inverse, (1 / 10 ** (torch.arange(3) / 3)).double())
            assert torch.equal(values[f"{layer}.rotary.flags"], torch.arange(6) % 2 == 0)
            assert torch.equal(values[f"{layer}.mask"], torch.full((6,), 1.5).double())
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                key = f"{layer}.norm2.{name}"
                assert torch.equal(values[key], wanted[key])
        one, other = (values[f"layers.{i}.rotary.phase"] for i in (0, 1))
        assert not torch.equal(one, other)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


class Lost(Turned):
    """With a buffer that nothing computes, and that modules share where it is given."""

    def __init__(self, persistent: bool, shared: Tensor | None = None) -> None:
        super().__init__()
        table = torch.arange(6.0) if shared is None else shared
        self.register_buffer("table", table, persistent=persistent)


@ranks(2)
def test_a_buffer_that_nothing_computes_has_its_value_from_the_first_rank(rank: int) -> None:
    with torch.device("meta"):
        shared = torch.empty(6, dtype=torch.float64)
        model = Tiny(partial(Lost, True, shared), layers=2).double()
    internsp.initialize(internsp.parallelize(model, mesh_of(2), CONFIG), fill, 0)
    given = {"layers.0.table": torch.arange(6.0)} if rank == 0 else None
    internsp.load_weights(model, given, strict=False)
    one, other = (layer.get_buffer("table") for layer in model.layers)
    assert one is other
    assert torch.equal(one, torch.arange(6.0).double())


@ranks(2)
def test_a_buffer_that_nothing_computes_is_refused_by_name() -> None:
    for persistent in (False, True):
        with torch.device("meta"):
            model = Tiny(partial(Lost, persistent), layers=2).double()
        make = partial(internsp.parallelize, model, mesh_of(2), CONFIG)
        if not persistent:
            raises(StructureError, make, "layers.0.table (of a Lost)", "reset_parameters")
            continue
        internsp.initialize(make(), fill, 0)
        forward = partial(model, torch.arange(VOCABULARY)[None])
        raises(StructureError, forward, "layers.0.table", "no values")
        model.load_state_dict({f"layers.{i}.table": torch.arange(6.0) for i in (0, 1)},
                              strict=False, assign=True)  # fmt: skip
        forward()


class Lazy(Mapping[str, Tensor]):
    """Creates each tensor on request."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.values_of, self.asked = values, 0

    def __getitem__(self, name: str) -> Tensor:
        self.asked += 1
        return self.values_of[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_of)

    def __len__(self) -> int:
        return len(self.values_of)


def write(folder: Path, values: dict[str, Tensor], index: bool) -> Path:
    folder.mkdir()
    names = sorted(values)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in files.items():
        save_file({name: values[name].clone() for name in own}, folder / file)
    if index:
        table = {name: file for file, own in files.items() for name in own}
        text = json.dumps({"metadata": {}, "weight_map": table})
        (folder / "model.safetensors.index.json").write_text(text)
    return folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Folders of one model's weights: with an index, without, with other names, tied."""
    torch.manual_seed(11)
    values = {n: torch.randn_like(v) if v.is_floating_point() else v
              for n, v in build("cpu").state_dict().items()}  # fmt: skip
    torch.save(values, tmp_path / "values.pt")
    write(tmp_path / "indexed", values, True)
    write(tmp_path / "plain", values, False)
    write(tmp_path / "renamed", {f"model.{n}": v for n, v in values.items()}, True)
    write(tmp_path / "untied", {n: v for n, v in values.items() if n != "head.weight"}, False)
    return tmp_path


@ranks(4)
def test_weights_are_read_from_a_folder_or_scattered_and_no_rank_holds_them_all(
    saved: Path, rank: int
) -> None:
    values: dict[str, Tensor] = torch.load(saved / "values.pt")
    sources: list[tuple[str, Callable[[], Any], dict[str, Any]]] = [
        ("indexed", lambda: saved / "indexed", {}), ("plain", lambda: str(saved / "plain"), {}),
        ("renamed", lambda: saved / "renamed", {"rename": "model.{}".format}),
        ("first rank", lambda: Lazy(values) if rank == 0 else None, {}),
    ]  # fmt: skip
    largest = max(value.nbytes for value in values.values())
    everything = sum(value.nbytes for value in values.values())
    for weight in (1, 2, 4):
        for what, source, options in sources:
            model = build("meta")
            communicator = internsp.parallelize(model, mesh_of(weight), CONFIG)
            members = communicator.replicated.all_parameters()
            given = source()
            read: list[int] = []

            def reading(files: Any, name: str, rows: Any, read: list[int] = read) -> Tensor:
                found: Tensor = READ(files, name, rows)
                read.append(found.nbytes)
                return found

            known = [*(m.storage for m in members), *values.values()]
            with Alive(known) as alive, patch.object(load._Files, "read", reading):
                assert internsp.load_weights(model, given, **options) == ([], [])
            # Of a file only this rank's rows; scattered, one tensor and its parts.
            own = max(-(-len(v) // weight) * v[0].nbytes for v in values.values() if v.ndim)
            assert max(read, default=0) <= max(own, 19 * 8), f"{what}, weight {weight}"
            assert bool(read) == (what != "first rank")
            assert alive.largest <= largest, f"{what}, weight {weight}"
            assert alive.most <= 3 * largest < everything / 2, f"{what}, weight {weight}"
            found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            found = {n: v.detach() for n, v in found.items() if n in values}
            check(found, values, f"{what}, weight {weight}", 0.0)
    plain = build("cpu")
    plain.load_state_dict(values)
    plain.rotary_phases = [layer.rotary.phase for layer in plain.layers]  # type: ignore[union-attr, assignment]
    for mine, theirs in zip(model.layers, plain.layers, strict=True):
        theirs.rotary.phase.copy_(mine.rotary.phase)  # type: ignore[union-attr, operator, arg-type]
        theirs.mask.fill_(1.5)  # type: ignore[union-attr, operator]
    ids = torch.arange(VOCABULARY)[None]
    torch.testing.assert_close(model(ids), plain(ids), atol=1e-12, rtol=1e-10)


@ranks(2)
def test_what_does_not_fit_is_refused_on_all_ranks_before_anything_is_written(
    saved: Path, rank: int
) -> None:
    values: dict[str, Tensor] = torch.load(saved / "values.pt")
    tied = build("meta", tied=True)
    internsp.parallelize(tied, mesh_of(2), CONFIG)
    missing, unused = internsp.load_weights(tied, saved / "untied")
    assert (missing, unused) == ([], [])
    model = build("cpu")
    internsp.parallelize(model, mesh_of(2), CONFIG)
    before = {n: p._local_tensor.clone() for n, p in model.named_parameters()}  # type: ignore[attr-defined]
    load = partial(internsp.load_weights, model)

    def refused(kind: type[Exception], source: Any, *words: str, alone: int | None = None) -> None:
        mine = kind if alone in (None, rank) else CollectiveError
        raises(mine, partial(load, source), *words)
        now = {n: p._local_tensor for n, p in model.named_parameters()}  # type: ignore[attr-defined]
        assert all(torch.equal(before[n], now[n]) for n in before)

    refused(ConfigError, saved / "untied", "no values for head.weight", "strict=False")
    refused(ConfigError, saved / "renamed", "no place for model.embed.weight")
    refused(ConfigError, saved / ("plain" if rank else "nowhere"), "there is no", alone=0)
    refused(ConfigError, values, "rank 1", "None to the others", alone=1)
    short = {**values, "layers.1.w1.weight": torch.zeros(3, 3)}
    write(saved / f"short{rank}", short, True)
    refused(LayoutError, saved / f"short{rank}", "layers.1.w1.weight", "[3, 3]", "[13, 6]")
    (saved / f"short{rank}" / "b.safetensors").unlink()
    refused(ConfigError, saved / f"short{rank}", "b.safetensors, which the index names")
    assert internsp.load_weights(model, saved / "untied", strict=False) == (["head.weight"], [])

    s = setup(Case(weight=2, dtype=torch.bfloat16))  # master weights are not rounded
    wide = {n: torch.randn(p.shape) for n, p in s.model.named_parameters()}
    for source in (wide if rank == 0 else None, saved / "wide"):
        if rank == 0 and source is not wide:
            save_file(wide, saved / "wide.safetensors")
        torch.distributed.barrier()
        where = saved / "wide.safetensors" if isinstance(source, Path) else source
        torch.distributed.broadcast_object_list(box := [wide], 0)
        internsp.load_weights(s.model, where)
        with internsp.full_params(s.model):
            for name, p in s.model.named_parameters():
                assert torch.equal(p, box[0][name]), name
