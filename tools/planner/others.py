"""What other programs have and internsp has not: tensor parallelism, attention that is not fused.

Rows of other programs are predicted by the planner's own parts of a step; a block, and the ends of
the model, are changed here by that.
"""

from __future__ import annotations

from dataclasses import replace

from internsp.app.plan import block_seconds as blocks
from internsp.app.plan import seconds
from internsp.app.plan.block_seconds import BlockSeconds
from internsp.app.plan.compute import STREAMED, product, shapes
from internsp.app.plan.devices import Device
from internsp.app.plan.links import Group
from internsp.app.plan.seconds import Computed, Stepped, StepSeconds, composed
from internsp.app.plan.weight_seconds import WeightMessages
from internsp.app.plan.workload import Workload


def step_seconds(load: Workload, device: Device) -> StepSeconds:
    """As :func:`internsp.app.plan.seconds.step_seconds`, of any program."""
    computed = Computed.of(load, device, block_seconds(load, device), ends(load, device))
    sent = WeightMessages.of(load, device)
    return composed(load, device, computed, sent, Stepped.of(load, device))


def block_seconds(load: Workload, device: Device) -> BlockSeconds:
    """What a block takes, with messages of tensor ranks, and with the kernel ``unfused``."""
    again = 1 if load.recompute.products and load.recompute.attention else 0
    tensor, hidden = _tensor(load, device, again)
    found = blocks.block_seconds(load, device)
    if load.habits.kernel == "unfused":
        ahead, behind = _unfused(load, device)
        repeated = load.recompute.attention * ahead
        found = replace(
            found,
            forward=replace(found.forward, attention=ahead),
            backward=replace(found.backward, attention=behind),
            again=replace(found.again, attention=repeated),
        )
    return replace(found, tensor=tensor, hidden_tensor=hidden)


def ends(load: Workload, device: Device) -> tuple[float, float]:
    """Seconds of embedding, head and loss, with messages of tensor ranks."""
    before, after = seconds.ends(load, device)
    sent = _sent_at_ends(load, device)
    return before + sent[0], after + sent[1]


def _tensor(
    load: Workload, device: Device, again: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Messages of tensor parallelism that nothing hides, and those beside products.

    A block has two products whose columns are cut, each with one after it whose rows are cut. With
    parts of sequences, the former gather their input and the latter reduce-scatter their output;
    backward, the latter gather the gradient, and the former gather their input again and
    reduce-scatter its gradient. Else these are all-reduces, of outputs and of inputs' gradients.
    """
    degree, habits = load.degrees.tensor, load.habits
    if degree == 1:
        return (0.0, 0.0), (0.0, 0.0)
    group = Group(degree, 1, device)
    one = group.gather(load.tokens * load.model.hidden * 2)  # half of an all-reduce
    forward = 4 * one
    waits, late = (2 + again * 4) * one, 4 * one  # of row and of column products
    if not habits.tensor_sequence:
        waits = again * 4 * one
    hidden = 0.0
    if habits.tensor_async or habits.tensor_overlap:
        hidden = _beside_gradients(load, device, one)
    first = 1 / degree if habits.tensor_overlap else 1.0  # parts of a product; it waits for one
    return (
        (forward * first, waits * first + late - hidden),
        (forward * (1 - first), waits * (1 - first) + hidden),
    )


def _beside_gradients(load: Workload, device: Device, one: float) -> float:
    """Seconds of messages of column products' backward that run beside their gradients.

    The gather of an input (``one``) has the product for the input's gradient beside it, and the sum
    of that gradient the product for the weight's; an all-reduce has the latter alone.
    """
    found, slower = 0.0, 1 + device.fitted.slowdown
    for (rows, columns, inner), count in shapes(load)[::2]:
        of_input = product(device, rows, inner, columns, load.dtype) * slower
        of_weight = product(device, inner, columns, rows, load.dtype) * slower
        if load.habits.tensor_sequence:
            found += min(one, count * of_input) + min(one, count * of_weight)
        else:
            found += min(2 * one, count * of_weight)
    return found


def _sent_at_ends(load: Workload, device: Device) -> tuple[float, float]:
    """Messages among tensor ranks for the embedding's and the head's rows, and three numbers a
    token for the loss, forward and backward, as in a block. Of a pipeline's ranks, the last's.

    Those of the head's backward run beside its products.
    """
    degrees, habits, alone = load.degrees, load.habits, load.degrees.pipeline == 1
    if degrees.tensor == 1 or habits.traced:  # a sum of traced parts has none of them
        return 0.0, 0.0
    group = Group(degrees.tensor, 1, device)
    one = group.gather(load.tokens * load.model.hidden * 2)
    loss = 3 * group.all_reduce(load.tokens * 4)
    if not habits.tensor_sequence:
        return loss + (2 * one if alone else 0.0), 0.0
    return loss + one + (one if alone else 0.0), one if alone else 0.0


def _unfused(load: Workload, device: Device) -> tuple[float, float]:
    """Two batched products and a softmax over all scores, which are stored."""
    model, degrees = load.model, load.degrees
    heads = load.rows * model.heads / degrees.tensor
    length, size = load.sequence / degrees.context, 2
    inner = model.head_dim
    scores = heads * length * load.sequence
    one = product(device, heads * length, load.sequence, inner, load.dtype)
    other = product(device, heads * length, inner, load.sequence, load.dtype)
    rate = device.bandwidth * STREAMED
    softmax = 2 * size * scores / rate
    dropout = (2 * size + 1) * scores / rate
    forward = one + other + softmax + dropout
    return forward, 2 * (one + other) + (3 * size + 2 * size + 1) * scores / rate
