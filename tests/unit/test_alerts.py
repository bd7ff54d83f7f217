"""What a run warns of, and the command that it runs with the message."""

from __future__ import annotations

import ast
import math
import sys
import time
from pathlib import Path

import pytest

from internsp.app.config import load_config
from internsp.app.train import alerts
from internsp.app.train.alerts import Alerts, Spikes, slow_ranks
from internsp.errors import ConfigError
from tests.support.metrics import step


def test_a_spike_is_told_from_the_median_of_the_steps_before() -> None:
    spikes = Spikes()
    said = [spikes.check(step(n, 2.0 + n % 3 / 10)) for n in range(1, 21)]
    assert not any(said)
    assert spikes.check(step(21, 4.1)) == ""
    found = spikes.check(step(22, 8.4))
    assert found == "step 22: the loss is 8.4, 4.0 times the median of the 21 steps before"
    assert spikes.check(step(23, math.nan)) == ""
    assert spikes.check(step(24, 2.1, grad_norm=1e9)).startswith(
        "step 24: the gradient norm is 1e+09"
    )
    early = Spikes()
    assert not any(early.check(step(n, 10.0**n)) for n in range(1, 11))


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([(0, 1.0), (0, 1.2), (0, 1.1), (0, 1.4)], ""),
        ([(0, 1.0), (0, 1.0), (0, 1.0), (0, 1.6)], "rank 3 computes 1.6 s of a step, others 1 s"),
        ([(0, 2.0), (0, 1.0)], "rank 0 computes 2 s of a step, others 1 s"),
        ([(0, 1.0), (0, 1.0), (1, 3.0), (1, 3.0)], ""),  # a stage has more to do
        ([(0, 0.0)], ""),
    ],
)
def test_a_rank_that_computes_for_longer_than_its_stage_is_slow(
    found: list[tuple[int, float]], told: str
) -> None:
    said = slow_ranks(found)
    assert said.startswith(told)
    assert bool(said) == bool(told)


WRITES = "import sys, os; open(sys.argv[1], 'a').write(repr(sys.argv[2:]) + os.linesep)"


def made(command: str) -> tuple[Alerts, list[str]]:
    told: list[str] = []
    one = Alerts(command, "run")
    one.notify = told.append
    return one, told


def test_the_message_is_the_last_argument_whatever_is_in_it(tmp_path: Path) -> None:
    one, told = made(f'{sys.executable} -c "{WRITES}" {tmp_path / "said"} "to me"')
    one.send("spike", "a 'quoted' $(touch there); `touch there` \n and a second line")
    one.send("spike", "not again within ten minutes")
    one.send("failed", "the last")
    one.close()
    assert sorted(map(ast.literal_eval, (tmp_path / "said").read_text().splitlines())) == [
        ["to me", "run: a 'quoted' $(touch there); `touch there` \n and a second line"],
        ["to me", "run: the last"],
    ]
    assert told == []
    assert [path.name for path in tmp_path.iterdir()] == ["said"]


def test_a_command_that_fails_or_hangs_is_told_and_delays_nothing_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, told = made(f"{sys.executable} -c 'import sys; sys.exit(3)'")
    one.send("slow", "a \0 that no argument can hold")
    one.close()
    assert told[0].startswith("report.alert: ")
    one.send("spike", "x")
    one.close()
    assert told[1].startswith(f"report.alert: Command '['{sys.executable}'")
    assert told[1].endswith("returned non-zero exit status 3.")
    monkeypatch.setattr(alerts, "_LAST_SECONDS", 0.5)
    monkeypatch.setattr(alerts, "_SECONDS", 1.0)
    one, told = made("sh -c 'exec sleep 60'")
    began = time.monotonic()
    one.send("spike", "x")
    assert time.monotonic() - began < 0.4
    one.close()
    assert time.monotonic() - began < 0.9
    assert told == []
    one._running[0].result(10)
    assert "timed out after" in told[0]


def test_a_command_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="finds no command 'no-such-thing'"):
        Alerts("no-such-thing --now", "run")
    for command, why in (("a 'b", "is not words as in a shell: No closing"), (" ", "names no")):
        with pytest.raises(ConfigError, match=rf"report\.alert: {why}"):
            load_config({"report": {"alert": command}})
    Alerts(None, "run").send("spike", "x")
