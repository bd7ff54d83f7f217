"""Constants of a device are fitted to runs: those that made the runs' seconds are found again."""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from internsp.app.cli.command import main
from internsp.app.config import Config
from internsp.app.plan.calibrate import calibrate, read_run, text_of
from internsp.app.plan.devices import Device, Fitted, device_named, on_device
from internsp.app.plan.replayed import replayed
from internsp.app.report.metrics import MetricsWriter, StepMetrics
from internsp.errors import ConfigError

H100 = device_named("h100-sxm")
TRUTH = replace(H100, fitted=Fitted(0.5, 0.55, 0.8))


def config(world: int, length: int, **sections: dict[str, Any]) -> Config:
    values: dict[str, dict[str, Any]] = {
        "model": {
            "vocab_size": 32000, "hidden_size": 4096, "layers": 4, "heads": 32,
            "intermediate_size": 11008,
        },
        "data": {"sequence_length": length},
        "train": {"global_batch": world, "dtype": "bfloat16", "steps": 20},
        "parallel": {"weight": world}, "launch": {"processes": world},
    }  # fmt: skip
    for name, given in sections.items():
        values[name] = {**values.get(name, {}), **given}
    return on_device(Config.model_validate(values), H100)


def row(step: int, seconds: float, **more: Any) -> StepMetrics:
    return StepMetrics(
        step=step, loss=1.0, grad_norm=1.0, lr=0.1, tokens=1, step_seconds=seconds,
        tokens_per_second=1 / seconds, exposed_comm_seconds=0.0, gathered_bytes=0,
        reduced_bytes=0, peak_memory_bytes=0, **more,
    )  # fmt: skip


def write_run(
    folder: Path, given: Config, seconds: Sequence[float], messages: float | None = None,
    **more: Any,
) -> Path:  # fmt: skip
    folder.mkdir()
    (folder / "config.toml").write_text(given.to_toml())
    with closing(MetricsWriter(folder / "metrics.jsonl")) as writer:
        for step, taken in enumerate(seconds, 1):
            writer.write(row(step, taken, **more))
    if messages is not None:
        event = ["AG", "", "", "", 1.0, 1.0 + messages, 0]
        content = {"mesh": {"world": given.launch.processes}, "timeline": {"0": [event]}}
        content |= {"title": "", "memory": [], "notes": []}
        (folder / "report.json").write_text(json.dumps({**content, "schedule": "", "advice": []}))
    return folder


def synthetic(
    folder: Path, world: int, length: int, device: Device = TRUTH, traced: bool = False
) -> Path:
    """A run whose steps take what ``device`` is predicted to take, a hundredth more or less."""
    given = config(world, length)
    found = replayed(given, world, device)
    noise = random.Random(folder.name)
    steps = [found.total * (1 + noise.uniform(-0.01, 0.01)) for _ in range(40)]
    warm = [9 * found.total, 3 * found.total]
    return write_run(folder, given, [*warm, *steps], found.messages if traced else None)


@pytest.mark.parametrize("traced", [False, True], ids=["metrics", "trace"])
def test_three_runs_give_back_the_constants_that_made_them(tmp_path: Path, traced: bool) -> None:
    sizes = [(8, 8192), (16, 2048), (32, 1024)]
    folders = [synthetic(tmp_path / f"w{w}", w, n, traced=traced) for w, n in sizes]
    found = calibrate([read_run(folder) for folder in folders], H100)
    assert found.constants == ("products", "links", "slowdown")
    assert max(map(abs, found.residuals)) < 0.01
    assert found.device.fitted.products == pytest.approx(0.5, rel=0.03)
    assert found.device.fitted.links == pytest.approx(0.55, rel=0.03)
    assert found.device.fitted.slowdown == pytest.approx(0.8, rel=0.15)
    other = config(64, 4096)
    true = replayed(other, 64, TRUTH).total
    assert replayed(other, 64, found.device).total == pytest.approx(true, rel=0.02)
    assert replayed(other, 64, H100).total != pytest.approx(true, rel=0.1)


def test_as_many_constants_are_fitted_as_there_are_runs(tmp_path: Path) -> None:
    one = read_run(synthetic(tmp_path / "a", 8, 8192))
    two = read_run(synthetic(tmp_path / "b", 32, 1024))
    first = calibrate([one], H100)
    assert first.constants == ("products",)
    assert (first.device.fitted.links, first.device.fitted.slowdown) == (
        H100.fitted.links, H100.fitted.slowdown,
    )  # fmt: skip
    assert abs(first.residuals[0]) < 1e-3
    assert calibrate([one, two], H100).constants == ("products", "links")


def test_a_constant_that_no_run_depends_on_stays_as_it_was(tmp_path: Path) -> None:
    runs = [read_run(synthetic(tmp_path / f"{n}", 1, n)) for n in (2048, 4096)]
    found = calibrate(runs, H100)
    assert (found.constants, found.untold) == (("products",), ("links", "slowdown"))
    assert found.device.fitted.links == H100.fitted.links
    assert found.device.fitted.products == pytest.approx(0.5, rel=0.03)


