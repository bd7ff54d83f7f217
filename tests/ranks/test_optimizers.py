"""Optimizers of a run: any class, groups by pattern, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from internsp import model_zoo
from internsp.app.config import Config
from internsp.app.plan.step import make_plan
from internsp.app.process.stop import StopRequest
from internsp.app.session.session import Session
from internsp.app.train.step import StepRunner
from internsp.errors import ConfigError
from internsp.sp import SequenceLayout
from tests.ranks.test_train import TEXT, config
from tests.support.batches import train_batch
from tests.support.command import internsp
from tests.support.ranks import run_ranks

STEPS = 4
GROUPS = [
    {"match": "embed", "lr": 2e-3, "weight_decay": 0.0},
    {"match": ["layers.*.attention.w?", "head"], "lr": 5e-3},
    {"match": "**.ffn_norm", "weight_decay": 0.3},
]


def settings(mesh: dict[str, Any] | None = None, **optimizer: Any) -> Config:
    return config(
        optimizer={"lr": 1e-2, "warmup_steps": 0, "schedule": "linear", "max_grad_norm": None,
                   **optimizer},
        train={"dtype": "float64", "steps": STEPS, "eval_batches": 0, "loss_chunk": 1024,
               "micro_batches": (mesh or {}).get("pipeline", 1)},
        parallel=mesh or {},
    )  # fmt: skip


def train_steps(
    rank: int, world_size: int, chosen: Config
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Parameters after some steps, and the learning rates that the steps reported."""
    session = Session.create(chosen)
    runner, rates = StepRunner(session), []
    with StopRequest() as stop:
        for step in range(STEPS):
            rates.append(runner.step(step, stop)[0].lr)
    whole = {n: p.full_tensor() for n, p in session.modules[0].named_parameters()}
    return {n: v.detach().clone() for n, v in whole.items()}, rates


def one_process(
    chosen: Config, cls: Any, settings_of: Any, **arguments: Any
) -> dict[str, torch.Tensor]:
    """The same with torch alone.

    Args:
        settings_of: rate and decay by a parameter's name; also a class with its arguments, if it is
            not ``cls``.
    """
    session = Session.create(chosen)  # for its data and first values
    model = model_zoo.build(chosen.model, dtype=torch.float64)
    whole = {n: p.full_tensor() for n, p in session.modules[0].named_parameters()}
    model.load_state_dict(whole)
    optimizers = []
    for name, parameter in model.named_parameters():  # all of them work parameter by parameter
        rate, decay, *other = settings_of(name)
        made, given = other or (cls, arguments)
        optimizers.append(made([parameter], lr=rate, weight_decay=decay, **given))
    first = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    for step in range(STEPS):
        for optimizer, rate in zip(optimizers, first, strict=True):
            factor = 1 + (chosen.optimizer.min_lr_ratio - 1) * step / STEPS
            optimizer.param_groups[0]["lr"] = rate * factor
        size = chosen.train.global_batch
        batch = train_batch(session.source, step * size, slice(0, size))
        layout = SequenceLayout.create(batch.ids, rank=0, size=1, boundaries=batch.boundaries)
        loss, count = model(layout.input_ids, layout=layout, labels=layout.labels)
        (loss / count).backward()
        if chosen.optimizer.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), chosen.optimizer.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


def plain(rank: int, world_size: int, *given: Any) -> dict[str, torch.Tensor]:
    chosen, cls, named, arguments = given
    return one_process(chosen, cls, named, **arguments)


def grouped(name: str) -> tuple[float, float]:
    if name.startswith("embed"):
        return 2e-3, 0.0
    if name.startswith("head") or ".attention.w" in name:
        return 5e-3, 0.1
    if "ffn_norm" in name:
        return 1e-2, 0.3
    return 1e-2, 0.0 if "norm" in name else 0.1


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], to: float) -> None:
    assert found.keys() == wanted.keys()
    worst = {n: (found[n] - wanted[n]).abs().max().item() for n in wanted}
    assert max(worst.values()) < to, max(worst.items(), key=lambda pair: pair[1])


def test_any_elementwise_class_with_groups_by_pattern_steps_as_torch_does() -> None:
    name, options = "torch.optim:NAdam", ["momentum_decay = 0.01", "decoupled_weight_decay = true"]
    made = {"name": name, "options": options, "groups": GROUPS}
    (wanted,) = run_ranks(
        plain, 1, settings(**made), torch.optim.NAdam, grouped,
        {"momentum_decay": 0.01, "decoupled_weight_decay": True},
    )  # fmt: skip
    for found, rates in run_ranks(
        train_steps, 2, settings({"weight": 2, "sequence": 2}, **made), timeout=120
    ):
        close(found, wanted, 1e-10)
        assert rates == pytest.approx([1e-2 * (1 - 0.9 * step / STEPS) for step in range(STEPS)])


