"""A slow link on one machine: one network namespace per rank, each with a limited sending rate.

The names of all namespaces contain this process's id. Two are connected by a veth pair, more by a
bridge in a further namespace. No interface is created in the machine's own namespace, and none of
ours has a route to the outside. Removing the namespaces removes everything.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from tools.bench.signals import Deaf

PREFIX = "ispbench"
NAME = re.compile(rf"^{PREFIX}(\d+)(r\d+|hub)$")
INTERFACE = "ispeth"
MTU = 9000  # of every interface, in bytes
BURST = 256 << 10  # bytes that the token bucket filter sends at once; larger packets are split
MOUNTED = Path("/run/netns")  # where iproute2 keeps them
# IPv6's own messages would be counted as our bytes.
NO_IPV6 = "f=/proc/sys/net/ipv6/conf/default/disable_ipv6; [ ! -e $f ] || echo 1 > $f"
# The default congestion control of every host. A host set to bbr would sometimes leave the link
# almost empty for 200 ms, to probe for the shortest round trip. Prints the one in use.
RENO = "f=/proc/sys/net/ipv4/tcp_congestion_control; echo reno 2>/dev/null > $f; cat $f"
# A connection's sent but unacknowledged data waits in the link's queue, ahead of the messages of
# every other connection.
SEND_BUFFER = "echo 4096 16384 {} > /proc/sys/net/ipv4/tcp_wmem"

Run = Callable[[Sequence[str]], str]


class NetworkError(RuntimeError):
    """The namespaces cannot be created; the message says what is missing."""


def run_command(command: Sequence[str]) -> str:
    """Run an iproute2 command and return its output.

    Raises:
        NetworkError: with the command and its error message.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def missing() -> str | None:
    """Why no namespace can be created here, or ``None``."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (package iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    return None


class Link(AbstractContextManager["Link"]):
    """The link between the ranks.

    Attributes:
        interface: its name inside each rank's namespace, for ``GLOO_SOCKET_IFNAME``.
        namespaces: of each rank, as files; empty: all ranks are in that of this process.
        limited: whether a rate can be set at all.
        label: for tables.
    """

    interface = "lo"
    namespaces: Sequence[Path] = ()
    limited = False
    label = "plain loopback, no rate limit"

    def limit(self, rate_mbit: float | None) -> None:
        """Limit the sending rate of every rank; ``None``: unlimited. No effect on loopback."""

    def __exit__(self, *_: object) -> None:
        """Nothing to remove."""


class Namespaces(Link):
    """Namespaces for ``ranks`` ranks: created on entry, removed on exit, also after errors.

    Args:
        send_buffer_kib: maximum per connection; 0: the host's setting.
        run: runs a command (a test may record it instead).
        owner: the process id in the names.
    """

    interface = INTERFACE
    limited = True

    def __init__(
        self,
        ranks: int,
        send_buffer_kib: int = 0,
        run: Run = run_command,
        owner: int | None = None,
    ) -> None:
        self.ranks = ranks
        self.send_buffer_kib = send_buffer_kib
        self._run = run
        self._owner = os.getpid() if owner is None else owner
        self._rate: float | None = None
        joined = "veth pair" if ranks == 2 else "veth and bridge"
        self._joined = f"{ranks} network namespaces, {joined}, mtu {MTU}, tbf"
        if send_buffer_kib:
            self._joined += f", at most {send_buffer_kib} KiB sent ahead by a connection"
        self._congestion: set[str] = set()  # in use, of each namespace

    @property
    def label(self) -> str:  # type: ignore[override]
        """See :class:`Link`."""
        return ", ".join([self._joined, *(f"tcp {kind}" for kind in sorted(self._congestion))])

    def name(self, rank: int) -> str:
        """The namespace of a rank."""
        return f"{PREFIX}{self._owner}r{rank}"

    @property
    def hub(self) -> str:
        """The namespace of the bridge."""
        return f"{PREFIX}{self._owner}hub"

    def __enter__(self) -> Namespaces:
        try:
            self._make()
        except BaseException:
            with Deaf():
                self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with Deaf():  # a second Ctrl-C must not interrupt the removal
            self._remove()

    @property
    def namespaces(self) -> Sequence[Path]:  # type: ignore[override]
        """See :class:`Link`."""
        return [MOUNTED / self.name(rank) for rank in range(self.ranks)]

    def limit(self, rate_mbit: float | None) -> None:
        """See :meth:`Link.limit`. Takes effect at once; connections stay."""
        if rate_mbit == self._rate:
            return
        for rank in range(self.ranks):
            tc = ["tc", "-n", self.name(rank), "qdisc"]
            if rate_mbit is None:
                self._run([*tc, "del", "dev", INTERFACE, "root"])
            else:
                rate = ["rate", f"{rate_mbit * 1000:.0f}kbit"]
                size = ["burst", f"{BURST}", "latency", "50ms"]
                self._run([*tc, "replace", "dev", INTERFACE, "root", "tbf", *rate, *size])
        self._rate = rate_mbit

    def _make(self) -> None:
        for rank in range(self.ranks):
            self._add(self.name(rank))
        if self.ranks == 2:
            self._veth(self.name(0), INTERFACE, self.name(1), INTERFACE)
        else:
            self._add(self.hub)
            inside = ["ip", "-n", self.hub, "link"]
            self._run([*inside, "add", "bridge", "type", "bridge", "forward_delay", "0"])
            for rank in range(self.ranks):
                self._veth(self.name(rank), INTERFACE, self.hub, f"port{rank}")
                self._run([*inside, "set", f"port{rank}", "mtu", str(MTU), "master", "bridge"])
                self._run([*inside, "set", f"port{rank}", "up"])
            self._run([*inside, "set", "bridge", "mtu", str(MTU), "up"])
        for rank in range(self.ranks):
            ip = ["ip", "-n", self.name(rank)]
            self._run([*ip, "address", "add", f"10.77.0.{rank + 1}/24", "dev", INTERFACE])
            self._run([*ip, "link", "set", INTERFACE, "mtu", str(MTU), "up"])

    def _add(self, name: str) -> None:
        self._run(["ip", "netns", "add", name])
        self._run(["ip", "netns", "exec", name, "sh", "-c", NO_IPV6])
        found = self._run(["ip", "netns", "exec", name, "sh", "-c", RENO]).strip()
        self._congestion |= {found} if found else set()
        if self.send_buffer_kib:
            limited = SEND_BUFFER.format(self.send_buffer_kib * 1024)
            self._run(["ip", "netns", "exec", name, "sh", "-c", limited])
        self._run(["ip", "-n", name, "link", "set", "lo", "up"])

    def _veth(self, here: str, port: str, there: str, other: str) -> None:
        command = ["ip", "link", "add", port, "netns", here, "type", "veth"]
        self._run([*command, "peer", "name", other, "netns", there])

    def _remove(self) -> None:
        names = {self.hub, *(self.name(rank) for rank in range(self.ranks))}
        for name in sorted(names & set(_listed(self._run))):
            self._run(["ip", "netns", "del", name])


def _listed(run: Run) -> list[str]:
    return [line.split()[0] for line in run(["ip", "netns", "list"]).splitlines() if line.strip()]


def stale(names: Sequence[str], alive: Callable[[int], bool]) -> list[str]:
    """Those of ``names`` that an earlier run left behind and whose process has ended."""
    found = [(name, NAME.match(name)) for name in names]
    return [name for name, match in found if match and not alive(int(match[1]))]


def remove_stale(run: Run = run_command) -> list[str]:
    """Remove the namespaces of killed runs; returns their names."""
    left = stale(_listed(run), lambda pid: Path(f"/proc/{pid}").exists())
    for name in left:
        run(["ip", "netns", "del", name])
    return left
