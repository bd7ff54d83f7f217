"""Failures on NCCL, where a wait raises nothing; by recorded texts, without a device."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from internsp import ParallelMesh, WeightParallelConfig, ZeroOptimizer, parallelize
from internsp.errors import CollectiveError
from internsp.failure.detection import is_consequence
from internsp.failure.flight_recorder import describe, unfinished
from internsp.failure.guard import abort_collectives
from internsp.optim import zero
from tests.support.models import VOCABULARY, Tiny
from tests.unit.test_wp_standstill import ranks_that_wait
from tools.bench.model import process_group

# As torch and NCCL wrote them, with the numbers of threads of issues that have them.
FOLLOWS = {
    "watchdog (pytorch 118369)": (
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, "
        "OpType=ALLREDUCE, NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000) ran for 600020 "
        "milliseconds before timing out."
    ),
    "aborted": (
        "NCCL communicator was aborted on rank 2. Original reason for failure was: [Rank 2] "
        "NCCL error: remote process exited or there was a network error"
    ),
    "a rank ended (nccl 2076)": (
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process "
        "exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed "
        "possibly due to a network error or a remote process exiting prematurely.\nLast error:\n"
        "socketProgressOpt: Call to recv from 172.16.0.1<33759> failed : Connection reset by peer"
    ),
    "the same, as an internal error (nccl 1514)": (
        "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1275, internal error, "
        "NCCL version 2.14.3\nncclInternalError: Internal check failed.\nLast error:\nNet : "
        "Connection closed by remote peer user<50260>"
    ),
    "a process is ended": (
        "Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA "
        "kernels, subsequent GPU operations might run on corrupted/incomplete data."
    ),
}  # fmt: skip
FIRST = {
    "a call of CUDA (nccl 1410)": (
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error "
        "(run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\nncclUnhandledCudaError: "
        "Call to CUDA function failed.\nLast error:\nCuda failure 1 'invalid argument'"
    ),
    "two ranks on one device (nccl 1241)": (
        "NCCL error in: ProcessGroupNCCL.cpp:1287, invalid usage, NCCL version 2.17.1\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        "Duplicate GPU detected : rank 3 and rank 2 both on CUDA device e2000"
    ),
    "a kernel": "CUDA error: an illegal memory access was encountered",
    "memory": "CUDA out of memory. Tried to allocate 2.00 GiB.",
}


@pytest.mark.parametrize("name", FOLLOWS | FIRST)
def test_words_of_nccl_tell_a_first_cause_from_what_follows(name: str) -> None:
    text = (FOLLOWS | FIRST)[name]
    assert is_consequence(dist.DistBackendError(text)) == (name in FOLLOWS)


@pytest.mark.parametrize("fused", [False, True])
def test_a_cause_that_came_with_the_norm_leaves_weights_and_replicas_as_they_are(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with process_group("fake", 4):
        model = Tiny()
        mesh = ParallelMesh.create(weight=2, device_type="cpu")
        communicator = parallelize(model, mesh, WeightParallelConfig(min_shard_elements=1))
        optimizer = ZeroOptimizer(communicator, torch.optim.SGD, lr=0.1, fused=fused)
        ids = torch.randint(VOCABULARY, (2, 3))
        model(ids, labels=ids).backward()
        before = [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]

        def aborted(*_: Any) -> Any:
            communicator.recovery.guard.fatal_cause = "rank 1 failed first: ValueError"
            return torch.full((99,), 2.0)  # what an aborted collective leaves

        monkeypatch.setattr(zero, "norm_and_flags", aborted)
        sent = communicator.state.collectives.counters.gathers
        with pytest.raises(CollectiveError, match=r"gradient norm.*rank 1 failed first"):
            optimizer.step()
        after = [p.to_local() for p in model.parameters()]  # type: ignore[attr-defined]
        assert all(map(torch.equal, before, after))
        assert communicator.state.collectives.counters.gathers == sent, "nothing is published"
        assert not any(m.ready for m in communicator.replicated.all_parameters())


RECORDED = {
    "version": "2.10",
    "entries": [
        {
            "process_group": (name, text), "collective_seq_id": number, "p2p_seq_id": 0,
            "profiling_name": f"nccl:{what}", "input_sizes": [[8, 4]], "state": state,
            "is_p2p": False, "retired": state == "completed",
        }
        for number, what, state, name, text in (
            (6, "all_reduce", "completed", "0", "default_pg"),
            (7, "_all_gather_base", "started", "12", "weight"),
            (8, "_all_gather_base", "scheduled", "12", "undefined"),
        )
    ],
}  # fmt: skip


def test_the_flight_recorder_names_collectives_that_have_not_ended() -> None:
    assert describe(RECORDED) == (
        "nccl:_all_gather_base number 7 of [8, 4] in group 12 (weight): started; "
        "nccl:_all_gather_base number 8 of [8, 4] in group 12: scheduled"
    )
    many = RECORDED | {"entries": RECORDED["entries"][1:] * 3}
    assert describe(many).endswith("; 2 later ones")
    assert not describe({})
    assert not unfinished(), "nothing is recorded here"


def test_a_rank_that_gives_up_prints_what_torch_has_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("internsp.failure.flight_recorder.unfinished", lambda: describe(RECORDED))
    _, (one, _) = ranks_that_wait(2)
    with caplog.at_level(logging.WARNING):
        one.report_lost("rank 1 failed first")
    assert re.search("rank 0, torch's flight recorder: nccl:_all_gather_base number 7", caplog.text)


@pytest.mark.parametrize(
    ("config", "ended"),
    [
        ("cuda:nccl", ["nccl"]),
        ("cpu:gloo,cuda:gloo", ["gloo"]),
        ("cuda:nccl,cpu:gloo", ["gloo", "nccl"]),  # as accelerate writes it for offload
        ("cpu:gloo,cuda:nccl,xpu:xccl,mps:gloo", ["gloo", "nccl"]),  # torch's own default
    ],
)
def test_each_backend_of_a_group_is_ended_in_its_own_way(
    config: str, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    class Group:
        def size(self) -> int:
            return 2

        def rank(self) -> int:
            return 0

        def recv(self, *_: Any) -> Any:
            found.append("gloo")
            raise RuntimeError("timed out")

    monkeypatch.setattr(dist, "get_backend_config", lambda _: config)
    abort = "_abort_process_group"
    monkeypatch.setattr(dist.distributed_c10d, abort, lambda _: found.append("nccl"))
    group: Any = Group()
    abort_collectives(group)
    assert found == ended
