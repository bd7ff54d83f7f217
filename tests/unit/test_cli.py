"""The command: exit status and message of every class of error; how ranks start and stop."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from internsp.app import cli
from internsp.app.config import Config, TrainConfig
from internsp.app.config.sections import LaunchConfig
from internsp.app.launch.launch import ChildError, start
from internsp.app.process.stop import StopRequest
from internsp.errors import MeshError

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
_tyro_internsp; printf '%s\\n' "${COMPREPLY[@]}"
"""
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """No launcher's variables, and an empty folder with a valid configuration."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("good.toml").write_text('[train]\nname = "good"\n')


@pytest.fixture
def started(monkeypatch):
    """Calls of the launcher, which starts nothing here."""
    calls: list[tuple[Config, Path]] = []

    def fake(run, config, output):
        calls.append((config, output))
        return 0

    monkeypatch.setattr("internsp.app.launch.launch.start", fake)
    return calls


def test_mistakes_of_the_file_and_the_options_are_one_report_with_status_2(capsys, started):
    Path("bad.toml").write_text('[parallel]\nweight = "2"\n[trian]\nsteps = 3\n')
    words = "train bad.toml --train.dtpye=float32 --optimizer.lr fast --paralel.zero 1 --outptu d"
    assert cli.main([*words.split(), "--weight-parallel.overlap", "perhaps", "--steps=1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "internsp: bad.toml: 8 mistakes",
        "  [trian]: unknown section; did you mean [train]?",
        '  --weight_parallel.overlap: expected true or false, got "perhaps"',
        '  --optimizer.lr: expected a number, got "fast"',
        "  --train.dtpye: unknown key; did you mean --train.dtype?",
        "  --paralel.zero: unknown option; did you mean --parallel.*?",
        '  parallel.weight: expected a whole number, got "2"',
        "  --outptu: unknown option; did you mean --output?",
        "  --steps: unknown option; did you mean --train.steps?",
    ]
    assert started == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trian", "good.toml"], "internsp: unknown command trian; did you mean train?\n"),
        (["good.toml"], "there are train, plan, init, generate, export and report\n"),
        (["train", "goood.toml"], "goood.toml: 1 mistake\n  cannot be read: No such file"),
        (["train", "good.toml", "extra"], "unexpected argument: extra"),
        (["train", "good.toml", "--parallel.weight", "3"], "3 does not divide the 1 rank"),
        (["train", "good.toml", "--resume", "gone"], "checkpoint.resume: no such checkpoint"),
        (["train", "good.toml", "--resume", ""], "no such checkpoint: (an empty text)"),
        (
            ["train", "good.toml", "--data.source", "text", "--data.paths", ""],
            "data.paths: no such file or folder: (an empty text)",
        ),
        (["train", "good.toml", "--data.cache_dir", ""], "--data.cache_dir: must not be empty"),
        (["plan", "good.toml", "--output", "x"], "--output: unknown option of plan"),
        (["plan", "good.toml", "--train.steps", "0"], "--train.steps: must be at least 1, got"),
        (["plan", "good.toml", "--write", "x"], "--write: it belongs to --search or --calibrate"),
        (["plan", "good.toml", "--host-memory", "1 GiB"], "it belongs to --longest; give that"),
        (["plan", "good.toml", "--device-file", "x"], "--device-file: it belongs to --device;"),
        (
            ["plan", "good.toml", "--search", "--longest", "1 GiB"],
            "--search and --longest: each has an answer of its own; give one",
        ),
        (
            ["plan", "good.toml", "--search", "--schedule", "x"],
            "--schedule: --search prints no schedule; leave one of them out",
        ),
        (["generate", "gone", "--seed", str(1 << 70)], "--seed: 1180591620717411303424 is out"),
        (["generate", "gone", "--temperature", "1e-320"], "--temperature: 1e-320 is out of range"),
        (["generate", "gone", "--prompt", "a\udcff"], "--prompt: character 2 is not UTF-8"),
    ],
)
def test_each_mistake_is_named_with_status_2(words, expected, capsys):
    assert cli.main(words) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "Expected one of {train, plan, init, generate, export, report}"),
        (["train"], "CONFIG.toml"),
        (["train", "good.toml", "--train.steps"], "--train.steps"),
    ],
)
def test_a_command_line_without_sense_ends_with_status_2(words, expected, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err


def test_help_shows_every_section_with_defaults_and_does_not_load_torch():
    code = "import sys; from internsp.app import cli\ntry: cli.main(['train', '--help'])\n"
    code += "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "0 False"
    assert "--weight_parallel.gather_before {qkv,attention,out_proj,mlp,rolling}" in done.stdout
    assert "Optimizer steps. (default: 100)" in done.stdout
    assert "--resume PATH" in done.stdout


@pytest.mark.thorough(1)
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_shell_completes_commands_and_options(tmp_path):
    path = tmp_path / "internsp"
    with pytest.raises(SystemExit) as caught:
        cli.main(["--tyro-write-completion", "bash", str(path)])
    assert caught.value.code in (0, None)

    def completed(*words):
        done = subprocess.run(
            ["bash", "-c", COMPLETE, "bash", path, "internsp", *words],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        return done.stdout.split()

    assert {"train", "plan", "init", "generate", "export", "report"} <= set(completed(""))
    assert completed("gen") == ["generate"]
    assert completed("train", "--optimizer.sch") == ["--optimizer.schedule"]
    assert completed("generate", "--te") == ["--temperature"]


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("write tcsh x", 3, "--tyro-write-completion: shtab is required"),
        ("write bash nowhere/x", 3, "No such file or directory: 'nowhere/x'"),
    ],
)
def test_a_completion_that_cannot_be_is_refused_in_one_line(words, status, said, capsys):
    what, *rest = words.split()
    try:
        ended = cli.main([f"--tyro-{what}-completion", *rest])
    except SystemExit as end:
        ended = end.code
    assert ended == status
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("words", ["train --help", "report --help"])
def test_a_reader_that_has_seen_enough_of_the_help_ends_it_in_silence(words):
    reading, writing = os.pipe()
    os.close(reading)
    code = f"import sys; from internsp.app import cli; sys.exit(cli.main({words.split()}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=60, text=True,
        stdout=writing, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


FULL = "internsp: standard output: No space left on device\n"


@pytest.mark.parametrize(
    ("words", "output", "status", "said"),
    [
        ("--version", "/dev/full", 3, FULL),
        ("report --help", "/dev/full", 3, FULL),
        ("train --help", "&-", 0, ""),
    ],
)
def test_output_that_is_full_or_closed_is_one_line_or_silence(words, output, status, said):
    code = f"import sys; from internsp.app import cli; sys.exit(cli.main({words.split()}))"
    done = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" >{output}', sys.executable, code], stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2], timeout=60, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (status, said)


def test_version_is_one_line(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("internsp ")


@pytest.mark.thorough(1)
def test_train_starts_local_processes_with_options_over_the_file(started):
    Path("point").mkdir()
    words = ["train", "good.toml", "--launch.processes", "2", "--parallel.weight", "2"]
    words += ["--data.source", "text", "--data.paths", "good.toml", "point"]
    words += ["--data.sequence_length", "8", "--data.held_out", "0"]
    assert cli.main(words) == 0
    assert cli.main(["train", "good.toml", "--output", "there", "--resume", "point"]) == 0
    (first, default), (second, chosen) = started
    assert (first.launch.processes, first.parallel.weight) == (2, 2)
    assert first.data.paths == ("good.toml", "point")
    assert (default, chosen) == (Path("runs/good"), Path("there"))
    assert second.checkpoint.resume == "point"


@pytest.fixture
def joined(monkeypatch):
    """This process as rank 1 of 4; ``joined(train)`` makes ``train`` the trainer."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29400")

    def use(train):
        module = types.SimpleNamespace(train=train)
        monkeypatch.setitem(sys.modules, "internsp.app.train.run", module)

    return use


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
def test_train_joins_the_ranks_of_torchrun_and_checks_degrees_against_them(joined, capsys):
    calls = []
    joined(lambda config, output, stop: calls.append((config.parallel.weight, output)))
    assert cli.main(["train", "good.toml", "--parallel.weight", "4"]) == 0
    assert calls == [(4, Path("runs/good"))]
    assert cli.main(["train", "good.toml", "--parallel.weight", "3"]) == 2
    assert capsys.readouterr().err == "", "rank 0 reports for all"


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
def test_an_error_of_the_project_is_told_without_a_traceback(joined, capsys):
    def train(config, output, stop):
        raise MeshError("rank 1: no such mesh")

    joined(train)
    assert cli.main(["train", "good.toml"]) == 2
    assert capsys.readouterr().err == "internsp: rank 1: no such mesh\n"


