"""Measures a forward and backward without values by counting the bytes of their storages.

The model's own code runs on tensors of one rank's sizes that have no values: blocks with their
checkpoints, tiles and offload, exchanges of heads and rings with all that they allocate. Only
nothing is sent. Models of the zoo are on the meta device, which takes a third of the time of fake
tensors (torch's ``FakeTensorMode``); code of transformers reads values and asks for devices, and
needs those. For a CUDA device, the temporary memory of its kernels is counted in place of that of
the CPU's (:mod:`internsp.app.plan.live`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._pytree import tree_leaves

from internsp.app.config import Config
from internsp.app.models.causal_lm import skip_packing_detection
from internsp.app.models.factory import (
    build_first_layers,
    device_type,
    to_parallelize,
)
from internsp.app.plan.live import LiveBytes, Outputs, fuse_norms, kernel_memory
from internsp.app.plan.sequences import balance_of, ring_traffic
from internsp.base.host import HostLink
from internsp.mesh import MeshShape
from internsp.mesh.sequence import HEADS, RING
from internsp.modules.offload import ActivationOffload
from internsp.modules.recompute import checkpoint_block
from internsp.modules.tiles import tile_all
from internsp.pipeline.chunks import Chunk
from internsp.sp import DistributedAttention, SequenceLayout, checkpoint_context_fn
from internsp.sp.exchange import ExchangeGroup
from internsp.structure.blocks import Structure, read_structure
from internsp.structure.dtypes import DTYPES
from internsp.structure.tiles import find_tiled


@dataclass(frozen=True)
class ModelPart:
    """Which part of the model is measured: all of it, or a pipeline's chunk.

    Attributes:
        shape: of the mesh.
        first: the chunk has the embedding; else it takes hidden states.
        last: the chunk has norm, head and loss; else it returns hidden states.
        split: input backward and weight backward are computed separately.
        kinds: of the measured blocks, those of the zoo's model that they are as
            (:func:`internsp.app.plan.step.block_kinds`); empty: its first ones.
    """

    shape: MeshShape
    first: bool = True
    last: bool = True
    split: bool = False
    kinds: tuple[int, ...] = ()


WHOLE = ModelPart(MeshShape(1))


@dataclass(frozen=True)
class Observed:
    """Measured bytes of one micro-batch on one rank, without messages of a pipeline.

    Attributes:
        batch: token ids, labels and positions.
        kept: from forward to backward, a chunk's output included.
        block: of ``kept``, what the last of the blocks adds.
        forward: at the peak of forward.
        phases: at the peaks of three phases: forward with the loss's backward, the last norm's
            backward, the blocks' backward. Each grows differently with the length.
        between_parts: between input backward and weight backward, where they are separate.
        host: in host memory at the end of forward, by tensor.
        exchanges: at the blocks' peak, in addition to ``kept``: what operators that exchange
            heads, or send keys and values around a ring, have allocated; by kind.
    """

    batch: int
    kept: int
    block: int
    forward: int
    phases: tuple[int, ...]
    between_parts: int
    host: tuple[int, ...]
    exchanges: Mapping[str, int]

    @property
    def peak(self) -> int:
        """At the peak of forward and backward."""
        return max(self.phases)


# What no measurement reads, or what is an argument of its own.
_UNREAD: Mapping[str, Any] = {
    "launch": True, "optimizer": True, "checkpoint": True, "pipeline": True,
    "parallel": {"weight", "sequence", "pipeline", "optimizer_ranks", "expert", "expert_weight"},
    "weight_parallel": {"offload"},
    "train": {"global_batch", "micro_batches"},
    "activation_checkpoint": {"fraction", "blocks", "offload", "tiles"},
}  # fmt: skip


class Observations:
    """Measures steps, each of them once: sharding weights in another way changes no activation."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Observed] = {}
        self._outputs = Outputs()

    def of(
        self, config: Config, rows: int, positions: int, tiles: int, layers: int, again: int,
        offload: Any, part: ModelPart = WHOLE, backward: bool = True,
    ) -> Observed:  # fmt: skip
        """A forward and backward of ``layers`` blocks, ``again`` of which recompute.

        What was measured before is remembered, and so is what each operator returned.

        Args:
            rows: sequences of a micro-batch.
            positions: of this rank.
            offload: ``activation_checkpoint.offload``.
            backward: False where only what forward keeps is needed (a third of the time or less):
                then no peak is that of a backward, and ``between_parts`` is 0.
        """
        told, whole = config.model_dump_json(exclude=_UNREAD), part.shape.pipeline == 1
        where = replace(part, shape=MeshShape(1)), part.shape.sequence_axes, whole
        key = told, rows, positions, tiles, layers, again, offload, where, backward
        if key in self._known:
            return self._known[key]
        model: Any = build_first_layers(config, layers, part.kinds)
        dtype = DTYPES[config.weight_parallel.compute_dtype or config.train.dtype]
        hf, cuda = config.model.family == "hf", device_type(config) == "cuda"
        layout = _layout(config, rows, positions, part.shape, hf)
        held = [tensor.untyped_storage() for _, tensor in _tensors(layout)]
        batch = sum({each._cdata: each.nbytes() for each in held}.values())
        live = LiveBytes(kernel_memory(config) if cuda else {}, None if hf else self._outputs)
        device = "cpu" if hf else "meta"
        with FakeTensorMode(allow_non_fake_inputs=True) if hf else nullcontext():
            _allocate(model, dtype, device)
            if cuda:
                fuse_norms(model, config)
            if not hf:
                made: dict[str, Any] = {name: each.to(device) for name, each in _tensors(layout)}
                layout = replace(layout, **made)
                _attach(model, config, part.shape)
            if not whole:
                model = Chunk(model, range(layers), part.first, part.last)
            link = _UncountedHost(torch.device(device), live)
            activation_offload = ActivationOffload(link, offload, again)
            blocks = config.weight_parallel.blocks if whole else model.block_names()
            structure = read_structure(to_parallelize(model), "qkv", blocks)
            _wrap(structure, config, tiles, again, activation_offload)
            found = [block.module for block in structure.blocks]
            _register_phase_hooks(model, found[-1], live)
            after: list[int] = []
            for block in found[-2:]:
                block.register_forward_hook(lambda *_: after.append(live.now))
            for parameter in model.parameters():
                # Gradients are counted elsewhere, with the weights.
                parameter.register_post_accumulate_grad_hook(lambda own: setattr(own, "grad", None))
            inputs = layout.input_ids
            if not part.first:
                shape = (*inputs.shape, config.model.hidden_size)
                inputs = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
            live.exclude(*(t for _, t in _tensors(layout)), inputs, *model.parameters())
            with skip_packing_detection() if hf else nullcontext(), live:
                output = model(
                    inputs, labels=layout.labels, loss_chunk=config.train.loss_chunk, layout=layout
                )
                if whole:  # the loss, and a count
                    output = output[0]
                kept, forward, host = live.now, live.peak, tuple(link.pieces)
                begun = live.kinds.copy()
                between = _backward(model, inputs, output, part, live) if backward else 0
        phases = [*live.phases, (live.peak, live.at_peak)]
        exchanges = {kind: max(phases[-1][1][kind] - begun[kind], 0) for kind in (HEADS, RING)}
        self._known[key] = Observed(
            batch, kept, after[1] - after[0], forward, tuple(peak for peak, _ in phases), between,
            host, exchanges,
        )  # fmt: skip
        return self._known[key]


