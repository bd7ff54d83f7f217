"""A forward and backward on tensors without memory, whose storages are counted.

The model's own code runs on fake tensors (torch's ``FakeTensorMode``) of one rank's sizes: blocks
with their checkpoints, tiles and offload, exchanges of heads and rings with all that they allocate.
Only what would be sent is not. For a CUDA device, its kernels' own memory is counted in place of
the host's (:mod:`internsp.plan.kernels`).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from internsp.config import Config
from internsp.factory import build_of_length, device_type, one_document_a_row, to_parallelize
from internsp.host import HostLink
from internsp.layers.offload import ActivationOffload
from internsp.layers.recompute import checkpoint_block
from internsp.layers.tiles import tile_all
from internsp.mesh import MeshShape
from internsp.mesh.sequence import HEADS, RING, SequenceAxes
from internsp.pipeline.chunks import Chunk
from internsp.plan.blocks import read
from internsp.plan.dtypes import DTYPES
from internsp.plan.kernels import Taken, fuse_norms, taken
from internsp.plan.tiles import find_tiled
from internsp.sp import DistributedAttention, SequenceLayout, checkpoint_context_fn
from internsp.sp.dispatch import FIXED, by_part, cut
from internsp.sp.exchange import OPERATORS as EXCHANGES
from internsp.sp.exchange import Channel
from internsp.sp.ranges import Seen
from internsp.sp.ring import OPERATORS as RINGS
from internsp.sp.routes import Route, routes

_OPERATORS = {
    **{name: (HEADS, body) for name, body in EXCHANGES.items()},
    **{name: (RING, body) for name, body in RINGS.items()},
}


@dataclass(frozen=True)
class Place:
    """Which rank is observed, and which part of a pipeline it runs.

    Attributes:
        shape: of the mesh.
        first, last: whether the chunk has the embedding, and norm, head and loss. Anything else
            takes hidden states, and returns them.
        split: whether gradients of inputs and of weights are computed apart.
    """

    shape: MeshShape
    first: bool = True
    last: bool = True
    split: bool = False

    @property
    def whole(self) -> bool:
        """Whether it is no part of a pipeline."""
        return self.shape.pipeline == 1


@dataclass(frozen=True)
class Observed:
    """Bytes of one micro-batch on one rank; messages of a pipeline are left out.

    Attributes:
        batch: token ids, labels and positions.
        kept: from forward to backward; a chunk's output is among it.
        forward: at the peak of forward.
        peak: at the peak of forward and backward.
        phases: at the peak of forward and the loss's backward, of the last norm's, and of the
            blocks'; each grows in its own way with the length.
        between: after the gradients of inputs and before those of weights, where they come apart.
        host: of activations in host memory, at the end of forward: of each piece.
        moving: of the blocks' peak, beside what is kept: what operators that exchange heads or go
            round a ring had made.
    """

    batch: int
    kept: int
    forward: int
    peak: int
    phases: tuple[int, ...]
    between: int
    host: tuple[int, ...]
    moving: Mapping[str, int]


def observe(
    config: Config,
    rows: int,
    positions: int,
    tiles: int,
    layers: int,
    again: int,
    offload: Any,
    place: Place | None = None,
    backward: bool = True,
) -> Observed:
    """Forward and backward of ``layers`` blocks, ``again`` of which recompute.

    Args:
        positions: of this rank.
        offload: of activations, or None.
        backward: False where what forward keeps is all that is asked for (a third of the time or
            less): then no peak is that of a backward, and ``between`` is 0.
    """
    place = place or Place(MeshShape(1))
    model: Any = build_of_length(config, layers)
    dtype = DTYPES[config.weight_parallel.compute_dtype or config.train.dtype]
    hf = config.model.family == "hf"
    layout = _layout(config, rows, positions, place.shape, hf)
    batch = sum(_storages(tensor for _, tensor in _tensors(layout)).values())
    cuda = device_type(config) == "cuda"
    live = _Live(taken(config) if cuda else {})
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        _give_memory(model, dtype)
        if cuda:
            fuse_norms(model, config)
        if not hf:  # transformers' code looks at values
            made: dict[str, Any]
            made = {name: fake.from_tensor(tensor) for name, tensor in _tensors(layout)}
            layout = replace(layout, **made)
            _attach(model, config, place.shape)
        if not place.whole:
            model = Chunk(model, range(layers), place.first, place.last)
        link = _Elsewhere(torch.device("cpu"), live)
        away = ActivationOffload(link, offload, again)
        _wrap(model, config, place, tiles, again, away)
        blocks = config.weight_parallel.blocks if place.whole else model.block_names()
        _turns(model, read(to_parallelize(model), "qkv", blocks).blocks[-1].module, live)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_dropped)
        given = layout.input_ids
        if not place.first:
            width = config.model.hidden_size
            given = torch.empty(*given.shape, width, dtype=dtype, requires_grad=True)
        live.leave_out(*(t for _, t in _tensors(layout)), given, *model.parameters())
        with one_document_a_row() if hf else nullcontext(), live:
            output = model(
                given, labels=layout.labels, loss_chunk=config.train.loss_chunk, layout=layout
            )
            if place.whole:  # the loss, and a count
                output = output[0]
            kept, forward, host = live.now, live.peak, tuple(link.pieces)
            begun = live.kinds.copy()
            between = _backward(model, given, output, place, live) if backward else 0
    phases = [*live.phases, (live.peak, live.at_peak)]
    peaks = tuple(peak for peak, _ in phases)
    in_blocks = phases[-1][1]
    moving = {kind: max(in_blocks[kind] - begun[kind], 0) for kind in (HEADS, RING)}
    return Observed(batch, kept, forward, max(peaks), peaks, between, host, moving)


def _backward(model: Any, given: Tensor, output: Tensor, place: Place, live: _Live) -> int:
    """Of the whole chunk; gives the bytes that live between its two parts, where there are two."""
    gradient = None
    if not place.last:
        with live.paused():
            gradient = torch.empty_like(output)
        live.leave_out(gradient)
    if not place.split:
        output.backward(gradient)
        return 0
    weights = list(model.parameters())
    upstream = None if gradient is None else [gradient]
    returned, groups = stage_backward_input([output], upstream, [given], iter(weights))
    given.grad = None
    del returned
    between = live.now
    stage_backward_weight(iter(weights), groups)
    return between


def _turns(model: Any, last: nn.Module, live: _Live) -> None:
    """Tell ``live`` when backward has left the loss, and when it comes to the last block."""
    norm = getattr(model, "norm", None)

    def made(_: nn.Module, __: Any, output: Any) -> None:
        first = next(t for t in tree_leaves(output) if isinstance(t, Tensor))
        if first.requires_grad:
            first.register_hook(lambda _: live.turn())

    for module in (norm, last):
        if isinstance(module, nn.Module):
            module.register_forward_hook(made)
        else:
            live.phases.append((0, Counter()))


def _wrap(
    model: Any, config: Config, place: Place, tiles: int, again: int, away: ActivationOffload
) -> None:
    """Have the first blocks recompute, and feed-forwards compute in tiles."""
    mode = config.activation_checkpoint
    blocks = config.weight_parallel.blocks if place.whole else model.block_names()
    found = read(to_parallelize(model), "qkv", blocks)
    for number, block in enumerate(found.blocks[:again]):
        context = checkpoint_context_fn if mode.mode == "selective" else None
        group = partial(away.group, number) if away.count else None
        checkpoint_block(block.module, mode.reentrant, context, None, group)
    if tiles > 1:
        tiled = mode.model_copy(update={"tiles": tiles})
        tile_all(find_tiled(found, tiled), tiles, ())


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


# Sequences over several ranks


def _layout(
    config: Config, rows: int, positions: int, shape: MeshShape, alone: bool
) -> SequenceLayout:
    """Of the rank that has most on its way; or of one that has whole sequences."""
    keys = torch.zeros(rows, dtype=torch.int64)
    if alone:
        ids = torch.zeros(rows, positions, dtype=torch.int64)
        return SequenceLayout.create(ids, row_keys=keys)
    ids = torch.zeros(rows, positions * shape.sequence, dtype=torch.int64)
    axes = shape.sequence_axes
    return SequenceLayout.create(
        ids, rank=axes.rank(_part(config, shape), 0), size=axes.size, ring=axes.ring,
        near=axes.near, balance=_balance(config, shape), row_keys=keys,
    )  # fmt: skip


def _balance(config: Config, shape: MeshShape) -> str:
    return config.parallel.balance if shape.pipeline == 1 else FIXED


def _part(config: Config, shape: MeshShape) -> int:
    """Of the ring, that whose keys and values in flight take most memory, of one document. Of the
    ranks that share its heads the first has most."""
    weights = config.weight_parallel
    way = weights.ring_form, weights.inner_ring
    return _busiest(shape.sequence_axes, _balance(config, shape), *way)


_PROBED = 256  # positions of a rank, for which routes are looked at


@lru_cache(maxsize=64)
def _busiest(axes: SequenceAxes, balance: str, form: str, inner: int) -> int:
    if axes.ring == 1:
        return 0
    length = _PROBED * axes.size
    seen = Seen(True, None, ((length,),))
    held = by_part(cut(length, axes, balance, seen), axes)
    loads = [_in_flight(route) for route in routes(held, seen, form, inner)]
    return loads.index(max(loads))


def _in_flight(route: Route) -> int:
    """Positions of what comes in a step and in the next, at most."""
    came = [sum(b - a for move in step.receives for a, b in move.what) for step in route.steps]
    return max(sum(came[i : i + 2]) for i in range(len(came)))


def _attach(model: nn.Module, config: Config, shape: MeshShape) -> None:
    """Have attention be that of one rank of its groups, to which nothing is sent."""
    if shape.sequence == 1:
        return
    axes, part = shape.sequence_axes, _part(config, shape)
    no_group: Any = None
    heads: Any = _Alone(no_group, None, 0, axes.heads)
    around: Any = _Alone(no_group, None, part, axes.ring) if axes.ring > 1 else None
    for module in model.modules():
        if isinstance(module, DistributedAttention):
            module.attach(
                heads, ring=around, axes=axes, form=config.weight_parallel.ring_form,
                inner=config.weight_parallel.inner_ring,
            )  # fmt: skip


class _Arrived:
    """Work that is done."""

    def wait(self) -> None:
        """Return at once."""


class _Alone(Channel):
    """A rank of a group whose others are not there."""

    def all_to_all(
        self, received: Tensor, send: Tensor, got: Sequence[int], sent: Sequence[int]
    ) -> _Arrived:
        """See :meth:`Channel.all_to_all`."""
        return _Arrived()

    def messages(self, operations: Sequence[tuple[bool, Tensor, int, int]]) -> list[_Arrived]:
        """See :meth:`Channel.messages`."""
        return [_Arrived() for _ in operations]


# Memory


def _tensors(layout: SequenceLayout) -> list[tuple[str, Tensor]]:
    found = ((each.name, getattr(layout, each.name)) for each in fields(layout))
    return [(name, value) for name, value in found if isinstance(value, Tensor)]


def _storages(tensors: Any) -> dict[int, int]:
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


class _Live(TorchDispatchMode):
    """Counts the bytes of all storages that live.

    Args:
        taken: what operators have while they run.
    """

    def __init__(self, taken: Taken) -> None:
        super().__init__()
        self._taken = taken
        self.now = self.peak = 0
        self.phases: list[tuple[int, Counter[str]]] = []
        self.kinds: Counter[str] = Counter()
        self.at_peak: Counter[str] = Counter()
        self._known: set[int] = set()
        self._paused = False
        self._kind = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kind, body = _OPERATORS.get(func._schema.name, ("", None))
        if body is not None:
            before, self._kind = self._kind, kind
            try:
                with self:
                    return body(*args, **(kwargs or {}))
            finally:
                self._kind = before
        output = func(*args, **(kwargs or {}))
        if not self._paused:
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor):
                    self._note(tensor.untyped_storage())
            if (own := self._taken.get(func._schema.name)) is not None:
                nbytes = own(*args, **(kwargs or {}))
                self._add(self._kind, nbytes)
                self._look()
                self._add(self._kind, -nbytes)
        return output

    def leave_out(self, *tensors: Tensor) -> None:
        """Do not count these, nor views of them."""
        for tensor in tensors:
            if id(tensor.untyped_storage()) not in self._known:
                self._keep(tensor.untyped_storage(), 0)

    def _note(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self._known:
            self._keep(storage, storage.nbytes())

    def _keep(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        self._known.add(id(storage))
        self._add(self._kind, nbytes)
        self._look()
        weakref.finalize(storage, self._gone, id(storage), self._kind, nbytes)

    def _gone(self, key: int, kind: str, nbytes: int) -> None:
        self._known.discard(key)
        self._add(kind, -nbytes)

    def turn(self) -> None:
        """A phase is over."""
        self.phases.append((self.peak, self.at_peak))
        self.peak, self.at_peak = self.now, self.kinds.copy()

    def _look(self) -> None:
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, self.kinds.copy()

    def _add(self, kind: str, nbytes: int) -> None:
        self.now += nbytes
        self.kinds[kind] += nbytes

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
        self.pieces: list[int] = []

    def empty(self, what: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See :meth:`HostLink.empty`."""
        with self._live.paused():
            made = super().empty(what, shape, dtype)
        self._live.leave_out(made)
        self.pieces.append(made.nbytes)
        return made