def test_plan_gets_the_world_of_the_launcher_or_the_local_processes(monkeypatch, capsys):
    module = types.SimpleNamespace(
        print_plan=lambda config, size, *files: print(config.train.name, size, *files)
    )
    monkeypatch.setitem(sys.modules, "internsp.app.plan.screen", module)
    assert cli.main(["plan", "good.toml", "--launch.processes", "2"]) == 0
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert cli.main(["plan", "good.toml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["good 2 None None None", "good 8 None None None"]


def _configured(**train) -> Config:
    return Config(launch=LaunchConfig(processes=2), train=TrainConfig(**train))


def _tell(config: Config, output: Path, stop: StopRequest) -> None:
    import torch

    told = (os.environ["RANK"], os.environ["WORLD_SIZE"], config.train.seed)
    (output / told[0]).write_text(f"{told} {torch.get_num_threads()}")


def _fail(config: Config, output: Path, stop: StopRequest) -> None:
    if os.environ["RANK"] == "0":
        time.sleep(0.2)  # a consequence, as when the peer's connection closes
        raise RuntimeError("Connection closed by peer")
    raise MeshError("the cause") if config.train.seed else ValueError("the cause")


def _die(config: Config, output: Path, stop: StopRequest) -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(120)


def _break(config: Config, output: Path, stop: StopRequest) -> None:
    if os.environ["RANK"] == "1":
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    try:  # as a pipeline stage wraps an error of its backward
        raise RuntimeError("Connection reset by peer")
    except RuntimeError as error:
        raise RuntimeError("Failed to run stage backward") from error


def _until_asked(config: Config, output: Path, stop: StopRequest) -> None:
    rank = os.environ["RANK"]
    (output / f"ready{rank}").touch()
    while not stop.requested or config.train.seed:
        time.sleep(0.02)
    (output / f"saved{rank}").touch()


@pytest.mark.thorough(1)
@pytest.mark.ranks
def test_local_processes_know_their_rank_and_get_their_threads(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    config = Config(launch=LaunchConfig(processes=2), train=TrainConfig(seed=7))
    assert start(_tell, config, tmp_path) == 0
    assert (tmp_path / "0").read_text() == "('0', '2', 7) 3"
    assert (tmp_path / "1").read_text() == "('1', '2', 7) 3"


@pytest.mark.ranks
def test_the_cause_of_a_failure_is_told_once_with_its_rank(tmp_path, capfd):
    with pytest.raises(ChildError, match=r"rank 1 failed: Traceback") as caught:
        start(_fail, _configured(), tmp_path)
    assert str(caught.value).count("ValueError: the cause") == 1
    assert "closed by peer" not in str(caught.value)
    with pytest.raises(ChildError) as known:
        start(_fail, _configured(seed=1), tmp_path)
    assert str(known.value) == "rank 1 failed: MeshError: the cause"
    assert "the cause" not in capfd.readouterr().err


@pytest.mark.ranks
def test_a_killed_rank_stops_the_others_and_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("internsp.app.launch.launch.SETTLE_SECONDS", 1.0)  # rank 0 does not end
    begin = time.monotonic()
    with pytest.raises(ChildError, match=r"rank 1 was ended by SIGKILL \(out of memory\?\)"):
        start(_die, _configured(), tmp_path)
    assert time.monotonic() - begin < 30


@pytest.mark.ranks
def test_a_consequence_inside_another_error_is_not_taken_for_the_cause(tmp_path):
    with pytest.raises(ChildError, match=r"rank 1 was ended by SIGKILL \(out of memory\?\)"):
        start(_break, _configured(), tmp_path)


def _signal_when_ready(folder: Path, count: int) -> threading.Thread:
    def send():
        while not all((folder / f"ready{rank}").exists() for rank in range(2)):
            time.sleep(0.02)
        for _ in range(count):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


@pytest.mark.ranks
def test_ctrl_c_lets_every_rank_save_and_gives_status_130(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    thread = _signal_when_ready(tmp_path, 1)
    assert start(_until_asked, _configured(), tmp_path) == 130
    thread.join()
    assert sorted(file.name for file in tmp_path.glob("saved*")) == ["saved0", "saved1"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.ranks
def test_a_second_ctrl_c_ends_ranks_that_do_not_stop(tmp_path):
    begin = time.monotonic()
    thread = _signal_when_ready(tmp_path, 2)
    assert start(_until_asked, _configured(seed=1), tmp_path) == 130
    thread.join()
    assert time.monotonic() - begin < 30, "the grace of 60 s was cut short"
    assert list(tmp_path.glob("saved*")) == []


def test_the_first_request_to_stop_counts_and_handlers_are_those_of_before_again():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert (stop.requested, stop.number, stop.insisted) == (True, signal.SIGTERM, False)
        signal.raise_signal(signal.SIGINT)
        assert (stop.number, stop.insisted) == (signal.SIGTERM, True)
    assert signal.getsignal(signal.SIGTERM) is before
