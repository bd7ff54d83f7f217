"""The overlap benchmark as a command: one tiny run, and the leftovers of a stopped one."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.ranks import start_server
from tools import bench_overlap
from tools.overlap.network import Namespaces, NetworkError, missing

ROOT = Path(__file__).resolve().parents[2]
Bench = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def bench(capfd: pytest.CaptureFixture[str]) -> Iterator[Bench]:
    """The command in this process, with ranks from the tests' fork server."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        status = bench_overlap.main(arguments)
        told = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, status, told.out, told.err)

    kept = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    start_server()
    yield run
    for number, handler in kept.items():
        signal.signal(number, handler)


SMALL = ("--preset", "tiny", "--lr", "10", "--rounds", "1", "--steps", "1")


@pytest.mark.unmeasured
@pytest.mark.ranks
def test_two_ranks_on_loopback_end_to_end(tmp_path: Path, bench: Bench) -> None:
    files = {k: tmp_path / f"out.{k}" for k in ("json", "markdown")}
    files["picture"] = tmp_path / "out.png"
    levers = (
        "ours:keep_unsharded=2", "ours:quantize=int8,coalesce_bytes=0",
        "ours:quantize=fp8,coalesce_bytes=0", "ours:reduce_dtype=float32",
    )  # fmt: skip
    wanted = ("ours", *levers, "ddp", "fsdp2:chunked+unshard", "ours:nonsense=1")
    flags = [x for k, path in files.items() for x in (f"--{k}", str(path))]
    done = bench(*SMALL, "--network", "loopback", *flags, "--variants", *wanted)
    assert done.returncode == 0, done.stderr
    assert "NO RATE LIMIT" in done.stdout
    summary = json.loads(files["json"].read_text())
    assert set(summary["variants"]) == {"compute", *wanted[:-1]}
    assert "nonsense" in summary["skipped"]["ours:nonsense=1"]
    ours = summary["variants"]["ours"]
    assert ours["payload_seen"] == ours["payload"] == summary["least_bytes"]
    for name in ("ours", *levers):
        row = summary["variants"][name]
        assert row["payload_seen"] == row["payload"], name
        assert row["unsharded_bytes"] == row["slot_bytes"], name
    payloads = [summary["variants"][name]["payload"] / ours["payload"] for name in levers]
    assert payloads[1] == payloads[2] < payloads[0] < 1 < payloads[3]
    assert ours["sent"] is None  # unknown on a shared loopback
    assert files["picture"].stat().st_size > 1000
    assert "| internsp |" in files["markdown"].read_text()


@pytest.mark.unmeasured
@pytest.mark.ranks
def test_cut_sequences_compete_for_the_link_and_train_the_same(
    tmp_path: Path, bench: Bench
) -> None:
    file = tmp_path / "out.json"
    flags = ("--network", "loopback", "--sequence-ranks", "2", "--json", str(file))
    done = bench(*SMALL, *flags, "--variants", "ours", "ours:gather_before=qkv")
    assert done.returncode == 0, done.stderr
    assert "every sequence sharded over 2 ranks" in done.stdout
    summary = json.loads(file.read_text())
    assert set(summary["variants"]) == {"compute", "ours", "ours:gather_before=qkv"}
    tokens, hidden, layers = 16, 96, 3
    assert summary["exchanged_bytes"] == layers * 8 * (tokens / 2) * hidden * 2 / 2
    for name in ("ours", "ours:gather_before=qkv"):
        row = summary["variants"][name]
        assert row["payload_seen"] == row["payload"] == summary["least_bytes"]
        assert any(phase.endswith("all-to-all") for _, phase, _ in row["exposures"])


@pytest.mark.unmeasured
@pytest.mark.ranks
def test_micro_batches_train_the_same_and_full_accumulation_reduces_once(
    tmp_path: Path, bench: Bench
) -> None:
    file = tmp_path / "out.json"
    flags = ("--network", "loopback", "--micro-batches", "2", "--json", str(file))
    full = "ours:accumulation=full"
    wanted = ("ours", full, "ddp", "fsdp2:full", "fsdp2:chunked+last")
    done = bench(*SMALL, *flags, "--variants", *wanted, "zero3")
    assert done.returncode == 0, done.stderr
    assert "2 micro-batches of 1 x 16 tokens" in done.stdout
    summary = json.loads(file.read_text())
    assert set(summary["variants"]) == {"compute", *wanted}
    assert "one micro-batch" in summary["skipped"]["zero3"]
    rows = summary["variants"]
    for name in ("ours", full):
        assert rows[name]["payload_seen"] == rows[name]["payload"], name
    assert rows["ours"]["payload"] == summary["least_bytes"]
    # One of two reductions of every weight, of which half is sent.
    assert rows["ours"]["payload"] - rows[full]["payload"] == summary["weight_bytes"] / 2


@pytest.mark.unmeasured
@pytest.mark.ranks
def test_hybrid_groups_train_the_same_and_send_less_for_gathers(
    tmp_path: Path, bench: Bench
) -> None:
    file = tmp_path / "out.json"
    flags = ("--network", "loopback", "--ranks", "4", "--json", str(file))
    wanted = ("ours:weight=2", "fsdp2:hybrid", "fsdp2:chunked+hybrid")
    done = bench(*SMALL, *flags, "--variants", *wanted)
    assert done.returncode == 0, done.stderr
    summary = json.loads(file.read_text())
    assert set(summary["variants"]) == {"compute", *wanted}
    ours, weights, layers = summary["variants"]["ours:weight=2"], summary["weight_bytes"], 3
    assert ours["payload_seen"] == ours["payload"]
    gathered = ours["payload"] - ours["replica_bytes"]
    assert gathered == weights * (3 - 2 / layers) / 2
    # Half a shard there and half a shard back; norms and padding add little.
    assert weights / 2 <= ours["replica_bytes"] <= 1.02 * weights / 2


def _namespaces() -> list[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return re.findall(r"^ispbench\d+\S+", done.stdout, re.MULTILINE)


def _can_make_namespaces() -> str | None:
    reason = missing()
    if reason is not None:
        return reason
    try:
        with Namespaces(2):
            return None
    except NetworkError as error:
        return str(error)


@pytest.mark.unmeasured
@pytest.mark.ranks
def test_a_stopped_run_leaves_no_namespace_behind() -> None:
    reason = _can_make_namespaces()
    if reason is not None:
        pytest.skip(f"needs network namespaces: {reason}")
    command = [sys.executable, "-m", "tools.bench_overlap", *SMALL, "--rounds", "99"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    own = {f"ispbench{process.pid}r{rank}" for rank in (0, 1)}
    try:
        until = time.monotonic() + 60
        while not own <= set(_namespaces()) and time.monotonic() < until:
            time.sleep(0.05)
        assert own <= set(_namespaces())
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    assert not own & set(_namespaces())