def _backward(
    model: Any, inputs: Tensor, output: Tensor, model_part: ModelPart, live: LiveBytes
) -> int:
    """Run backward; return the bytes that live between its two parts, 0 if it has one part."""
    gradient = None
    if not model_part.last:
        gradient = live.uncounted(lambda: torch.empty_like(output))
    if not model_part.split:
        output.backward(gradient)
        return 0
    weights = list(model.parameters())
    upstream = None if gradient is None else [gradient]
    returned, groups = stage_backward_input([output], upstream, [inputs], iter(weights))
    inputs.grad = None
    del returned
    between_parts = live.now
    stage_backward_weight(iter(weights), groups)
    return between_parts


def _register_phase_hooks(model: Any, last: nn.Module, live: LiveBytes) -> None:
    """Begin a new phase of ``live`` when backward reaches the last norm, and the last block."""
    norm = getattr(model, "norm", None)

    def register(_: nn.Module, __: Any, output: Any) -> None:
        first = next(t for t in tree_leaves(output) if isinstance(t, Tensor))
        if first.requires_grad:
            first.register_hook(lambda _: live.end_phase())

    for module in (norm, last):
        if isinstance(module, nn.Module):
            module.register_forward_hook(register)
        else:
            live.phases.append((0, Counter()))


def _wrap(
    found: Structure, config: Config, tiles: int, again: int,
    activation_offload: ActivationOffload,
) -> None:  # fmt: skip
    """Checkpoint the first ``again`` blocks, and make feed-forwards compute in tiles."""
    mode = config.activation_checkpoint
    for number, block in enumerate(found.blocks[:again]):
        context = checkpoint_context_fn if mode.mode == "selective" else None
        group = partial(activation_offload.group, number) if activation_offload.count else None
        checkpoint_block(block.module, mode.reentrant, context, None, group)
    if tiles > 1:
        tiled = mode.model_copy(update={"tiles": tiles})
        tile_all(find_tiled(found, tiled), tiles, ())


