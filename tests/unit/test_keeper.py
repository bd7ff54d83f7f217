"""The process that keeps copies of checkpoints' files: its contents, and when it ends."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from internsp.app.checkpoint import keeper
from internsp.app.checkpoint.disk import KeeperConnection, put_copy

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
LARGE = os.urandom(1 << 20) * 5


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for torchrun's agent."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def start(launcher: subprocess.Popen[bytes]) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    name = keeper.name_of(launcher.pid)
    words = [sys.executable, "-I", keeper.__file__, str(launcher.pid), name]
    process = subprocess.Popen(words, start_new_session=True)
    deadline = time.monotonic() + 20
    while True:
        try:
            KeeperConnection({"name": name}).close()
            return process, {"name": name}
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put(address: dict[str, Any], data: bytes, owner: int, keep: list[bytes]) -> str | None:
    copy = {"address": address, "owner": owner, "keep": [digest_of(one) for one in keep]}
    return put_copy(memoryview(data), digest_of(data), copy)


def held(address: dict[str, Any]) -> set[str]:
    return set(KeeperConnection(address).request("held")["digests"])


def test_of_each_owner_the_newest_valid_copy_and_one_more_are_kept(
    launcher: subprocess.Popen[bytes],
) -> None:
    _, here = start(launcher)
    first, second, third, other = b"first", LARGE, b"third", b"other"
    assert put(here, first, 0, []) is None
    assert put(here, other, 1, []) is None
    assert put(here, second, 0, [first]) is None
    assert held(here) == {digest_of(x) for x in (first, second, other)}
    # It did not become valid: it is deleted before the next one is stored.
    assert put(here, third, 0, [first]) is None
    assert held(here) == {digest_of(x) for x in (first, third, other)}
    assert put(here, LARGE, 0, [third]) is None
    connection = KeeperConnection(here)
    memory = bytearray(len(LARGE) - 3)
    assert connection.read_into(memory, digest_of(LARGE), 3) == len(memory)
    assert memory == LARGE[3:]
    asked = {"digest": digest_of(LARGE), "nbytes": len(LARGE)}
    assert connection.request("check", **asked) == {"intact": True}
    assert connection.request("check", **{**asked, "nbytes": 5}) == {"intact": False}
    connection.request("retain", digests=[digest_of(other)])
    assert held(here) == {digest_of(other)}
    with pytest.raises(OSError, match="KeyError"):
        connection.request("check", **asked)


def test_a_sender_that_ends_in_between_leaves_nothing(launcher: subprocess.Popen[bytes]) -> None:
    _, here = start(launcher)
    words = b'{"do": "put", "owner": 0, "digest": "d", "nbytes": 100, "keep": []}\n'
    for data in (words + b"less", b"no JSON\n", b'{"do": "__init__"}\n', b'{"do": "put"}\n'):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect("\0" + here["name"])
            raw.sendall(data)
    assert put(here, b"whole", 1, []) is None
    assert held(here) == {digest_of(b"whole")}
    # Over the network a key is required.
    network = {"host": "localhost", **KeeperConnection(here).request("listen")}
    assert held(network) == held(here)
    assert put(network, LARGE, 2, []) is None
    for wrong in ("", "0" * 32):
        with pytest.raises(OSError, match=r"ended the connection|reset|Broken pipe"):
            held({**network, "key": wrong})
        assert put({**network, "key": wrong}, LARGE, 3, []) is not None
    assert held(here) == {digest_of(b"whole"), digest_of(LARGE)}


def test_a_connection_that_is_closed_ends_at_once_though_somebody_still_holds_it() -> None:
    name = f"internsp-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        connection = KeeperConnection({"name": name})
        other, _ = listener.accept()
        with other:
            other.settimeout(5)
            connection.close()
            assert other.recv(1) == b""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda n: n.name)
def test_it_ends_with_the_launcher_alone(
    launcher: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    before = set(Path("/dev/shm").iterdir())
    process, here = start(launcher)
    second = subprocess.run(
        [sys.executable, "-I", keeper.__file__, str(launcher.pid), here["name"]],
        timeout=20, check=False,
    )  # fmt: skip
    assert second.returncode == 0, "there is one already"
    process.send_signal(signal.SIGTERM)  # signals that end ranks do not end it
    connection = KeeperConnection(here)
    assert put(here, LARGE, 0, []) is None
    with socket.socket(socket.AF_UNIX) as raw:  # one is coming
        raw.connect("\0" + here["name"])
        raw.sendall(b'{"do": "put", "owner": 0, "digest": "d", "nbytes": 100, "keep": []}\n')
        launcher.send_signal(number)
        launcher.wait()
        assert process.wait(timeout=5) == 0
    connection.close()
    assert put(here, LARGE, 0, []) is not None
    assert set(Path("/dev/shm").iterdir()) <= before
    assert subprocess.run(  # stands for a launcher that has ended
        [sys.executable, "-I", keeper.__file__, str(launcher.pid), here["name"]],
        timeout=20, check=False,
    ).returncode == 0  # fmt: skip
