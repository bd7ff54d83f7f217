"""Module that the fork server of local ranks imports, and nothing else: it changes the process.

The server is the parent of the ranks (:mod:`internsp.app.launch.launch`). It ends with the
launcher, not by signals that reach the whole process group: a closed terminal, Ctrl-C, a service
manager. Those signals are for the ranks, which save first, and whose exit statuses come through the
server.
"""

from __future__ import annotations

import os
import signal

from internsp.app.process.lifetime import LAUNCHER_VARIABLE, signal_at_parents_end
from internsp.app.process.stop import SAVE, SIGNALS

if LAUNCHER_VARIABLE not in os.environ:
    raise ImportError(f"{__name__} is only for the server that internsp.app.launch.launch starts")
_launcher = int(os.environ[LAUNCHER_VARIABLE])  # not getppid(): it may have ended before this line


def _leave_to_the_ranks(*_: object) -> None:
    """Ignore a signal. A rank would take SIG_IGN for an ignore inherited from the user (nohup)."""


def _end_with_launcher(*_: object) -> None:
    """Handle the signal that the kernel sends when the launcher ends; ignore any other sender."""
    if os.getppid() != _launcher:
        os._exit(0)  # the kernel then ends the ranks with this process


for _number in (*SIGNALS, SAVE):
    if signal.getsignal(_number) is not signal.SIG_IGN:
        signal.signal(_number, _leave_to_the_ranks)
# SIGUSR2 is not one of SIGNALS, which may be ignored; ranks restore its handler after the fork.
_before = signal.signal(signal.SIGUSR2, _end_with_launcher)
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGUSR2, _before))
signal_at_parents_end(signal.SIGUSR2)
_end_with_launcher()  # the launcher may have ended already
