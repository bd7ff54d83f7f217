"""Seconds of a block's computation on one device: products, attention, element-wise passes. Pure.

A product is cut into tiles that multiprocessors compute in waves; a partly filled last tile takes
as long as a full one. Element-wise operations read and write memory: their bytes are counted pass
by pass, for operations of torch one by one (``eager``), for a program's own kernels (``kernels``),
and for what a compiler fuses (``compiled``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from internsp.app.plan.devices import Device
from internsp.app.plan.workload import ModelShape, Workload

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.78), (64, 64, 0.6))
"""Rows and columns of a tile, and the share of a large tile's rate: less reuse of what is read."""
_FILL = 2e-6  # seconds until a wave's first operands have come
STREAMED = 0.85  # share of the memory's bandwidth that long reads and writes reach
_NARROW = 0.85  # products of 8 bits reach so much of the share that those of 16 bits reach
_ACTIVATION = {"eager": (10, 18), "kernels": (6, 10), "compiled": (6, 10)}
"""Bytes a token and feature of a gated feed-forward, forward and backward."""
_SHORT = 256  # tokens of a sequence at which attention reaches half of its rate


@dataclass(frozen=True)
class Work:
    """Seconds of one micro-batch on one device, by what they are spent on."""

    products: float = 0.0
    attention: float = 0.0
    passes: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.products + self.attention + self.passes


@lru_cache(maxsize=100_000)
def product(device: Device, rows: float, columns: float, inner: float, dtype: str) -> float:
    """Seconds of ``[rows, inner] @ [inner, columns]``: reads run beside it, writes after it."""
    peak = device.peak[dtype] * device.fitted.products * (_NARROW if dtype == "fp8" else 1)
    size = {"fp8": 1, "fp32": 4, "fp64": 8}.get(dtype, 2)
    rate = device.bandwidth * STREAMED
    reads = (rows * inner + inner * columns) * size / rate
    writes = rows * columns * max(size, 2) / rate
    units, found = device.multiprocessors, math.inf
    if units == 1:
        return max(2 * rows * columns * inner / peak, reads + writes)
    for high, wide, share in _TILES:
        tiles = math.ceil(rows / high) * math.ceil(columns / wide)
        step = units * 2 * high * wide / (peak * share)
        found = min(found, _waves(tiles / units) * (step * inner + _FILL))
        for parts in (2, 4):  # of the inner dimension, if all are computed at once; summed after
            if tiles * parts <= units:
                summed = parts * rows * columns * 8 / rate
                found = min(found, step * inner / parts + _FILL + summed)
    return max(found, reads) + writes


def _waves(full: float) -> float:
    """How long the tiles of ``full`` waves take, in waves: no multiprocessor waits for the others,
    so that those without a tile in the last wave save half of it; one tile takes a whole one."""
    return max(1.0, (full + math.ceil(full)) / 2)


def attention(load: Workload, device: Device) -> tuple[float, float]:
    """Seconds of one block's attention, forward and backward, over one rank's share."""
    model, degrees = load.model, load.degrees
    heads = model.heads / degrees.tensor
    rows = load.rows
    length = load.sequence / degrees.context
    done = 4 * rows * heads * length * load.sequence * model.head_dim / 2  # what is not masked
    if not load.habits.context_balanced:  # the last part of a sequence sees the most of it
        done *= 2 - 1 / degrees.context
    # Blocks of 128 queries of each head are computed in waves.
    full = rows * heads * math.ceil(length / 128) / device.multiprocessors
    reached = load.sequence / (load.sequence + _SHORT) * full / _waves(full)
    forward, backward = device.attention_rates(load.habits.kernel, model.head_dim)
    return done / (forward * reached), 2.5 * done / (backward * reached)


def block_products(load: Workload, device: Device) -> tuple[float, float]:
    """Seconds of one block's products forward, and of the last of them."""
    each = [product(device, *shape, load.dtype) * count for shape, count in shapes(load)]
    return sum(each), each[-1]


def fed(load: Workload, device: Device) -> Work:
    """Of a block's forward, its feed-forward, which is no mixture: what tiles compute again."""
    products = sum(product(device, *shape, load.dtype) * n for shape, n in shapes(load)[-2:])
    size = {"fp32": 2.0, "fp64": 4.0}.get(load.dtype, 1.0)
    moved = _ACTIVATION[load.habits.fused][0] * load.model.ffn / load.degrees.tensor
    return Work(products, 0.0, load.tokens * moved * size / (device.bandwidth * STREAMED))


