"""Under torchrun a run goes on by itself, on as many ranks as there are, to the same weights."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import get_method_name

from internsp.app.checkpoint.disk import steps_in
from internsp.app.launch.launch import start
from internsp.app.report.metrics import read_metrics
from internsp.app.train.run import train
from tests.chaos.runs import STEPS, settings, tensors
from tests.support.command import TORCHRUN, begin, caller

ROOT = Path(__file__).parents[2]
LAST = Path("checkpoints") / f"step-{STEPS:06d}"
# How soon agents notice that one has gone, and how long they wait for another one: seconds.
RENDEZVOUS = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=300"

Agent = BaseProcess


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Start an agent; what remains of it is killed at the end."""
    started: list[Agent] = []

    def agent(output: Path, *words: str, slow: float = 0.0, wait: int = 0, die: str = "") -> Agent:
        faults = {"INTERNSP_SLOW": str(slow), "INTERNSP_WAIT": str(wait), "INTERNSP_DIE": die}
        around = environment(**faults)
        with output.with_suffix(f".{len(started)}.txt").open("wb") as log:
            where = log.fileno()
            told = command(output, *words)
            started.append(begin(told, ROOT, where, where, around, session=True))
        return started[-1]

    yield agent
    for one in started:
        if one.exitcode is None:
            kill(one)


def environment(**faults: str) -> dict[str, str]:
    gone = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE") and k not in gone}
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    return kept | ours | faults


def command(output: Path, *words: str) -> list[str]:
    """Start Python under torchrun with this command line."""
    file = output.with_suffix(".toml")
    file.write_text(configuration(weight=2 if "2" in words else 1))
    ours = ["-m", "tests.support.elastic", "train", str(file), "--output", str(output)]
    return [*TORCHRUN, *words, *ours]


def kill(agent: Agent) -> None:
    """Its ranks end with it."""
    assert agent.pid is not None
    os.killpg(agent.pid, signal.SIGKILL)
    agent.join()


def status(agent: Agent) -> int | None:
    agent.join(600)
    return agent.exitcode


def configuration(weight: int) -> str:
    """The configuration that torchrun's ranks read; ``resume`` has its default value."""
    # Enough time for a rank to import torch on a busy machine.
    parallel = {"weight": weight, "timeout_seconds": 60}
    own = {"checkpoint": {"resume": None}, "launch": {"processes": 1}}
    return settings(weight, parallel=parallel, **own).to_toml()


def said(output: Path) -> str:
    return "".join(file.read_text() for file in sorted(output.parent.glob(f"{output.name}.*.txt")))


@pytest.mark.slow(20)
def test_a_run_goes_on_by_itself_after_a_rank_died_and_ends_with_the_same_bytes(
    tmp_path: Path, torchrun: Callable[..., Agent]
) -> None:
    alone, output = tmp_path / "alone", tmp_path / "run"
    start(train, settings(2), alone)
    # The remaining rank ends so soon after the other one that torchrun may name either of them.
    words = ("--nproc-per-node", "2", "--standalone", "--max-restarts", "1")
    assert status(torchrun(output, *words, die="0 1 6")) == 0, said(output)
    assert "local_rank: " in said(output)
    assert "  rank 1 was at step 6, last collective: " in said(output), "told by the one left"
    assert "  to go on after step " in said(output)
    assert "is now in" not in said(output)
    found, expected = tensors(output / LAST), tensors(alone / LAST)
    assert found.keys() == expected.keys()
    kept = [name for name in expected if not name.startswith("random.")]  # of a user's program
    assert [name for name in kept if not torch.equal(found[name], expected[name])] == []
    rows = [read_metrics(folder / "metrics.jsonl") for folder in (output, alone)]
    assert [row.loss for row in rows[0]] == [row.loss for row in rows[1]]
    log = (output / "logs" / "rank-00001.log").read_text()
    assert log.count("rank 1, process ") == 2, "one of each start"


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(False, marks=pytest.mark.slow(40), id="fewer"),
        pytest.param(True, marks=pytest.mark.thorough(60), id="fewer, and more again"),
    ],
)
def test_a_run_goes_on_with_as_many_agents_as_there_are(
    more: bool, tmp_path: Path, torchrun: Callable[..., Agent]
) -> None:
    """Two agents with one rank each; one is killed with its rank, and the other continues.

    Or the other is killed, too, and two new ones start. A third agent that joins the remaining one
    is not tested: torch 2.13's rendezvous then waits for an address that no agent publishes, after
    the rank has saved and ended as requested.
    """
    alone, output = tmp_path / "alone", tmp_path / "run"
    start(train, settings(1), alone)

    def words() -> tuple[str, ...]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return (
            "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "9",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
            "--rdzv-conf", RENDEZVOUS, "--rdzv-id", "elastic",
        )  # fmt: skip

    def reached(step: int) -> bool:
        saved = max((s for s, _ in steps_in(output / "checkpoints")), default=0)
        return saved >= step or agents[0].exitcode is not None

    def until(true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 300
        while not true():
            assert time.monotonic() < deadline, said(output)
            time.sleep(0.05)

    def held(words: tuple[str, ...]) -> bool:
        host, port = words[words.index("--rdzv-endpoint") + 1].split(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    first = words()
    # If it is to be killed, the remaining rank waits before its seventh step.
    options = {"slow": 0.5, "wait": 7} if more else {"slow": 0.5}
    agents = [torchrun(output, *first, **options)]  # it hosts the rendezvous
    until(lambda: held(first))
    agents.append(torchrun(output, *first, **options))
    two = output / "logs" / "rank-00001.log"
    until(lambda: reached(2) and (two.exists() or agents[0].exitcode is not None))
    kill(agents[1])
    if more:
        until(lambda: reached(4))
        kill(agents[0])
        again = words()
        agents = [torchrun(output, *again)]
        until(lambda: held(again))
        agents.append(torchrun(output, *again))
    assert status(agents[0]) == 0, said(output)
    worlds = (output / "logs" / "rank-00000.log").read_text()
    assert "world 1 " in worlds, said(output)
    assert "world 2 " in worlds, said(output)
    assert two.exists()
    found, expected = tensors(output / LAST), tensors(alone / LAST)
    for name, value in expected.items():
        if not name.startswith("random."):
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9)
    losses = [
        [row.loss for row in read_metrics(folder / "metrics.jsonl")] for folder in (output, alone)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len(losses[0]) == STEPS


def test_events_of_agents_that_tests_fork_have_torchs_names() -> None:
    def noted(name: Callable[[], str]) -> str:
        return name()

    def happened(name: Callable[[], str]) -> str:
        return noted(name)

    assert happened(caller) == happened(get_method_name) == "happened"
