"""Attention over ranges as plain data: what each query sees, what is sent, who holds what."""

from __future__ import annotations

import random

import pytest

from internsp.errors import ConfigError
from internsp.mesh import SequenceAxes
from internsp.mesh.sequence import NEAR
from internsp.sp.dispatch import (
    BALANCES,
    balance_ranges,
    cost,
    fixed_sizes,
    imbalance,
    rank_ranges,
    ring_ranges,
)
from internsp.sp.heads import Span
from internsp.sp.partial import Band
from internsp.sp.ranges import (
    BAND,
    CAUSAL,
    FULL,
    KernelCall,
    MaskSpec,
    Ranges,
    kernel_calls,
    needed_spans,
    union,
)
from internsp.sp.routes import FORMS, _Rings, traffic
from tests.support.routes import received, returned, routes, sent

Pairs = set[tuple[int, int]]


def drawn(
    random: random.Random,
) -> tuple[tuple[Ranges, ...], MaskSpec, int]:
    """Ranges of some ranks, in any order, what is visible, and a length."""
    length, size = random.randint(4, 30), random.choice([1, 2, 3, 4, 6])

    def spans(most: int) -> list[Span]:
        edges = sorted(random.sample(range(1, length), min(length - 1, random.randint(0, most))))
        return list(zip([0, *edges], [*edges, length], strict=True))

    held: list[list[Span]] = [[] for _ in range(size)]
    for span in spans(8):
        held[random.randrange(size)].append(span)
    rows = [tuple(b - a for a, b in spans(4)) for _ in range(random.choice([1, 1, 2]))]
    window = random.choice([None, None, 1, 2, 5, 100])
    return tuple(map(tuple, held)), MaskSpec(random.random() < 0.7, window, tuple(rows)), length


def wanted(queries: Ranges, keys: Ranges, spec: MaskSpec, row: int) -> Pairs:
    """The keys that each query sees, pair by pair, by the definition."""
    document = [number for number, size in enumerate(spec.documents[row]) for _ in range(size)]
    q, k = ([p for start, stop in held for p in range(start, stop)] for held in (queries, keys))
    return {
        (i, j) for i, a in enumerate(q) for j, b in enumerate(k)
        if document[a] == document[b] and (b <= a or not spec.causal)
        and (spec.window is None or abs(a - b) < spec.window)
    }  # fmt: skip


def pairs_of(part: KernelCall, spec: MaskSpec) -> list[tuple[int, int]]:
    """The result of a kernel for one part."""
    found = []
    for i in range(*part.q):
        for j in range(*part.k):
            apart = part.distance + (i - part.q[0]) - (j - part.k[0])
            near = spec.window is None or abs(apart) < spec.window
            if part.kind == FULL or (
                apart >= 0 if part.kind == CAUSAL else near and (apart >= 0 or not spec.causal)
            ):
                found.append((i, j))
    return found


def read_by_flash(part: KernelCall, spec: MaskSpec) -> list[tuple[int, int]]:
    """The pairs of a band as flash attention takes them: sides are counted from the key that stands
    at the end, and one as long as the keys has no limit."""
    (a, b), (c, d) = part.q, part.k
    band = Band(spec.window or 0, spec.causal, part.distance)
    left, right = (s if s < d - c else 99 for s in band.window_sides(b - a, d - c))
    return [
        (i, j) for i in range(a, b) for j in range(c, d)
        if -left <= (j - c) - (i - a) - (d - c) + (b - a) <= right
    ]  # fmt: skip


def positions(spans: Ranges) -> set[int]:
    return {position for span in spans for position in range(*span)}


def test_parts_are_the_pairs_that_are_seen_each_once() -> None:
    for number in range(400):
        held, spec, _ = drawn(random.Random(number))
        for queries in held:
            for keys in held:
                found = kernel_calls(queries, keys, spec)
                for part in found:
                    here = {i for i, _ in pairs_of(part, spec)}
                    assert here == set(range(*part.q)), "a kernel needs a key for every query"
                    assert part.kind in (FULL, CAUSAL, BAND)
                    if part.kind == BAND:
                        assert read_by_flash(part, spec) == pairs_of(part, spec)
                for row in range(len(spec.documents)):
                    pairs = [x for p in found if p.row in (-1, row) for x in pairs_of(p, spec)]
                    assert len(pairs) == len(set(pairs))
                    assert set(pairs) == wanted(queries, keys, spec, row)


def test_what_ranks_need_of_blocks_is_what_their_parts_read() -> None:
    for number in range(400):
        held, spec, _ = drawn(random.Random(number))
        if number % 3 == 0:  # a rank may hold them in any order
            held = tuple(tuple(random.Random(number).sample(own, len(own))) for own in held)
        assert needed_spans(held, spec) == tuple(
            tuple(union(part.k for part in kernel_calls(queries, keys, spec)) for keys in held)
            for queries in held
        )


