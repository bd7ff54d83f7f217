"""What makes the host wait for a device: the lines that read a tensor's value in one step."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import internsp
from internsp.app.process.stop import StopRequest
from internsp.app.train.step import StepRunner
from internsp.base import accelerator
from internsp.base.accelerator import HostCopy
from internsp.base.host import HostLink
from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.optim.bucket import Bucket
from tests.ranks.test_train import config
from tests.support.models import VOCABULARY, Tiny
from tests.support.ranks import ranks

ROOT = Path(internsp.__file__).parent
READS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__")


@contextmanager
def reads() -> Iterator[Counter[str]]:
    """Counts reads of tensors' values, by the file and function of this project that makes them."""
    found: Counter[str] = Counter()

    def counted(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any, **options: Any) -> Any:
            frame: Any = sys._getframe(1)
            while frame and not frame.f_code.co_filename.startswith(f"{ROOT}/"):
                frame = frame.f_back
            if frame is not None:
                file = Path(frame.f_code.co_filename).relative_to(ROOT)
                found[f"{file}: {frame.f_code.co_name}"] += 1
            return read(tensor, *args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(Tensor, name, counted(name, getattr(Tensor, name)))
        yield found


# Of one step with a ZeroOptimizer: what the norm has found, of this step or, where a fused
# optimizer takes the verdict from the device, of the one before:
# unit/test_vector_clocks::test_the_host_stands_behind_nothing_of_a_step_that_it_queues.
ZERO = {"base/accelerator.py: read": 1}
# These lie on the host: the inner optimizer's counts of steps, and a batch before it is copied.
HOST = {
    "optim/bucket.py: step", "optim/streamed.py: step", "sp/layout.py: create",
}  # fmt: skip
# The tokens of the step, before the weights change, its norm, and all figures together at its end.
TRAINER = {"base/accelerator.py: read": 3}


def waits(step: Callable[[], object]) -> dict[str, int]:
    with reads() as found:
        step()
    return {line: count for line, count in found.items() if line not in HOST}


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "every weight alone, two ahead": ({"coalesce_bytes": 0, "prefetch_depth": 2}, {}),
    "offload": ({"offload": ("weights", "optimizer")}, {"mode": "full", "offload": "all"}),
    "quantized": ({"quantize": "int8", "coalesce_bytes": 0}, {}),
    "fused": ({}, {}),
    "fused, offload": ({"offload": ("weights", "optimizer", "gradients")}, {}),
}


@pytest.mark.thorough(2)
@pytest.mark.parametrize("form", FORMS)
@ranks(2)
def test_a_step_reads_no_value_but_the_norm(form: str) -> None:
    weights, checkpoint = FORMS[form]
    mesh = internsp.ParallelMesh.create(weight=2, device_type="cpu")
    torch.manual_seed(0)
    model = Tiny()
    communicator = internsp.parallelize(
        model,
        mesh,
        WeightParallelConfig(**{"min_shard_elements": 1, **weights}),
        activation_checkpoint=ActivationCheckpointConfig(**(checkpoint or {"mode": "none"})),
    )
    zero = internsp.ZeroOptimizer(
        communicator, torch.optim.AdamW, lr=1e-3, max_grad_norm=1.0,
        fused=form.startswith("fused"),
    )  # fmt: skip
    ids = torch.randint(VOCABULARY, (2, 3))

    def backward() -> None:
        model(ids, labels=ids).backward()

    for _ in range(2):
        backward()
        zero.step()
        zero.zero_grad()
    found = {**waits(backward), **waits(zero.step)}
    assert found == ZERO, found
    assert (zero.unread is not None) == form.startswith("fused")


def test_a_step_of_a_run_reads_its_tokens_its_norm_and_its_figures(tmp_path: Path) -> None:
    with internsp.Trainer(config(train={"steps": 4}), output=tmp_path / "run") as trainer:
        runner = StepRunner(trainer._session)
        runner.step(0, StopRequest())
        assert waits(lambda: runner.step(1, StopRequest())) == TRAINER


SPREAD: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    # On a CPU alone: later batches are compared beside the pass, and read at its end.
    "ring": (
        {"parallel": {"weight": 2, "sequence": 2}, "sequence": {"ring": 2}},
        {"sp/same_batch.py: require_same": 1},
    ),
    # Sizes of an exchange, once a layer and once a recompute; the loads of a row, with its figures.
    "experts": (
        {
            "model": {"family": "mixtral", "experts": 4, "top_k": 2},
            "parallel": {"weight": 2, "expert": 2, "expert_weight": 1},
        },
        {"experts/exchange.py: exchange_counts": 3 + 2, "base/accelerator.py: read": 1},
    ),
}


@pytest.mark.parametrize("form", [pytest.param("ring", marks=pytest.mark.thorough(1)), "experts"])
@ranks(2)
def test_a_step_of_a_ring_or_with_owners_reads_what_is_listed(form: str, rank: int) -> None:
    sections, more = SPREAD[form]
    made = config(train={"steps": 8}, **sections)
    with tempfile.TemporaryDirectory() as own, internsp.Trainer(made, output=own) as trainer:
        runner = StepRunner(trainer._session)
        for step in range(3):  # the first forwards compare batches at once
            runner.step(step, StopRequest())
        found = waits(lambda: runner.step(3, StopRequest()))
    assert found == Counter(TRAINER) + Counter(more)


@pytest.mark.parametrize(
    "offload",
    [pytest.param((), marks=pytest.mark.thorough(1)), ("weights", "optimizer", "gradients")],
)
def test_a_step_of_a_run_with_a_fused_optimizer_reads_the_step_before(
    offload: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its own it reads nothing. Behind a step that is unread it waits for no copy to the host,
    and looks for nothing that a program wrote."""
    calls: Counter[str] = Counter()
    for kind, name in ((HostLink, "synchronize"), (Bucket, "merge_external_writes")):
        real = getattr(kind, name)
        monkeypatch.setattr(
            kind, name, lambda *a, r=real, n=name, **k: (calls.update([n]), r(*a, **k))[1]
        )
    queued: list[HostCopy] = []
    own: list[bool] = []
    init, read = HostCopy.__init__, HostCopy.read

    def noted(self: HostCopy, tensor: Tensor) -> None:
        queued.append(self)
        init(self, tensor)

    def asked(self: HostCopy) -> list[float]:
        own.append(self in queued)
        return read(self)

    monkeypatch.setattr(HostCopy, "__init__", noted)
    monkeypatch.setattr(HostCopy, "read", asked)
    made = config(
        train={"steps": 4}, optimizer={"options": ["fused = true"]},
        weight_parallel={"offload": offload},
    )  # fmt: skip
    with internsp.Trainer(made, output=tmp_path / "run") as trainer:
        runner = StepRunner(trainer._session)
        runner.step(0, StopRequest())
        assert runner.queue(1, StopRequest()) is None
        assert calls["merge_external_writes"]
        assert bool(calls["synchronize"]) == bool(offload)
        calls.clear()
        queued.clear()
        own.clear()
        ticks = itertools.count(float(runner._end) + 5)
        monkeypatch.setattr(accelerator, "moment", lambda _: next(ticks))
        assert waits(lambda: runner.queue(2, StopRequest())) == {"base/accelerator.py: read": 3}
        assert not calls
        assert own == [False] * 3, "tokens, figures and norm of the step before"
        done = runner.finish()
        assert done is not None
        assert (done.metrics.step, runner.finish()) == (3, None)
        assert done.metrics.step_seconds == 5, "it began where the one before ended"
