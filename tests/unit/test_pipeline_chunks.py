"""Where a model is split: balanced by cost, no empty chunk, names as in the full model."""

from __future__ import annotations

from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import internsp.pipeline.chunks as chunks_module
from internsp import model_zoo
from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.config.model import ModelConfig
from internsp.errors import StructureError
from internsp.mesh.shape import MeshShape
from internsp.pipeline.chunks import Chunk, partition_costs, split_model
from internsp.pipeline.pipeline import chunk_config, require_patterns_match
from internsp.pipeline.tied import copy_shared_modules, find_tied
from internsp.sp import SequenceLayout
from internsp.structure.blocks import read_structure


def build(**sizes: object) -> model_zoo.CausalLM:
    given = {"vocab_size": 257, "hidden_size": 16, "layers": 6, "heads": 2} | sizes
    return model_zoo.build(ModelConfig(**given), device="meta")  # type: ignore[arg-type]


def test_equal_blocks_without_a_head_are_cut_evenly() -> None:
    assert partition_costs([1.0] * 8, 4) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert partition_costs([1.0] * 7, 3) == [range(3), range(3, 5), range(5, 7)]


def test_the_part_with_the_head_gets_fewer_blocks() -> None:
    assert partition_costs([1.0] * 8, 2, tail=2.0) == [range(5), range(5, 8)]
    assert partition_costs([1.0] * 4, 2, tail=100.0) == [range(3), range(3, 4)]


def test_unequal_blocks_are_balanced_by_cost() -> None:
    assert partition_costs([5.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2) == [range(1), range(1, 6)]


@pytest.mark.thorough(1)
@given(
    costs=st.lists(st.floats(0.1, 10), min_size=1, max_size=9),
    parts=st.integers(1, 5),
    tail=st.floats(0, 20),
)
def test_no_other_cut_has_a_smaller_sum_of_squares(
    costs: list[float], parts: int, tail: float
) -> None:
    if parts > len(costs):
        return
    found = partition_costs(costs, parts, tail)
    assert [i for part in found for i in part] == list(range(len(costs)))
    assert all(len(part) > 0 for part in found)

    def value(ends: list[int]) -> float:
        edges = [0, *ends, len(costs)]
        sums = [sum(costs[a:b]) for a, b in pairwise(edges)]
        sums[-1] += tail
        return sum(s * s for s in sums)

    best = min(value(list(ends)) for ends in combinations(range(1, len(costs)), parts - 1))
    assert value([part.stop for part in found[:-1]]) == pytest.approx(best)


def test_products_are_what_costs_and_the_heads_count_four_thirds() -> None:
    def blocks_of_each(outputs: int) -> list[int]:
        model: Any = SimpleNamespace(
            embed=nn.Embedding(999, 8),
            layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(6)),  # 64 products, 8 additions
            head=nn.Linear(8, outputs, bias=False),
            norm=None, rotary=None, loss_options={},
        )  # fmt: skip
        return [len(blocks) for blocks in split_model(model, 2)]

    # The last stage loses a block as soon as its head costs as much: four thirds of 8 x 6.
    assert [blocks_of_each(rows) for rows in (5, 6)] == [[3, 3], [4, 2]]


def test_what_several_chunks_share_has_the_models_name_and_one_in_each_chunk() -> None:
    model = build(tie_embeddings=True)
    model.layers[5].ffn_norm = model.layers[1].ffn_norm
    blocks = split_model(model, 3)
    chunks = [Chunk(model, part, i == 0, i == 2) for i, part in enumerate(blocks)]
    assert find_tied(model, chunks) == {
        "embed.weight": {0: "embed.weight", 2: "head.weight"},
        "layers.1.ffn_norm.weight": {0: "layers.1.ffn_norm.weight", 2: "layers.5.ffn_norm.weight"},
    }
    copy_shared_modules(chunks)
    norms = [chunks[0].layers["1"].ffn_norm, chunks[2].layers["5"].ffn_norm]
    assert norms[0] is model.layers[1].ffn_norm is not norms[1]
    assert norms[0].weight.shape == norms[1].weight.shape


