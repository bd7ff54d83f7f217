"""Parameters mixed with plain tensors outside of every forward: refused by name, or exact."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from internsp.errors import GradientError, StructureError
from tests.ranks.test_reads_refused import sizes, still_right
from tests.support.compare import close
from tests.support.models import Tiny, Twin, raises
from tests.support.ranks import ranks


def mixtures(model: Any, x: Tensor) -> dict[str, Callable[[], Any]]:
    """Operations of ``embed.weight``, and of tensors made of it, with plain tensors, by name."""
    table, whole = model.embed.weight, torch.zeros(11, 6).double()
    average, still = whole.clone(), table.detach()
    return {
        "linear": lambda: F.linear(x, table),
        "matmul": lambda: table @ x.t(),
        "cat": lambda: torch.cat([table, x]),
        "embedding": lambda: F.embedding(torch.tensor([1, 2]), table),
        "einsum": lambda: torch.einsum("ab,cb->ac", table, x),
        "mse_loss": lambda: F.mse_loss(table, whole),
        "where": lambda: torch.where(whole > 0, table, 0.0),
        "Tensor.mul": lambda: table.pow(2).sum(1, keepdim=True).mul(x[:, :2].sum(0)),
        "add": lambda: x[0] + table.t().mean(1),
        "lerp_": lambda: average.lerp_(still, 0.1),
        "sub_": lambda: still.sub_(whole),
        "copy_": lambda: still.copy_(whole),
        "addcmul_": lambda: still.addcmul_(x[:1], x[1:2]),
        "add_": lambda: torch.zeros(()).double().add_(still.norm()),
        "torch.add": lambda: torch.add(still, 1, out=average),
        "redistribute": lambda: table.redistribute(placements=table.placements) @ x.t(),
    }


def loss_and_terms(twin: Twin) -> None:
    """A term of the parameters added to a loss: refused there, and right as the error proposes."""
    ours, (everybody, mine) = twin.ours, twin.batch()

    def loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")

    def penalty(model: nn.Module) -> Any:
        return sum(p.pow(2).sum() for p in model.parameters())

    def both() -> Any:
        return loss(ours, *mine) + penalty(ours)

    words = ("a backward of its own", ".full_tensor()", f"on rank {twin.mesh.rank}")
    raises(GradientError, both, "embed.weight", *words)
    twin.zero_grad()
    (loss(twin.plain, *everybody) + penalty(twin.plain)).backward()
    (loss(ours, *mine) + penalty(ours).full_tensor()).backward()
    twin.check_gradients("a whole penalty in one loss")
    assert all(type(p.grad) is DTensor for p in ours.parameters())
    twin.zero_grad()

    table: Any = ours.embed.weight
    summed = [Partial()] * table.device_mesh.ndim
    whole = table.full_tensor(grad_placements=summed)
    rows = torch.randn(2, 4, 6, dtype=torch.float64)[:, : twin.mesh.world_size]
    (F.linear(rows, twin.plain.embed.weight).tanh().sum()).backward()  # type: ignore[arg-type]
    F.linear(rows[:, twin.mesh.rank], whole).tanh().sum().backward()
    twin.check_gradients("an unsharded weight with a rank's own rows")
    twin.zero_grad()


@ranks(2)
def test_parameters_mixed_with_plain_tensors_are_refused_and_the_remedies_are_right(
    rank: int,
) -> None:
    for mesh, config in sizes():
        twin = Twin(partial(Tiny, layers=2), mesh, **config)
        before = {n: p.to_local().clone() for n, p in twin.ours.named_parameters()}
        x = torch.randn(3, 6, dtype=torch.float64)
        where = ("embed.weight", f"on rank {rank}", "full_tensor()", "plain tensor")
        for recorded in (True, False):
            for name, call in mixtures(twin.ours, x).items():
                word = "matmul" if name == "redistribute" else name
                with torch.set_grad_enabled(recorded):
                    raises(StructureError, call, *where, word)
        for name, p in twin.ours.named_parameters():
            close(p.to_local(), before[name], f"{name} after refusals")
        loss_and_terms(twin)
        still_right(twin, "mixtures")


@ranks(2)
def test_a_number_of_a_part_is_refused_and_one_of_the_whole_is_right(rank: int) -> None:
    numbers: dict[str, Callable[[Any], Any]] = {
        "item": lambda p: p.norm().item(),
        "item of the largest": lambda p: p.detach().max().item(),
        "float": lambda p: float(p.detach().sum()),
        "int": lambda p: int((p.detach() * 1000).sum()),
        "complex": lambda p: complex(p.square().sum()),
        "index": lambda p: [*range(99)][(p != 0).sum()],
    }
    for mesh, config in sizes():
        twin = Twin(partial(Tiny, layers=2), mesh, **config)
        ours, plain = twin.ours.embed.weight, twin.plain.embed.weight
        whole = ours.full_tensor()
        for name, call in numbers.items():
            wanted = call(plain)
            assert abs(call(whole) - wanted) <= 1e-12 * abs(wanted), name
            if all(each.is_replicate() for each in ours.placements) or mesh.shape.weight == 1:
                assert abs(call(ours) - wanted) <= 1e-12 * abs(wanted), name
            else:
                raises(
                    StructureError, partial(call, ours), "embed.weight", f"on rank {rank}",
                    ".full_tensor() before it", ".to_local() for the part",
                )  # fmt: skip
        assert ours[3, 1].item() == plain[3, 1].item(), "an element is gathered"
        assert ours.isfinite().all()
        still_right(twin, "numbers")


def pickled(value: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def vectors(twin: Twin, uneven: bool) -> None:
    ours, wanted = twin.ours, parameters_to_vector(twin.plain.parameters())
    call = partial(parameters_to_vector, list(ours.parameters()))
    if uneven:
        words = ("view", "on rank", "full_tensor().view(-1)", "vector_to_parameters")
        raises(StructureError, call, "embed.weight", *words)
    else:
        close(call().full_tensor(), wanted, "a vector")  # type: ignore[attr-defined]
    with torch.no_grad():
        whole: list[Any] = list(ours.parameters())
        vector = torch.cat([p.full_tensor().view(-1) for p in whole])
        close(vector, wanted, "a vector of whole values")
        vector_to_parameters(vector * 2, ours.parameters())
        vector_to_parameters(wanted * 2, twin.plain.parameters())
    twin.check_parameters("set from a vector")
    still_right(twin, "vectors")


@ranks(2)
def test_what_works_goes_on_working_and_vectors_of_parameters_are_right_or_refused() -> None:
    for mesh, config in sizes():
        twin = Twin(partial(Tiny, layers=2), mesh, **config)
        models = (twin.plain, twin.ours)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, foreach=True) for m in models]
        averages = [[p.detach().clone() for p in m.parameters()] for m in models]
        for _ in range(2):
            twin.backward()
            twin.check_gradients("before a step")
            for model, optimizer, average in zip(models, optimizers, averages, strict=True):
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                for mean, p in zip(average, model.parameters(), strict=True):
                    mean.lerp_(p.detach(), 0.1)
            twin.check_parameters("after a step")
        ours: list[Any] = averages[1]
        for wanted, found, p in zip(averages[0], ours, twin.ours.parameters(), strict=True):
            close(found.full_tensor(), wanted, "an average")
            again = pickled(found)
            for copied in (again, copy.deepcopy(found), torch.zeros_like(p) + 0):
                assert type(copied) is DTensor, type(copied)
            close(again.to_local(), found.to_local(), "a saved average")
            assert isinstance(p, DTensor)
            assert isinstance(p, nn.Parameter)
            assert isinstance(nn.Parameter(found), nn.Parameter)
            assert {type(v) for v in optimizers[1].state[p].values()} == {Tensor, DTensor}
        norms = [torch.stack([p.norm() for p in m.parameters()] + [torch.ones(()).double()])
                 for m in models]  # fmt: skip
        close(norms[1].full_tensor(), norms[0], "norms")  # type: ignore[attr-defined]
        vectors(twin, uneven=mesh.shape.weight == 2 and "min_shard_elements" not in config)
