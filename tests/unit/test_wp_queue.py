"""WP-2, WP-4: the gather queue and its parts, over random programs."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import internsp.modules
import internsp.parallel
import internsp.schedule
import internsp.wp
from internsp.errors import PoolError
from internsp.schedule import progress
from internsp.schedule.progress import FOLLOWS, LEGAL_IN, Phase
from internsp.schedule.terms import Action, Group
from tests.support.queue_programs import (
    Chunk,
    Event,
    Weight,
    change_weight,
    random_program,
    report,
)

SEEDS = st.integers(0, 10**9)
REFUSALS = (PoolError, ValueError, KeyError)  # an order that is not the chunk's
# else the last part of the path
ORACLE_PATHS = {"uses.set": "set_uses", "backward.use": "use_in_backward"}


def outcome(queue: Any, event: Event, path: str) -> Any:
    """The actions of an event, by names; or its refusal."""
    try:
        actions = report(queue, event, path)
    except REFUSALS as error:
        return type(error), str(error)
    return [
        (
            action.kind,
            action.phase,
            action.unit and action.unit.name,
            [weight.name for weight in action.weights],
            [weight.name for weight in action.others],
            action.parcel and action.parcel.name,
        )
        for action in actions
    ]


def same_as_the_oracle(seed: int) -> int:
    """Run one program in both queues; returns the number of actions."""
    chunk, events = random_program(seed, orderly=False)
    queue, oracle = chunk.queue(), chunk.oracle()
    compared = 0
    for number, event in enumerate(events):
        if change_weight(event):
            continue
        queue.uses.runs.clear()  # the oracle reduces each of several runs in a row by itself
        path = event[0]
        old = path.removeprefix("backward.").removeprefix("slots.").removeprefix("passes.")
        found = outcome(queue, event, path)
        expected = outcome(oracle, event, ORACLE_PATHS.get(path, old))
        what = f"seed {seed}, event {number}: {path} {event[1:]}"
        assert found == expected, what
        if isinstance(found, tuple):
            break
        opened = queue.backward.open.unit
        assert opened is oracle.open, what
        assert queue.slots.contents == oracle.contents, what
        assert queue.slots.held == oracle.held, what
        assert queue.slots.flying == oracle.flying, what
        assert queue.backward.turns.reduced == oracle.reduced, what
        assert queue.progress.lowest == oracle.lowest, what
        assert queue.progress.split == oracle.split, what
        compared += len(found)
    return compared


@settings(max_examples=150)
@given(seed=SEEDS)
@example(seed=8)  # recurring blocks, whose next run must wait for the present one: rare
@example(seed=95)
@example(seed=135)
def test_the_parts_return_the_actions_that_one_object_returned(seed: int) -> None:
    same_as_the_oracle(seed)


@settings(max_examples=300)
@given(seed=SEEDS)
@example(seed=2695)  # neighbors in one slot
@example(seed=924)  # a block between two runs of another
def test_releases_within_a_block_change_nothing_where_no_gather_asks_for_its_bytes(
    seed: int,
) -> None:
    chunk, events = random_program(seed, orderly=True)
    queue, unreleased = chunk.queue(), chunk.queue()
    assume(not queue.passes.order.shares)
    for event in events:
        if change_weight(event) or event[0] == "prefetch_pass":  # asks in passing, in any block
            continue
        found = outcome(queue, event, event[0])
        if event[0] != "release":
            assert found == outcome(unreleased, event, event[0]), event


@pytest.mark.thorough(seconds=60)
def test_the_parts_return_the_actions_that_one_object_returned_in_thousands_of_programs() -> None:
    assert sum(map(same_as_the_oracle, range(6000))) > 500_000


class Bytes:
    """A model of the slots' bytes: what a rank would read."""

    def __init__(self, chunk: Chunk, overlap: bool) -> None:
        self.units, self.overlap = {w: u for u in chunk.units for w in u.weights}, overlap
        self.lying: dict[int, list[Group[Weight]]] = defaultdict(list)
        self.there: set[Weight] = set()
        self.flying: dict[Weight, Any] = {}
        self.in_use: set[Weight] = set()

    def perform(self, action: Action[Weight]) -> None:
        if action.kind in ("AG", "AG_NEAR"):
            self.gather(action)
        elif action.kind == "WAIT" and action.others:  # else it is for a reduction
            assert action.weights[0] in self.flying, "waited for once"
            for weight in action.others:
                assert self.flying.pop(weight) is action.others
        elif action.kind == "USE" and action.weights[0].needs_gather:
            assert action.weights[0] in self.there, "used, and lies in its slot"
            assert action.weights[0] not in self.flying, "used, and has arrived"
            self.in_use.update(action.weights)
        elif action.kind == "RS":
            self.in_use.difference_update(action.weights)

    def gather(self, action: Action[Weight]) -> None:
        unit = action.unit
        assert unit is not None
        overwritten = set(action.others)
        for group in unit.groups:
            if not set(group.weights) & set(action.weights):
                continue
            assert set(action.weights) <= set(group.weights), "one group is one launch"
            lying = self.lying[unit.slot]
            for other in [o for o in lying if o.start < group.end and group.start < o.end]:
                if other is not group:
                    lying.remove(other)
                    overwritten |= set(other.weights) & self.there
            if group not in lying:
                lying.append(group)
        assert not overwritten & self.there - set(action.others), "is named by the action"
        assert not overwritten & self.in_use, "nothing is overwritten while it is in use"
        assert not (overwritten | set(action.weights)) & self.flying.keys(), "it has arrived"
        self.there -= overwritten
        self.there.update(action.weights)
        if action.weights[0].needs_wait:
            self.flying.update(dict.fromkeys(action.weights, action.weights))

    def before(self, event: Event) -> None:
        """What the program does not read any more once ``event`` has come, or may not."""
        if event[0] == "release":
            self.in_use -= set(event[1].weights if event[1].unshard_at_entry else event[2:3])
        elif event[0] in ("post_forward", "backward.leave_recompute"):
            self.in_use.difference_update(event[1].weights)
        elif event[0].endswith(("root_pre_forward", "pre_backward", "post_backward", "_graph")):
            self.in_use.clear()  # the block before is over
        if event[0] == "reshard":
            self.there.difference_update(event[1].weights)
        elif event[0] == "slots.invalidate_contents" or event[:2] == ("root_pre_forward", False):
            self.there.clear()


