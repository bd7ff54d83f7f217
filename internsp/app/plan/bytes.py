"""Bytes of a step on one rank, in closed form: what a search prunes by, and tables check. Pure.

The plan that is printed counts the same components from the objects that run
(:mod:`internsp.app.plan.step`); this form needs no model and takes microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from internsp.app.plan.workload import Workload

_LOGITS = {"eager": 10, "kernels": 6, "compiled": 6}  # bytes of one logit at the loss


@dataclass(frozen=True)
class StepBytes:
    """Bytes of a rank's device at the peak of a step, by component."""

    weights: float
    gradients: float
    optimizer: float
    unsharded: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        """All of it, as allocated: an allocator reserves more."""
        return (
            self.weights + self.gradients + self.optimizer + self.unsharded + self.activations
            + self.working
        )


def step_bytes(load: Workload) -> StepBytes:
    """Bytes of the first stage, which has the most passes in flight, or of the last one's head.

    Of a V, the first rank has both ends, and the others have more messages.
    """
    model, degrees = load.model, load.degrees
    if not degrees.v_shaped:
        tied = model.tied or degrees.pipeline > 1
        most = -(-model.layers // (degrees.pipeline * degrees.interleave))
        return _rank_bytes(load, 1 if tied else 2, [most] * degrees.interleave)
    stages = 2 * degrees.pipeline
    most, fewest = -(-model.layers // stages), model.layers // stages
    inner = _rank_bytes(load, 0, [most, most])
    outer = _rank_bytes(load, 1 if model.tied else 2, [most, fewest])
    return max(inner, outer, key=lambda one: one.total)


def _rank_bytes(load: Workload, ends: int, chunks: list[int]) -> StepBytes:
    """Bytes of a rank.

    Args:
        ends: weights as large as the embedding that it has.
        chunks: blocks of each of its chunks, at most.
    """
    model, degrees, habits = load.model, load.degrees, load.habits
    size = {"fp32": 4, "fp64": 8}.get(load.dtype, 2)
    blocks = -(-model.layers // degrees.pipeline)
    if degrees.v_shaped and ends:
        blocks = sum(chunks)
    dense = (blocks * model.dense_parameters + ends * model.embedding) / degrees.tensor
    experts = blocks * model.experts * model.expert_parameters / degrees.expert
    copies = degrees.data * degrees.context
    over = degrees.sharded
    owners = over if degrees.kind in ("zero3", "zero2") else 1
    if degrees.kind == "zero1":
        owners = degrees.optimizer or copies
    few = degrees.expert_shards or max(1, owners // degrees.expert)
    own = dense / owners + experts / few
    held = dense / over + experts / (degrees.expert_shards or max(1, over // degrees.expert))
    whole = degrees.kind in ("zero3", "zero2")
    # A sharded step keeps weights, sums and moments in 32 bits; a program with unsharded weights
    # keeps the weights in the dtype of its products, and masters with the optimizer's state.
    weights = held * (habits.shard_bytes or (4 if whole else size))
    sums = 4 if whole or habits.reduce_bytes == 4 else size
    gradients = held * (habits.sum_bytes or sums)
    if habits.shard_bytes and degrees.optimizer:  # copies divide the state further
        own = dense / over / degrees.optimizer + experts / few / degrees.expert_optimizer
    optimizer = own * (habits.state_bytes or (8 if whole else 12))
    if "optimizer" in load.offload:
        optimizer = 0.0
        if whole and not habits.shard_bytes:
            weights, gradients = held * size, held * size
    if "gradients" in load.offload:
        gradients = 0.0
    if "weights" in load.offload:
        weights = 0.0
    gradients += _exchanged(load, ends, chunks)
    unsharded = _unsharded(load, size, ends)
    inputs, others, working = _activations(load, size)
    kept = others + (0.0 if "activations" in load.offload else inputs)
    logits = load.loss_chunk or load.tokens
    each = _LOGITS["eager" if habits.shard_bytes else habits.fused]
    loss = min(logits, load.tokens) * model.vocab / degrees.tensor * each
    # What the head gets, before and after its norm.
    outer = 2 * load.tokens * model.hidden * size if habits.shard_bytes else 0.0
    if "activations" in load.offload or load.recompute.attention:
        loss = min(loss, 2**31)  # such runs compute the loss by parts
    if degrees.pipeline > 1:  # the head is on the last stage, which has one pass in flight
        last = kept * blocks + outer + loss
        flying = _in_flight(load, kept, blocks, size)
        if degrees.v_shaped and ends:
            last = _in_flight_of_both_ends(load, kept, chunks, size) + outer
            return StepBytes(
                weights, gradients, optimizer, unsharded, last, max(working, loss)
            )
        return StepBytes(
            weights, gradients, optimizer, unsharded, max(flying, last), working
        )
    kept = kept * blocks + outer
    return StepBytes(weights, gradients, optimizer, unsharded, kept, max(working, loss))


def _in_flight_of_both_ends(
    load: Workload, kept: float, chunks: list[int], size: int
) -> float:
    """Bytes of :func:`_in_flight` on the first rank of a V: it has a neighbor for each chunk."""
    stages, number = load.degrees.pipeline, load.micro_batches
    blocks = min(2 * stages - 1, number) * chunks[0] + chunks[1]
    message = number * load.tokens * load.model.hidden * size / load.degrees.tensor
    return blocks * kept + (2 + 1) * message


def _in_flight(load: Workload, kept: float, blocks: int, size: int) -> float:
    """Bytes that the passes in flight keep on the fullest stage, and messages between stages.

    torch has a receive buffer for each micro-batch and neighbor of a chunk; what schedules but 1F1B
    sent stays until the step ends.
    """
    degrees, number, chunks = load.degrees, load.micro_batches, load.degrees.interleave
    stages = degrees.pipeline
    first: float = min(stages, number) * kept * blocks
    if not load.habits.shard_bytes:  # another program's stages
        if chunks > 1:
            flying = min(min(stages, number) + (stages - 1) / chunks, number)
            return kept * blocks * flying
        return first
    # A pass keeps its output, and its input where that is in no receive buffer.
    one = load.tokens * load.model.hidden * size / degrees.tensor
    message = number * one
    if degrees.v_shaped:
        # Between the two parts of a backward, a chunk keeps gradients, too.
        parted = _returned(load, size) * (1 - load.recompute.products)
        several = min(2 * stages - 1, number) * (kept + parted) * blocks / 2
        return max(first + parted * blocks / 2, several) + (4 + 2) * message
    if chunks > 1:
        flying = min(min(stages, number) + (stages - 1) / chunks, number)
        sent = min(chunks, number / (2 * stages))
        entered = min(2 * stages - 1, number) * one
        return kept * blocks * flying + (2 * chunks - 1 + sent) * message + entered
    second = min(stages - 1, number) * kept * blocks + message * (2 if stages > 2 else 1)
    return max(first + message + min(stages, number) * one, second)


def _returned(load: Workload, size: int) -> float:
    """Bytes of the gradients that a block's products receive and return."""
    model, tensor = load.model, load.degrees.tensor
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    width = model.topk * model.expert_ffn + model.shared_ffn if model.experts else model.ffn
    gates = 1 + model.gated
    return load.tokens * size * (2 * model.hidden + (q + 2 * kv + (gates + 1) * width) / tensor)


def _exchanged(load: Workload, ends: int, chunks: list[int]) -> float:
    """Bytes of the buffers in which ranks with the same shard exchange sums of gradients.

    One for each length; where the state is divided, two of a length are in flight, with two each.
    """
    model, degrees, habits = load.model, load.degrees, load.habits
    if not habits.sum_bytes:
        return 0.0
    over, divided = degrees.sharded, degrees.optimizer > 1
    several = sum(2 * min(2, number) for number in chunks)
    found = model.dense_parameters / over * (several if divided else len(chunks))
    found += model.embedding / over * (2 * ends if divided else min(1, ends))
    if model.experts:
        own = model.experts * model.expert_parameters / (degrees.expert * degrees.expert_shards)
        found += own * (several if degrees.expert_optimizer > 1 else len(chunks))
    return found * habits.sum_bytes


def _unsharded(load: Workload, size: int, ends: int) -> float:
    """Bytes of gathered weights, and of gradients on their way."""
    model, degrees, habits = load.model, load.degrees, load.habits
    if degrees.sharded == 1 and "weights" not in load.offload:
        return 0.0
    own = 0.0 if degrees.expert_shards == 1 else model.experts * model.expert_parameters
    one = (model.dense_parameters + own / (degrees.expert if degrees.expert_shards else 1))
    one /= degrees.tensor
    if not habits.shard_bytes:
        blocks = 2 if degrees.kind == "zero3" else -(-model.layers // degrees.pipeline)
        return blocks * one * size + one * habits.reduce_bytes
    # Each chunk has two blocks' slots, and those of the ends; the two largest units' gradients, and
    # what they sum.
    outer = [model.embedding] * ends
    largest = sorted([*outer, one, one])[-2:]
    chunks = degrees.interleave
    slots = (2 * chunks * one + sum(outer)) * size
    return slots + 2 * chunks * sum(largest) * habits.reduce_bytes


def _activations(load: Workload, size: int) -> tuple[float, float, float]:
    """Bytes of a block's input and of what else it keeps for its backward, and of that at work.

    The first two are means of all blocks: those that recompute keep their input only.
    """
    model, tensor, again = load.model, load.degrees.tensor, load.recompute
    habits = load.habits
    tokens = load.tokens
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    width = model.topk * model.expert_ffn + model.shared_ffn if model.experts else model.ffn
    among = tensor if load.habits.tensor_sequence else 1
    gates = 1 + model.gated
    streams = 4 * model.hidden / among  # inputs of both norms and their results
    heads = (2 * q + 2 * kv + 4 * model.heads / size) / tensor
    fed = (gates + 1) * width / tensor
    by_heads = habits.shard_bytes and load.degrees.context > load.degrees.ring
    if by_heads:  # attention's result, as its ranks computed it and as it came back
        heads += q
    if load.habits.fused == "eager":
        streams += 4 * model.hidden / among if model.gated else 0  # norms in 32 bits
        fed += model.gated * width / tensor
    if load.habits.keeps_rotated:
        heads += (q + kv) / tensor
    if load.habits.keeps_activated:
        fed += model.gated * width / tensor
    if habits.shard_bytes:  # tokens in the experts' order, and what the experts return
        fed += 2 * model.topk * model.hidden
    whole = tokens * size * (streams + heads + fed)
    if load.habits.kernel == "unfused" and not again.attention:
        scores = load.rows * model.heads / tensor * load.sequence * load.sequence
        whole += scores * (2 * size + 1)
    working = tokens * size * (gates * width / tensor + width / tensor + 2 * model.hidden)
    if habits.shard_bytes and not model.experts:  # beside what the block kept and has freed
        working = max(0.0, tokens * size * 2 * (width - model.hidden))
    inputs = tokens * size * model.hidden / among
    if again.attention and again.attention == again.products:  # a share of the blocks, whole
        return again.products * inputs, (1 - again.products) * whole, whole + working
    parts = tokens * size * (streams + again.products * (heads + fed)) if again.passes else 0.0
    out = 0.0
    if again.products == 1:  # attention's result is kept by itself, and its sums are
        out = tokens * size * (q + (4 * model.heads / size if habits.shard_bytes else 0)) / tensor
        if by_heads:
            out += tokens * size * (2 * q + 2 * kv)
    again_now = parts - out if habits.shard_bytes else parts
    return inputs, max(out, whole - parts - inputs), working + max(0.0, again_now)
