"""Bytes of a step on one rank of other programs, in closed form: there is no model to plan. Pure.

What internsp needs is planned from the objects that run (:mod:`internsp.app.plan.longest`).
"""

from __future__ import annotations

from internsp.app.plan.workload import Workload

_LOGITS = {"eager": 10, "kernels": 6, "compiled": 6}  # bytes of one logit at the loss


def step_bytes(load: Workload) -> float:
    """Of a rank's device at the peak of a step, as allocated: an allocator reserves more.

    Of the first stage, which has the most passes in flight, or of the last one's head.
    """
    model, degrees, habits = load.model, load.degrees, load.habits
    ends = 1 if model.tied or degrees.pipeline > 1 else 2
    size = {"fp32": 4, "fp64": 8}.get(load.dtype, 2)
    blocks = -(-model.layers // degrees.pipeline)
    dense = (blocks * model.dense_parameters + ends * model.embedding) / degrees.tensor
    experts = blocks * model.experts * model.expert_parameters / degrees.expert
    copies = degrees.data * degrees.context
    over = degrees.sharded
    owners = over if degrees.kind in ("zero3", "zero2") else 1
    if degrees.kind == "zero1":
        owners = degrees.optimizer or copies
    own = dense / owners + experts / max(1, owners // degrees.expert)
    shard = dense / over + experts / max(1, over // degrees.expert)
    whole = degrees.kind in ("zero3", "zero2")
    # A sharded step keeps weights, sums and moments in 32 bits; a program with unsharded weights
    # keeps the weights in the dtype of its products, and masters with the optimizer's state.
    weights = shard * (4 if whole else size)
    gradients = shard * (4 if whole or habits.reduce_bytes == 4 else size)
    optimizer = own * (8 if whole else 12)
    if "optimizer" in load.offload:
        optimizer = 0.0
        if whole:
            weights, gradients = shard * size, shard * size
    if "gradients" in load.offload:
        gradients = 0.0
    if "weights" in load.offload:
        weights = 0.0
    held = weights + gradients + optimizer + _unsharded(load, size)
    inputs, others, working = _activations(load, size)
    kept = others + (0.0 if "activations" in load.offload else inputs)
    loss = load.tokens * model.vocab / degrees.tensor * _LOGITS[habits.fused]
    if "activations" in load.offload or load.recompute.attention:
        loss = min(loss, 2**31)  # such runs compute the loss by parts
    if degrees.pipeline > 1:  # the head is on the last stage, which has one pass in flight
        return held + max(_in_flight(load, kept, blocks), kept * blocks + loss) + working
    return held + kept * blocks + max(working, loss)


def _in_flight(load: Workload, kept: float, blocks: int) -> float:
    """Bytes that the passes in flight keep on the first stage."""
    stages, number, chunks = load.degrees.pipeline, load.micro_batches, load.degrees.interleave
    flying: float = min(stages, number)
    if chunks > 1:
        flying = min(flying + (stages - 1) / chunks, number)
    return kept * blocks * flying


def _unsharded(load: Workload, size: int) -> float:
    """Bytes of gathered weights, and of gradients on their way."""
    model, degrees, habits = load.model, load.degrees, load.habits
    if degrees.sharded == 1 and "weights" not in load.offload:
        return 0.0
    one = (model.dense_parameters + model.experts * model.expert_parameters) / degrees.tensor
    blocks = 2 if degrees.kind == "zero3" else -(-model.layers // degrees.pipeline)
    return blocks * one * size + one * habits.reduce_bytes


def _activations(load: Workload, size: int) -> tuple[float, float, float]:
    """Bytes of a block's input and of what else it keeps for its backward, and of that at work.

    The first two are means of all blocks: those that recompute keep their input only.
    """
    model, tensor, again = load.model, load.degrees.tensor, load.recompute
    tokens = load.tokens
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    width = model.topk * model.expert_ffn + model.shared_ffn if model.experts else model.ffn
    among = tensor if load.habits.tensor_sequence else 1
    gates = 1 + model.gated
    streams = 4 * model.hidden / among  # inputs of both norms and their results
    heads = (2 * q + 2 * kv + 4 * model.heads / size) / tensor
    fed = (gates + 1) * width / tensor
    if load.habits.fused == "eager":
        streams += 4 * model.hidden / among if model.gated else 0  # norms in 32 bits
        fed += model.gated * width / tensor
    whole = tokens * size * (streams + heads + fed)
    if load.habits.kernel == "unfused" and not again.attention:
        scores = load.rows * model.heads / tensor * load.sequence * load.sequence
        whole += scores * (2 * size + 1)
    working = tokens * size * (gates * width / tensor + width / tensor + 2 * model.hidden)
    inputs = tokens * size * model.hidden / among
    if again.attention and again.attention == again.products:  # a share of the blocks, whole
        return again.products * inputs, (1 - again.products) * whole, whole + working
    parts = tokens * size * (streams + again.products * (heads + fed)) if again.passes else 0.0
    out = 0.0
    if again.products == 1:  # attention's result is kept by itself
        out = tokens * size * q / tensor
    return inputs, max(out, whole - parts - inputs), working + max(0.0, parts)