def test_a_model_without_a_part_is_refused_by_its_name() -> None:
    model: Any = nn.ModuleDict({"embed": nn.Identity(), "layers": nn.ModuleList([nn.Identity()])})
    with pytest.raises(StructureError, match="ModuleDict has no norm, head, rotary, loss_options"):
        split_model(model, 1)


def test_lists_of_layers_elsewhere_in_the_model_are_no_blocks() -> None:
    model = build()
    model.embed.layers = nn.ModuleList([nn.Linear(16, 16)])
    with pytest.raises(StructureError, match=r"no prefetch trigger .* in block embed\.layers\.0"):
        read_structure(model)  # without a pipeline the names decide
    require_patterns_match(model, WeightParallelConfig(), MeshShape(2, pipeline=2))


def test_too_few_blocks_are_refused() -> None:
    with pytest.raises(StructureError, match="6 blocks cannot be split into 8 chunks"):
        split_model(build(), 8)


def test_parameters_keep_the_names_of_the_whole_model() -> None:
    model = build()
    names = {name for name, _ in model.named_parameters()}
    blocks = split_model(model, 3)
    chunks = [Chunk(model, part, i == 0, i == 2) for i, part in enumerate(blocks)]
    found = [name for chunk in chunks for name, _ in chunk.named_parameters()]
    assert sorted(found) == sorted(names)
    assert chunks[1].block_names() == tuple(f"layers.{i}" for i in blocks[1])


def test_settings_that_number_blocks_are_handed_down_as_a_chunks_own() -> None:
    model, again = build(layers=9), ActivationCheckpointConfig(mode="full", fraction=0.5)
    assert again.selected(9) == (0, 1, 2, 3)
    found = {}
    for blocks in (range(2), range(2, 7), range(7, 9)):
        chunk = Chunk(model, blocks, blocks.start == 0, blocks.stop == 9)
        weights, local = chunk_config(chunk, WeightParallelConfig(keep_unsharded=1), again)
        assert weights.blocks == tuple(f"layers.{i}" for i in blocks)
        assert weights.keep_unsharded == 1
        assert local is not None
        found[blocks.start] = {blocks.start + i for i in local.selected(len(blocks))}
    assert found == {0: {0, 1}, 2: {2, 3}, 7: set()}


def test_chunks_one_after_another_are_the_model() -> None:
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=31, hidden_size=16, layers=5, heads=2)
    model = model_zoo.build(config, dtype=torch.float64)
    ids = torch.randint(0, 31, (2, 7))
    wanted = model(ids)
    wanted_loss, _ = model(ids, labels=ids)
    parts = split_model(model, 3)
    h = ids
    for stage, part in enumerate(parts):
        chunk = Chunk(model, part, stage == 0, stage == 2)
        before, h = h, chunk(h)
    torch.testing.assert_close(h, wanted)
    torch.testing.assert_close(chunk(before, labels=ids), wanted_loss)


def test_the_last_chunk_hands_the_models_and_the_micro_batchs_options_to_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Any] = {}

    def loss(hidden: torch.Tensor, *_: Any, **options: Any) -> tuple[torch.Tensor, None]:
        seen.update(options)
        return hidden.sum(), None

    monkeypatch.setattr(chunks_module, "token_loss", loss)
    model = model_zoo.build(ModelConfig(vocab_size=31, hidden_size=16, layers=1, heads=2))
    model.loss_options = {"output": "vocabulary", "group": "of sequences"}
    ids = torch.zeros(2, 7, dtype=torch.int64)
    layout = SequenceLayout.create(ids)
    Chunk(model, range(1), True, True)(ids, layout=layout, labels=ids, loss_chunk=5)
    assert seen == {
        "output": "vocabulary", "group": "of sequences", "layout": layout, "chunk_tokens": 5,
    }  # fmt: skip