def each_rule_holds(seed: int) -> Counter[str]:
    """Run one orderly program, and check what every rank relies on; counts what was checked."""
    chunk, events = random_program(seed, orderly=True)
    queue = chunk.queue()
    memory = Bytes(chunk, queue.slots.overlap)
    reduced: Counter[Weight] = Counter()
    graphs, seen = 0, Counter[str]()
    for event in events:
        memory.before(event)
        try:
            actions = report(queue, event, event[0])
        except PoolError:
            # Refused: a weight is used more often than ever before, once its bytes are gone.
            seen["refused"] += 1
            return seen
        for action in actions:
            memory.perform(action)
        seen.update(action.kind for action in actions)
        reduced.update(w for action in actions if action.kind == "RS" for w in action.weights)
        if event[0] in ("backward.root_pre_backward", "backward.begin_earlier_graph"):
            graphs += 1
        elif event[0] == "backward.end_backward_part" and queue.progress.phase is Phase.REST:
            assert not reduced, "an input backward reduces nothing"
            graphs = 0
        elif event[0] == "backward.end_pass" and not queue.progress.split:
            check_reductions(chunk, reduced, graphs)
            seen["backward"] += 1
            reduced.clear()
            graphs = 0
    return seen


def check_reductions(chunk: Chunk, reduced: Counter[Weight], graphs: int) -> None:
    """Each trained weight has one reduction in a backward: for each run of its block, and for
    each graph where losses were added; no other weight has one."""
    split = graphs == 0
    runs = Counter(dict.fromkeys(chunk.blocks, 1) if split else chunk.run)
    for unit in chunk.units:
        expected = 1 if split else graphs * runs[unit]
        if unit in chunk.root and not split:
            expected = 1 + (graphs if unit is chunk.head else 0)
        elif unit.block < 0:
            expected = 1 if split else graphs
        for weight in unit.weights:
            if unit in chunk.rests and split:
                continue
            assert reduced[weight] == (expected if weight.trained else 0), weight.name