def _allocate(model: nn.Module, dtype: torch.dtype, device: str) -> None:
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = made.setdefault(
                    id(parameter),
                    nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device)),
                )
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


# Sequences over several ranks


def _layout(
    config: Config, rows: int, positions: int, shape: MeshShape, alone: bool
) -> SequenceLayout:
    """Layout of the rank with most in flight; if ``alone``, of a rank with unsharded sequences."""
    keys = torch.zeros(rows, dtype=torch.int64)
    if alone:
        ids = torch.zeros(rows, positions, dtype=torch.int64)
        return SequenceLayout.create(ids, row_keys=keys)
    ids = torch.zeros(rows, positions * shape.sequence, dtype=torch.int64)
    axes = shape.sequence_axes
    return SequenceLayout.create(
        ids, rank=axes.rank(_ring_part(config, shape), 0), size=axes.size, ring=axes.ring,
        near=axes.near, balance=balance_of(config, shape), row_keys=keys,
    )  # fmt: skip


def _ring_part(config: Config, shape: MeshShape) -> int:
    """Index in the ring of the rank whose keys and values in flight take most memory, for one
    document. Of the ranks that share its heads, the first has most."""
    if shape.ring == 1:
        return 0
    loads = ring_traffic(config, shape).in_flight
    return loads.index(max(loads))


def _attach(model: nn.Module, config: Config, shape: MeshShape) -> None:
    """Make attention run as one rank of its groups, without sending anything."""
    if shape.sequence == 1:
        return
    axes, part = shape.sequence_axes, _ring_part(config, shape)
    no_group: Any = None
    heads: Any = _SingleRankGroup(no_group, None, 0, axes.heads)
    around: Any = _SingleRankGroup(no_group, None, part, axes.ring) if axes.ring > 1 else None
    for module in model.modules():
        if isinstance(module, DistributedAttention):
            module.attach(
                heads, ring=around, axes=axes, form=config.sequence.ring_form,
                inner=config.sequence.inner_ring,
            )  # fmt: skip


class _CompletedWork:
    """A work handle that is already complete."""

    def wait(self) -> None:
        """Return at once."""


class _SingleRankGroup(ExchangeGroup):
    """One rank of a group whose other ranks do not exist: its collectives send nothing."""

    def all_to_all(
        self, received: Tensor, send: Tensor, receive_counts: Sequence[int],
        send_counts: Sequence[int],
    ) -> _CompletedWork:  # fmt: skip
        """See :meth:`ExchangeGroup.all_to_all`."""
        return _CompletedWork()

    def batch_isend_irecv(
        self, operations: Sequence[tuple[bool, Tensor, int, int]]
    ) -> list[_CompletedWork]:
        """See :meth:`ExchangeGroup.batch_isend_irecv`."""
        return [_CompletedWork() for _ in operations]

    def next_tag(self) -> int:
        """See :meth:`ExchangeGroup.next_tag`."""
        return 0

    def keep(self, tag: int, works: list[Any]) -> None:
        """Nothing is in flight."""

    def release(self, tag: int) -> None:
        """Nothing is in flight."""


# Memory


def _tensors(layout: SequenceLayout) -> list[tuple[str, Tensor]]:
    found = ((each.name, getattr(layout, each.name)) for each in fields(layout))
    return [(name, value) for name, value in found if isinstance(value, Tensor)]


class _UncountedHost(HostLink):
    """Host memory, which is not counted."""

    def __init__(self, device: torch.device, live: LiveBytes) -> None:
        super().__init__(device)
        self._live = live
        self.pieces: list[int] = []

    def empty(self, what: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See :meth:`HostLink.empty`."""
        make = partial(torch.empty, tuple(shape), dtype=dtype, device=self.device)
        made = self._live.uncounted(make)
        self.pieces.append(made.nbytes)
        return made
