"""WP-11, WP-14: kept blocks stay unsharded for the passes of a step, and no longer."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from internsp.config import ActivationCheckpointConfig
from internsp.mesh import ParallelMesh
from tests.support.compare import close
from tests.support.models import Tiny, Twin
from tests.support.ranks import ranks

FULL = ActivationCheckpointConfig(mode="full")


@pytest.mark.thorough(4)
@ranks(2)
def test_kept_blocks_are_gathered_once_a_step_and_never_stale() -> None:
    """Kept blocks are gathered once a step, and again after any write to a weight."""
    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=20)
    for checkpoint in (None, FULL):
        twin = Twin(partial(Tiny, layers=6), mesh, checkpoint, keep_unsharded=2)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin.plain, twin.ours)]
        plan = twin.communicator.plan
        assert plan is not None
        assert plan.policy.kept == {1, 3}

        def gathers(twin: Twin = twin) -> list[str]:
            """Kept blocks whose weights were gathered since the last call."""
            lines = twin.lines("AG")
            return [n for n in ("1", "3") for line in lines if f"layers.{n}.w1.weight" in line]

        def passes(what: str, twin: Twin = twin) -> None:
            """Two micro-batches, an evaluation between them, and their gradients."""
            with twin.communicator.unchanged():
                twin.backward()
                assert gathers() == ["1", "3"], what
                everybody, _ = twin.batch()
                with torch.no_grad():
                    found, wanted = twin.ours(*everybody), twin.plain(*everybody)
                close(found, wanted, f"{what}: evaluation", 1e-9)
                twin.backward()
                assert gathers() == [], f"{what}: a further micro-batch"
            twin.check_gradients(what)

        passes("first")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        passes("after a step")
        twin.zero_grad()
        twin.ours.load_state_dict({k: v.clone() for k, v in twin.ours.state_dict().items()})
        passes("after load_state_dict")
        twin.zero_grad()
        with torch.no_grad():
            for model in (twin.plain, twin.ours):
                model.get_parameter("layers.3.w1.weight").mul_(0.5)
        twin.backward()
        assert gathers() == ["1", "3"], "a pass for itself"
        twin.check_gradients("edited")
        twin.zero_grad()
        for model in (twin.plain, twin.ours):
            for parameter in model.parameters():
                parameter.data.mul_(1.25)
        passes("after .data was written")
