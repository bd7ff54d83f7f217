"""Memory of one rank by component, in bytes, from what exists."""

from __future__ import annotations

from internsp.train.session import Session


def components(session: Session) -> list[tuple[str, int]]:
    """(component, bytes) of this rank: shards, slots, reduction buffers, optimizer."""
    total: dict[str, int] = {}
    for communicator, optimizer in zip(session.communicators, session.optimizers, strict=True):
        replicated, pool = communicator.replicated, communicator.state.pool
        shards = sum(w.storage.numel() * w.storage.element_size() for w in replicated.sharded)
        whole = sum(m.storage.numel() * m.storage.element_size() for m in replicated.members)
        rows = [
            ("weight shards", shards),
            ("replicated parameters", whole),
            ("unsharded weights (slots)", pool.slot_nbytes if pool.reuse else pool.live_nbytes()),
            ("reduction buffers", communicator.state.reducer.buffers.nbytes),
        ]
        for name, nbytes in (*rows, *optimizer.memory()):
            total[name] = total.get(name, 0) + nbytes
    return list(total.items())
