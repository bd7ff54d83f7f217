"""What a step computes and how it is distributed: the input of the planner's seconds. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelShape:
    """The shape of a transformer.

    Attributes:
        gated: the feed-forward has three matrices instead of two.
        tied: the head is the embedding.
        experts: 0: dense. ``topk`` of them, each ``expert_ffn`` wide, take a token, beside a
            feed-forward of ``shared_ffn`` that all tokens pass.
    """

    layers: int
    hidden: int
    ffn: int
    gated: bool
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0

    @property
    def attention_parameters(self) -> int:
        """Of one block."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (2 * q + 2 * kv)

    @property
    def expert_parameters(self) -> int:
        """Of one expert of one block."""
        return (2 + self.gated) * self.hidden * self.expert_ffn

    @property
    def dense_parameters(self) -> int:
        """Of one block, without experts."""
        width = self.shared_ffn if self.experts else self.ffn
        ffn = (2 + self.gated) * self.hidden * width
        return self.attention_parameters + ffn + 2 * self.hidden

    @property
    def tensors(self) -> int:
        """Parameters, without those of experts; q, k and v are one, and there are no biases."""
        return self.layers * (6 + self.gated) + (2 if self.tied else 3)

    @property
    def embedding(self) -> int:
        """Of the embedding; a head that is not tied has as many."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        block = self.dense_parameters + self.experts * self.expert_parameters
        return self.layers * block + self.embedding * (1 if self.tied else 2)


@dataclass(frozen=True)
class Degrees:
    """Over how many devices what is cut: their product is the number of devices.

    Attributes:
        weight: weights are sharded over ``weight`` x ``context`` where ``kind`` says so.
        kind: ``zero3``: weights, gradients and optimizer are sharded; ``zero2``: weights stay
            unsharded from forward to backward; ``zero1``: the optimizer only; ``none``.
        optimizer: ranks that share the optimizer's state; 0: all that have the same weights.
        tensor: each product is cut over as many.
        pipeline, interleave: stages, and chunks of each.
        v_shaped: of two chunks, the second goes back through the stages, and backwards are split
            into gradients of inputs and of weights (ZBVZeroBubble).
        context: each sequence is cut over as many; ``ring`` of them by a ring, the rest by heads.
        expert: experts are divided among as many.
        expert_shards: ranks over which each expert is sharded, neighbors; 0: as other weights, over
            their ranks / ``expert``.
        owners_near: the owners of different experts are neighbors instead.
        expert_optimizer: ranks that share the state of a shard of an expert.
        replicas: copies of the sharded weights.
        shards: ranks over which a weight is sharded, where that is not ``weight`` x ``context``.
        ring_near: the ring has the neighboring ranks, and heads are exchanged between others.
    """

    devices: int
    weight: int = 1
    kind: str = "none"
    optimizer: int = 0
    tensor: int = 1
    pipeline: int = 1
    interleave: int = 1
    context: int = 1
    ring: int = 1
    expert: int = 1
    expert_shards: int = 0
    owners_near: bool = False
    expert_optimizer: int = 1
    replicas: int = 1
    shards: int = 0
    ring_near: bool = False
    v_shaped: bool = False

    @property
    def copies(self) -> int:
        """Ranks that hold the same shard of the same weight."""
        return max(1, self.devices // (self.tensor * self.pipeline * self.sharded))

    @property
    def expert_copies(self) -> int:
        """Ranks that hold the same shard of the same expert, where ``expert_shards`` is given."""
        stage = self.devices // (self.tensor * self.pipeline)
        return max(1, stage // (self.expert * self.expert_shards))

    @property
    def owners_stride(self) -> int:
        """Distance of the owners of different experts, in ranks."""
        if not self.expert_shards:
            return self.tensor * self.context
        return 1 if self.owners_near else self.expert_shards

    @property
    def expert_stride(self) -> int:
        """Distance of the ranks of ``expert_shards``."""
        return self.expert if self.owners_near else 1

    @property
    def data(self) -> int:
        """Ranks with different sequences."""
        return self.weight * self.replicas

    @property
    def sharded(self) -> int:
        """Ranks over which weights are sharded and gathered."""
        if self.kind not in ("zero3", "zero2"):
            return 1
        return self.shards or self.weight * self.context


@dataclass(frozen=True)
class Habits:
    """How a program trains: facts about it, none of them fitted.

    Attributes:
        fused: element-wise operations of a block are fused: ``eager`` (none), ``kernels`` (norms,
            activations, rotations and the loss have kernels of their own), ``compiled``.
        kernel: of attention.
        gather_bytes, reduce_bytes: of one element in a weight gather and a gradient reduction.
        keeps_gathers: a pipeline gathers its weights once a step.
        whole_recompute: a recompute computes the block's last product, too.
        tensor_sequence: between products, tensor ranks hold parts of the sequence.
        tensor_overlap: messages of tensor parallelism run beside the products.
        tensor_async: in the backward of a product whose columns are cut, the gather of its input
            runs beside the gradient of the input, and the sum of this beside that of the weight.
        overlaps: gathers and reductions run beside computation.
        owners: with ``zero1`` no parameter is cut: gradients are all-reduced, and each rank sends
            those that it owns in a broadcast of its own, beside which nothing is computed.
        launches: seconds of the host for a block's forward; the device never runs ahead of it.
        launches_behind: of a block's backward, in those of its forward.
        traced: a step is a sum of traced parts: no message runs beside launches, and those between
            stages are whole and leave the near domain.
        passes, cut_passes: bytes a token and hidden feature of further element-wise passes, forward
            and backward; tensor ranks divide the latter.
        accumulates: bytes of memory traffic an element of a gradient takes in each micro-batch.
        context_balanced: each part of a sequence has as much of causal attention as others.
        once_an_owner: a token travels once to each owner of its experts, not once to each expert,
            and a recompute sends no results.
        sends_ahead: messages between stages run beside computation.
        collectives: in which a block's weights travel.
        loss: bytes that the loss moves for a logit, forward and backward; zeros: as ``fused`` has
            it.
        balances_head: blocks are divided among stages so that those with fewer have the head, as
            :func:`internsp.pipeline.chunks.split_model` does; else evenly.
        reduce_near: gradients are summed among so many neighbors first, and their sums between
            them; 0: among all at once; ``None``: among a near domain's, where that sends less.
        sends_parts: a reduction sends each rank its part, which it sums; else round a ring.
        reduces_in_ring: within a weight group it goes round a ring all the same.
        shard_bytes, sum_bytes, state_bytes: of one element of a weight's shard, of its gradient's
            sum, and of the optimizer's state with masters; 0: as the kind of sharding has it.
        step_bytes: that the optimizer's step moves for an element; 0: as ``fused`` has it.
        passes_state: the device steps what is in host memory, which comes and goes at once.
    """

    fused: str = "eager"
    kernel: str = "flash2"
    gather_bytes: int = 2
    reduce_bytes: float = 4
    keeps_gathers: bool = False
    whole_recompute: bool = False
    tensor_sequence: bool = True
    tensor_overlap: bool = False
    tensor_async: bool = False
    overlaps: bool = True
    owners: bool = False
    launches: float = 0.0004
    launches_behind: float = 1.6
    traced: bool = False
    passes: tuple[int, int] = (0, 0)
    cut_passes: tuple[int, int] = (0, 0)
    accumulates: int = 12
    context_balanced: bool = True
    once_an_owner: bool = False
    sends_ahead: bool = False
    collectives: int = 1
    loss: tuple[int, int] = (0, 0)
    balances_head: bool = False
    reduce_near: int | None = 0
    sends_parts: bool = False
    reduces_in_ring: bool = False
    shard_bytes: int = 0
    sum_bytes: int = 0
    state_bytes: int = 0
    step_bytes: int = 0
    passes_state: bool = False


@dataclass(frozen=True)
class Recompute:
    """What a backward computes again.

    Attributes:
        products: share of the products of blocks.
        attention, passes: attention, and element-wise passes, are computed again; shares.
    """

    products: float = 0.0
    attention: float = 0.0
    passes: float = 0.0


@dataclass(frozen=True)
class Workload:
    """A step.

    Attributes:
        sequence: tokens.
        rows: sequences of a micro-batch on one rank.
        micro_batches: of a step.
        dtype: of the products (``"bf16"``).
        offload: what is kept in host memory.
        tiled: feed-forwards are computed in parts of the sequence, and those again in backward.
    """

    model: ModelShape
    degrees: Degrees
    sequence: int
    rows: int
    micro_batches: int
    dtype: str = "bf16"
    recompute: Recompute = field(default_factory=Recompute)
    habits: Habits = field(default_factory=Habits)
    offload: frozenset[str] = frozenset()
    tiled: bool = False

    @property
    def tokens(self) -> float:
        """Tokens that one rank computes in a micro-batch, before tensor parallelism."""
        return self.rows * self.sequence / self.degrees.context

    @property
    def step_tokens(self) -> float:
        """Tokens of a step, over all devices."""
        return self.rows * self.sequence * self.degrees.data * self.micro_batches
