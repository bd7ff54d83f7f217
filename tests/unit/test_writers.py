"""Writers for other programs: invalid choices are refused, later failures do not end a run."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from internsp.app.config import Config, load_config
from internsp.app.launch.preflight import check_before_start
from internsp.app.report import writers
from internsp.app.report.metrics import StepMetrics, named
from internsp.app.report.writers import Writers
from internsp.errors import ConfigError, MissingDependencyError
from tests.support.metrics import step


def chosen(*names: str) -> Config:
    return Config.model_validate({"report": {"writers": list(names)}})


class Kept:
    """A writer that records what it gets, and fails at its third row."""

    location = "here"

    def __init__(self, fails: bool = False) -> None:
        self.rows: list[int] = []
        self.ends: list[bool] = []
        self.fails = fails

    def write(self, row: StepMetrics) -> None:
        if self.fails and row.step == 3:
            raise OSError(28, "No space left on device")
        self.rows.append(row.step)

    def close(self, well: bool) -> None:
        self.ends.append(well)


def test_a_writer_that_fails_is_told_once_and_the_other_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken, whole = Kept(fails=True), Kept()
    monkeypatch.setattr(writers, "_TensorBoard", lambda *_: broken)
    monkeypatch.setattr(writers, "_WeightsAndBiases", lambda *_: whole)
    monkeypatch.setattr(writers, "missing_packages", lambda _: ())
    told: list[str] = []
    both = Writers(chosen("tensorboard", "wandb"), Path(), "run", [], told.append)
    assert both.files == {"tensorboard": "here", "wandb": "here"}
    for number in range(1, 6):
        both.write(step(number))
    both.close()
    both.close(well=False)
    assert told == [
        "report.writers: tensorboard failed (OSError: [Errno 28] No space left on device); the run "
        "goes on without it"
    ]
    assert (broken.rows, broken.ends) == ([1, 2], [])
    assert (whole.rows, whole.ends) == ([1, 2, 3, 4, 5], [True])


def test_a_writer_that_cannot_be_opened_costs_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writers, "_TensorBoard", fail)
    told: list[str] = []
    none = Writers(chosen("tensorboard"), Path(), "run", [], told.append)
    none.write(step(1))
    none.close()
    assert len(told) == 1
    assert none.files == {}


def test_every_number_of_a_row_has_a_name() -> None:
    row = step(7, eval_loss=2.5, epochs={"": 0.5, "code": 1.5}, run="x")
    found = named(row)
    assert found["train/loss"] == row.loss
    assert found["eval/held-out"] == 2.5
    assert (found["epochs/text"], found["epochs/code"]) == (0.5, 1.5)
    plain = {"step", "run", "eval_loss", "epochs"}
    assert {n.removeprefix("train/") for n in found if n.startswith("train/")} == {
        key for key in row.model_dump(exclude_none=True) if key not in plain
    }


def test_a_missing_package_is_found_before_a_run_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    check_before_start(chosen(), Path("out"))  # imports what it needs, before the path is cut
    Path("wandb").mkdir()  # which programs of W&B leave behind: no package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("wandb", "tensorboard"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(MissingDependencyError) as caught:
        check_before_start(chosen("tensorboard", "wandb"), Path("out"))
    assert caught.value.exit_status == 3
    for name in ("tensorboard", "wandb"):
        assert f"pip install 'internsp[{name}]'" in str(caught.value)
    with pytest.raises(MissingDependencyError):
        Writers(chosen("wandb"), Path("out"), "run", [], print)


@pytest.mark.parametrize(
    ("report", "wanted"),
    [
        ({"writers": ["tensorbord"]}, 'expected "tensorboard" or "wandb", got "tensorbord"'),
        ({"writers": ["wandb", "wandb"]}, "report.writers: one is given twice"),
        ({"wandb_mode": "online"}, "report.wandb_mode: unknown key; .* WANDB_MODE now"),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused(report: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        load_config({"report": report})


class _Server(types.ModuleType):
    """A mock of wandb: a run of which the server has three steps; a login may be missing."""

    class errors:
        class UsageError(Exception):
            pass

        class AuthenticationError(Exception):
            pass

    def __init__(self, logged_in: bool) -> None:
        super().__init__("wandb")
        self.sent: list[int] = []
        self.given: dict[str, Any] = {}
        self.logged_in = logged_in
        self.starting_step, self.dir, self.url = 4, "a/files", "https://there"

    def Settings(self, **given: Any) -> dict[str, Any]:  # noqa: N802 - as there
        return given

    def init(self, **given: Any) -> _Server:
        if not self.logged_in:
            raise self.errors.UsageError("No API key configured.")
        self.given = given
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.sent.append(step)

    def finish(self, exit_code: int) -> None:
        self.sent.append(-exit_code)


def test_a_server_is_asked_only_when_online_is_said_and_gets_no_step_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    server = _Server(logged_in=True)
    monkeypatch.setitem(sys.modules, "wandb", server)
    monkeypatch.setattr(writers, "missing_packages", lambda _: ())
    told: list[str] = []
    one = Writers(chosen("wandb"), tmp_path, "id", [step(1), step(2)], told.append)
    for number in (3, 4, 5):  # it resumes from a checkpoint of step 2
        one.write(step(number))
    one.close()
    given = [server.given[key] for key in ("mode", "id", "resume", "project")]
    assert given == ["online", "id", "allow", "mine"]
    assert server.sent == [4, 5, 0]
    assert one.files == {}
    assert told == []


def test_who_is_not_logged_in_is_told_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setitem(sys.modules, "wandb", _Server(logged_in=False))
    monkeypatch.setattr(writers, "missing_packages", lambda _: ())
    with pytest.raises(ConfigError, match=r"No API key .* WANDB_MODE=offline"):
        Writers(chosen("wandb"), tmp_path, "id", [], print)
