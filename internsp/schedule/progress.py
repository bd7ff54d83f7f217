'''Pure: the phase that the passes of a chunk are in, and which event may come when.

========  ==========================================================  =============================
phase     meaning                                                     may be followed by
========  ==========================================================  =============================
REST      between two passes                                          any
FORWARD   a forward runs, or has ended and nothing else has begun     any
HEAD      a backward has begun and not come to the blocks             HEAD BLOCKS REST
BLOCKS    a backward is in the blocks                                 HEAD REST
WEIGHTS   the weight backward of a split backward                     REST
========  ==========================================================  =============================

The end of a forward is no event: a program may drop its output. From ``REST`` or ``FORWARD`` a
backward comes to ``BLOCKS`` where a gradient enters a block by a way that no hook on the model's
output has seen. From ``BLOCKS`` it comes to ``HEAD`` where the losses of two forwards were added:
autograd goes on to the graph of the earlier one. From ``HEAD`` to ``HEAD`` it comes where a
backward had begun at a ready gradient, within a reentrant recompute, and begins anew outside.

===========================================  ===========================  =======================
event                                        legal in                     goes to
===========================================  ===========================  =======================
root_pre_forward begin_blocks                REST FORWARD                 FORWARD
root_pre_backward                            REST FORWARD HEAD BLOCKS     HEAD
prefetch_at_output                           REST FORWARD HEAD BLOCKS     -
first_block                                  REST FORWARD HEAD            BLOCKS
begin_earlier_graph                          REST FORWARD HEAD BLOCKS     BLOCKS HEAD
root_post_backward                           REST FORWARD HEAD BLOCKS     BLOCKS
begin_backward_part                          REST FORWARD                 WEIGHTS
end_backward_part                            REST FORWARD WEIGHTS         -
end_pass reset                               any                          REST
prefetch reshard reorder                     REST FORWARD                 -
===========================================  ===========================  =======================

``first_block`` is the first pre-backward of a block, or the end of a graph in which no block got a
gradient: the head is reduced there. Only the weight backward goes to ``WEIGHTS``. That an input
backward runs is no phase: it has ``HEAD`` and ``BLOCKS`` as any backward, and reduces nothing
(:attr:`Progress.split`). All other events may come in any phase and change none: a block, a use, a
release, a ready gradient, a recompute, a pipeline's prefetch for the next pass.
'''

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Where the passes of a chunk are; the table of this module has their meanings."""

    REST = "REST"
    FORWARD = "FORWARD"
    HEAD = "HEAD"
    BLOCKS = "BLOCKS"
    WEIGHTS = "WEIGHTS"


_ANY = frozenset(Phase)
_IDLE = frozenset({Phase.REST, Phase.FORWARD})
_BACKWARD = frozenset({Phase.HEAD, Phase.BLOCKS})

FOLLOWS = {
    Phase.REST: _ANY,
    Phase.FORWARD: _ANY,
    Phase.HEAD: _BACKWARD | {Phase.REST},
    Phase.BLOCKS: frozenset({Phase.HEAD, Phase.REST}),
    Phase.WEIGHTS: frozenset({Phase.REST}),
}
"""The phases that may follow each phase."""

LEGAL_IN = {
    "root_pre_forward": _IDLE,
    "begin_blocks": _IDLE,
    "root_pre_backward": _IDLE | _BACKWARD,
    "prefetch_at_output": _IDLE | _BACKWARD,
    "first_block": _IDLE | {Phase.HEAD},
    "begin_earlier_graph": _IDLE | _BACKWARD,
    "root_post_backward": _IDLE | _BACKWARD,
    "begin_backward_part": _IDLE,
    "end_backward_part": _IDLE | {Phase.WEIGHTS},
    "end_pass": _ANY,
    "reset": _ANY,
    "prefetch": _IDLE,
    "reshard": _IDLE,
    "reorder": _IDLE,
}
"""The phases in which each event is legal."""


class Progress:
    """How far the passes of one chunk have come.

    Attributes:
        phase: where they are.
        split: ``"inputs"`` or ``"weights"`` while that part of a split backward runs; else empty.
        lowest: the number of the last block that this backward has come to.
    """

    def __init__(self, blocks: int) -> None:
        self.phase, self.split, self.lowest = Phase.REST, "", blocks

    def require(self, event: str) -> None:
        """Check that ``event`` may come now.

        Raises:
            AssertionError: it may not; whoever reports events has left one out, or a failure has
                not been followed by a reset.
        """
        if self.phase not in LEGAL_IN[event]:
            raise AssertionError(f"the event {event} in phase {self.phase.name}")

    def to(self, phase: Phase) -> None:
        """Go to ``phase``.

        Raises:
            AssertionError: it may not follow the present one.
        """
        if phase not in FOLLOWS[self.phase]:
            raise AssertionError(f"phase {phase.name} after phase {self.phase.name}")
        self.phase = phase
