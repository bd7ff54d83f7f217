"""torch's own modules that read weights of other modules (design.md 4.3)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from internsp.config import ActivationCheckpointConfig
from internsp.errors import StructureError
from internsp.mesh import ParallelMesh
from internsp.parallel.parallelize import parallelize
from tests.support.compare import close
from tests.support.models import ALL, Tiny, Twin
from tests.support.ranks import run_ranks

WIDTH = 6
FULL = ActivationCheckpointConfig(mode="full")
REENTRANT = ActivationCheckpointConfig(mode="full", reentrant=True)


class Attention(nn.Module):
    """``nn.MultiheadAttention`` reads the weight of its ``out_proj``, which it never calls."""

    def __init__(self, separate: bool = False) -> None:
        super().__init__()
        keys = WIDTH - 1 if separate else WIDTH  # then q, k and v have separate weights
        self.attention = nn.MultiheadAttention(
            WIDTH, 2, batch_first=True, kdim=keys, vdim=keys, add_bias_kv=separate
        )
        self.up = nn.Linear(WIDTH, WIDTH)
        self.keys = keys

    def forward(self, x: Tensor) -> Tensor:
        keys = x[..., : self.keys]
        x = x + self.attention(x, keys, keys, need_weights=False)[0]
        return x + torch.tanh(self.up(x))


def encoder(first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(
        WIDTH, 2, 2 * WIDTH + 1, dropout=0.0, batch_first=True, norm_first=first
    )


class Recurrent(nn.Module):
    """``nn.LSTM`` and similar modules hold their parameters in a list, with which they compute."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, batch_first=True, **options)
        sides = 2 if options.get("bidirectional") else 1
        self.up = nn.Linear(sides * (options.get("proj_size") or WIDTH), WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(self.rnn(x)[0]))


class Listed(nn.Module):
    """A user-defined module that also keeps its parameters in a list and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Linear(WIDTH, WIDTH).weight, nn.Linear(WIDTH, WIDTH).weight
        self.kept = {"all": [self.weight, self.other]}

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.kept["all"]:
            x = x + torch.tanh(x @ weight)
        return x


MODULES = {
    "lstm": Recurrent,
    "lstm, two ways": partial(Recurrent, bidirectional=True, num_layers=2),
    "lstm, projected": partial(Recurrent, proj_size=4),
    "gru": partial(Recurrent, nn.GRU),
    "listed": Listed,
    "attention": Attention,
    "attention of other keys": partial(Attention, separate=True),
    "encoder layer": partial(encoder, False),
    "encoder layer, norm first": partial(encoder, True),
}


def train(
    rank: int, world: int, name: str, checkpoint: ActivationCheckpointConfig | None, options: Any
) -> None:
    mesh = ParallelMesh.create(weight=world, sequence=1, device_type="cpu")
    twin = Twin(partial(Tiny, MODULES[name]), mesh, checkpoint, gather_before="qkv", **options)
    steps = [torch.optim.SGD(model.parameters(), 0.1) for model in (twin.plain, twin.ours)]
    for step in range(3):
        twin.backward()
        twin.check_gradients(f"{name}, step {step}")
        for optimizer in steps:
            optimizer.step()
        twin.zero_grad()
        twin.check_parameters(f"{name}, step {step}")
    ids = twin.batch()[0][0]
    for model in (twin.plain, twin.ours):
        model.eval()  # torch's fast path of an encoder layer reads the weights of all its modules
    with torch.no_grad():
        close(twin.ours(ids), twin.plain(ids), f"{name}: logits of an evaluation")


@pytest.mark.thorough(7)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("options", [{}, ALL], ids=["alone", "coalesced"])
def test_modules_that_read_others_weights_train_as_on_one_process(name: str, options: Any) -> None:
    run_ranks(train, 2, name, None, options)


@pytest.mark.parametrize("checkpoint", [FULL, REENTRANT], ids=["recomputed", "reentrant"])
@pytest.mark.parametrize("name", ["attention", "encoder layer", "lstm", "listed"])
def test_they_are_right_when_recomputed(
    name: str, checkpoint: ActivationCheckpointConfig
) -> None:
    run_ranks(train, 2, name, checkpoint, {})


class Stacked(Tiny):
    """``nn.TransformerEncoder``, which reads its first layer's weights before it calls it."""

    def __init__(self) -> None:
        super().__init__(partial(encoder, False), layers=1)
        self.stack = nn.TransformerEncoder(encoder(False), 3)
        del self.layers

    def blocks(self, x: Tensor) -> Tensor:
        padded = torch.arange(x.shape[1]).expand(x.shape[:2]) >= 3
        return self.stack(x, src_key_padding_mask=padded).masked_fill(padded[..., None], 0.0)  # type: ignore[no-any-return]


