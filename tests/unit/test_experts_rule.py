"""Which travels, weights or tokens: the arithmetic, its choice, and what a plan prints of it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from internsp.app.config import Config
from internsp.app.plan.experts import chosen_experts, expert_lines, experts_traffic
from internsp.app.plan.longest import MemoryBudget
from internsp.app.plan.screen import print_plan
from internsp.base.sizes import human
from internsp.experts.rule import ExpertTraffic, expected_owners


@pytest.mark.parametrize(("experts", "top_k", "ranks"), [(8, 2, 4), (128, 8, 8), (16, 2, 2)])
def test_the_expected_owners_of_a_token_are_those_of_random_tokens(
    experts: int, top_k: int, ranks: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    chosen = torch.rand(10_000, experts, generator=generator).topk(top_k).indices
    owners = chosen // (experts // ranks)
    seen = torch.zeros(10_000, ranks).scatter_(1, owners, 1.0).sum(1).mean()
    assert expected_owners(experts, top_k, ranks) == pytest.approx(float(seen), rel=0.02)


def traffic(tokens: int) -> ExpertTraffic:
    """128 experts of 3 x 1024 x 768 over 8 ranks in bf16, two gathers and a reduction."""
    weights = 3 * 128 * 768 * 1024
    return ExpertTraffic(128, 8, 1024, 3 * weights * 2 * 7 // 8, 8, tokens, 2, 2)


def test_the_threshold_is_that_of_the_elements_and_the_pick_turns_there() -> None:
    at = traffic(1)
    assert at.owners == pytest.approx(5.34, abs=0.01)
    assert at.threshold == pytest.approx(9 * 128 * 768 / (4 * at.owners), rel=0.02)
    picks = [replace(at, tokens=int(at.threshold * n)).exchanges for n in (0.25, 0.45, 1, 4)]
    assert picks == [True, True, False, False]
    words = [replace(at, tokens=int(at.threshold * n)).verdict() for n in (0.25, 1, 4)]
    assert [w.split(":")[0] for w in words] == [
        "tokens travel (expert = 8)", *["weights travel (expert_weight = 8)"] * 2,
    ]  # fmt: skip
    margins = zip(words, ("4.0 times", "tie", "4.0 times"), strict=True)
    assert all(margin in text for text, margin in margins)
    again = replace(at, recomputed=True)
    assert again.bytes_of_a_token == pytest.approx(1.25 * at.bytes_of_a_token, rel=0.02)


def test_a_rule_that_is_turned_round_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = property(lambda each: each.tokens > each.threshold / 2)
    monkeypatch.setattr(ExpertTraffic, "exchanges", turned)
    with pytest.raises(AssertionError):
        test_the_threshold_is_that_of_the_elements_and_the_pick_turns_there()


def config(folder: Path, length: int, **parallel: Any) -> Config:
    return Config.model_validate({
        "model": {"family": "hf", "path": str(folder)},
        "data": {"sequence_length": length},
        "parallel": parallel,
        "weight_parallel": {"min_shard_elements": 64},
        "train": {"global_batch": 4, "micro_batches": 1, "dtype": "bfloat16"},
    })  # fmt: skip


def test_auto_takes_the_way_of_fewer_bytes_and_a_plan_says_so(tmp_path: Path) -> None:
    from transformers import MixtralConfig

    MixtralConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=8,
    ).save_pretrained(tmp_path)  # fmt: skip
    given = config(tmp_path, 64, expert_weight=2)
    each = experts_traffic(given, 2)
    assert list(each) == [f"model.layers.{n}.mlp.experts" for n in range(5)]
    first, *_, last = each.values()
    weights = 3 * 8 * 48 * 32 * 2
    assert first.gathered == pytest.approx(3 * weights // 2, rel=0.01), "two gathers, a reduction"
    assert last.gathered < first.gathered, "the last block stays in its slot for backward"
    threshold = last.threshold
    few, many = int(threshold / 4), int(threshold * 4)
    for length, degrees in ((few, (2, 1)), (many, (1, 2))):
        chosen = chosen_experts(config(tmp_path, length, expert="auto", expert_weight=2), 2)
        assert (chosen.parallel.expert, chosen.parallel.expert_weight) == degrees
        assert chosen.degrees()["expert"] == degrees[0]
        console = Console(file=io.StringIO(), width=200)
        print_plan(config(tmp_path, length, expert="auto", expert_weight=2), 2, console)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("tokens travel (expert = 2)" if length == few else "weights travel") in text
        assert "8 experts over 2 ranks, 2 a token" in text


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [({"hidden_size": 32}, "float64"), ({"hidden_size": 20, "head_dim": 8}, "bfloat16")],
)
def test_memory_of_experts_is_planned_where_grouped_products_do_not_take_them(
    sizes: dict[str, int], dtype: str
) -> None:
    """In fp64 and in odd sizes each expert has a product of its own, and a plan has no values."""
    given = Config.model_validate({
        "model": {"family": "deepseek", "layers": 2, "heads": 4, "expert_size": 15, **sizes},
        "data": {"sequence_length": 32}, "parallel": {"weight": 2},
        "train": {"global_batch": 4, "dtype": dtype},
    })  # fmt: skip
    kept = dict(MemoryBudget(given, 2).at(32)[0])["activations that are kept"]
    assert kept > 2 * 32 * 32 * 2, "of two rows at least the residual stream"


def test_auto_decides_in_a_pipeline_by_what_its_schedule_gathers() -> None:
    def stages(length: int) -> Config:
        return Config.model_validate({
            "model": {"family": "mixtral", "hidden_size": 64, "layers": 4, "heads": 4},
            "data": {"sequence_length": length},
            "parallel": {"pipeline": 2, "weight": 2, "expert": "auto", "expert_weight": 2},
            "weight_parallel": {"min_shard_elements": 64},
            "train": {"global_batch": 8, "micro_batches": 4},
        })  # fmt: skip

    each = experts_traffic(stages(64), 4)
    assert list(each) == [f"layers.{n}.feed_forward.experts" for n in range(4)]
    second = each["layers.1.feed_forward.experts"]
    weights = 3 * 8 * 192 * 64 * 4
    # A stage's two blocks stay in its two slots: one gather for four micro-batches.
    assert second.gathered == weights // 2 * (1 + 4) // 4
    for factor, degrees in ((0.25, (2, 1)), (4, (1, 2))):
        chosen = chosen_experts(stages(int(second.threshold * factor)), 4).parallel
        assert (chosen.expert, chosen.expert_weight) == degrees
        lines = "\n".join(expert_lines(stages(int(second.threshold * factor)), 4))
        assert ("tokens travel (expert = 2)" in lines) == (factor < 1)


def test_a_plan_says_which_bytes_and_which_way_leave_a_machine() -> None:
    assert [traffic(64).far(near) for near in (1, 2, 8, 16)] == [1, 6 / 7, 0, 0]

    def settings(**parallel: Any) -> Config:
        return Config.model_validate({
            "model": {"family": "mixtral", "hidden_size": 64, "layers": 1, "heads": 4},
            "data": {"sequence_length": 64}, "parallel": {"weight": 4, **parallel},
            "train": {"global_batch": 8},
        })  # fmt: skip

    def lines(near: int | None, **parallel: Any) -> str:
        return "\n".join(expert_lines(settings(**parallel), 4, near))

    (each,) = experts_traffic(settings(expert=4, expert_weight=1), 4).values()
    assert "other machines" not in lines(None, expert=4, expert_weight=1)
    far = [human(int(nbytes * 2 / 3)) for nbytes in (each.gathered, each.exchanged)]
    text = lines(2, expert=4, expert_weight=1)
    assert all(f"({nbytes} of it from other machines)" in text for nbytes in far)
    assert "model.capacity_factor" not in text
    limited = settings().model_copy(update={
        "model": settings().model.model_copy(update={"capacity_factor": 1.25}),
    })  # fmt: skip
    told = "\n".join(expert_lines(limited, 4))
    assert "at most 40 of a rank's tokens (model.capacity_factor)" in told, "5/4 x 2 x 128 / 8"
    assert "weights do not travel: each is too small" in replace(traffic(64), gathered=0).verdict()
    both = {"expert": 2, "expert_weight": 2}
    assert "weights between near ranks, tokens between far" in lines(2, **both)
    assert "tokens between near ranks, weights between far" in lines(2, **both, fast_links="expert")
    for one in ({"expert": 4, "expert_weight": 1}, {"expert_weight": 4}, {"expert": "auto"}):
        with pytest.raises(ValueError, match=r"parallel.fast_links: of no effect here: it needs"):
            lines(None, **one, fast_links="expert")
