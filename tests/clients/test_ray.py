"""Ray Train starts ranks and restarts them: the loss of one process, also after a death."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray.train", reason="the package ray[train] is not installed")

import ray

from examples import ray_train

pytestmark = [pytest.mark.clients, pytest.mark.unmeasured]
ROOT = Path(__file__).parents[2]
STEPS = 5


@pytest.fixture(scope="module", autouse=True)
def _local_ray() -> Iterator[None]:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    ray.init(
        num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": paths}}, log_to_driver=False,
    )  # fmt: skip
    yield
    ray.shutdown()


def dies_once(note: Path) -> Callable[[dict[str, Any]], None]:
    """The example's loop; in the first attempt rank 1 is killed after a checkpoint."""

    def loop(settings: dict[str, Any]) -> None:
        report, rank = ray.train.report, ray.train.get_context().get_world_rank()

        def killed(metrics: dict[str, Any], checkpoint: Any) -> None:
            report(metrics, checkpoint=checkpoint)
            if rank == 1 and metrics["step"] == 3 and not note.exists():
                note.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        ray.train.report = killed
        ray_train.train(settings)

    return loop


@pytest.mark.slow(60)
def test_workers_that_ray_restarts_have_the_loss_of_one_process(tmp_path: Path) -> None:
    note = tmp_path / "killed"
    alone = ray_train.fit(1, STEPS, tmp_path / "alone", dtype=torch.float64)
    again = ray_train.fit(
        2, STEPS, tmp_path / "two", dtype=torch.float64, failures=1, loop=dies_once(note)
    )
    assert note.exists()
    assert alone["step"] == again["step"] == STEPS
    assert abs(again["loss"] - alone["loss"]) < 1e-9 * alone["loss"]
