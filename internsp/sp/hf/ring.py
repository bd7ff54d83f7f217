"""The attention of a ``transformers`` model whose positions are sharded over a ring of ranks.

Plain attention (a causal mask, a window, documents, a scale) is computed by ring attention
(:mod:`internsp.sp.ring`), with the result of the model's own kernel. For anything else (soft caps,
sinks, a bias, a user's mask, dropout) the keys and values of all ranks are gathered, and the
model's own kernel computes this rank's queries with their rows of the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from internsp.errors import StructureError
from internsp.sp.exchange import gather_positions
from internsp.sp.hf.shard import SequenceShard
from internsp.sp.layout import in_order, select_ranges
from internsp.sp.ranges import MaskSpec, count_positions
from internsp.sp.ring import RingGroup

# Kernel options that do not change the result when the mask is known.
_IGNORED_OPTIONS = frozenset({"position_ids", "cache_position", "use_cache", "output_attentions",
                             "output_hidden_states", "output_router_logits"})  # fmt: skip


def gather(ring: RingGroup, x: Tensor, shard: SequenceShard, name: str, role: str) -> Tensor:
    """Gather each rank's ``[B, n, kv, d]`` into ``[B, S, kv, d]``, in sequence order.

    In backward the ranks' gradients of one position are summed.
    """
    lengths = [count_positions(held) for held in shard.ring_ranges]
    whole = gather_positions(x, ring.group, lengths, name, f"all {role}")
    return in_order(whole, shard.ring_ranges)


def mask_rows(
    ring: RingGroup, shard: SequenceShard, make: Callable[..., Any], options: dict[str, Any]
) -> Tensor:
    """The mask of this rank's queries, ``[B, 1, n, S]``, made by a kernel's mask function.

    The mask function may not omit the mask: torch's causal flag counts queries from 0.
    """
    options = options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    held = shard.ring_ranges[ring.group.rank]
    made = [make(q_length=stop - start, q_offset=start, **options) for start, stop in held]
    return torch.cat(made, 2)


def own_mask_rows(
    ring: RingGroup, shard: SequenceShard, given: Tensor | None,
    make: Callable[[], Tensor] | None, name: str, kernel: str,
) -> Tensor:  # fmt: skip
    """The mask rows of this rank's queries: selected from ``given``, or else made by ``make``.

    Raises:
        StructureError: ``kernel`` takes no mask of queries and keys.
    """
    if "flash" in kernel:
        raise StructureError(
            f"{name} asks {kernel} for what a ring of {ring.group.size} does not compute "
            "(a soft cap, sinks, dropout, documents that only the kernel finds, or a mask of "
            "another kind than causal with a window): choose attn_implementation = 'sdpa' or "
            "'eager', or make the mesh with ring = 1"
        )
    if given is not None:
        return select_ranges(given, shard.ring_ranges[ring.group.rank], 2)
    assert make is not None, "a recorded mask exists or has a function that makes it"
    return make()


def is_plain_attention(
    kernel: str, spec: MaskSpec, packed: Tensor | None, options: dict[str, Any]
) -> bool:
    """Whether ``kernel`` with these options computes plain attention with the mask ``spec``.

    False for an eager function, which is the model's own code and may compute anything.
    """
    flash = "flash" in kernel
    if kernel != "sdpa" and not flash:
        return False
    for option, value in options.items():
        if option in ("scaling", *_IGNORED_OPTIONS) or value is None:
            continue
        if option == "is_causal":
            same = value == spec.causal
        elif option == "sliding_window":
            same = not flash or value == spec.window
        else:
            same = not isinstance(value, Tensor) and not value  # such as dropout = 0.0
        if not same:
            return False
    positions = options.get("position_ids")
    # Flash attention finds documents in position_ids.
    if flash and packed is None and isinstance(positions, Tensor):
        return bool((positions.diff(dim=-1) == 1).all())
    return True
