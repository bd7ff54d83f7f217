"""A device with streams at odds, on the CPU: which stream stands behind what it uses.

Every stream knows what it stands behind: what was queued on it, and what was queued on the streams
that it has waited for. Each call of a layer comes on a stream drawn at random, which the program
has ordered behind nothing; so every use must have been ordered by the library. Values are not
touched: the host computes in order. An error names the use.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from internsp.optim.bucket import Bucket
from internsp.wp import collectives, encode, parameter, reduce, slots
from internsp.wp.communicator import ChunkWeights, ISPCommunicator


class RacingStream:
    """Knows, transitively, the work that it stands behind."""

    def __init__(self, name: str) -> None:
        self.name, self.behind = name, set[int]()

    def wait_stream(self, stream: Any) -> None:
        """What is queued here from now on runs after what is queued on ``stream`` now."""
        self.behind |= stream.behind


class Racing:
    """Three streams in this process; :meth:`install` makes the library see them on the CPU.

    Attributes:
        hops: number of calls that came on another stream than the call before.
        checks: number of uses that were checked.
    """

    def __init__(self, seed: int = 0) -> None:
        self.streams = [RacingStream(name) for name in "abc"]
        self.here = self.streams[0]
        self.hops = self.checks = 0
        self._random, self._work = random.Random(seed), itertools.count()
        self._done: dict[tuple[str, Any], int] = {}
        self._reads: dict[int, list[int]] = defaultdict(list)

    def hop(self) -> None:
        """The next call comes on any of the streams."""
        before, self.here = self.here, self._random.choice(self.streams)
        self.hops += before is not self.here

    def queue(self) -> int:
        """Queue some work on the current stream."""
        work = next(self._work)
        self.here.behind.add(work)
        return work

    def write(self, what: str, thing: Any) -> None:
        """The current stream writes ``thing``."""
        self._done[what, thing] = self.queue()

    def require(self, what: str, thing: Any, use: str) -> None:
        """The current stream uses ``thing``: it stands behind its last write."""
        self.checks += 1
        work = self._done.get((what, thing))
        assert work is None or work in self.here.behind, (
            f"{use} of {thing} on stream {self.here.name}, which does not stand behind its {what}"
        )

    def install(self) -> None:
        """For the rest of this process."""
        for module in (collectives, reduce, slots):
            module.current_stream = lambda device: lambda: self.here  # type: ignore[attr-defined]
        torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
        for name in ("unshard", "pre_backward", "on_grad_ready"):
            around(ChunkWeights, name, before=lambda *_: self.hop())
        for name in ("unshard_all", "pre_backward_all", "on_grads_ready"):
            around(ISPCommunicator, name, before=lambda *_: self.hop())
        self._watch_collectives()
        self._watch_slots()
        self._watch_gradients()
        self._watch_steps()

    def _watch_collectives(self) -> None:
        real = collectives.Collectives.launch

        def launch(
            group: Any, send: Any, tensors: Any, kind: str, unit: str, weights: Any, *rest: Any
        ) -> Any:
            work = next(self._work)
            self._done.update({(kind, name or unit): work for name in weights})
            if group.size == 1:
                self.here.behind.add(work)

            def sent(*given: Any) -> Any:
                return _Sent(self, send(*given), work)

            return real(group, sent, tensors, kind, unit, weights, *rest)

        collectives.Collectives.launch = launch  # type: ignore[method-assign]

    def _watch_slots(self) -> None:
        def used(weight: Any) -> None:
            if weight.needs_gather:
                self.require("AG", weight.name, "use")
                self._reads[weight.unit.slot].append(self.queue())

        def acquired(slot: Any, *_: Any) -> None:
            for read in self._reads.pop(slot.index, ()):
                assert read in self.here.behind, f"slot {slot.index} is overwritten while read"

        around(parameter.ShardedParameter, "read", after=used)
        around(slots.Slot, "acquire", after=acquired)

        def backward(communicator: Any, weights: Iterable[Any]) -> None:
            reduced = communicator.queue.backward.turns.reduced
            for weight in weights:
                if not weight.unit.recomputed and weight not in reduced:
                    used(weight)

        around(ChunkWeights, "pre_backward", after=lambda c, weight: backward(c, [weight]))
        around(ISPCommunicator, "pre_backward_all", after=backward)
        around(
            encode.Encoder, "decode",
            before=lambda _, weight, streams: self.require("AG", weight.name, "decoding"),
            after=lambda _, weight, streams: self.write("AG", weight.name),
        )  # fmt: skip

    def _watch_gradients(self) -> None:
        def kept(_: Any, unit: Any, ready: Iterable[tuple[Any, Any]]) -> None:
            for weight, _gradient in ready:
                self.require("gradient", weight.name, "addition")
                self.write("gradient", weight.name)

        def reduced(_: Any, weights: Iterable[Any]) -> None:
            for weight in weights:
                self.require("gradient", weight.name, "reduction")

        oldest: list[Any] = []

        def finishing(reducer: Any, *_: Any) -> None:
            oldest[:] = [weight for pending in reducer._queue[0] for weight in pending.weights]

        def finished(*_: Any) -> None:
            for weight in oldest:
                self.require("RS", weight.name, "sum")
                self.require("sum", weight.name, "sum")
                self.write("sum", weight.name)

        around(ChunkWeights, "_keep_gradients", after=kept)
        for name in ("reduce_scatter", "accumulate"):
            around(reduce.GradientReducer, name, before=reduced)
        around(reduce.GradientReducer, "finish_oldest", before=finishing, after=finished)

    def _watch_steps(self) -> None:
        published: dict[Any, Any] = {}

        def publish(bucket: Any, _: Any) -> None:
            published.update(dict.fromkeys(bucket.offsets, bucket.name))

        def read(member: Any, *_: Any) -> None:
            if member in published:
                self.require("PUBLISH", published[member], f"read ({member.name})")

        around(Bucket, "publish", after=publish)
        around(parameter.ShardedParameter, "fresh", after=read)
        around(parameter.ReplicatedParameter, "unshard", after=read)


class _Sent:
    """A collective in flight: who waits for it stands behind it."""

    def __init__(self, racing: Racing, work: Any, number: int) -> None:
        self._racing, self._work, self._number = racing, work, number

    def wait(self) -> None:
        """Block, as on the CPU."""
        self._work.wait()
        self._racing.here.behind.add(self._number)


def around(
    kind: type, name: str, before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
) -> None:  # fmt: skip
    """Call ``before`` and ``after`` with the arguments of each call of a method."""
    real = getattr(kind, name)

    def call(*given: Any) -> Any:
        if before is not None:
            before(*given)
        result = real(*given)
        if after is not None:
            after(*given)
        return result

    setattr(kind, name, call)
