"""A store for one start of the ranks, where torchrun hands all its starts the same one.

Since torch 2.13 an agent keeps its store over restarts, and what ranks of an earlier start have
left in it (addresses of processes that are gone) is read by those of the next: they connect to
nothing. Neither the number of restarts (a change of membership counts none) nor anything else in
the environment tells two starts apart, so the ranks name theirs by themselves.
"""

from __future__ import annotations

import os
import time
import uuid

import torch.distributed as dist

_PAUSE = 0.02


def is_shared() -> bool:
    """Whether the store of this process's environment outlives this start of the ranks."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return agent and "TORCHELASTIC_RUN_ID" in os.environ


def fresh(store: dist.Store, rank: int, world_size: int, seconds: float) -> dist.Store:
    """A part of ``store`` in which these ranks, and none before them, have written. Blocks.

    Every rank calls itself by a name that no process has had; rank 0 answers names, also those that
    processes of an earlier start have left, until every rank has read its own answer.

    Raises:
        DistNetworkError: some rank did not come within ``seconds``; the message names them.
    """
    deadline, own = time.monotonic() + seconds, uuid.uuid4().hex
    if rank:
        store.set(f"internsp/start/hello/{rank}", own)
        answer = f"internsp/start/welcome/{own}"
        while not store.check([answer]):
            if time.monotonic() > deadline:
                raise dist.DistNetworkError(f"rank 0 did not come within {seconds:g} s")
            time.sleep(_PAUSE)
        start = store.get(answer).decode()
        store.set(f"internsp/start/{start}/{rank}", "")
        return dist.PrefixStore(f"internsp/start/{start}", store)
    missing = set(range(1, world_size))
    while missing:
        for other in sorted(missing):
            hello = f"internsp/start/hello/{other}"
            if store.check([f"internsp/start/{own}/{other}"]):
                missing.discard(other)
            elif store.check([hello]):
                store.set(f"internsp/start/welcome/{store.get(hello).decode()}", own)
        if missing and time.monotonic() > deadline:
            names = ", ".join(map(str, sorted(missing)))
            raise dist.DistNetworkError(f"ranks {names} did not come within {seconds:g} s")
        if missing:
            time.sleep(_PAUSE)
    return dist.PrefixStore(f"internsp/start/{own}", store)