def by_muon(name: str) -> tuple[Any, ...]:
    adamw = (torch.optim.AdamW, {"betas": (0.9, 0.95)})
    if name.startswith(("embed", "head")):
        return 5e-3, 0.1, *adamw
    if "norm" in name:
        return 5e-3, 0.0, *adamw
    if ".wo." in name:
        return 5e-3, 0.1, *adamw
    return 3e-2 if ".w2." in name else 1e-2, 0.1


def by_adafactor(name: str) -> tuple[float, float]:
    return 1e-2, 0.0 if "norm" in name else 0.1


MUON = {
    "name": "muon", "max_grad_norm": 0.5, "options": ["nesterov = false"],
    "groups": [
        {"match": ["embed", "head", "**.*norm*", "norm"], "lr": 5e-3},
        {"match": "**.w2", "lr": 3e-2}, {"match": "**.wo", "optimizer": "adamw", "lr": 5e-3},
    ],
}  # fmt: skip
WHOLE = {
    "muon": (
        MUON, torch.optim.Muon, by_muon,
        {"momentum": 0.95, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
    ),
    "adafactor": (
        {"name": "adafactor", "options": ["d = 2.0"]}, torch.optim.Adafactor, by_adafactor,
        {"d": 2.0},
    ),
}  # fmt: skip


@pytest.mark.unmeasured
@pytest.mark.parametrize(("made", "cls", "named", "arguments"), WHOLE.values(), ids=WHOLE.keys())
def test_matrices_are_stepped_whole_as_torch_does_on_every_mesh(
    made: dict[str, Any], cls: Any, named: Any, arguments: dict[str, Any]
) -> None:
    (wanted,) = run_ranks(plain, 1, settings(**made), cls, named, arguments)
    meshes = [
        (2, {"weight": 2, "sequence": 2}),
        (4, {"weight": 4}),
        (4, {"weight": 2, "sequence": 1}),
        (4, {"weight": 2, "pipeline": 2}),
    ]
    for world, mesh in meshes[::3] if made["name"] == "muon" else meshes[2:3]:
        for found, _ in run_ranks(train_steps, world, settings(mesh, **made), timeout=120):
            for name, value in found.items():
                assert (value - wanted[name]).abs().max().item() < 1e-10, (mesh, name)
            assert found.keys() == wanted.keys() or "pipeline" in mesh


def measured(rank: int, world_size: int, chosen: Config) -> tuple[int, int]:
    """Bytes of the optimizer's state, and bytes that its step has received."""
    session = Session.create(chosen)
    runner, counters = StepRunner(session), session.communicators[0].state.collectives.counters
    update, received = session.optimizer._update, []

    def counted(factor: float) -> None:
        before = counters.gathered_bytes
        update(factor)
        received.append(counters.gathered_bytes - before)

    session.optimizer._update = counted  # type: ignore[method-assign]
    with StopRequest() as stop:
        runner.step(0, stop)
    return dict(session.optimizer.memory())["optimizer state"], received[0]


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_the_plan_tells_the_state_and_the_bytes_of_whole_matrix_steps(name: str) -> None:
    chosen = settings({"weight": 2}, name=name)
    plan = make_plan(chosen, 2)
    found = run_ranks(measured, 2, chosen)
    state, received = (sum(each) / 2 for each in zip(*found, strict=True))
    assert abs(plan.ranks[0].memory["optimizer state"] - state) <= 8
    assert abs(plan.ranks[0].matrices()[1] - received) <= 0.01 * received


CONFIG = """
[model]
hidden_size = 32
layers = 2
heads = 4
[data]
source = "text"
paths = ["{text}"]
sequence_length = 33
[weight_parallel]
min_shard_elements = 128
[optimizer]
name = "muon"
lr = 3e-3
warmup_steps = 0
groups = [{{ match = ["embed", "head"], lr = 1e-3 }}]
[train]
steps = 6
global_batch = 6
eval_batches = 0
dtype = "float64"
[checkpoint]
every = 3
"""


@pytest.mark.unmeasured
def test_a_user_trains_with_muon_and_goes_on_with_other_ranks(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG.format(text=TEXT.resolve()))

    def rows() -> dict[int, dict[str, Any]]:
        lines = (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()
        return {row["step"]: row for row in map(json.loads, lines)}

    two = ("--launch.processes", "2", "--parallel.weight", "2")
    internsp("train", "c.toml", *two, cwd=tmp_path)
    before = rows()
    internsp(
        "train", "c.toml", "--launch.processes", "3", "--parallel.weight", "3",
        "--checkpoint.resume", "runs/run/checkpoints/step-000003",
        cwd=tmp_path,
    )  # fmt: skip
    after = rows()
    assert list(after) == [1, 2, 3, 4, 5, 6]
    for step, row in after.items():
        assert row["loss"] == pytest.approx(before[step]["loss"], rel=1e-10)
        assert row["grad_norm"] == pytest.approx(before[step]["grad_norm"], rel=1e-10)
    assert before[6]["loss"] < before[1]["loss"] - 0.05


def refusals(rank: int, world_size: int, given: list[Config]) -> list[str]:
    found = []
    for each in given:
        with pytest.raises(ConfigError) as caught:
            Session.create(each)
        found.append(str(caught.value))
    return found


def test_what_an_optimizer_does_not_take_is_refused_by_name() -> None:
    cases = [
        ({"name": "torch.optim:Nadam"}, "optimizer.name = 'torch.optim:Nadam': there is no such"),
        ({"name": "torch.nn:Linear"}, "name = 'torch.nn:Linear' is no subclass of torch's"),
        ({"name": "torch.optim:NAdam", "options": ["momentum = 1"]}, "unexpected keyword"),
        ({"options": ["weight_decay = 1"]}, "weight_decay has a key of its own"),
        ({"name": "torch.optim:Rprop"}, "optimizer.weight_decay: torch.optim:Rprop takes none"),
        ({"name": "torch.optim:Muon"}, "layers.0.attention_norm.weight cannot be stepped by Muon"),
        (
            {"name": "tests.unit.test_scaler:Lamb", "weight_decay": 0.0},
            "optimizer.name = 'tests.unit.test_scaler:Lamb': ZeroOptimizer cuts parameters into",
        ),
        (
            {"name": "muon", "groups": [{"match": "norm", "optimizer": "muon"}]},
            "norm.weight cannot be stepped by Muon, which needs whole matrices: its shape is [32]",
        ),
        ({"groups": [{"match": "layer.*", "lr": 0.1}]}, "group 1: 'layer.*' matches no parameter"),
    ]  # fmt: skip
    (found,) = run_ranks(refusals, 1, [settings(**given) for given, _ in cases])
    for (given, wanted), text in zip(cases, found, strict=True):
        assert wanted in text, given


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('name = "adamv"', "did you mean adamw?"),
        ('options = ["nesterov"]', 'write an argument as "name = value"'),
        ('[[optimizer.groups]]\nmatch = "embed"', "lr, weight_decay or optimizer"),
        ('[[optimizer.groups]]\nlr = 0.1', "group 1: match: is missing"),
        ('[[optimizer.groups]]\nmatch = "a"\nlr = "x"', "group 1: lr: expected a number"),
        ('name = "a:B"\neps = 1e-3', "only for adamw and sgd"),
        ('name = "muno"', "did you mean muon?"),
        ('name = "adafactor"\nmomentum = 0.9', "adafactor has no momentum"),
        (
            'name = "muon"\n[[optimizer.groups]]\nmatch = "a"\noptimizer = "sgd"',
            "group 1: sgd is neither: give muon (optimizer.name) or adamw (optimizer.other)",
        ),
        (
            '[[optimizer.groups]]\nmatch = "a"\noptimizer = "muon"',
            "group 1: optimizer.name is adamw; set optimizer.other, too",
        ),
        ("decay_steps = 3", 'unused with schedule = "cosine"'),
    ],
)
def test_mistakes_of_the_section_are_told(text: str, wanted: str, tmp_path: Path) -> None:
    from internsp.app.config import load_config

    path = tmp_path / "c.toml"
    path.write_text(f"[optimizer]\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert wanted in str(caught.value)


def decays(rank: int, world_size: int, chosen: list[Config]) -> list[dict[str, float]]:
    """Learning rate and decay by parameter, of each configuration."""
    found = []
    for each in chosen:
        session = Session.create(each)
        names = {id(p): name for name, p in session.modules[0].named_parameters()}
        groups = session.optimizers[0].param_groups
        found.append({names[id(p)]: g["weight_decay"] for g in groups for p in g["params"]})
    return found


@pytest.mark.thorough(1)
def test_weight_decay_is_of_matrices_whether_they_are_sharded_or_not() -> None:
    """No value of a run may depend on how weights are communicated."""
    chosen = [
        settings(weight_decay=0.25).model_copy(
            update={"weight_parallel": settings().weight_parallel.model_copy(
                update={"min_shard_elements": elements}
            )}
        )
        for elements in (1, 1 << 30)
    ]  # fmt: skip
    sharded, replicated = run_ranks(decays, 1, chosen)[0]
    assert sharded == replicated
    assert {name for name, decay in sharded.items() if not decay} == {
        name for name in sharded if "norm" in name
    }


def scaled(rank: int, world_size: int, dtypes: list[str]) -> list[bool]:
    found = []
    for dtype in dtypes:
        train = {"dtype": "float32", "seed": 5}
        session = Session.create(config(weight_parallel={"compute_dtype": dtype}, train=train))
        assert session.source.seed == 5, "the data are in the order of the run's seed"
        found.append(session.optimizer.loss_scaler is not None)
    return found


def test_the_loss_is_scaled_where_weights_are_computed_with_in_float16() -> None:
    assert run_ranks(scaled, 1, ["float16", "bfloat16"]) == [[True, False]]
