"""``tools/bench_overhead.py``: equal work in all variants, ratios of medians.

This does not test speed: the figures are in ``docs/dev/overhead.md``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist

from tools import bench_overhead as bench
from tools.bench.model import process_group


@pytest.fixture
def four_ranks() -> Iterator[None]:
    with process_group("fake", 4):
        yield


# 7 weights a block, embedding and head; in backward the last two blocks are still in their slots.
APART = {
    "c10d._allgather_base_": 7 * 3 + 2 + 7,
    "c10d.alltoall_base_": 7 * 3 + 2,
    "c10d.allreduce_": 1,
}
# All weights are small: those of a block are coalesced.
TOGETHER = {
    "c10d.allgather_into_tensor_coalesced_": 3 + 1,
    "c10d._allgather_base_": 2,
    "c10d.alltoall_base_": 3 + 2,
    "c10d.allreduce_": 1,
}


@pytest.mark.parametrize(("coalesce_bytes", "ours"), [(0, APART), (65536, TOGETHER)])
def test_all_variants_compute_one_loss_and_only_the_parallel_ones_communicate(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    coalesce_bytes: int,
    ours: dict[str, int],
) -> None:
    path = tmp_path / "overhead.json"
    flags = ["--blocks", "3", "--rounds", "6", "--warm-up", "1", "--batches", "2", "--json",
             str(path), "--coalesce-bytes", str(coalesce_bytes)]  # fmt: skip

    assert bench.main(flags) == 0

    told, printed = json.loads(path.read_text()), capsys.readouterr().out
    plain = told["losses"]["plain"]
    assert told["losses"] == pytest.approx(dict.fromkeys(bench.VARIANTS, plain), rel=1e-6)
    assert told["collectives"]["plain"] == {}
    assert told["collectives"]["internsp"] == ours
    # One coalesced gather per block and pass, and one for the root, which stays unsharded.
    assert told["collectives"]["fsdp2"] == {
        "c10d._allgather_base_": 2 * 3 + 1,
        "c10d._reduce_scatter_base_": 3 + 1,
    }
    for phase in bench.PHASES:
        figures, times = told["phases"][phase], {n: told["times"][n][phase] for n in bench.VARIANTS}
        assert all(len(t) == 6 and min(t) > 0 for t in times.values())
        medians = {n: median(t) / 3 for n, t in times.items()}
        assert figures["median"] == pytest.approx(medians)
        added = {n: medians[n] - medians["plain"] for n in ("internsp", "fsdp2")}
        assert figures["ratio"] == pytest.approx(added["internsp"] / added["fsdp2"])
        assert f"{phase:9}internsp adds {figures['ratio']:.2f} of what FSDP2 adds" in printed
    assert dist.is_initialized() is False


def test_a_ratio_is_of_medians_of_all_rounds_and_of_each_part() -> None:
    times = {
        "plain": {p: [10.0, 10.0, 90.0, 10.0, 10.0, 10.0] for p in bench.PHASES},
        "internsp": {p: [20.0, 20.0, 20.0, 40.0, 40.0, 40.0] for p in bench.PHASES},
        "fsdp2": {p: [50.0, 50.0, 50.0, 50.0, 50.0, 50.0] for p in bench.PHASES},
    }

    both = bench.summarize(times, blocks=10, batches=2)["phases"]["both"]

    assert both["median"] == {"plain": 1.0, "internsp": 3.0, "fsdp2": 5.0}
    assert both["added"] == {"internsp": 2.0, "fsdp2": 4.0}
    assert both["ratio"] == 0.5
    assert both["ratio_batches"] == [0.25, 0.75]


@pytest.mark.usefixtures("four_ranks")
def test_what_is_timed_yields_the_gradient_of_a_model_made_of_repeated_shards() -> None:
    options = bench.Options(blocks=2)
    plain, ours = bench.build("plain", options).model, bench.build("internsp", options).model
    ids = torch.randint(bench.VOCABULARY, (options.tokens,))
    for model in (plain, ours):
        model(ids).square().mean().backward()

    for (name, whole), shard in zip(plain.named_parameters(), ours.parameters(), strict=True):
        expected = whole.grad
        if whole.ndim > 1:  # a fake exchange returns a rank's own parts to it
            expected = expected.view(options.world, -1, whole.shape[1]).sum(0)
        torch.testing.assert_close(shard.grad.to_local(), expected, msg=name)


@pytest.mark.usefixtures("four_ranks")
def test_a_variant_with_another_loss_is_refused(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    step = bench.step

    def wrong(variant: object, ids: torch.Tensor) -> tuple[float, float, float]:
        loss, forward, backward = step(variant, ids)
        is_plain = not any(isinstance(p, dist.tensor.DTensor) for p in variant.model.parameters())
        return (loss if is_plain else 1.01 * loss), forward, backward

    monkeypatch.setattr(bench, "step", wrong)
    with pytest.raises(RuntimeError, match="disagree about the loss"):
        bench.measure(bench.Options(blocks=2, rounds=2, warm_up=0))
