"""Dropout's masks: SplitMix64's bits, evenly distributed, independent, requested by position."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import model_zoo
from internsp.app.config.load import load_config
from internsp.config.model import ModelConfig
from internsp.errors import ConfigError, LayoutError
from internsp.layers import dropout
from internsp.layers.dropout import Dropout, block_keys, dropout_mask, row_keys, token_keys
from internsp.sp import SequenceLayout

# From a generator that began with 1234567: Rosetta Code, "Pseudo-random numbers/Splitmix64".
KNOWN = [
    6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
    16408922859458223821,
]  # fmt: skip
CHANNELS = 64


def keys(rows: int = 8, length: int = 64, seed: int = 0, first: int = 0) -> Tensor:
    made = row_keys(seed, range(first, first + rows))
    return token_keys(made, torch.arange(length))


def mask(share: float = 0.5, number: int = 1, site: int = 0, **given: int) -> Tensor:
    return dropout_mask(block_keys(keys(**given), number), site, CHANNELS, share)


def test_words_are_those_of_splitmix64() -> None:
    found = dropout._words(torch.tensor([1234567]), torch.arange(5))
    assert [word % (1 << 64) for word in found.tolist()] == KNOWN


def test_a_mask_is_the_same_for_ever() -> None:
    """A run that resumes with a later version draws the same masks."""
    digest = hashlib.sha256(mask(0.1, first=1 << 40).numpy().tobytes()).hexdigest()
    assert digest[:16] == "12687ad4bc1b9010"


@pytest.mark.thorough(1)
@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9])
def test_a_share_of_the_elements_is_dropped_and_the_mean_stays(share: float) -> None:
    module = Dropout(share)
    x = torch.ones(8, 64, 3 * CHANNELS + 1, dtype=torch.float64, requires_grad=True)
    out = module(x, block_keys(keys(), 1))
    gone = out.detach() == 0
    spread = 5 * math.sqrt(share * (1 - share) / gone.numel())
    assert float(gone.double().mean()) == pytest.approx(share, abs=spread + 2**-16)
    kept = out.detach()[~gone]
    assert kept.numpy() == pytest.approx(1 / (1 - share), rel=1e-4)
    # Exactly unbiased: kept values are scaled by the exact probability in 65,536ths.
    assert module.scale * (1 - dropout.steps_of(share) / 65536) == pytest.approx(1, rel=1e-15)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


def test_numbers_are_evenly_spread() -> None:
    """Chi-squared over 256 classes, of each of a word's four numbers."""
    tokens = block_keys(keys(rows=16), 1)
    for lane in range(4):
        counts = torch.zeros(256)
        for level in range(1, 256):  # numbers below each bound
            counts[level] = dropout_mask(tokens, 0, CHANNELS, level / 256)[..., lane::4].sum()
        total = 16 * 64 * CHANNELS / 4
        each = torch.diff(counts, append=torch.tensor([float(total)]))
        expected = total / 256
        chi = float(((each - expected) ** 2 / expected).sum())
        assert abs(chi - 255) < 5 * math.sqrt(2 * 255), (lane, chi)


NEIGHBORS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "channels": lambda: (mask()[..., 1:], mask()[..., :-1]),
    "words": lambda: (mask()[..., 4:], mask()[..., :-4]),
    "positions": lambda: (mask()[:, 1:], mask()[:, :-1]),
    "rows": lambda: (mask()[1:], mask()[:-1]),
    "blocks": lambda: (mask(number=1), mask(number=2)),
    "places in a block": lambda: (mask(site=0), mask(site=1)),
    "embedding and block": lambda: (mask(number=0), mask(number=1)),
    "steps": lambda: (mask(first=0), mask(first=8)),
    "seeds": lambda: (mask(seed=0), mask(seed=1)),
    "row and seed": lambda: (mask(seed=1, first=0), mask(seed=0, first=1)),
    "position and row": lambda: (mask()[:-1, 1:], mask()[1:, :-1]),
    "position and block": lambda: (mask(number=2)[:, :-1], mask(number=1)[:, 1:]),
    "position and channel": lambda: (mask()[:, 1:, :-4], mask()[:, :-1, 4:]),
    "block and place": lambda: (mask(number=2, site=0), mask(number=1, site=1)),
}


@pytest.mark.parametrize("name", NEIGHBORS)
def test_neighbors_are_dropped_independently(name: str) -> None:
    one, other = (m.double() - 0.5 for m in NEIGHBORS[name]())
    correlation = float((one * other).mean()) * 4 * math.sqrt(one.numel())
    assert abs(correlation) < 4.5