def passed_on(
    held: tuple[Ranges, ...], spec: MaskSpec, size: int, way: int
) -> dict[tuple[int, int], set[tuple[int, Ranges]]]:
    """What a rank sends in a step of rings of ``size`` ranks, by their definition. A block is
    sent to the next rank with everything that this one and those after it need; around the outer
    ring it is sent when it arrives at an inner one."""
    needed = needed_spans(held, spec)
    found: dict[tuple[int, int], set[tuple[int, Ranges]]] = {}
    outer = len(held) // size
    for block in range(len(held)):
        visits = [
            (block // size + way * o) % outer * size + (block % size + way * i) % size
            for o in range(outer) for i in range(size)
        ]  # fmt: skip
        for step, rank in enumerate(visits):
            ends = (step // size + 1) * size
            goes = [(step + 1, visits[step + 1 : ends])] if step + 1 < ends else []
            if step % size == 0 and ends < len(visits):
                goes.append((ends, visits[ends:]))
            for to, users in goes:
                what = union(span for user in users for span in needed[user][block])
                if what:
                    found.setdefault((rank, step), set()).add((visits[to], what))
    return found


def test_what_each_rank_works_out_for_itself_is_what_the_rings_are_defined_to_send() -> None:
    for number in range(150):
        held, spec, _ = drawn(random.Random(number))
        size = len(held)
        inner = random.Random(number).choice([n for n in range(1, size + 1) if size % n == 0])
        for form, of, way in (("ring", size, 1), ("reverse", size, -1), ("double", inner, 1)):
            wanted = passed_on(held, spec, of, way)
            found = routes(held, spec, form, inner if form == "double" else 1)
            for rank, own in enumerate(found):
                for step, did in enumerate(own.steps):
                    moves = {(move.peer, move.spans) for move in did.sends}
                    assert moves == wanted.get((rank, step), set()), (number, form)
            # By what all send each rank chooses a form, the same on all.
            counted = _Rings(form, needed_spans(held, spec), of, way).sent
            assert counted == [*map(sent, found)]


@pytest.mark.parametrize("form", FORMS)
def test_what_a_plan_counts_is_what_the_steps_of_all_ranks_send(form: str) -> None:
    for number in range(100):
        held, spec, _ = drawn(random.Random(number))
        inner = len(held) // 2 if form == "double" and len(held) % 2 == 0 else 1
        found, counted = routes(held, spec, form, inner), traffic(held, spec, form, inner)
        assert counted.sent == [*map(sent, found)]
        assert counted.returned == [*map(returned, found)]
        came = [*map(received, found)]
        assert counted.in_flight == [
            max(sum(own[i : i + 2]) for i in range(len(own))) for own in came
        ]


@pytest.mark.parametrize("form", FORMS)
def test_blocks_arrive_before_they_are_used_and_messages_meet(form: str) -> None:
    for number in range(150):
        held, spec, _ = drawn(random.Random(number))
        size = len(held)
        inner = random.Random(number).choice([n for n in range(1, size + 1) if size % n == 0])
        found = routes(held, spec, form, inner if form == "double" else 1)
        for rank, route in enumerate(found):
            assert route.steps[0].block == rank
            assert sorted(step.block for step in route.steps) == list(range(size))
            have = {rank: set(range(sum(b - a for a, b in held[rank])))}
            for at, step in enumerate(route.steps):
                needed_spans = positions(union(part.k for part in step.calls))
                assert needed_spans <= have.get(step.block, set())
                for move in step.sends:
                    assert move.peer != rank
                    assert positions(move.spans) <= have[move.block]
                    (met,) = [
                        other for other in found[move.peer].steps[at].receives
                        if (other.block, other.peer) == (move.block, rank)
                    ]  # fmt: skip
                    assert met.spans == move.spans
                for move in step.receives:
                    have[move.block] = positions(move.spans)
                home = (
                    positions(step.gradient_send.spans) if step.gradient_send is not None else set()
                )
                assert home == (needed_spans if step.block != rank else set())
                if step.gradient_send is not None:
                    back = found[step.block].steps[at].gradient_receive
                    assert back is not None
                    assert (back.block, back.peer, back.spans) == (
                        step.block,
                        rank,
                        step.gradient_send.spans,
                    )


def test_direct_sends_no_more_than_a_ring_and_auto_takes_the_least() -> None:
    fewer = 0
    for number in range(100):
        held, spec, _ = drawn(random.Random(number))
        sends = {
            form: [*map(sent, routes(held, spec, form))]
            for form in ("auto", "ring", "reverse", "direct")
        }
        assert sum(sends["direct"]) <= min(sum(sends["ring"]), sum(sends["reverse"]))
        assert max(sends["auto"]) == min(max(sends[form]) for form in ("ring", "reverse", "direct"))
        fewer += sum(sends["direct"]) < sum(sends["ring"])
    assert fewer > 10


def test_a_zigzag_of_one_causal_document_is_level_and_sends_what_is_needed() -> None:
    held = rank_ranges(64, SequenceAxes(1, 4), "zigzag", MaskSpec(True, None, ((64,),)))
    assert held[1] == ((8, 16), (48, 56))
    spec = MaskSpec(True, None, ((64,),))
    assert imbalance(held, spec) == 1.0
    # Of a block's two chunks the later one is needed by the ranks before its owner alone.
    found = routes(held, spec, "direct")
    assert [*map(sent, found)] == [24, 32, 40, 48]
    assert sum(map(sent, routes(held, spec, "reverse"))) == 24 + 32 + 40 + 48
    assert sum(map(sent, routes(held, spec, "ring"))) == 168
    assert routes(held, spec)[0].form == "reverse"


def test_a_window_needs_the_edge_of_the_neighbor_alone() -> None:
    spec = MaskSpec(True, 5, ((64,),))
    held = rank_ranges(64, SequenceAxes(1, 4), "auto", spec)
    assert held == (((0, 16),), ((16, 32),), ((32, 48),), ((48, 64),))
    assert [*map(sent, routes(held, spec))] == [4, 4, 4, 0]


@pytest.mark.parametrize("balance", BALANCES)
def test_every_position_is_held_once_and_costs_are_those_of_the_pairs(balance: str) -> None:
    for number in range(150):
        held, spec, length = drawn(random.Random(number))
        for ranges in held:
            pairs = sum(
                len(wanted(ranges, keys, spec, row))
                for keys in held for row in range(len(spec.documents))
            )  # fmt: skip
            assert sum(cost(span, spec) for span in ranges) == pairs
        shares, ring = random.Random(number).choice([(1, 2), (2, 2), (2, 3), (3, 1), (1, 4)])
        axes = SequenceAxes.create(shares * ring, ring, random.Random(number).choice(NEAR))
        found = rank_ranges(length, axes, balance, spec)
        assert sorted(p for ranges in found for p in positions(ranges)) == list(range(length))
        sizes = [sum(b - a for a, b in ranges) for ranges in found]
        assert max(sizes) - min(sizes) <= (16 if balance in ("auto", "level") else 3)
        if balance == "zigzag":
            assert tuple(sizes) == fixed_sizes(length, axes)
        other = SequenceAxes.create(shares * ring, ring)  # the same, to other ranks
        assert ring_ranges(found, axes) == ring_ranges(
            rank_ranges(length, other, balance, spec), other
        )


@pytest.mark.parametrize("lengths", [(100, 300, 112), (400, 50, 62), (512,), (17,) * 30 + (2,)])
def test_packed_documents_are_level_too(lengths: tuple[int, ...]) -> None:
    spec = MaskSpec(True, None, (lengths,))
    for ring in (2, 4, 8):
        held = balance_ranges(sum(lengths), ring, "auto", spec)
        assert imbalance(held, spec) <= 1.05
        assert {sum(b - a for a, b in ranges) for ranges in held} == {sum(lengths) // ring}


def test_what_does_not_fit_is_refused_by_name() -> None:
    spec = MaskSpec(True, None, ((8,),))
    with pytest.raises(ConfigError, match="No form 'circle'"):
        routes((((0, 8),),), spec, "circle")
    with pytest.raises(ConfigError, match="Inner rings of 3 do not divide a ring of 2 ranks"):
        routes((((0, 4),), ((4, 8),)), spec, "double", 3)
    with pytest.raises(ConfigError, match="Inner rings of 2 are of the form 'double', not of 'r"):
        routes((((0, 4),), ((4, 8),)), spec, "ring", 2)
    with pytest.raises(ConfigError, match="No balance 'fair'"):
        rank_ranges(8, SequenceAxes(1, 2), "fair", spec)


@pytest.mark.parametrize("near", NEAR)
def test_an_inner_ring_is_of_ranks_that_follow_one_another_in_either_order(near: str) -> None:
    """Between nodes, each block is sent once, not at every step."""
    axes, spec = SequenceAxes.create(16, 8, near), MaskSpec(False, None, ((64,),))
    held = ring_ranges(rank_ranges(64, axes, "contiguous", spec), axes)
    node = 4 * axes.heads if near == "heads" else 4  # ranks; between a ring's are those of heads
    hops = {form: [0, 0] for form in ("ring", "double")}  # within a node, between two
    for form, counts in hops.items():
        found = routes(held, spec, form, 4 if form == "double" else 1)
        for share in range(axes.heads):
            around = axes.around(share)
            for part, route in enumerate(found):
                for move in (move for step in route.steps for move in step.sends):
                    counts[around[part] // node != around[move.peer] // node] += 1
    assert hops == {"ring": [2 * 7 * 6, 2 * 7 * 2], "double": [2 * 8 * 6, 2 * 8 * 1]}
