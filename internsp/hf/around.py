"""The attention of a ``transformers`` model whose positions are cut over a ring of ranks.

What a kernel of ranges computes as the model's own would (a causal mask, a window, documents, a
scale) goes round the ring (:mod:`internsp.sp.ring`). For anything else (soft caps, sinks, a bias, a
mask of the user's, dropout) the keys and values of all ranks are gathered, and the model's own
kernel computes this rank's queries, with their rows of the mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from internsp.errors import StructureError
from internsp.hf.cut import Cut
from internsp.sp.dispatch import by_part
from internsp.sp.exchange import Channel, exchange
from internsp.sp.layout import in_order, taken
from internsp.sp.ranges import Ranges, Seen
from internsp.sp.ring import Rings, ring_attention

# Options of a kernel that change nothing of what is computed once the mask is known.
_WITHOUT_EFFECT = frozenset({"position_ids", "cache_position", "use_cache", "output_attentions",
                             "output_hidden_states", "output_router_logits"})  # fmt: skip


class Around:
    """A ring of ranks, each with some heads of a part of the positions.

    Args:
        channel: of the ranks between which keys and values travel.
        form, inner: how they travel, see :func:`internsp.sp.routes.routes`.
    """

    def __init__(self, channel: Channel, form: str = "auto", inner: int = 1) -> None:
        self.channel = channel
        self.rings = Rings(channel, form, inner)

    def held(self, cut: Cut) -> tuple[Ranges, ...]:
        """The positions of each part."""
        return by_part(cut.ranges, cut.axes)

    def attend(
        self, cut: Cut, seen: Seen, reads: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor,
        scale: float | None, name: str,
    ) -> Tensor:  # fmt: skip
        """``[B, n, h, d of v]`` of this part's ``q [B, n, h, d]``, ``k`` and ``v``."""
        scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
        return ring_attention(self.rings.of(self.held(cut), seen, reads, scale), q, k, v, name)

    def gathered(self, x: Tensor, cut: Cut, name: str, role: str) -> Tensor:
        """``[B, S, kv, d]`` in the order of the sequence, of each part's ``[B, n, kv, d]``.

        In backward the gradients that the parts have of one position are summed.
        """
        held = self.held(cut)
        lengths = [sum(stop - start for start, stop in ranges) for ranges in held]
        everything = (0, x.shape[2]) * self.channel.size
        whole = exchange(
            x, self.channel, lengths, everything, to="heads", unit=name, label=f"all {role}"
        )
        return in_order(whole, held)

    def rows(self, cut: Cut, make: Callable[..., Any], options: dict[str, Any]) -> Tensor:
        """The mask of this part's queries, ``[B, 1, n, S]``, as a kernel's mask function makes it.

        It may not leave the mask out: torch's causal flag counts a part's queries from 0.
        """
        options = options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        held = self.held(cut)[self.channel.rank]
        made = [make(q_length=stop - start, q_offset=start, **options) for start, stop in held]
        return torch.cat(made, 2)

    def rows_of(
        self, cut: Cut, given: Tensor | None, make: Callable[[], Tensor] | None, name: str,
        kernel: str,
    ) -> Tensor:  # fmt: skip
        """The rows of a mask that belong to this part's queries, of a kernel that takes such.

        Raises:
            StructureError: the kernel takes no mask of queries and keys.
        """
        if "flash" in kernel:
            raise StructureError(
                f"{name} asks {kernel} for what a ring of {self.channel.size} does not compute "
                "(a soft cap, sinks, dropout, documents that only the kernel finds, or a mask of "
                "another kind than causal with a window): choose attn_implementation = 'sdpa' or "
                "'eager', or make the mesh with ring = 1"
            )
        if given is not None:
            return taken(given, self.held(cut)[self.channel.rank], 2)
        assert make is not None, "a mask that is handed on is given or can be made"
        return make()


def understood(kernel: str, seen: Seen, packed: Tensor | None, options: dict[str, Any]) -> bool:
    """Whether ``kernel`` with these options computes plain attention of what is ``seen``.

    An eager function is the model's own, and may compute anything.
    """
    flash = "flash" in kernel
    if kernel != "sdpa" and not flash:
        return False
    for option, value in options.items():
        if option in ("scaling", *_WITHOUT_EFFECT) or value is None:
            continue
        if option == "is_causal":
            same = value == seen.causal
        elif option == "sliding_window":
            same = not flash or value == seen.window
        else:
            same = not isinstance(value, Tensor) and not value  # dropout = 0.0, an option set off
        if not same:
            return False
    positions = options.get("position_ids")
    if flash and packed is None and isinstance(positions, Tensor):  # it looks for documents there
        return bool((positions.diff(dim=-1) == 1).all())
    return True
