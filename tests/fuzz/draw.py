"""Cases of the fuzzer: their description, random generation from a seed, and simplification."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.fuzz.shapes import BASES, BESIDE, IN_BLOCK, OUTPUTS

Op = tuple[Any, ...]

STEPS = 3
PASSES = (
    "plain", "plain", "plain", "retain", "sum_of_two", "both", "reversed", "middle", "with_middle",
    "throw_first", "evaluate_between", "some_inputs", "gradient_of_hidden", "weights_in_loss",
    "assigned_before", "penalty",
)  # fmt: skip
SYNCS = ("all", "all", "no_sync", "no_replica_sync", "mixed", "nested", "unchanged")
WRITES = (
    "multiply", "copy", "data_multiply", "data_subtract", "data_set", "data_copy", "load",
    "load_assigned", "foreach", "foreach_invalidate", "local_invalidate", "fill_one", "swap",
)  # fmt: skip
PATCHES = ("function", "method", "wrapping", "undone")
FAILURES = ("forward", "block", "backward")
TORCH_OPTIMIZERS = (
    "sgd", "momentum", "adam", "adamw_foreach", "adamw_loop", "adamw_fused", "sgd_foreach",
    "counting",
)  # fmt: skip
ZERO_OPTIMIZERS = (
    "zero_adamw", "zero_sgd", "zero_momentum", "zero_groups", "zero_rmsprop", "zero_counting",
)  # fmt: skip

CUT_EMBEDDING = [{"match": "embed", "shard_dim": 1}]
OPTIONS: dict[str, tuple[Any, ...]] = {
    "gather_before": ("qkv", "attention", "mlp", "rolling", "rolling"),
    "granularity": ("module",),
    "coalesce_bytes": (200, 400, 1000, 65536),
    "min_shard_elements": (0, 1, 30, 100, 2048),
    "prefetch_depth": (2, 3, 9),
    "memory_pool": (False,),
    "overlap": (False,),
    "keep_unsharded": (1, 2, "2000 B", "all"),
    "accumulation": ("full",),
    "reductions_in_flight": (1, 5),
    "rules": (CUT_EMBEDDING,),
    "unexpected_order": ("gather",),
    "reduction": ("mean",),
    "expert_parameters": (["experts", "fc1"], ["fc2"]),
}
DEFAULTS = {"min_shard_elements": 20, "coalesce_bytes": 0}


@dataclass(frozen=True)
class Case:
    """A model, how it is sharded, and a loop. Complete, so that a case can be repeated."""

    seed: int = 0
    world: int = 2
    weight: int = 2
    zero: int | None = None
    expert_weight: int | None = None
    width: int = 6
    vocabulary: int = 11
    rows: int = 2
    length: int = 4
    blocks: tuple[tuple[str, ...], ...] = (("plain",), ("plain",))
    beside: tuple[str, ...] = ()
    output: str = "loss"
    options: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    clip: str = "none"
    program: tuple[Op, ...] = ()
    machine: int = 0
    """Ranks on a machine; 0: all are on one."""

    def features(self) -> set[str]:
        """One word per drawn feature: for ``--without`` and for the list of what may be refused."""
        found = {part for block in self.blocks for part in block} | set(self.beside)
        found |= {f"output={self.output}", self.optimizer, f"clip={self.clip}"}
        found |= {f"{key}={value}" for key, value in self.options.items()}
        found |= {f"checkpoint.{key}={value}" for key, value in self.checkpoint.items()}
        found.add("checkpoint" if self.checkpoint else "no_checkpoint")
        found.add("zero" if self.optimizer.startswith("zero") else "torch")
        found |= {f"weight={self.weight}", f"world={self.world}"}
        if self.expert_weight is not None:
            found.add("expert_weight")
        if self.machine:
            found.add("machines")
        for op in self.program:
            found |= set(words(op))
        return found

    def lines(self) -> list[str]:
        """A readable description of the case."""
        mesh = f"world {self.world} = weight {self.weight} x replicas {self.world // self.weight}"
        mesh += f", zero {self.zero}" if self.zero else ""
        mesh += f", expert_weight {self.expert_weight}" if self.expert_weight else ""
        mesh += f", machines of {self.machine}" if self.machine else ""
        lines = [mesh, f"width {self.width}, vocabulary {self.vocabulary}"]
        lines[-1] += f", rows {self.rows}, length {self.length}, output {self.output}"
        lines += [f"block {i}: {' '.join(block)}" for i, block in enumerate(self.blocks)]
        lines.append(f"beside: {' '.join(self.beside) or '-'}")
        lines.append(f"options: {self.options}  checkpoint: {self.checkpoint or '-'}")
        lines.append(f"optimizer: {self.optimizer}, clip: {self.clip}")
        lines += [f"  {op}" for op in self.program]
        return lines


def words(op: Op) -> Iterator[str]:
    """The kinds named in an operation: ``accumulate``, ``no_sync``, ``retain``, ..."""
    for part in op:
        if isinstance(part, str):
            yield part if part == op[0] else f"{op[0]}:{part}"
        if isinstance(part, tuple):
            for inner in part:
                yield f"{op[0]}:{inner}" if isinstance(inner, str) else ""


def draw(seed: int, number: int, world: int | None = None) -> Case:
    """Case ``number`` of ``seed``, independent of other draws."""
    rng = random.Random(f"{seed}:{number}")
    world = world or rng.choice((2, 2, 3, 4))
    weight = rng.choice([d for d in range(2, world + 1) if world % d == 0])
    if rng.random() < 0.15:
        weight = 1
    replicas = world // weight
    case = Case(
        seed=rng.randrange(1_000_000),
        world=world,
        weight=weight,
        zero=rng.choice([None, *(z for z in range(1, replicas + 1) if replicas % z == 0)]),
        width=rng.choice((4, 5, 6, 6, 7, 8)),
        vocabulary=rng.choice((3, 11, 13, 16)),
        rows=rng.choice((1, 2)),
        length=rng.choice((2, 3, 5)),
        blocks=_blocks(rng),
        beside=tuple(rng.sample(BESIDE, rng.choice((0, 0, 1, 1, 2, 3)))),
        output=rng.choice(("loss", "loss", *OUTPUTS)),
        options=_options(rng),
        checkpoint=_checkpoint(rng),
        optimizer=rng.choice((*TORCH_OPTIMIZERS, *ZERO_OPTIMIZERS, *ZERO_OPTIMIZERS)),
        clip=rng.choice(("none", "torch", "ours")),
    )
    if rng.random() < 0.1:
        case = replace(case, expert_weight=rng.choice([d for d in (1, 2, 3, 4) if world % d == 0]))
    if weight == 4:  # by numbers of its own: other draws are as they were before it
        machine = random.Random(f"{seed}:{number}:machine").choice((0, 2))
        case = replace(case, machine=machine)
    if not case.machine and random.Random(f"{seed}:{number}:sums").random() < 0.1:
        case = replace(case, options=case.options | {"reduce": "backend"})
    return fitted(replace(case, program=_program(rng, case)))


def _blocks(rng: random.Random) -> tuple[tuple[str, ...], ...]:
    number = rng.choice((1, 2, 2, 3, 3, 4, 5))
    if rng.random() < 0.3:  # all equal, as in most models
        block = (rng.choice(BASES), *rng.sample(IN_BLOCK, rng.choice((0, 1, 2))))
        return (block,) * number
    made = []
    for _ in range(number):
        base = rng.choice(("plain", "plain", "plain", *BASES))
        made.append((base, *rng.sample(IN_BLOCK, rng.choice((0, 0, 1, 1, 2, 3)))))
    return tuple(made)


def _options(rng: random.Random) -> dict[str, Any]:
    chosen = rng.sample(sorted(OPTIONS), rng.choice((0, 1, 2, 3, 4)))
    return {key: rng.choice(OPTIONS[key]) for key in chosen}


def _checkpoint(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.6:
        return {}
    found: dict[str, Any] = {"mode": rng.choice(("full", "full", "selective"))}
    found["fraction"] = rng.choice((1.0, 1.0, 0.5, 0.34))
    if found["mode"] == "full" and rng.random() < 0.5:
        found["reentrant"] = True
    return found


def _passes(rng: random.Random) -> tuple[str, ...]:
    number = rng.choice((1, 1, 1, 2, 2, 3))
    kinds = PASSES if rng.random() < 0.1 else PASSES[:-1]  # the last kind ends most cases
    return tuple(rng.choice(kinds) for _ in range(number))


def _between(rng: random.Random, case: Case) -> list[Op]:
    """What a user does between two steps."""
    ops: list[Op] = []
    draws = rng.choice((0, 0, 1, 1, 2))
    for _ in range(draws):
        kind = rng.choice(
            ("evaluate", "write", "write", "freeze", "fail", "thrown", "thrown", "forward", "state",
             "whole", "settings", "blocks_alone", "patch", "keep", "keep", "restore"),
        )  # fmt: skip
        who = rng.choice(("model", "optimizer"))
        if kind == "evaluate":
            ops.append((kind, rng.choice(("no_grad", "inference", "graph"))))
        elif kind == "write":
            ops.append((kind, rng.choice(WRITES), rng.choice((-1, -1, rng.randrange(40)))))
        elif kind == "freeze":
            ops.append((kind, rng.randrange(40)))
        elif kind == "patch":
            ops.append((kind, rng.choice(PATCHES), rng.randrange(-1, len(case.blocks))))
        elif kind == "fail":
            ops.append((kind, rng.choice(FAILURES), rng.randrange(len(case.blocks)), who))
        elif kind == "thrown":
            ops.append((kind, rng.choice(SYNCS), _passes(rng), who))
        else:
            ops.append((kind,))
    return ops


def _program(rng: random.Random, case: Case) -> tuple[Op, ...]:
    ops: list[Op] = []
    for _ in range(STEPS):
        ops += _between(rng, case)
        ops.append(("accumulate", rng.choice(SYNCS), _passes(rng)))
        if rng.random() < 0.8:
            ops.append(("look",))
        if rng.random() < 0.15:
            ops.append(("accumulate", "all", ("plain",)))
        ops.append(("step",))
        if rng.random() < 0.5:
            ops.append(("parameters",))
        ops.append(("zero", rng.choice(("model", "optimizer", "to_zero", "kept"))))
    return tuple(ops)


def fitted(case: Case) -> Case:
    """The case without combinations that are meaningless in any model or loop."""
    options = dict(case.options)
    if options.get("gather_before") == "rolling":
        options.pop("granularity", None)
    if "granularity" in options:
        options.pop("coalesce_bytes", None)
    if case.expert_weight is None:
        options.pop("expert_parameters", None)
    if any("full_tensor" in block for block in case.blocks):
        # Some ranks run modules that others do not, and all of them meet in full_tensor(). A rank
        # that waits at once, for a reduction or for a gather of that module alone, waits for those
        # that have come there: refused on all ranks.
        options.pop("overlap", None)
        options.pop("granularity", None)
    if {"run_twice", "reversed", "skipped", "same_block_twice"} & set(case.beside):
        options["unexpected_order"] = "gather"
    if case.expert_weight is not None and "expert_parameters" not in options:
        # Patterns without a match are dropped.
        options["expert_parameters"] = ["experts", "fc1", "out_proj"]
    clip = case.clip
    if case.expert_weight is not None and clip == "torch":
        clip = "ours"  # torch's clipping requires gradients of one mesh
    checkpoint = dict(case.checkpoint)
    if "fraction" in checkpoint and not round(checkpoint["fraction"] * len(case.blocks)):
        checkpoint["fraction"] = 1.0
    kinds = {word for op in case.program for word in words(op)}
    if any(word.endswith(("some_inputs", "gradient_of_hidden", "penalty")) for word in kinds):
        checkpoint.pop("reentrant", None)  # torch's reentrant form refuses both
    beside, program = case.beside, tuple(_without_writes(op) for op in case.program)
    idle = any({"branch", "experts"} & set(block) for block in case.blocks)
    if idle and options.get("unexpected_order") == "gather":
        # A block whose output needs a gradient on some ranks only: the ranks of a weight group run
        # its backward together only if blocks run in the declared order.
        beside = tuple(b for b in beside if b != "frozen_embedding")
        program = tuple(op for op in program if op[0] != "freeze")
    if "frozen_embedding" in beside or any(op[0] == "freeze" for op in program):
        # A loss of hidden states that need no gradient has no backward, so the sums of earlier
        # micro-batches without reduction would stay unfinished: gradients cannot be read then.
        program = tuple(_with_the_head(op) for op in program)
    if "tied" in beside and "tied_functional" in beside:
        beside = tuple(b for b in beside if b != "tied")
    if "tied_functional" in beside and "bag" in beside:
        beside = tuple(b for b in beside if b != "bag")
    return replace(
        case, options=options, checkpoint=checkpoint, beside=beside, clip=clip, program=program
    )


def _without_writes(op: Op) -> Op:
    """``unchanged()`` forbids writes within."""
    if op[0] not in ("accumulate", "thrown") or op[1] != "unchanged":
        return op
    return (*op[:2], tuple("plain" if k == "assigned_before" else k for k in op[2]), *op[3:])


def _with_the_head(op: Op) -> Op:
    if op[0] not in ("accumulate", "thrown"):
        return op
    return (*op[:2], tuple("with_middle" if k == "middle" else k for k in op[2]), *op[3:])


def simpler(case: Case) -> Iterator[Case]:
    """Cases with one feature less, the largest reductions first."""
    for less in _simpler(case):
        other = fitted(less)
        if other != case:
            yield other


def _simpler(case: Case) -> Iterator[Case]:
    yield from _shorter_programs(case)
    if len(case.blocks) > 1:
        for i in range(len(case.blocks)):
            yield replace(case, blocks=case.blocks[:i] + case.blocks[i + 1 :])
    for i in range(len(case.beside)):
        yield replace(case, beside=case.beside[:i] + case.beside[i + 1 :])
    for i, block in enumerate(case.blocks):
        for j in range(1, len(block)):
            less = (*block[:j], *block[j + 1 :])
            yield replace(case, blocks=(*case.blocks[:i], less, *case.blocks[i + 1 :]))
        if block[0] != "plain":
            plain = ("plain", *block[1:])
            yield replace(case, blocks=(*case.blocks[:i], plain, *case.blocks[i + 1 :]))
    for key in case.options:
        yield replace(case, options={k: v for k, v in case.options.items() if k != key})
    if case.checkpoint:
        yield replace(case, checkpoint={})
        for key in set(case.checkpoint) - {"mode"}:
            yield replace(
                case, checkpoint={k: v for k, v in case.checkpoint.items() if k != key}
            )
    plain = Case()
    for name in ("zero", "expert_weight", "width", "vocabulary", "rows", "length", "output",
                 "clip", "optimizer", "machine"):  # fmt: skip
        if getattr(case, name) != getattr(plain, name):
            yield replace(case, **{name: getattr(plain, name)})
    if case.world > 2 and case.weight in (1, 2, case.world):
        weight = 2 if case.weight == case.world else case.weight
        yield replace(case, world=2, weight=weight, zero=None, expert_weight=None, machine=0)


def _shorter_programs(case: Case) -> Iterator[Case]:
    ops = case.program
    for i, op in enumerate(ops):
        yield replace(case, program=ops[:i] + ops[i + 1 :])
        if op[0] in ("accumulate", "thrown"):
            for less in _shorter_passes(op):
                yield replace(case, program=(*ops[:i], less, *ops[i + 1 :]))


def _shorter_passes(op: Op) -> Iterator[Op]:
    passes = op[2]
    if len(passes) > 1:
        for i in range(len(passes)):
            yield (*op[:2], passes[:i] + passes[i + 1 :], *op[3:])
    if op[1] != "all":
        yield (op[0], "all", *op[2:])
    for i, kind in enumerate(passes):
        if kind != "plain":
            yield (*op[:2], (*passes[:i], "plain", *passes[i + 1 :]), *op[3:])