def test_no_two_rows_positions_or_channels_have_the_same_mask() -> None:
    """And sums over each are as spread as those of independent draws: neither less nor more."""
    found = mask().double() - 0.5
    for dims in ((0, 1), (0, 2), (1, 2), (0,), (1,), (2,)):
        count = math.prod(found.shape[d] for d in dims)
        sums = found.sum(dims) / math.sqrt(count / 4)
        spread = float(sums.var(correction=0) + sums.mean() ** 2)
        assert abs(spread - 1) < 5 * math.sqrt(2 / sums.numel()), dims
    for dim in range(3):
        assert torch.unique(found, dim=dim).shape[dim] == found.shape[dim]


def test_a_part_of_the_positions_has_its_part_of_the_mask() -> None:
    whole = mask()
    tokens = token_keys(row_keys(0, [5, 2]), torch.tensor([40, 3]))
    part = dropout_mask(block_keys(tokens, 1), 0, CHANNELS - 3, 0.5)
    assert torch.equal(part, whole[[5, 2]][:, [40, 3], :-3])


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough(30))]
)
def test_a_compiler_makes_the_same_masks(backend: str) -> None:
    module = Dropout(0.3)

    def run(x: Tensor, tokens: Tensor) -> Tensor:
        return module(x, block_keys(tokens, 3), 1) * 2

    x = torch.randn(8, 64, 50)
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    assert torch.equal(compiled(x, keys()), run(x, keys()))


def test_nothing_is_dropped_in_evaluation_or_of_no_share() -> None:
    x = torch.randn(8, 64, CHANNELS)
    assert Dropout(0.5).eval()(x, None) is x
    assert Dropout(0.0)(x, None) is x


def test_keys_that_are_missing_or_of_other_tokens_are_refused() -> None:
    x = torch.randn(8, 64, CHANNELS)
    for wrong in (None, keys()[:1], keys()[:, 1:]):
        with pytest.raises(LayoutError, match="needs the keys of"):
            Dropout(0.5)(x, wrong)


def zoo(**model: Any) -> nn.Module:
    sizes = {"vocab_size": 31, "hidden_size": 16, "layers": 2, "heads": 2, "intermediate_size": 24}
    return model_zoo.build(ModelConfig(**{**sizes, **model}), dtype=torch.float64)


@pytest.mark.parametrize("family", ["llama", "internlm2"])
def test_a_model_drops_in_training_alone_by_the_rows_that_it_is_told(family: str) -> None:
    torch.manual_seed(0)
    plain = zoo(family=family)
    model = zoo(family=family, dropout=0.5)
    model.load_state_dict(plain.state_dict())
    ids = torch.randint(0, 31, (2, 9))

    def layout(*numbers: int) -> SequenceLayout:
        return SequenceLayout.create(ids, row_keys=row_keys(0, numbers))

    one, again, other = (model(ids, layout=layout(*n)) for n in ((4, 7), (4, 7), (4, 8)))
    assert torch.equal(one, again)
    assert torch.equal(one[0], other[0])
    assert not torch.allclose(one[1], other[1])
    assert torch.equal(model(ids, row_keys=row_keys(0, [4, 7])), one)
    for refused in ({}, {"layout": SequenceLayout.create(ids)}):
        with pytest.raises(LayoutError, match="row_keys"):
            model(ids, **refused)
    with pytest.raises(LayoutError, match="2 row keys"):
        layout(4)
    model.eval()
    assert torch.equal(model(ids), plain(ids))
    generated = model_zoo.generate(model.train(), ids[0], 3, temperature=0)
    assert torch.equal(generated, model_zoo.generate(plain, ids[0], 3, temperature=0))
    assert model.training


def refused(**sections: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(sections)
    return str(error.value)


def test_attention_dropout_is_refused_with_its_reason() -> None:
    text = refused(model={"attention_dropout": 0.1})
    assert "model.attention_dropout: unknown key; there is none: attention kernels" in text
    assert "did you mean model.dropout?" in refused(model={"hidden_dropout": 0.1})
    assert "dropout" in refused(model={"dropout": 1.0})


def test_a_model_of_transformers_has_its_own() -> None:
    text = refused(model={"family": "hf", "path": "x", "dropout": 0.1})
    assert "model.dropout: only for the model zoo" in text
