"""Optimizers of a run: any class, groups by pattern, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from internsp import model_zoo
from internsp.config import Config
from internsp.errors import ConfigError
from internsp.sp import SequenceLayout
from internsp.train.session import Session
from internsp.train.step import StepRunner
from internsp.train.stop import StopRequest
from tests.ranks.test_train import config
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
        train={"dtype": "float64", "steps": STEPS, "eval_batches": 0, "loss_chunk": 1024},
        parallel=mesh or {},
    )  # fmt: skip


def train_steps(
    rank: int, world_size: int, chosen: Config
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Parameters after some steps, and the rates that the steps told."""
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
        settings_of: rate and decay by a parameter's name.
    """
    session = Session.create(chosen)  # for its data and first values
    model = model_zoo.build(chosen.model, dtype=torch.float64)
    whole = {n: p.full_tensor() for n, p in session.modules[0].named_parameters()}
    model.load_state_dict(whole)
    groups = [
        {"params": [p], "lr": settings_of(n)[0], "weight_decay": settings_of(n)[1]}
        for n, p in model.named_parameters()
    ]
    optimizer = cls(groups, **arguments)
    first = [group["lr"] for group in optimizer.param_groups]
    for step in range(STEPS):
        for group, rate in zip(optimizer.param_groups, first, strict=True):
            group["lr"] = rate * (1 + (chosen.optimizer.min_lr_ratio - 1) * step / STEPS)
        size = chosen.train.global_batch
        batch = session.source.train_batch(step * size, slice(0, size))
        layout = SequenceLayout.create(batch.ids, rank=0, size=1, boundaries=batch.boundaries)
        loss, count = model(layout.input_ids, layout=layout, labels=layout.labels)
        (loss / count).backward()
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


def refusals(rank: int, world_size: int, given: list[Config]) -> list[str]:
    found = []
    for each in given:
        with pytest.raises((ConfigError, TypeError)) as caught:
            Session.create(each)
        found.append(str(caught.value))
    return found


def test_what_an_optimizer_does_not_take_is_refused_by_name() -> None:
    cases = [
        ({"name": "torch.optim:Nadam"}, "optimizer.name = 'torch.optim:Nadam': there is no such"),
        ({"name": "torch.optim:NAdam", "options": ["momentum = 1"]}, "unexpected keyword"),
        ({"options": ["weight_decay = 1"]}, "weight_decay has a key of its own"),
        ({"name": "torch.optim:Rprop"}, "optimizer.weight_decay: torch.optim:Rprop takes none"),
        ({"name": "torch.optim:Muon"}, "not one: it is Muon"),
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
        ('[[optimizer.groups]]\nmatch = "embed"', "group 1: needs match, and lr or weight_decay"),
        ('[[optimizer.groups]]\nlr = 0.1', "group 1 lacks match"),
        ('[[optimizer.groups]]\nmatch = "a"\nlr = "x"', "group 1: lr: expected a number"),
        ('name = "a:B"\neps = 1e-3', "of adamw and sgd alone"),
        ("decay_steps = 3", 'unused with schedule = "cosine"'),
    ],
)
def test_mistakes_of_the_section_are_told(text: str, wanted: str, tmp_path: Path) -> None:
    from internsp.config import load_config

    path = tmp_path / "c.toml"
    path.write_text(f"[optimizer]\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert wanted in str(caught.value)
