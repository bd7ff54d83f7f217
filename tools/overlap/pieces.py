"""One step's collectives without compute: as messages, as gloo's collectives, or in pieces.

The output of an all-gather in pieces is not contiguous: each piece consists of a part of every
rank's rows, in as many ranges of the slot, so it uses the list form of all-gather with views. An
all-to-all in pieces copies each piece into a buffer first. Messages between pairs of ranks are the
library's own form. All must give the same bits as a single collective of gloo, which :func:`verify`
checks first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from internsp import ParallelMesh
from internsp.wp.collectives import gather_slices, send_pairs
from tools.bench.model import DTYPE
from tools.overlap.fsdp import Works, ranges_of

MESSAGES = 0
"""Instead of a number of pieces: messages between pairs, one per unsharded weight."""
Message = tuple[str, int]
"""``AG`` or ``RS``, and the elements of one rank's shard."""


def messages(schedule: Sequence[Sequence[Any]], world: int) -> list[Message]:
    """The messages of a printed schedule, in the order of launch."""
    each = (world - 1) * DTYPE.itemsize
    return [(a[0], a[3] // each) for a in schedule if a[0] in ("AG", "RS") and a[3]]


def gather(slot: Tensor, shard: Tensor, group: dist.ProcessGroup, pieces: int) -> Any:
    """All-gather ``shard`` ``[n]`` into ``slot`` ``[ranks * n]``."""
    if pieces == MESSAGES:
        ranks = group.size()
        places = slot.view(ranks, -1).unbind()
        places[group.rank()].copy_(shard)
        return send_pairs(group, places, [shard] * ranks, 0)
    if pieces == 1:
        return gather_slices(slot, shard, group)
    rows = slot.view(group.size(), -1)
    works = [
        dist.all_gather([r[a:b] for r in rows], shard[a:b], group=group, async_op=True)
        for a, b in ranges_of(len(shard), pieces)
    ]
    return Works(works)


def exchange(received: Tensor, packed: Tensor, group: dist.ProcessGroup, pieces: int) -> Any:
    """All-to-all of ``packed`` ``[ranks * n]``; ``received`` holds the pieces consecutively."""
    if pieces == MESSAGES:
        ranks = group.size()
        places, sent = received.view(ranks, -1).unbind(), packed.view(ranks, -1).unbind()
        places[group.rank()].copy_(sent[group.rank()])
        return send_pairs(group, places, sent, 0)
    if pieces == 1:
        return dist.all_to_all_single(received, packed, group=group, async_op=True)
    rows = packed.view(group.size(), -1)
    ranges = ranges_of(rows.shape[1], pieces)
    parts = received.split([group.size() * (b - a) for a, b in ranges])
    works = []
    keep: list[Tensor] = []
    for part, (a, b) in zip(parts, ranges, strict=True):
        keep.append(rows[:, a:b].contiguous().view(-1))
        works.append(dist.all_to_all_single(part, keep[-1], group=group, async_op=True))
    return Works(works, keep)


def reduced(received: Tensor, ranks: int, pieces: int) -> Tensor:
    """The sum of what :func:`exchange` has received, ``[n]`` in fp32."""
    ranges = ranges_of(len(received) // ranks, max(pieces, 1))
    parts = received.split([ranks * (b - a) for a, b in ranges])
    return torch.cat([part.view(ranks, -1).sum(0, dtype=torch.float32) for part in parts])


def verify(mesh: ParallelMesh, numel: int, pieces: int) -> None:
    """Check that pieces arrive where one collective puts them. Collective.

    Raises:
        RuntimeError: they do not.
    """
    ranks = mesh.weight
    generator = torch.Generator().manual_seed(mesh.rank)
    shard = torch.randn(numel, generator=generator).to(DTYPE)
    gradient = torch.randn(ranks * numel, generator=generator).to(DTYPE)
    found: list[tuple[Tensor, Tensor]] = []
    for count in (1, pieces):
        slot, received = torch.zeros_like(gradient), torch.zeros_like(gradient)
        gather(slot, shard, mesh.weight_group, count).wait()
        exchange(received, gradient, mesh.gradient_group, count).wait()
        found.append((slot, reduced(received, ranks, count)))
    if not all(torch.equal(one, other) for one, other in zip(*found, strict=True)):
        what = f"{pieces} pieces" if pieces else "messages"
        raise RuntimeError(f"{what} of a weight do not arrive as one collective does")


def send(
    mesh: ParallelMesh, sent: Sequence[Message], pieces: int, flying: int
) -> tuple[float, float]:
    """Send all of ``sent``, at most ``flying`` unsharded weights in flight. Collective, blocks.

    Returns:
        Seconds, and processor seconds of this rank's threads.
    """
    ranks = mesh.weight
    rings = {message: _ring(*message, ranks, flying + 1) for message in set(sent)}
    queue: deque[Any] = deque()
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    for message in sent:
        while len(queue) >= flying:
            queue.popleft().wait()
        output, source = next(rings[message])
        if message[0] == "AG":
            queue.append(gather(output, source, mesh.weight_group, pieces))
        else:
            queue.append(exchange(output, source, mesh.gradient_group, pieces))
    while queue:
        queue.popleft().wait()
    return time.perf_counter() - start, time.process_time() - busy


def _ring(kind: str, numel: int, ranks: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    source = numel if kind == "AG" else ranks * numel
    made = [
        (torch.zeros(ranks * numel, dtype=DTYPE), torch.zeros(source, dtype=DTYPE))
        for _ in range(count)
    ]
    while True:
        yield from made
