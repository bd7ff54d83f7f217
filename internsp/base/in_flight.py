"""Messages that one operator launches and another one waits for.

An operator of ``torch.library`` returns tensors alone. So a message in flight is named by a
*token*, a tensor of one element: the identity of its storage counts, not its value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.base.autograd import in_backward
from internsp.base.trace import Trace, Work
from internsp.errors import CollectiveError

# A message that is started and never waited for (after an exception) would keep its buffers
# forever. No program has this many in flight, so beyond this count the oldest is dropped.
_MOST = 64


@contextmanager
def _naming(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"{what} failed on rank {dist.get_rank()}: {error}") from error


@dataclass(frozen=True)
class Reporter:
    """Tells of messages between ranks: by default no other rank.

    Attributes:
        launched: called before each set of messages between several ranks, with its kind in a
            trace, what is sent and the phase. All ranks call it equally often, so that a rank that
            waits for a failed one finds out (WP-10).
        naming: context in which a message is started or waited for; raises a ``CollectiveError``
            with that text if another rank has failed or has closed the connection.
        pairs: counts messages between pairs on the host (``ParallelMesh.pairs``).
    """

    launched: Callable[[str, str, str], None] = lambda kind, what, phase: None
    naming: Callable[[str], AbstractContextManager[Any]] = _naming
    pairs: Counter[str] = field(default_factory=Counter)


def phase_of(adjoint: bool = False) -> str:
    """The phase, from where the operator runs and not from a flag that a caller must set (WP-9)."""
    if adjoint:
        return "backward"
    return "recompute" if in_backward() else "forward"


@dataclass(eq=False)
class InFlight:
    """A message in flight, with its buffers.

    Attributes:
        token: kept, since no other token may get its address before the message is finished.
    """

    work: Work
    sent: Tensor
    received: Tensor
    event: int
    phase: str
    token: torch.UntypedStorage | None = None


class MessagesInFlight:
    """The messages of one group that have been launched and not been waited for.

    Args:
        trace: has ``A2A`` for each message and ``A2A_WAIT`` for each wait; or ``None``.
        reporter: names a message that fails.
    """

    def __init__(self, trace: Trace | None, reporter: Reporter) -> None:
        self._trace, self._reporter = trace or Trace(), reporter
        self._of_token: dict[int, InFlight] = {}

    def __len__(self) -> int:
        return len(self._of_token)

    def launch(
        self, unit: str, label: str, phase: str, nbytes: int, sent: Tensor, received: Tensor,
        start: Callable[[], Any],
    ) -> InFlight:  # fmt: skip
        """Call ``start``, which returns a work handle; ``unit`` and ``label`` are the trace's."""
        event = self._trace.record("A2A", unit, label, phase, nbytes=nbytes, in_flight=True)
        return InFlight(start(), sent, received, event, phase)

    def add(self, message: InFlight) -> Tensor:
        """Keep ``message`` and return its token.

        It is on the device of the message, so that autograd runs both operators on one thread and
        one stream, in the same order on all ranks (WP-2).
        """
        token = message.sent.new_zeros(1, dtype=torch.float32)
        message.token = token.untyped_storage()
        while len(self._of_token) >= _MOST:
            self._of_token.pop(next(iter(self._of_token)))
        self._of_token[_key(token)] = message
        return token

    def take(self, token: Tensor) -> InFlight | None:
        """The message of ``token``; ``None`` if it was taken before, or dropped."""
        return self._of_token.pop(_key(token), None)

    def wait(self, message: InFlight, unit: str, label: str, what: str) -> None:
        """Wait for the message, ``what`` in an error; the trace has how long it took.

        Raises:
            CollectiveError: another rank has failed or has closed the connection.
        """
        trace, begin = self._trace, self._trace.now()
        with self._reporter.naming(f"{what} ({message.phase})"):
            message.work.wait()
        end = trace.now()
        trace.waited(begin, end)
        trace.record("A2A_WAIT", unit, label, message.phase, start=begin, end=end)
        trace.finish(message.event, end)


def _key(token: Tensor) -> int:
    """The identity of a token's storage; under a plan's fake tensors storages have no address."""
    return int(token.untyped_storage()._cdata)