@pytest.mark.thorough(1)
@settings(max_examples=150)
@given(seed=SEEDS)
def test_nothing_in_use_is_overwritten_and_each_weight_is_reduced_once(seed: int) -> None:
    each_rule_holds(seed)


@pytest.mark.thorough(seconds=60)
def test_nothing_in_use_is_overwritten_in_thousands_of_programs() -> None:
    seen = Counter[str]()
    for seed in range(5000):
        seen += each_rule_holds(seed)
    assert seen["backward"] > 5000
    assert seen["refused"] < 1000
    assert all(seen[kind] > 1000 for kind in ("AG", "AG_NEAR", "WAIT", "USE", "FREE", "RS"))


def tables(text: str) -> Iterator[list[list[str]]]:
    """The rows of each table of a docstring, cell by cell, without its head."""
    for table in re.findall(r"^(=+ .*\n(?:.*\n)*?=+ .*\n(?:.*\n)*?)=+ .*$", text, re.M):
        rule, _, _, *rows = table.splitlines()
        columns = [match.span() for match in re.finditer("=+", rule)]
        yield [[row[start:end].strip() for start, end in columns] for row in rows]


def declared() -> tuple[dict[Phase, set[Phase]], dict[str, set[Phase]], dict[str, list[Phase]]]:
    """What the docstring says: the phases that follow each, in which each event is legal, and to
    which each goes."""
    phases, events = tables(progress.__doc__ or "")

    def named(cell: str) -> list[Phase]:
        return [*Phase] if cell == "any" else [Phase[n] for n in cell.split() if n != "-"]

    follows = {Phase[name]: set(named(cell)) for name, _, cell in phases}
    each = [(name, legal, to) for names, legal, to in events for name in names.split()]
    legal_in = {name: set(named(legal)) for name, legal, _ in each}
    return follows, legal_in, {name: named(to) for name, _, to in each}


def test_the_table_of_phases_in_the_docstring_is_the_one_that_the_code_asserts() -> None:
    follows, legal_in, _ = declared()
    assert follows == FOLLOWS
    assert legal_in == LEGAL_IN


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[Any]]:
    """Which changes of phase came, and which events in which phase."""
    found: dict[str, set[Any]] = {"changes": set(), "events": set()}
    to, require = progress.Progress.to, progress.Progress.require

    def watched_to(self: progress.Progress, phase: Phase) -> None:
        before = self.phase
        to(self, phase)
        found["changes"].add((before, phase))

    def watched_require(self: progress.Progress, event: str) -> None:
        require(self, event)
        found["events"].add((event, self.phase))

    monkeypatch.setattr(progress.Progress, "to", watched_to)
    monkeypatch.setattr(progress.Progress, "require", watched_require)
    return found


def test_random_programs_change_the_phase_as_the_table_says(watched: dict[str, set[Any]]) -> None:
    """Each event that has a row goes where the row says, and others change no phase. That no
    program meets another change is asserted by the code itself."""
    _, _, goes_to = declared()
    for seed in range(150):
        chunk, events = random_program(seed, orderly=False)
        queue = chunk.queue()
        for event in events:
            name, before = event[0].rpartition(".")[2], queue.progress.phase
            try:
                if not change_weight(event):
                    report(queue, event, event[0])
            except REFUSALS:
                break
            after = queue.progress.phase
            if name == "begin_backward_part" and not event[1]:  # an input backward: no phase
                assert after is before
            elif name == "pre_backward":
                assert after in (before, Phase.BLOCKS)
            else:
                assert after is (goes_to.get(name, [])[-1:] or [before])[0] or (
                    "enclosing" in event[0] and after is Phase.BLOCKS
                ), (seed, event)
    # What the table allows happens: it is no wider than it must be. A phase follows itself, and a
    # pass ends at once, in too few of so many programs.
    follows, legal_in, _ = declared()
    assert {event for event, _ in watched["events"]} == {*legal_in}
    allowed = {(before, after) for before in follows for after in follows[before]}
    rare = {pair for pair in allowed if pair[1] in (pair[0], Phase.REST)}
    assert allowed - watched["changes"] <= rare