def test_the_file_says_what_it_was_made_of_and_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = synthetic(tmp_path / "a", 8, 8192)
    given = str(folder / "config.toml")
    asked = ["plan", given, "--devices", "8", "--device", "h100-sxm", "--calibrate", str(folder)]
    assert main(asked) == 0
    told = capsys.readouterr().out
    assert "one run fits one constant" in told
    assert "a step takes about" in told
    path = tmp_path / "device.toml"
    made = tomllib.loads(path.read_text())["h100-sxm-measured"]
    assert made["measured"].keys() >= {"date", "internsp", "torch", "residual", "constants"}
    device = device_named("h100-sxm-measured", path)
    assert device.fitted.rows == ("a",)
    for name in ("peak", "memory", "near", "far", "attention", "multiprocessors", "kind"):
        assert getattr(device, name) == getattr(H100, name), name
    seconds = r"a step takes about ([\d.]+ \w+) on h100-sxm-measured"
    first = re.findall(seconds, told)
    asked[5:] = ["h100-sxm-measured", "--device-file", str(path)]
    assert main(asked) == 0
    assert re.findall(seconds, capsys.readouterr().out) == first != []
    path.write_text("# my own\n")  # is not replaced
    assert main(["plan", given, "--device", "h100-sxm", "--calibrate", str(folder)]) == 2
    assert path.read_text() == "# my own\n"
    asked = ["plan", given, "--device", "h100-sxm", "--calibrate", str(folder)]
    assert main([*asked, "--write", str(tmp_path / "b.toml")]) == 0
    assert "h100-sxm-measured" in (tmp_path / "b.toml").read_text()


def test_a_measured_device_keeps_the_facts_of_its_links(tmp_path: Path) -> None:
    b200 = device_named("b200")
    assert b200.hop > H100.hop
    given = config(8, 8192)
    run = read_run(write_run(tmp_path / "a", given, [replayed(given, 8, b200).total] * 12))
    path = tmp_path / "own.toml"
    path.write_text(text_of(calibrate([run], b200), [run], b200))
    found = device_named("b200-measured", path)
    for name in ("start", "hop", "host", "near", "far"):
        assert getattr(found, name) == pytest.approx(getattr(b200, name)), name


def test_a_processor_stays_one_and_its_assumed_peak_is_no_limit(tmp_path: Path) -> None:
    cpu = device_named("cpu")
    fast = replace(cpu, fitted=replace(cpu.fitted, products=5.0))
    given = config(1, 256, train={"dtype": "float32"}, parallel={"weight": 1})
    given = on_device(given, cpu)
    seconds = replayed(given, 1, fast).total
    run = read_run(write_run(tmp_path / "a", given, [seconds] * 12))
    found = calibrate([run], cpu)
    assert found.device.fitted.products == pytest.approx(5.0, rel=0.01)
    path = tmp_path / "own.toml"
    path.write_text(text_of(found, [run], cpu))
    assert device_named("cpu-measured", path).kind == "cpu"


STEADY = [1.0] * 12


@pytest.mark.parametrize(("seconds", "more", "said"), [
    (STEADY[:9], {}, r"7 steps after the first 2; set train.steps to 10 or more"),
    ([], {}, r"0 steps after the first 2"),
    ([1.0, 1.0] + [0.93, 1.0, 1.07] * 6, {}, r"within 7\.0% of the median, more than 5%"),
    (STEADY, {"sequences": 3}, r"different numbers of sequences"),
], ids=["short", "empty", "scatters", "batches"])  # fmt: skip
def test_a_run_that_says_too_little_is_refused(
    tmp_path: Path, seconds: list[float], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        read_run(write_run(tmp_path / "a", config(8, 1024), seconds, **more))
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        read_run(tmp_path)


def test_a_slow_step_among_many_and_slow_first_steps_do_not_count(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", config(8, 1024), [50.0, 8.0, *[1.0] * 19, 30.0])
    found = read_run(folder)
    assert (found.seconds, found.steps, found.scatter) == (1.0, 20, 0.0)
    written = folder / "config.toml"
    written.write_text(written.read_text().replace('reduce = "auto"', "reduce_near_ranks = 8"))
    assert read_run(folder).config.weight_parallel.reduce == 8  # a key of an earlier release
    written.write_text("[train")
    with pytest.raises(ConfigError, match=r"config\.toml: Expected"):
        read_run(folder)


def test_what_cannot_be_fitted_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = config(8, 1024)
    wide = given.train.model_copy(update={"dtype": "float64"})
    run = write_run(tmp_path / "a", given.model_copy(update={"train": wide}), STEADY)
    with pytest.raises(ConfigError, match="h100-sxm: it has no peak of fp64; set"):
        calibrate([read_run(run)], H100)
    asked = ["plan", str(run / "config.toml"), "--calibrate", str(run)]
    for wrong in (asked, [*asked[:-1], "--device", "cpu"]):  # no device, and no folder
        assert main(wrong) == 2
        assert "give folders of runs, and --device NAME" in capsys.readouterr().err
    assert main([*asked, "--device", "h100-sxm", "--search"]) == 2
