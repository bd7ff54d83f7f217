"""A run compares replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from internsp.app.train import loop
from internsp.app.train.replicas import compare_replicas
from internsp.app.train.run import train
from internsp.errors import ReplicaError
from tests.ranks.test_train import config
from tests.support.few import some
from tests.support.ranks import run_ranks

SHORT = {"steps": 6, "compare_replicas_every": 2, "eval_batches": 1}


def flip(rank: int, world_size: int, folder: str, weight: int, which: str) -> str:
    """A run in which one bit of one rank's copy flips after the fourth step; its error."""

    def after(session, step: int) -> ReplicaError | None:
        if step == 4 and rank == 1:
            for communicator in session.communicators:
                communicator.wait_until_ready()  # a parameter all-gather would overwrite it
            parameters = dict(session.modules[0].named_parameters())
            name = next(name for name in parameters if which in name)
            tensor = parameters[name]
            local = getattr(tensor, "_local_tensor", tensor)
            local.data.view(torch.int32).view(-1)[3] ^= 1
        return compare_replicas(session, step)

    settings = config(
        parallel={"weight": weight}, train=SHORT, checkpoint={"save": True, "every": 2}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "compare_replicas", after)
        try:
            train(settings, Path(folder))
        except ReplicaError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("world", "weight", "which", "found"),
    some([
        (
            2,
            1,
            "wq.weight",
            "layers.0.attention.wq.weight differs: one value on ranks [0], another on [1]",
        ),
        (
            4,
            2,
            "w1.weight",
            "feed_forward.w1.weight differs: one value on ranks [1], another on [3]",
        ),
        (4, 4, "norm.weight", "norm.weight differs: one value on ranks [0, 2, 3], another on [1]"),
    ], 1),
)
def test_one_flipped_bit_in_one_replica_ends_the_run(
    tmp_path: Path, world: int, weight: int, which: str, found: str
) -> None:
    folder = tmp_path / "run"
    for rank, error in enumerate(run_ranks(flip, world, str(folder), weight, which, timeout=120)):
        assert "after step 4" in error
        assert found in error
        assert f"this is rank {rank}" in error
    assert "replicas of weights are not equal" in (folder / "report.html").read_text()
    saved = [path.name for path in (folder / "checkpoints").iterdir()]
    assert any("2" in name for name in saved)
    assert not any("4" in name for name in saved)