def block_products_backward(load: Workload, device: Device) -> float:
    """Seconds of the gradients of inputs and of weights of one block's products."""
    found = 0.0
    for (rows, columns, inner), count in shapes(load):
        found += count * product(device, rows, inner, columns, load.dtype)
        found += count * product(device, inner, columns, rows, load.dtype)
    return found


def shapes(load: Workload) -> list[tuple[tuple[float, float, float], float]]:
    """(rows, columns, inner dimension) of one block's products on one rank, and how many."""
    model, tensor = load.model, load.degrees.tensor
    rows, hidden = load.tokens, model.hidden
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    found = [((rows, (q + 2 * kv) / tensor, hidden), 1.0), ((rows, hidden, q / tensor), 1.0)]
    if model.experts:
        own = max(1.0, model.experts / load.degrees.expert)
        each = rows * model.topk / own  # balanced: as many tokens go out as come in
        width = model.expert_ffn / tensor
        found += [((each, (1 + model.gated) * width, hidden), own), ((each, hidden, width), own)]
    width = (model.shared_ffn if model.experts else model.ffn) / tensor
    if width:
        found += [
            ((rows, (1 + model.gated) * width, hidden), 1.0),
            ((rows, hidden, width), 1.0),
        ]
    return found


def passes(load: Workload, device: Device) -> tuple[float, float]:
    """Seconds of one block's element-wise operations, forward and backward."""
    model, habits, tensor = load.model, load.habits, load.degrees.tensor
    # Bytes a token and hidden feature: norms and residuals; a feature of the feed-forward; a
    # rotated feature of queries and keys. Operands have two bytes.
    norms, norms_back = {"eager": (20, 36), "kernels": (18, 30), "compiled": (16, 24)}[habits.fused]
    act, act_back = _ACTIVATION[habits.fused]
    turn, turn_back = {"eager": (20, 20), "kernels": (4, 4), "compiled": (4, 4)}[habits.fused]
    if model.gated and habits.fused == "eager":
        norms, norms_back = norms + 56, norms_back + 56  # root mean squares in fp32, one by one
    if not model.gated:
        act, act_back, turn, turn_back = 4, 6, 0, 0  # an activation, no rotation
    norms, norms_back = norms + habits.passes[0], norms_back + habits.passes[1]
    cut, cut_back = (more * model.hidden / tensor for more in habits.cut_passes)
    rotated = (model.heads + model.kv_heads) * model.head_dim / tensor
    whole = model.topk * model.expert_ffn + model.shared_ffn if model.experts else model.ffn
    width = whole / tensor
    among = tensor if habits.tensor_sequence else 1
    forward = norms * model.hidden / among + act * width + turn * rotated + cut
    back = norms_back * model.hidden / among + act_back * width + turn_back * rotated + cut_back
    if model.experts:
        forward += 8 * model.topk * model.hidden  # to the experts' order and back
        back += 8 * model.topk * model.hidden
    if load.dtype == "fp8":
        q, kv = model.heads * model.head_dim / tensor, model.kv_heads * model.head_dim / tensor
        gates = 1 + model.gated
        forward += 4 * (2 * model.hidden + q + width)  # read, written twice: as is and transposed
        back += 4 * (2 * model.hidden + q + 2 * kv + gates * width)
    size = {"fp32": 2.0, "fp64": 4.0}.get(load.dtype, 1.0)
    rate = device.bandwidth * STREAMED / size
    return load.tokens * forward / rate, load.tokens * back / rate


def head(load: Workload, device: Device) -> tuple[Work, Work]:
    """Seconds of the head and loss, forward and backward."""
    model, tensor = load.model, load.degrees.tensor
    dtype = "bf16" if load.dtype == "fp8" else load.dtype
    columns = model.vocab / tensor
    out = product(device, load.tokens, columns, model.hidden, dtype)
    back = product(device, load.tokens, model.hidden, columns, dtype)
    back += product(device, model.hidden, columns, load.tokens, dtype)
    each = {"eager": (16, 14), "kernels": (14, 10), "compiled": (8, 4)}[load.habits.fused]
    if any(load.habits.loss):
        each = load.habits.loss
    rate = device.bandwidth * STREAMED
    logits = load.tokens * columns
    return Work(out, 0, each[0] * logits / rate), Work(back, 0, each[1] * logits / rate)


def model_flops(model: ModelShape, sequence: int, causal: bool = True) -> float:
    """Operations of a forward and backward a token, without recompute, by the usual count."""
    active = model.layers * (model.dense_parameters + model.topk * model.expert_parameters)
    products_ = 6 * (active + model.embedding)
    over = 12 * model.layers * model.heads * model.head_dim * sequence
    return products_ + over / (2 if causal else 1)
