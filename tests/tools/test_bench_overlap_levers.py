"""Options of the benchmark: micro-batches, hybrid groups, weights in pieces."""

from __future__ import annotations

import pytest
import torch

from tools.bench.model import batch, elements, exchanged_bytes, full_batch
from tools.overlap.laws import least_bytes, own_least_bytes, passes
from tools.overlap.options import Options, Spec


def test_each_turn_between_passes_saves_the_blocks_in_the_slots() -> None:
    # Three micro-batches: six passes of gathers with five turns; each saves two blocks.
    assert passes(8, micro_batches=3) == 9 - 5 * 2 / 8
    assert passes(2, micro_batches=3) == 1 + 3  # two blocks always stay in their slots
    assert least_bytes(800, 8, 2, micro_batches=3) == pytest.approx(400 * (9 - 10 / 8))


def test_micro_batches_cost_each_family_what_it_gathers_and_reduces_in_them() -> None:
    sizes = (800, 2, 8, 3)
    assert own_least_bytes("ddp", (), *sizes) == 2 * 400
    assert own_least_bytes("fsdp2", (), *sizes) == 3 * 3 * 400
    assert own_least_bytes("fsdp2", {"full"}, *sizes) == (3 * 2 + 1) * 400
    assert own_least_bytes("fsdp2", {"whole"}, *sizes) == 3 * 2 * 400
    assert own_least_bytes("fsdp2", {"whole", "full"}, *sizes) == (3 + 1) * 400
    assert own_least_bytes("fsdp2", {"last"}, *sizes) == 3 * (3 - 1 / 8) * 400
    assert own_least_bytes("ours", (), *sizes) == least_bytes(800, 8, 2, micro_batches=3)


def test_hybrid_groups_send_half_of_the_weights_and_once_the_sums_of_the_shards() -> None:
    # Two groups of two: shards of 400 bytes, whose sum is an all-reduce of two ranks.
    assert own_least_bytes("fsdp2", {"hybrid"}, 800, 4, 8) == 3 * 400 + 400
    assert own_least_bytes("fsdp2", {"hybrid"}, 800, 4, 8, 3) == 9 * 400 + 400


def test_each_micro_batch_has_data_of_its_own_and_the_first_is_that_of_a_plain_step() -> None:
    options = Options(preset="tiny", ranks=4, sequence_ranks=2, micro_batches=3).resolve()
    sizes, plain = options.sizes(), options.sizes(micro_batches=1)
    found = [full_batch(sizes, data, micro)[0] for micro in range(3) for data in range(2)]
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
    assert torch.equal(batch(sizes, 3)[0], batch(plain, 3)[0])
    parts = [batch(sizes, rank, 2)[0] for rank in (2, 3)]
    assert torch.equal(torch.cat(parts, 1), full_batch(sizes, 1, 2)[0])
    assert elements(sizes) == 3 * elements(plain)
    assert exchanged_bytes(sizes) == 3 * exchanged_bytes(plain)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(micro_batches=0), "--micro-batches must be at least 1"),
        (Options(preset="four", variants=("ours:weight=3",)), "4 ranks are not groups of 3"),
        (Options(variants=("ours:weight=true",)), "not groups of True"),
        (Options(variants=("fsdp2:hybrid",)), "not several groups of 2"),
    ],
)
def test_groups_that_cannot_be_made_are_refused(options: Options, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        options.resolve()


def test_what_a_name_says_of_groups_is_no_setting_of_weights() -> None:
    spec = Spec.parse("ours:weight=2,gather_before=qkv")
    assert (spec.arguments, spec.weight) == ({"gather_before": "qkv"}, 2)
    assert Spec.parse("ours").weight is None
    assert Spec.parse("fsdp2:hybrid").weight is None
