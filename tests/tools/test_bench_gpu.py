"""``tools/bench_gpu.py`` with tiny sizes on a CPU: it trains the same, and detects differences."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tools import bench_gpu
from tools.bench.model import initial_weights, repeated
from tools.gpu import emulation, overhead, report, rounds, runs
from tools.gpu.link import Pace, ThreadLink
from tools.gpu.model import Trainee, disagreement, step_flops, tied
from tools.gpu.options import LARGE, Options

CPU = torch.device("cpu")
TINY = replace(
    Options(device="cpu").resolve("cpu"), layers=3, rounds=1, steps=1, warm_up=1, sequences=(16,)
)


@pytest.fixture
def link() -> Iterator[ThreadLink]:
    made = ThreadLink(Pace(bytes_per_second=1e6))
    yield made
    made.close()


def test_a_transfer_takes_its_bytes_over_the_bandwidth_and_they_queue(link: ThreadLink) -> None:
    source, targets = torch.arange(8.0), [torch.zeros(8) for _ in range(2)]
    start = time.perf_counter()
    works = [link.send([(target, source)], 50_000) for target in targets]
    launched = time.perf_counter() - start
    works[1].wait()
    took = time.perf_counter() - start
    assert all(torch.equal(target, source) for target in targets)
    assert launched < 0.04, "sending does not block"
    assert took >= 0.1, "two transfers of 50 ms, one behind the other"
    assert link.busy_seconds() >= 0.1
    assert link.busy_seconds() == 0.0


def test_what_has_not_arrived_is_nan_and_half_of_it_arrives_late() -> None:
    link = ThreadLink(Pace(bytes_per_second=1e6, poison=True))
    target, source = torch.zeros(4), torch.ones(4)
    work = link.send([(target, source)], 200_000)
    time.sleep(0.08)
    assert target[:2].tolist() == [1, 1]
    assert target[2:].isnan().all()
    work.wait()
    assert target.tolist() == [1, 1, 1, 1]
    link.close()


def test_a_failed_transfer_is_told_to_whoever_waits(link: ThreadLink) -> None:
    work = link.send([(torch.zeros(4), torch.zeros(5))], 0)
    with pytest.raises(RuntimeError, match="an emulated transfer failed"):
        work.wait()
    link.send([(torch.zeros(4), torch.zeros(4))], 0).wait()  # the thread is still alive


def test_a_tied_model_keeps_equal_shards_and_sums_their_gradients() -> None:
    sizes = TINY.sizes(sequence=16, ranks=1)
    weights = {n: repeated(w, 2) if w.ndim > 1 else w for n, w in initial_weights(sizes).items()}
    made = tied(sizes, weights, CPU, 2)
    before = {n: p.detach().clone() for n, p in made.model.named_parameters()}
    sums: dict[str, torch.Tensor] = {}

    def spy(finish: Callable[[], None] = made.finish) -> None:
        for name, parameter in made.model.named_parameters():
            assert parameter.grad is not None
            sums[name] = parameter.grad.detach().float()
        finish()

    made.finish = spy
    made.seconds(CPU)
    for name, parameter in made.model.named_parameters():
        gradient = sums[name]
        if parameter.ndim > 1:
            halves = parameter.detach().chunk(2)
            assert torch.equal(halves[0], halves[1]), name
            gradient = sum(gradient.chunk(2)).repeat(2, 1)  # type: ignore[union-attr, arg-type]
        wanted = before[name].float() - sizes.lr * gradient
        torch.testing.assert_close(parameter.float(), wanted, rtol=2e-2, atol=1e-4, msg=name)


def with_losses(name: str, losses: list[float], norm: float = 1.0) -> Trainee:
    nothing: Any = None
    made = Trainee(name, nothing, nothing, nothing, nothing, 1.0, losses=losses)
    made.norms = [2.0, norm]
    return made


def test_other_losses_gradients_and_nan_are_not_the_same_training() -> None:
    wanted = with_losses("plain", [2.0, 1.5, 1.0])
    assert disagreement(with_losses("ours", [2.0, 1.501]), wanted) is None
    for losses, norm, words in (
        ([2.1], 1.0, "first loss"),
        ([2.0, math.nan], 1.0, "the loss of step 1"),
        ([2.0], 1.1, "first gradient of parameter 1"),
        ([2.0] * 4, 1.0, "4 losses"),
    ):
        reason = disagreement(with_losses("ours", losses, norm), wanted)
        assert reason is not None
        assert words in reason
    slow = with_losses("plain", [2.0, 1.9]), with_losses("ours", [2.0035, 1.8965])
    assert "the loss fell by 0.107" in (disagreement(slow[1], slow[0]) or "")
    with pytest.raises(rounds.Differs, match="ours did not train what plain did"):
        rounds.compare({"plain": wanted, "ours": with_losses("ours", [1.0])}, "plain")


def test_flops_are_those_of_the_products_and_of_causal_attention() -> None:
    options = replace(Options(), **{**LARGE, "layers": 1, "sequences": (128,)})
    weights = {"w": torch.empty(10, 20), "norm": torch.empty(20)}
    assert step_flops(options.sizes(sequence=128), weights) == 6 * 200 * 128 + 6 * 4096 * 128 * 128


def test_settings_that_do_not_fit_are_refused_by_name() -> None:
    for change, words in (
        ({"hidden": 66, "heads": 4}, "not a multiple of --heads"),
        ({"emulated_ranks": 3}, "not a multiple of --emulated-ranks"),
        ({"emulated_ranks": 1}, "--emulated-ranks must be at least 2"),
        ({"warm_up": 0}, "--warm-up must be at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            replace(Options(), **change).resolve("cpu")  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        assert bench_gpu.main(["--device", "cuda"]) == 2


def test_streams_at_odds_train_what_one_plain_process_does() -> None:
    rows = emulation.run_streams(replace(TINY, steps=2), CPU)
    assert [row["name"] for row in rows] == list(emulation.STREAMS)
    assert [row["reason"] for row in rows] == [None] * len(rows)
    assert all(len(row["losses"]) == 3 for row in rows)


def test_a_wait_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.gpu.link._Job.wait", lambda job: None)
    monkeypatch.setattr(emulation, "STREAMS", {"defaults": ({}, {})})
    # On the host contents are compared, and that raises first; on a device only values can differ.
    monkeypatch.setattr("internsp.wp.contents.Contents.check", lambda contents: None)
    (row,) = emulation.run_streams(replace(TINY, delay_ms=20.0), CPU)
    assert row["reason"] is not None


def test_the_emulated_link_hides_what_it_can_and_the_pool_says_its_bytes() -> None:
    options = replace(TINY, ratios=(1.0,), steps=2)
    (row,) = emulation.run_link(options, CPU)
    assert row["ideal"] == max(row["compute"], row["communication"])
    assert row["over_ideal"] == pytest.approx(row["median"] / row["ideal"])
    assert row["bound"] > row["ideal"], "the first gather and the last reduction cannot be hidden"
    hidden, middle, ranks, layers = 64, 96, 2, 3
    block = 2 * (4 * hidden * hidden + 3 * hidden * middle)  # bf16
    assert row["payload"] == (3 * layers - 2) * block / ranks
    memory = emulation.run_memory(options, CPU)
    assert memory["slots"] == 2 * block
    assert memory["late_allocations"] == 0
    assert not [t for t in threading.enumerate() if "_run" in t.name], "no thread stays"


@pytest.mark.unmeasured
def test_all_parts_run_and_the_page_gets_them_between_its_marks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- gpu -->\nold\n<!-- /gpu -->\nafter\n")
    arguments = [
        "--device", "cpu", "--layers", "2", "--sequences", "16", "--rounds", "1", "--steps", "1",
        "--warm-up", "1", "--parts", "overhead", "--json", str(tmp_path / "gpu.json"),
        "--markdown", str(page),
    ]  # fmt: skip
    assert bench_gpu.main(arguments) == 0
    told = capsys.readouterr()
    assert "a rehearsal, no figure of it means anything" in told.out
    assert "device: CPU" in told.err
    summary = json.loads((tmp_path / "gpu.json").read_text())
    (row,) = summary["overhead"]
    assert set(row["variants"]) == {"plain", "internsp", "internsp.fsdp", "FSDP2"}
    plain, ours = (row["variants"][name]["losses"] for name in ("plain", "internsp"))
    assert len(plain) == len(ours) == 2
    text = page.read_text()
    assert text.startswith("before\n<!-- gpu -->\n```\npython -m tools.bench_gpu --device cpu")
    assert text.endswith("<!-- /gpu -->\nafter\n")
    assert "old" not in text
    assert "| 16, eager | internsp |" in text


def test_what_was_measured_before_a_time_limit_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []
    times = {"median": 1.0, "low": 1.0, "high": 1.0, "predicted": None, "peak": None}

    def row(case: runs.Case, *_: Any) -> dict[str, Any]:
        made.append(case.name)
        if len(made) == 3:
            raise TimeoutError
        return {"name": case.name, "tokens": 1, "planned": 1, **times}

    monkeypatch.setattr(runs, "_row", row)
    kept = tmp_path / "rows.jsonl"
    arguments = ["--device", "cpu", "--parts", "runs", "--rows", str(kept)]
    with pytest.raises(TimeoutError):
        bench_gpu.main(arguments)
    assert len(kept.read_text().splitlines()) == 3
    with kept.open("a") as file:
        file.write('{"part": "runs", "case": "cut o')
    assert bench_gpu.main(arguments) == 0
    names = [case.name for case in runs.CASES]
    assert made == [*names[:3], *names[2:]]
    assert all(name in capsys.readouterr().out for name in names[:1])
    assert bench_gpu.main([*arguments, "--seed", "1"]) == 2
    assert "has results of" in capsys.readouterr().err


def test_a_variant_that_trains_something_else_gets_no_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = overhead._ours

    def off(*arguments: Any) -> Trainee:
        made = honest(*arguments)
        made.scale *= 2.0
        return made

    monkeypatch.setattr(overhead, "_ours", off)
    arguments = ["--device", "cpu", "--layers", "1", "--sequences", "16", "--parts", "overhead"]
    assert bench_gpu.main(arguments) == 1
    told = capsys.readouterr()
    assert "internsp did not train what plain did" in told.err
    assert "step ms" not in told.out


def test_the_report_marks_the_emulation_and_what_is_wrong() -> None:
    row = {
        "ratio": 0.5, "median": 0.011, "low": 0.01, "high": 0.012, "compute": 0.01,
        "communication": 0.005, "ideal": 0.01, "over_ideal": 1.1, "bound": 0.0105,
    }  # fmt: skip
    memory = {"slots": 2**20, "buffers": 2**20, "predicted": 4 * 2**20, "late_allocations": 0}
    measured = {"held": 4.2 * 2**20, "peak": 10 * 2**20, "predicted_peak": 10 * 2**20}
    summary = {
        "device": "NVIDIA H100, 80 GiB", "torch": "2.13", "link": [row],
        "memory": {**memory, **measured},
        "streams": [{"name": "no pool", "reason": "no pool did not train"}],
    }  # fmt: skip
    text = report.page(summary).markdown(["python", "-m", "tools.bench_gpu"])
    assert report.EMULATED in text
    assert "| 0.5 | 11.00 (10.00 .. 12.00) | 10.00 | 5.00 | 1.100 | 1.050 |" in text
    assert "4.2 MiB held (+5.0%)" in text
    assert "Peak 10.0 MiB, predicted 10.0 MiB (+0.0%)" in text
    assert bench_gpu.wrong(summary) == ["no pool did not train"]
    assert "only a GPU counts" in report.page({**summary, "memory": memory}).text()