def stacked(rank: int, world: int) -> None:
    mesh = ParallelMesh.create(weight=world, sequence=1, device_type="cpu")
    for checkpoint, options in ((None, {}), (FULL, ALL), (REENTRANT, {})):
        found = {"blocks": ("stack.layers.*",), "gather_before": "qkv"} | options
        twin = Twin(Stacked, mesh, checkpoint, **found)
        steps = [torch.optim.SGD(model.parameters(), 0.1) for model in (twin.plain, twin.ours)]
        for step in range(2):
            twin.backward()
            twin.check_step(steps, f"{checkpoint}, step {step}")
        ids = twin.batch()[0][0]
        with torch.no_grad():
            close(twin.ours.eval()(ids), twin.plain.eval()(ids), f"{checkpoint}: an evaluation")


@pytest.mark.thorough(1)
def test_a_stack_of_encoder_layers_with_padding_is_right_in_training_and_evaluation() -> None:
    run_ranks(stacked, 2)


def moved(rank: int, world: int) -> None:
    """An LSTM renews its list itself (in ``model.to``); it holds shards between passes."""
    mesh = ParallelMesh.create(weight=2, sequence=1, device_type="cpu")
    twin = Twin(partial(Tiny, Recurrent), mesh, gather_before="qkv")
    for layer in twin.ours.layers:  # type: ignore[union-attr]
        held = layer.rnn._flat_weights
        assert all(a is b for a, b in zip(held, layer.rnn.parameters(), strict=True)), "at rest"
        layer.rnn._flat_weights = list(layer.rnn.parameters())
    twin.backward()
    twin.check_gradients("after it was renewed")
    for layer in twin.ours.layers:  # type: ignore[union-attr]
        held = layer.rnn._flat_weights
        assert all(a is b for a, b in zip(held, layer.rnn.parameters(), strict=True)), "put back"


def test_an_lstms_list_holds_shards_at_rest_and_may_be_renewed() -> None:
    run_ranks(moved, 2)


def changed(rank: int, world: int, options: Any) -> None:
    """Another tensor in such a list would be ignored silently."""
    mesh = ParallelMesh.create(weight=2, sequence=1, device_type="cpu")
    twin = Twin(partial(Tiny, Listed), mesh, gather_before="qkv", **options)
    held = twin.ours.layers[1].kept["all"]  # type: ignore[index, union-attr]
    ours, held[0] = held[0], torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for _ in range(2):
        with pytest.raises(StructureError, match=r"kept of a Listed layers\.1 no longer holds"):
            twin.ours(*twin.batch()[1])
    held[0] = ours
    twin.backward()
    twin.check_gradients("once it was put back")


@pytest.mark.parametrize("options", [{}, ALL], ids=["alone", "coalesced"])
def test_a_list_in_which_something_else_was_put_is_refused(options: Any) -> None:
    run_ranks(changed, 2, options)


def refused(rank: int, world: int) -> None:
    mesh = ParallelMesh.create(weight=1, sequence=2, device_type="cpu")
    with pytest.raises(StructureError, match=r"layers\.0\.self_attn: MultiheadAttention"):
        parallelize(Tiny(partial(encoder, False)).double(), mesh)


def test_torchs_attention_over_a_cut_sequence_is_refused_by_name() -> None:
    run_ranks(refused, 2)
