"""All-gathers of shards as bytes of another form: quantized, or packed by a user's functions."""

from __future__ import annotations

import torch
from torch import Tensor

from internsp.mesh.shape import MeshShape
from internsp.schedule.chunk import ChunkLayout, Schedule
from internsp.schedule.encoding import Encoding
from internsp.wp.parameter import ShardedParameter
from internsp.wp.reduce import Buffers
from internsp.wp.slots import SlotStreams


class Encoder:
    """Encodes shards of one chunk before their all-gathers, and decodes what has arrived.

    Args:
        reuse: ``weight_parallel.memory_pool``.

    Attributes:
        buffers: the all-gathers' inputs and outputs, and scratch; allocated in the first step only.
    """

    def __init__(self, device: torch.device, reuse: bool) -> None:
        self.buffers = Buffers(device, reuse)
        self._in_flight: dict[ShardedParameter, tuple[Encoding, Tensor, Tensor]] = {}

    def encode(self, weight: ShardedParameter, shard: Tensor) -> tuple[Tensor, Tensor]:
        """Encode this rank's padded ``shard``; returns output and input of the all-gather.

        Both are flat and uint8.
        """
        assert weight.encoding is not None, "of such weights alone"
        encoding = weight.encoding.used_in(weight.compute_dtype)
        sent = self._acquire(encoding.nbytes, torch.uint8)
        scratch = [self._acquire(numel, encoding.work_dtype) for numel in encoding.scratch]
        encoding.encode(shard.view(weight.layout.shard_shape), sent, scratch)
        for buffer in scratch:
            self.buffers.release(buffer)
        received = self._acquire(weight.layout.size * encoding.nbytes, torch.uint8)
        self._in_flight[weight] = encoding, sent, received
        return received, sent

    def decode(self, weight: ShardedParameter, streams: SlotStreams) -> None:
        """Fill the slot after the all-gather was waited for. Runs on the current stream.

        Args:
            streams: streams that use the slot.
        """
        encoding, sent, received = self._in_flight.pop(weight)
        streams.before_overwrite(weight)  # wait for readers of the slot's previous contents
        layout, out = weight.layout, weight.in_slot.flat
        if encoding.slot_nbytes is None:
            out = out.view(layout.size, *layout.shard_shape)
        encoding.decode(received.view(layout.size, -1), out)
        streams.written(weight)
        self.buffers.release(sent)
        self.buffers.release(received)

    def _acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # training uses buffers that an evaluation allocates
            return self.buffers.acquire(numel, dtype)


def encoder_bytes(chunk: ChunkLayout, schedule: Schedule, shape: MeshShape) -> int:
    """Bytes of an encoder's buffers for a chunk that runs ``schedule``; exact (WP-1).

    It acquires them on the meta device, as an :class:`Encoder` does.
    """
    encodings = {
        weight.name: (weight.encoding, shape.axis(weight.expert).size)
        for unit in chunk.units
        for weight in unit.weights
        if weight.encoding is not None
    }
    buffers = Buffers(torch.device("meta"))
    in_flight: dict[str, tuple[Tensor, Tensor]] = {}
    for action in schedule.actions:
        name = action.weight
        if name not in encodings or action.near:
            continue
        if action.kind == "AG":
            encoding, ranks = encodings[name]
            sent = buffers.acquire(encoding.nbytes, torch.uint8)
            scratch = [buffers.acquire(n, encoding.work_dtype) for n in encoding.scratch]
            for buffer in scratch:
                buffers.release(buffer)
            in_flight[name] = sent, buffers.acquire(ranks * encoding.nbytes, torch.uint8)
        elif action.kind == "WAIT" and name in in_flight:
            for buffer in in_flight.pop(name):
                buffers.release(buffer)
    return buffers.nbytes
