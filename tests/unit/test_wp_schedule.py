"""The schedule is pure data: its rules hold for any chunk, without a process group."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from internsp.schedule.chunk import ChunkLayout, UnitLayout, WeightLayout
from internsp.schedule.simulate import simulate
from internsp.schedule.terms import BACKWARD, FORWARD, Policy

PARTS = ("q", "wo", "w1", "w2")


def weight(name: str, needs_gather: bool = True, pages: int = 1, **more: bool) -> WeightLayout:
    return WeightLayout(
        name, 10 if needs_gather else 0, 20, 256 * pages, 64,
        needs_gather=needs_gather, gradient_bytes=40 * pages, **more,
    )  # fmt: skip


def chunk(
    blocks: int,
    depth: int = 1,
    per_module: bool = False,
    recomputed: frozenset[int] = frozenset(),
    trigger_at: int = 1,
    pending: int = 2,
    needs_gather: bool = True,
    kept: frozenset[int] = frozenset(),
    rolling: bool = False,
    uneven: int = 0,
    frozen: str = "",
    small: str = "",
    depths: tuple[int, ...] = (),
) -> ChunkLayout:
    alone = kept & frozenset(range(blocks))
    own = tuple(min(depth, d) for d in depths[:blocks]) if len(depths) >= blocks else ()
    policy = Policy(
        blocks, depth, per_module and not rolling, alone, rolling=rolling, depths=own
    )
    units = tuple(
        UnitLayout(
            f"b{i}",
            tuple(
                weight(f"b{i}.{p}", needs_gather, 1 + (uneven * i * n) % 4, trainable=p != frozen,
                       coalesced=p in small.split())
                for n, p in enumerate(PARTS)
            ),
            policy.slot(i),
            i,
            i in recomputed,
            -1 if rolling else trigger_at,
        )
        for i in range(blocks)
    )
    embedding = UnitLayout("embed", (weight("embed.w", needs_gather),), policy.slots)
    head = UnitLayout("head", (weight("head.w", needs_gather),), policy.slots + 1)
    other = UnitLayout("other", (weight("other.w", needs_gather),), policy.slots + 2)
    return ChunkLayout(policy, units, embedding, head, pending, (other,))


chunks = st.builds(
    chunk,
    blocks=st.integers(1, 7),
    depth=st.integers(0, 3),
    depths=st.just(()) | st.tuples(*[st.integers(0, 3)] * 7),
    per_module=st.booleans(),
    recomputed=st.frozensets(st.integers(0, 6)),
    trigger_at=st.integers(-1, 4),
    pending=st.integers(1, 3),
    kept=st.frozensets(st.integers(0, 6)),
    rolling=st.booleans(),
    uneven=st.integers(0, 3),
    frozen=st.sampled_from(["", "q", "w1"]),
    small=st.sampled_from(["", "wo w1", "q wo w1 w2", "w2"]),
)


@pytest.mark.thorough(1)
@given(plan=chunks, micro_batches=st.integers(1, 2), overlap=st.booleans())
# Small blocks do not overwrite the end of a large one's weights, kept for the next micro-batch.
@example(plan=chunk(3, uneven=1, trigger_at=0), micro_batches=2, overlap=False)
def test_what_is_used_was_gathered_into_its_slot_and_nothing_took_the_slot_since(
    plan: ChunkLayout, micro_batches: int, overlap: bool
) -> None:
    assert plan.head is not None
    units = (*plan.blocks, *plan.root_units, plan.head)
    where = {w.name: (u.slot, u, u.byte_range(w)) for u in units for w in u.weights}

    def taken_by(name: str) -> set[str]:
        """Weights of other units whose bytes ``name`` overwrites; others stay."""
        slot, unit, (start, end) = where[name]
        others = {n: x for n, (s, u, x) in where.items() if s == slot and u is not unit}
        return {n for n, (low, high) in others.items() if low < end and start < high}

    tiny = {w.name for u in units for w in u.weights if w.coalesced}
    arrived: set[str] = set()
    flying: dict[str, set[str]] = {}  # with what was launched together
    launch: set[str] = set()
    for action in simulate(plan, micro_batches, overlap).actions:
        if action.kind == "AG":
            alike = {where[n][1].name for n in launch} == {where[action.weight][1].name}
            if not (alike and launch <= tiny and action.weight in tiny):
                launch = set()
            launch.add(action.weight)
            arrived -= taken_by(action.weight)
            flying[action.weight] = launch
            continue
        launch = set()
        if action.kind == "WAIT" and action.weight in flying:
            for name in flying[action.weight]:
                del flying[name]
                arrived.add(name)
        elif action.kind == "USE":
            assert action.weight in arrived, action.line()


@given(plan=chunks, overlap=st.booleans())
def test_every_weight_is_reduced_once_a_backward_and_finished_in_launch_order(
    plan: ChunkLayout, overlap: bool
) -> None:
    lines = simulate(plan, 1, overlap)
    reduced = [a.weight for a in lines.actions if a.kind == "RS"]
    assert reduced == [a.weight for a in lines.actions if a.kind == "FINISH"]
    wanted = ["head.w"]
    wanted += [w.name for u in reversed(plan.blocks) for w in reversed(u.weights) if w.trainable]
    assert reduced == [*wanted, "embed.w", "other.w"]
    assert plan.head is not None
    sizes = {w.name: w.gradient_bytes for u in (*plan.units, plan.head) for w in u.weights}
    pending: list[str] = []
    for action in lines.actions:
        if action.kind == "RS":
            pending.append(action.weight)
        elif action.kind == "FINISH":
            pending.remove(action.weight)
        assert sum(sizes[name] for name in pending) <= plan.pending_bytes  # WP-6


@given(plan=chunks, micro_batches=st.integers(1, 3))
def test_the_synchronous_path_sends_the_same_messages_in_the_same_order(
    plan: ChunkLayout, micro_batches: int
) -> None:
    one, other = (simulate(plan, micro_batches, overlap) for overlap in (True, False))
    assert one.lines(["AG", "RS"]) == other.lines(["AG", "RS"])
    assert one.lines(["USE"]) == other.lines(["USE"])


@pytest.mark.parametrize("blocks", range(2, 8))
@pytest.mark.parametrize("how", [{}, {"per_module": True}, {"rolling": True}])
def test_a_step_gathers_twice_what_is_not_still_in_its_slot(
    blocks: int, how: dict[str, bool]
) -> None:
    plan = chunk(blocks, **how)  # type: ignore[arg-type]
    gathers = simulate(plan).lines(["AG"])
    assert sum(".w1" in line for line in gathers) == 2 * blocks - 2
    kept = [line for line in gathers if line.startswith(f"AG {BACKWARD}")]
    assert not any(f"b{blocks - 1}." in line or f"b{blocks - 2}." in line for line in kept)
    two = simulate(plan, 2).lines(["AG"])
    assert sum(".w1" in line for line in two) == 2 * blocks - 2 + 2 * (blocks - 2)
    assert sum("embed" in line or "head" in line or "other" in line for line in two) == 3


def test_the_next_blocks_gather_starts_before_the_weight_behind_the_prefetch_trigger() -> None:
    lines = simulate(chunk(4, trigger_at=1)).lines(["AG", "USE"])
    start = lines.index(f"AG {FORWARD} b2.q")
    assert lines[start - 1] == f"USE {FORWARD} b1.q"
    assert lines[start + 4] == f"USE {FORWARD} b1.wo"
    back = lines.index(f"AG {BACKWARD} b1.w2")  # in the exact reverse of the order of use
    assert lines[back : back + 5] == [
        f"AG {BACKWARD} b1.{p}" for p in reversed(PARTS)
    ] + [f"USE {BACKWARD} b2.w2"]


def test_between_summed_losses_the_last_block_is_gathered_before_the_head_computes() -> None:
    lines = simulate(chunk(3), 2, summed_losses=True).lines(["AG", "USE"])
    gathered = [n for n, line in enumerate(lines) if line == f"AG {BACKWARD} b2.w2"]
    heads = [n for n, line in enumerate(lines) if line == f"USE {BACKWARD} head.w"]
    assert len(heads) == 2
    assert len(gathered) == 1, "for the earlier loss; in the later one's graph it is in its slot"
    assert heads[0] < gathered[0] < heads[1]


def test_a_recomputed_block_is_gathered_once_in_the_order_of_its_recompute() -> None:
    lines = simulate(chunk(4, recomputed=frozenset(range(4)))).lines(["AG", "USE"])
    mine = [line for line in lines if "b0" in line and FORWARD not in line]
    assert mine == [f"AG {BACKWARD} b0.{p}" for p in PARTS] + [
        f"USE recompute b0.{p}" for p in PARTS
    ]


def test_the_block_before_is_gathered_while_a_block_recomputes() -> None:
    recomputed = chunk(4, recomputed=frozenset(range(4)), trigger_at=1)
    lines = simulate(recomputed).lines(["AG", "USE", "RS"])
    start = lines.index(f"AG {BACKWARD} b1.q")
    assert lines[start - 1] == "USE recompute b2.q"
    assert lines[start + 4] == "USE recompute b2.wo", "before the weight behind the trigger"
    assert lines.index(f"RS {BACKWARD} b2.w2") > start, "before any gradient of the block"


def test_weights_that_are_unsharded_at_rest_are_neither_gathered_nor_waited_for() -> None:
    schedule = simulate(chunk(3, needs_gather=False))
    assert schedule.count("AG") == 0
    assert {a.kind for a in schedule.actions} == {"USE", "FREE", "RS", "WAIT", "FINISH"}


@pytest.mark.thorough(1)
@given(plan=chunks, micro_batches=st.integers(1, 3))
def test_a_kept_block_is_gathered_once_and_the_others_as_if_it_were_not_there(
    plan: ChunkLayout, micro_batches: int
) -> None:
    gathers = simulate(plan, micro_batches).lines(["AG"])
    kept = plan.policy.kept
    for block in kept:
        for part in PARTS:
            assert sum(f"b{block}.{part}" in line for line in gathers) == 1
    fewer = chunk(len(plan.blocks) - len(kept), plan.policy.depth)
    moving = sum(".q" in line for line in simulate(fewer, micro_batches).lines(["AG"]))
    assert sum(".q" in line for line in gathers) == moving + len(kept)


def test_with_depth_0_a_block_is_gathered_into_the_only_slot_when_the_one_before_has_left() -> None:
    plan = chunk(4, depth=0)
    assert plan.policy.slots == 1
    lines = simulate(plan).lines(["AG", "USE", "RS"])
    for i in (1, 2, 3):
        at = lines.index(f"AG {FORWARD} b{i}.q")
        assert f"USE {FORWARD} b{i - 1}.w2" in lines[:at]
        assert lines[at : at + 5] == [
            *(f"AG {FORWARD} b{i}.{p}" for p in PARTS), f"USE {FORWARD} b{i}.q"
        ]  # fmt: skip
    assert lines.index(f"AG {FORWARD} head.w") < lines.index(f"USE {FORWARD} b3.wo")
    at = lines.index(f"AG {BACKWARD} b2.w2")
    assert lines[at - 1] == f"RS {BACKWARD} b3.q"
    assert sum("AG" in line and ".w1" in line for line in lines) == 4 + 3


def test_each_block_gathers_as_far_ahead_as_is_said_of_it() -> None:
    policy = Policy(5, 2, depths=(0, 2, 1, 0, 0))
    assert policy.slots == 3
    assert [policy.targets(b, FORWARD) for b in range(5)] == [[], [2, 3], [3], [], [5]]
    assert [policy.targets(b, BACKWARD) for b in range(5)] == [[], [0], [1], [], []]


def test_past_a_kept_block_the_next_one_comes_early() -> None:
    policy = Policy(6, kept=frozenset({1, 3, 4}))
    assert [policy.targets(b, FORWARD) for b in range(6)] == [
        [1, 2], [2], [3], [4, 5], [5], [6],
    ]  # fmt: skip
    assert [policy.targets(b, BACKWARD) for b in range(6)] == [
        [], [0], [1, 0], [2], [3, 2], [4],
    ]  # fmt: skip


@given(
    blocks=st.integers(1, 9), depth=st.integers(0, 4), kept=st.frozensets(st.integers(0, 8))
)
def test_blocks_ahead_of_a_block_never_share_its_slot(
    blocks: int, depth: int, kept: frozenset[int]
) -> None:
    policy = Policy(blocks, depth, kept=kept & frozenset(range(blocks)))
    for block in range(blocks):
        for phase in (FORWARD, BACKWARD):
            ahead = [b for b in policy.targets(block, phase) if b < blocks]
            slots = [policy.slot(b) for b in [block, *ahead]]
            assert len(set(slots)) == len(slots)
            assert max(slots) < policy.slots
            assert sum(b not in policy.kept for b in ahead) <= depth


def test_rolling_gathers_into_the_place_that_the_same_weight_two_blocks_back_has_left() -> None:
    lines = simulate(chunk(5, rolling=True)).lines(["AG", "USE", "FREE", "RS"])
    first = [f"AG {FORWARD} b{i}.{p}" for i in (0, 1) for p in PARTS]
    assert lines[2:10] == first, "both slots are filled at once"
    for part in PARTS:
        at = lines.index(f"FREE {FORWARD} b1.{part}")
        assert lines[at - 1] == f"USE {FORWARD} b1.{part}"
        assert lines[at + 1] == f"AG {FORWARD} b3.{part}"
        at = lines.index(f"RS {BACKWARD} b3.{part}")
        assert lines[at + 1 : at + 3] == [f"FREE {BACKWARD} b3.{part}", f"AG {BACKWARD} b1.{part}"]
    at = lines.index(f"AG {FORWARD} b4.w2")
    assert lines[at + 1] == f"AG {FORWARD} head.w", "the head follows the last block"


@given(plan=chunks, micro_batches=st.integers(1, 2))
def test_rolling_sends_what_other_triggers_send_block_by_block_in_the_order_of_the_pass(
    plan: ChunkLayout, micro_batches: int
) -> None:
    rolling = replace(plan, policy=replace(plan.policy, rolling=True, per_module=False))
    blocks = replace(plan, policy=replace(plan.policy, rolling=False, per_module=False))
    one, other = (simulate(p, micro_batches).lines(["AG"]) for p in (rolling, blocks))
    if len({w.slot_bytes for u in plan.blocks for w in u.weights}) == 1:
        assert sorted(one) == sorted(other), "equal shapes: what forward leaves is the same"
    else:  # a smaller block leaves part of the earlier contents
        assert set(one) <= set(other)
    order = [line for line in other if ".q" in line and line.split()[2][0] == "b"]
    assert [line for line in one if line in order] == [line for line in order if line in one]


def test_frozen_and_uneven_weights_wait_until_everything_under_them_is_free() -> None:
    lines = simulate(chunk(4, rolling=True, frozen="w1")).lines(["AG", "RS"])
    held = lines.index(f"AG {BACKWARD} b1.w1")
    assert lines[held - 1] == f"RS {BACKWARD} b3.q", "a frozen weight is left with its block"
    assert lines.index(f"AG {BACKWARD} b1.w2") < held < lines.index(f"AG {BACKWARD} b1.wo")
    plan = chunk(3, rolling=True, uneven=1)  # b2's weights: 1, 3, 1 and 3 pages for b0's 1 each
    lines = simulate(plan).lines(["AG", "FREE"])
    for part, last in (("q", "q"), ("wo", "w2"), ("w1", "w2"), ("w2", "w2")):
        freed = lines.index(f"FREE {FORWARD} b0.{last}")
        assert lines.index(f"AG {FORWARD} b2.{part}") > freed
    assert lines[lines.index(f"FREE {FORWARD} b0.q") + 1] == f"AG {FORWARD} b2.q"
