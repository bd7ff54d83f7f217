"""Which of several failures is reported as the cause, and which process is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from internsp.app.launch.launch import Failure, RankOutcome, first_cause
from internsp.app.process.lifetime import is_stopped, stopped_ranks
from internsp.errors import CollectiveError, ConfigError


def failure(error: BaseException, at: float = 0.0) -> Failure:
    seen = Failure.of(error)
    return Failure(seen.text, seen.consequence, at, seen.exit_status)


GONE = failure(RuntimeError("Connection closed by peer [127.0.0.1]:1"))
WAITED = failure(CollectiveError("head.weight: Timed out waiting 10000ms for recv"), 1.0)
CLOSED = failure(RuntimeError("Application timeout caused pair closure"))
WRONG = failure(ConfigError("model.heads: 3"), 2.0)
LATER = failure(ValueError("later"), 3.0)


@pytest.mark.parametrize(
    ("outcomes", "cause"),
    [
        (
            [RankOutcome(0, 1, GONE), RankOutcome(1, 1, LATER), RankOutcome(2, 1, WRONG)],
            "rank 2 failed: ConfigError: model.heads: 3",
        ),
        (
            [
                RankOutcome(0, 1, WAITED),
                RankOutcome(1, -9, killed=True, stopped=True),
                RankOutcome(2, 1, CLOSED),
            ],
            "rank 1 was stopped (SIGSTOP, SIGTSTP or a debugger) while the others waited for it; "
            "it has been ended\nLater, rank 2: RuntimeError: Application timeout caused pair "
            "closure",
        ),
        ([RankOutcome(0, 1, GONE), RankOutcome(1, -15)], "rank 1 was ended by SIGTERM"),
        (
            [RankOutcome(0, 1, GONE), RankOutcome(1, 7)],
            "rank 1 ended with exit status 7\nLater, rank 0: RuntimeError: Connection closed by "
            "peer [127.0.0.1]:1",
        ),
        (
            [RankOutcome(0, 1, WAITED), RankOutcome(1, -9, killed=True)],
            "rank 1 did not come where the others waited, and had to be ended; if that is slow and "
            "not stuck, raise parallel.timeout_seconds\nLater, rank 0: CollectiveError: "
            "head.weight: Timed out waiting 10000ms for recv",
        ),
        (
            [RankOutcome(0, -9, killed=True), RankOutcome(1, -9, killed=True)],
            "ranks 0, 1 did not stop in time when asked, and had to be ended",
        ),
        (
            [RankOutcome(0, 1, WAITED), RankOutcome(1, 0)],
            "rank 0 failed: CollectiveError: head.weight: Timed out waiting 10000ms for recv\n"
            "Another rank went away without a message.",
        ),
    ],
    ids=["real", "stopped", "signal", "silent", "stuck", "grace", "alone"],
)
def test_the_cause_is_told_and_not_what_followed_from_it(
    outcomes: list[RankOutcome], cause: str
) -> None:
    error = first_cause(outcomes)
    assert error is not None
    assert str(error) == cause
    assert error.exit_status == (2 if "ConfigError" in cause else 1)


def test_ranks_that_ended_well_have_no_cause() -> None:
    assert first_cause([RankOutcome(0, 0), RankOutcome(1, 0, stopped_by=15)]) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_stopped_rank_among_an_agents_children_is_found() -> None:
    environment = {**os.environ, "RANK": "7"}
    with subprocess.Popen(["sleep", "60"], env=environment) as sleeper:
        try:
            assert stopped_ranks(os.getpid()) == []
            sleeper.send_signal(signal.SIGSTOP)
            deadline = time.monotonic() + 5
            while not is_stopped(sleeper.pid) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert stopped_ranks(os.getpid()) == [7]
            assert stopped_ranks(os.getppid()) == []
        finally:
            sleeper.kill()


def test_a_rank_that_leaves_without_a_word_has_failed() -> None:
    ended_early = RankOutcome(1, 0, ended_early=True)
    assert ended_early.failed
    cause = first_cause([RankOutcome(0, 1, GONE), ended_early])
    assert cause is not None
    assert cause.ranks == (1,)
    assert str(cause).startswith(
        "rank 1 ended with exit status 0 before its run had come to an end\nLater, rank 0: "
    )
    assert first_cause([RankOutcome(0, 0), RankOutcome(1, 0)]) is None
