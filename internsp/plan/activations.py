"""The memory of activations on one rank, by a step of the model on tensors without memory.

A model is run forward and backward on fake tensors (torch's ``FakeTensorMode``) of the
sizes of one rank, with the blocks' own checkpoints, tiles and offload, and every storage that lives
is counted. Memory is linear in the number of blocks, and in the positions while tiles and chunks of
the loss have a fixed length: a few small steps give that of any. What an exchange of heads needs
beside is a formula, at most.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from internsp.config import Config
from internsp.config.kept import size_in_bytes
from internsp.errors import ConfigError
from internsp.factory import build_of_length, one_document_a_row, to_parallelize
from internsp.host import HostLink
from internsp.layers.offload import ActivationOffload, offloaded_blocks
from internsp.layers.recompute import checkpoint_block
from internsp.layers.tiles import ROWS, tile_all
from internsp.mesh import MeshShape
from internsp.plan.blocks import read
from internsp.plan.dtypes import DTYPES
from internsp.plan.tiles import find_tiled, tile_tokens, tiles_of
from internsp.sp import SequenceLayout, checkpoint_context_fn

_LEAST = 512  # positions of the smaller of two steps; small ones round to ROWS


@dataclass(frozen=True)
class Activations:
    """Bytes on one rank in a forward and backward of one micro-batch.

    Attributes:
        kept: on the device between forward and backward.
        working: beside that at the peak, in the backward of a block or of the loss.
        exchanged: copies of queries, keys and values that exchanges of heads have in flight.
        around: what attention around a ring has in its backward beside attention of one rank.
        host: in host memory, at the end of forward.
    """

    kept: int
    working: int
    exchanged: int
    around: int
    host: int

    def rows(self) -> list[tuple[str, int]]:
        """(component, bytes) on the device."""
        found = [("activations that are kept", self.kept), ("block or loss at work", self.working)]
        moving = [
            ("exchanges of heads (at most)", self.exchanged),
            ("keys and values around a ring (at most)", self.around),
        ]
        return found + [row for row in moving if row[1]]


@dataclass(frozen=True)
class _Step:
    kept: int
    peak: int
    host: int


class ActivationModel:
    """Of one configuration, for any length of its sequences."""

    def __init__(self, config: Config, shape: MeshShape) -> None:
        if shape.pipeline > 1:
            raise ConfigError(
                "the memory of activations is planned without a pipeline: set parallel.pipeline = 1"
            )
        self.config, self.shape = config, shape
        self.rows = config.train.global_batch // (config.train.micro_batches * shape.data)
        self._steps: dict[tuple[int, int], _Step] = {}

    def at(self, length: int) -> Activations:
        """For sequences of ``length`` tokens over all ranks."""
        local = -(-length // self.shape.sequence)
        chosen = self.config.model_copy(
            update={"data": self.config.data.model_copy(update={"sequence_length": length})}
        )
        tiles = tiles_of(chosen, self.shape.data)
        if self.config.activation_checkpoint.tiles == "auto" and tiles > 1:
            # Tiles of a fixed length: two and three of them, then a straight line.
            one = -(-tile_tokens(self.config) // self.rows // ROWS) * ROWS
            small, large = 2 * one, 3 * one
            steps = [self._step(small, 2), self._step(large, 3)]
        else:
            small = max(_LEAST, -(-self.config.train.loss_chunk // self.rows), ROWS * tiles)
            large = 2 * small
            steps = [self._step(small, tiles), self._step(large, tiles)]
        kept, peak, host = (
            _line((small, large), [getattr(step, name) for step in steps], local)
            for name in ("kept", "peak", "host")
        )
        return Activations(kept, peak - kept, self._exchanged(local), self._around(local), host)

    def _step(self, positions: int, tiles: int) -> _Step:
        key = positions, tiles
        if key not in self._steps:
            self._steps[key] = self._deep(positions, tiles)
        return self._steps[key]

    def _deep(self, positions: int, tiles: int) -> _Step:
        """A step of all blocks, from steps of two and three recomputing and other ones."""
        again = self.config.activation_checkpoint
        layers = self.config.model.layers
        recomputing = len(again.selected(layers))
        offload = again.offload
        few = _observe(self.config, self.rows, positions, tiles, 2, 0, None)
        more = _observe(self.config, self.rows, positions, tiles, 3, 0, None)
        plain_block = more.kept - few.kept
        if not recomputing:
            return _Step(few.kept + (layers - 2) * plain_block,
                         few.peak + (layers - 2) * plain_block, 0)  # fmt: skip
        step = _observe(self.config, self.rows, positions, tiles, 2, 2, offload and 1)
        whole = _observe(self.config, self.rows, positions, tiles, 2, 2, None)
        block = _observe(self.config, self.rows, positions, tiles, 3, 3, None).kept - whole.kept
        away = offloaded_blocks(offload, recomputing)
        limit = size_in_bytes(offload) if isinstance(offload, str) else None
        if limit is not None and step.host:
            away = min(away, limit // step.host)
        base = step if away else whole
        stays = recomputing - 2 - max(away - 1, 0)
        others = (layers - recomputing) * plain_block
        more_kept = stays * block + others
        return _Step(base.kept + more_kept, base.peak + more_kept, away * step.host)

    def _exchanged(self, local: int) -> int:
        shares = self.shape.sequence // self.shape.ring
        if shares == 1:
            return 0
        model = self.config.model
        heads = model.heads + 2 * (model.kv_heads or model.heads)
        features = heads * (model.head_dim or model.hidden_size // model.heads)
        size = DTYPES[self.config.weight_parallel.compute_dtype or self.config.train.dtype].itemsize
        return 2 * self.rows * local * features * size


    def _around(self, local: int) -> int:
        """In a step of the ring's backward (:mod:`internsp.sp.ring`): sums of gradients for queries
        and, of two parts, for keys and values, wide; a part of these that has come and gradients
        that come home; the next part, where there is one; gradients that leave, where they are
        narrower than their sums."""
        ring, model = self.shape.ring, self.config.model
        if ring == 1:
            return 0
        dtype = DTYPES[self.config.weight_parallel.compute_dtype or self.config.train.dtype]
        size, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
        blocks = 4 + 2 * (ring > 2) + 2 * (size < wide)
        features = model.head_dim or model.hidden_size // model.heads
        each = model.heads * wide + (model.kv_heads or model.heads) * (4 * wide + blocks * size)
        return self.rows * local * features * each


def _line(at: tuple[int, int], values: Sequence[int], wanted: int) -> int:
    if at[0] == at[1]:
        return values[1]
    slope = (values[1] - values[0]) / (at[1] - at[0])
    return round(values[1] + slope * (wanted - at[1]))


def _observe(
    config: Config, rows: int, positions: int, tiles: int, layers: int, again: int, offload: Any
) -> _Step:
    """One forward and backward of ``layers`` blocks, ``again`` of which recompute."""
    model: Any = build_of_length(config, layers)
    mode = config.activation_checkpoint
    dtype = DTYPES[config.weight_parallel.compute_dtype or config.train.dtype]
    live = _Live()
    options: dict[str, Any] = {}
    hf = config.model.family == "hf"
    if hf:  # the zoo's need none; it is made of values
        options["layout"] = SequenceLayout.create(torch.zeros(rows, positions, dtype=torch.int64))
    with FakeTensorMode(allow_non_fake_inputs=True):
        _give_memory(model, dtype)
        found = read(to_parallelize(model), "qkv", config.weight_parallel.blocks)
        link = _Elsewhere(torch.device("cpu"), live)
        away = ActivationOffload(link, offload, again)
        for number, block in enumerate(found.blocks[:again]):
            context = checkpoint_context_fn if mode.mode == "selective" else None
            group = partial(away.group, number) if offload else None
            checkpoint_block(block.module, mode.reentrant, context, None, group)
        if tiles > 1:
            tiled = mode.model_copy(update={"tiles": tiles})
            tile_all(find_tiled(found, tiled), tiles, ())
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_dropped)
        ids = torch.zeros(rows, positions, dtype=torch.int64)
        live.leave_out(ids, *model.parameters())
        apart = one_document_a_row() if hf else nullcontext()
        if not hf:
            options["row_keys"] = ids[:, 0]  # for dropout
        with apart, live:
            loss, _ = model(ids, labels=ids, loss_chunk=config.train.loss_chunk, **options)
            kept, host = live.now, away.pool.used
            loss.backward()
    return _Step(kept, live.peak, host)


def _dropped(parameter: Tensor) -> None:
    """Gradients of weights are counted with the weights."""
    parameter.grad = None


def _give_memory(model: nn.Module, dtype: torch.dtype) -> None:
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = made.setdefault(
                    id(parameter),
                    nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="cpu")),
                )
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")


class _Live(TorchDispatchMode):
    """Counts the bytes of all storages that live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()
        self._paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if not self._paused:
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor):
                    self._note(tensor.untyped_storage())
        return output

    def leave_out(self, *tensors: Tensor) -> None:
        """Do not count these, nor views of them."""
        for tensor in tensors:
            self._keep(tensor.untyped_storage(), 0)

    def _note(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self._known:
            self._keep(storage, storage.nbytes())

    def _keep(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        self._known.add(id(storage))
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, id(storage), nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is made inside lies elsewhere."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False


class _Elsewhere(HostLink):
    """Host memory, which is not counted."""

    def __init__(self, device: torch.device, live: _Live) -> None:
        super().__init__(device)
        self._live = live

    def empty(self, what: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See :meth:`HostLink.empty`."""
        with self._live.paused():
            made = super().empty(what, shape, dtype)
        self._live.leave_out(made)
        return made
