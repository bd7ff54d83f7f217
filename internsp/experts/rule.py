"""Weights to tokens or tokens to weights: the bytes of both ways, and which is less. Pure.

A layer's experts are divided among ``p`` ranks, either by cutting each expert (``expert_weight``)
or by giving each rank its own (``expert``). In a micro-batch the first way gathers and reduces
weights, whatever the number of tokens; the second sends each token to ``d`` owners and back, in
forward and in backward, whatever the size of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

COUNTS_BYTES = 9 * 8
"""What a rank tells each owner before it sends tokens."""
_NUMBER_BYTES = 4
FEW_ROWS = 64
"""Products of fewer rows than this read more bytes of weights than they compute with."""


def expected_owners(experts: int, top_k: int, ranks: int) -> float:
    """How many of ``ranks`` own at least one of a token's ``top_k`` experts, chosen at random."""
    others = experts - experts // ranks
    return ranks * (1 - comb(others, top_k) / comb(experts, top_k))


@dataclass(frozen=True)
class ExpertTraffic:
    """One layer of experts, of which one rank has ``tokens`` in a micro-batch.

    Attributes:
        experts, top_k: of the layer, and how many a token passes.
        width: features of a token.
        gathered: bytes that a rank receives of weights and gradients in a micro-batch where each
            expert is cut over the ranks, as the schedule has them.
        ranks: among which the experts are divided.
        token_size, weight_size: bytes of an element of a token and of a router's weight.
        recomputed: whether the layer's tokens are sent once more for a recompute.
    """

    experts: int
    top_k: int
    width: int
    gathered: int
    ranks: int
    tokens: int
    token_size: int
    weight_size: int
    recomputed: bool = False

    @property
    def owners(self) -> float:
        """Expected number of owners of a token."""
        return expected_owners(self.experts, self.top_k, self.ranks)

    @property
    def bytes_of_a_token(self) -> float:
        """Expected bytes that a rank sends for one of its tokens, forward and backward."""
        row, route = self.width * self.token_size, self.top_k * self.weight_size
        there = row + route + self.top_k * _NUMBER_BYTES
        each = there + row + row + row + route  # there, back; its gradients back and there
        if self.recomputed:
            each += there
        return self.owners * (self.ranks - 1) / self.ranks * each

    @property
    def exchanged(self) -> float:
        """Expected bytes that a rank sends in a micro-batch where ranks own experts."""
        counts = COUNTS_BYTES * (self.ranks - 1) * (1 + self.recomputed)
        return self.tokens * self.bytes_of_a_token + counts

    @property
    def threshold(self) -> float:
        """T*: as many tokens of a rank and micro-batch make the two ways equal."""
        return self.gathered / self.bytes_of_a_token

    @property
    def rows_of_an_expert(self) -> float:
        """Expected tokens of an expert on one rank where weights are gathered."""
        return self.tokens * self.top_k / self.experts

    @property
    def exchanges(self) -> bool:
        """Whether tokens should travel.

        Within a factor of 2 the gather is taken: it is hidden behind the block before, while an
        exchange is on the critical path.
        """
        return self.tokens < self.threshold / 2

    def far(self, near: int) -> float:
        """The share of either way's bytes that leaves a machine of ``near`` neighboring ranks."""
        return max(0, self.ranks - near) / (self.ranks - 1)

    def verdict(self) -> str:
        """Which way, and by what margin."""
        if not self.gathered:
            return "weights do not travel: each is too small to be cut (min_shard_elements)"
        ratio = self.exchanged / self.gathered
        if self.exchanges:
            return f"tokens travel (expert = {self.ranks}): {1 / ratio:.1f} times fewer bytes"
        if self.tokens <= 2 * self.threshold:
            return (
                f"weights travel (expert_weight = {self.ranks}): the two tie in bytes (within a "
                "factor of 2), and a gather is hidden"
            )
        return f"weights travel (expert_weight = {self.ranks}): {ratio:.1f} times fewer bytes"
