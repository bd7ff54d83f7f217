"""Memory of one rank by component, in bytes, measured: first on the device, then on the host."""

from __future__ import annotations

from internsp.app.plan.offloaded import HOSTED, STAGED
from internsp.app.session.session import Session
from internsp.base.host import ACTIVATIONS


def components(session: Session) -> list[tuple[str, int]]:
    """(component, bytes) of this rank: shards, slots, reduction buffers, optimizer, host memory."""
    total: dict[str, int] = {}
    for communicator, optimizer in zip(session.communicators, session.optimizers, strict=True):
        replicated, pool = communicator.replicated, communicator.state.pool
        shards = sum(w.storage.nbytes for w in replicated.sharded if not w.hosted)
        full = sum(m.storage.numel() * m.storage.element_size() for m in replicated.members)
        rows = [
            ("weight shards", shards),
            ("replicated parameters", full),
            ("unsharded weights (slots)", pool.slot_nbytes if pool.reuse else pool.live_nbytes()),
            ("reduction buffers", communicator.state.reducer.buffers.nbytes),
        ]
        link = communicator.state.link
        kinds = [what for what in HOSTED if what != ACTIVATIONS]
        hosted = (
            [(HOSTED[what], link.allocated[what]) for what in kinds] if link is not None else []
        )
        if link is not None:
            rows.append((STAGED, link.staging_bytes))
        if communicator.state.activations is not None:
            hosted.append((HOSTED[ACTIVATIONS], communicator.state.activations.peak))
        for name, nbytes in (*rows, *optimizer.memory(), *hosted):
            total[name] = total.get(name, 0) + nbytes
    return list(total.items())
