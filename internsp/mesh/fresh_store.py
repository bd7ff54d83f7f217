"""A prefix of the store for each start of the ranks, where torchrun's starts share one store.

Since torch 2.13 an elastic agent keeps its store over restarts. Ranks would read there what ranks
of an earlier start have left (addresses of processes that have ended), and fail to connect. Nothing
in the environment distinguishes two starts, not even the number of restarts (a change of membership
does not increase it), so the ranks choose a name for each start.
"""

from __future__ import annotations

import os
import time
import uuid

import torch.distributed as dist

_POLL_SECONDS = 0.02


def is_shared() -> bool:
    """Whether this process's store is kept over restarts, by torchrun's agent."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return agent and "TORCHELASTIC_RUN_ID" in os.environ


def for_this_start(store: dist.Store, rank: int, world_size: int, seconds: float) -> dist.Store:
    """A ``PrefixStore`` of ``store`` into which only ranks of this start write. Blocks.

    Every rank writes a unique name; rank 0 answers each name with the name of the start, also names
    that processes of an earlier start have left, until every rank has read its answer.

    Raises:
        DistNetworkError: some ranks did not come within ``seconds``; the message names them.
    """
    deadline, own = time.monotonic() + seconds, uuid.uuid4().hex
    if rank:
        store.set(f"internsp/start/hello/{rank}", own)
        answer = f"internsp/start/welcome/{own}"
        while not store.check([answer]):
            if time.monotonic() > deadline:
                raise dist.DistNetworkError(f"rank 0 did not come within {seconds:g} s")
            time.sleep(_POLL_SECONDS)
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
            time.sleep(_POLL_SECONDS)
    return dist.PrefixStore(f"internsp/start/{own}", store)
