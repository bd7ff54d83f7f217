"""The benchmark of overlap as a command: one tiny run, and what a stopped one leaves behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.bench.network import Namespaces, NetworkError, missing

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.bench_overlap", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )


SMALL = ("--preset", "tiny", "--lr", "10", "--rounds", "1", "--steps", "1")


@pytest.mark.ranks
def test_two_ranks_on_loopback_end_to_end(tmp_path: Path) -> None:
    files = {k: tmp_path / f"out.{k}" for k in ("json", "markdown")}
    files["picture"] = tmp_path / "out.png"
    levers = (
        "ours:resident_blocks=2", "ours:codec=int8,together_bytes=0",
        "ours:codec=fp8,together_bytes=0", "ours:reduce_dtype=float32",
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
        assert row["whole_bytes"] == row["slot_bytes"], name
    payloads = [summary["variants"][name]["payload"] / ours["payload"] for name in levers]
    assert payloads[1] == payloads[2] < payloads[0] < 1 < payloads[3]
    assert ours["sent"] is None  # nobody can tell on a shared loopback
    assert files["picture"].stat().st_size > 1000
    assert "| internsp |" in files["markdown"].read_text()


@pytest.mark.ranks
def test_cut_sequences_compete_for_the_link_and_train_the_same(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    flags = ("--network", "loopback", "--sequence-ranks", "2", "--json", str(file))
    done = bench(*SMALL, *flags, "--variants", "ours", "ours:trigger=qkv")
    assert done.returncode == 0, done.stderr
    assert "every sequence cut over 2 ranks" in done.stdout
    summary = json.loads(file.read_text())
    assert set(summary["variants"]) == {"compute", "ours", "ours:trigger=qkv"}
    tokens, hidden, layers = 16, 96, 3
    assert summary["exchanged_bytes"] == layers * 8 * (tokens / 2) * hidden * 2 / 2
    for name in ("ours", "ours:trigger=qkv"):
        row = summary["variants"][name]
        assert row["payload_seen"] == row["payload"] == summary["least_bytes"]
        assert any(phase.endswith("all-to-all") for _, phase, _ in row["exposures"])


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


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_no_namespace_behind(number: signal.Signals) -> None:
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
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    assert not own & set(_namespaces())
