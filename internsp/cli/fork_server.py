"""Loaded by the fork server of local ranks, and by nothing else: importing it changes the process.

The server is the parent of the ranks (:mod:`internsp.cli.launch`). It ends with the launcher, and
by nothing that is sent to the whole group of processes: a closed terminal, Ctrl-C, a service
manager. Those are for the ranks, which save first, and whose exit statuses come through the server.
"""

from __future__ import annotations

import os
import signal

from internsp.cli.lifetime import LAUNCHER_VARIABLE, remove_socket_folder, signal_at_parents_end
from internsp.train.stop import SAVE, SIGNALS

if LAUNCHER_VARIABLE not in os.environ:
    raise ImportError(f"{__name__} is only for the server that internsp.cli.launch starts")
_launcher = int(os.environ[LAUNCHER_VARIABLE])  # not getppid(): it may have ended before this line


def _leave_to_the_ranks(*_: object) -> None:
    """Not SIG_IGN, which a rank would take for an ignore inherited from the user (nohup)."""


def _end_with_launcher(*_: object) -> None:
    """The kernel sends the signal when the launcher ends; one from elsewhere means nothing."""
    if os.getppid() != _launcher:
        # The socket's folder, which the launcher can no longer remove; then the ranks, which the
        # kernel ends with this process.
        remove_socket_folder()
        os._exit(0)


for _number in (*SIGNALS, SAVE):
    if signal.getsignal(_number) is not signal.SIG_IGN:
        signal.signal(_number, _leave_to_the_ranks)
# Not one of SIGNALS, which may be ignored; a rank has it back as it was.
_before = signal.signal(signal.SIGUSR2, _end_with_launcher)
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGUSR2, _before))
signal_at_parents_end(signal.SIGUSR2)
_end_with_launcher()  # it may have ended before