@pytest.mark.parametrize(("event", "phase"), [
    ("root_pre_forward", Phase.BLOCKS),
    ("prefetch", Phase.HEAD),
    ("root_pre_backward", Phase.WEIGHTS),
    ("begin_backward_part", Phase.BLOCKS),
    ("first_block", Phase.BLOCKS),
])  # fmt: skip
def test_an_event_in_another_phase_is_refused_and_both_are_named(event: str, phase: Phase) -> None:
    one = progress.Progress(2)
    one.phase = phase
    with pytest.raises(AssertionError, match=f"{event}.*{phase.name}"):
        one.require(event)


def test_an_illegal_change_of_phase_names_both() -> None:
    one = progress.Progress(2)
    one.to(Phase.WEIGHTS)
    with pytest.raises(AssertionError, match=r"BLOCKS.*WEIGHTS"):
        one.to(Phase.BLOCKS)


def test_no_class_of_these_rooms_is_too_large_for_a_head() -> None:
    """At most 30 methods, and 16 attributes: names assigned on ``self``, or declared as fields."""
    sizes = {}
    for room in (internsp.schedule, internsp.wp, internsp.modules, internsp.parallel):
        for path in sorted(Path(room.__path__[0]).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    sizes[f"{path.name}: {node.name}"] = methods_and_attributes(node)
    known = {"GatherQueue", "ShardedParameter", "Hooks", "Scopes"}
    assert known <= {name.partition(": ")[2] for name in sizes}
    too_large = {name: (m, a) for name, (m, a) in sizes.items() if m > 30 or a > 16}
    assert not too_large


def methods_and_attributes(node: ast.ClassDef) -> tuple[int, int]:
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    declared = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    assigned = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    return len(methods), len(declared | assigned)


def test_that_count_sees_fields_attributes_and_methods() -> None:
    """Shows that the test above is not trivially true."""
    source = "class A:\n  x: int = 0\n  def f(self): self.y, self.x = 1, 2\n  def g(self): pass"
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.ClassDef)
    assert methods_and_attributes(node) == (2, 2)


def test_nothing_in_the_schedule_is_typed_any() -> None:
    """An attribute typed ``Any`` hides an arrow to an upper floor."""
    for path in sorted(Path(internsp.schedule.__path__[0]).glob("*.py")):
        assert not re.search(r"\bAny\b", path.read_text()), path.name


def test_no_attribute_of_weights_or_hooks_is_typed_any() -> None:
    hooks = Path(internsp.modules.__path__[0], "hooks.py")
    for path in (*sorted(Path(internsp.wp.__path__[0]).glob("*.py")), hooks):
        assert not attributes_typed_any(path.read_text()), path.name


def attributes_typed_any(source: str) -> list[str]:
    """Fields of classes and attributes of ``self`` whose annotation says ``Any``."""
    tree = ast.parse(source)
    fields = [each for n in ast.walk(tree) if isinstance(n, ast.ClassDef) for each in n.body]
    return [
        ast.unparse(node.target)
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign)
        and (node in fields or isinstance(node.target, ast.Attribute))
        and re.search(r"\bAny\b", ast.unparse(node.annotation))
    ]


def test_an_attribute_typed_any_is_found() -> None:
    source = "class A:\n  x: dict[str, Any]\n  def f(self):\n    self.y: Any = 1\n    z: Any = 2"
    assert attributes_typed_any(source) == ["x", "self.y"]
