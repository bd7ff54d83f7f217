"""Partition a model into the chunks of a pipeline; the module of one chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from internsp.errors import StructureError
from internsp.layers.dropout import block_keys
from internsp.sp import token_loss
from internsp.structure.rules import own_rules, rules_of_chunk


class SplittableModel(Protocol):
    """Attributes that a module needs to be partitioned; all families of the model zoo have them."""

    loss_options: dict[str, Any]

    @property
    def embed(self) -> nn.Module:
        """Token ids to hidden states."""

    @property
    def layers(self) -> nn.ModuleList:
        """Blocks, each called with hidden states, rotary tables and layout."""

    @property
    def norm(self) -> nn.Module:
        """Normalization between the last block and the head."""

    @property
    def head(self) -> nn.Module:
        """Hidden states to logits."""

    @property
    def rotary(self) -> Callable[..., Any]:
        """Makes rotary tables from a tensor ``[B, s]``, the layout and a dtype."""


PARTS = ("embed", "layers", "norm", "head", "rotary", "loss_options")
"""The attributes of a :class:`SplittableModel`."""


@dataclass(frozen=True)
class MicroBatch:
    """Arguments of one micro-batch for the chunks of a rank.

    Attributes:
        inputs: positional arguments of the first stage (token ids ``[B, s]``).
        options: keyword arguments of every chunk: layout, labels, loss_chunk.
    """

    inputs: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


class Chunk(nn.Module):
    """Consecutive blocks of a model; the first chunk also has the embedding, the last the head.

    Parameters keep the names that they have in the model, so that initial values, checkpoints and
    optimizer state do not depend on how the model was partitioned.

    Args:
        blocks: indices of the chunk's blocks.
        first: whether the chunk has the embedding and takes token ids.
        last: whether the chunk has the head and returns the summed loss.
    """

    def __init__(self, model: SplittableModel, blocks: range, first: bool, last: bool) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.blocks = blocks
        self.total = len(model.layers)
        if first:
            self.embed = model.embed
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in blocks})
        if last:
            self.norm, self.head = model.norm, model.head
        self.loss_options: dict[str, Any] = model.loss_options
        self._rotary = model.rotary
        self._token_keys = getattr(model, "token_keys", None)  # models of the zoo, for dropout
        self.weight_parallel_plan = rules_of_chunk(self, own_rules(model))

    def forward(
        self,
        x: Tensor,
        *,
        layout: Any = None,
        labels: Tensor | None = None,
        loss_chunk: int = 1024,
    ) -> Tensor:
        """Run the chunk's blocks, and its embedding before or its head after them.

        Args:
            x: token ids ``[B, s]`` on the first stage, else hidden states ``[B, s, hidden]``.
            layout: this rank's part of the sequences; needed for sharded or packed sequences.
            labels: ``[B, s]``. With labels the last stage returns the summed loss, without them
                logits.

        Returns:
            Hidden states ``[B, s, hidden]``; from the last stage the loss, a scalar, or logits
            ``[B, s, vocabulary]``, both in ``promote_types(dtype, float32)``.
        """
        h: Tensor = self.embed(x) if self.first else x
        rotary = self._rotary(h.detach()[..., 0], layout, h.dtype)
        tokens = None
        if self.training and self._token_keys is not None:
            tokens = self._token_keys(h, layout)
        for number, block in zip(self.blocks, self.layers.values(), strict=True):
            keys = () if tokens is None else (block_keys(tokens, number + 1),)
            h = block(h, rotary, layout, *keys)
        if not self.last:
            return h
        h = self.norm(h)
        if labels is None:
            logits: Tensor = self.head(h)
            return logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss, _ = token_loss(
            h, self.head, labels, chunk_tokens=loss_chunk, layout=layout, **self.loss_options
        )
        return loss

    def block_names(self) -> tuple[str, ...]:
        """Names of the blocks within this chunk, as patterns for ``weight_parallel.blocks``."""
        return tuple(f"layers.{i}" for i in self.blocks)


def split_model(model: SplittableModel, stages: int) -> list[range]:
    """Blocks of each of ``stages`` stages, balanced by cost.

    The cost of a block is its number of multiplications for one token. The head costs a third more
    than its multiplications, since its logits are computed again in backward. The embedding is a
    lookup and costs nothing.

    Raises:
        StructureError: there are fewer blocks than stages, or the model lacks a part.
    """
    if missing := [part for part in PARTS if not hasattr(model, part)]:
        raise StructureError(
            f"{type(model).__name__} has no {', '.join(missing)}: a pipeline splits a model with "
            f"{', '.join(PARTS)}. Give it these, as the zoo's models do, or make the stages "
            "yourself (docs/howto/pipeline.md)"
        )
    blocks = len(model.layers)
    if blocks < stages:
        raise StructureError(
            f"{blocks} blocks cannot be split into {stages} chunks (pipeline ranks x chunks a "
            "rank) of one block or more; choose fewer stages or chunks, or more layers"
        )
    head = 4 * _multiplications(model.head) / 3
    return partition_costs([_multiplications(block) for block in model.layers], stages, head)


def partition_costs(costs: Sequence[float], parts: int, tail: float = 0.0) -> list[range]:
    """Partition ``costs`` into ``parts`` consecutive, non-empty ranges.

    The sum of the squared costs of the ranges is minimal.

    Args:
        tail: cost that is added to the last range (the head's).
    """
    count = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best: dict[tuple[int, int], tuple[float, int]] = {(0, 0): (0.0, 0)}
    for part in range(1, parts + 1):
        for end in range(part, count - (parts - part) + 1):
            extra = tail if part == parts else 0.0
            options = [
                (best[part - 1, start][0] + (sums[end] - sums[start] + extra) ** 2, start)
                for start in range(part - 1, end)
                if (part - 1, start) in best
            ]
            # Among equal costs prefer more blocks in earlier parts: the last one has the head.
            best[part, end] = min(options, key=lambda option: (option[0], -option[1]))
    cuts = [count]
    for part in range(parts, 0, -1):
        cuts.append(best[part, cuts[-1]][1])
    cuts.reverse()
    return [range(a, b) for a, b in pairwise(cuts)]


def _multiplications(module: nn.Module) -> float:
    return float(sum(p.numel() for p in module.parameters() if p.dim() > 1))
