"""The attention of a ``transformers`` model over a sequence that is cut over a group.

``AttentionInterface`` and ``AttentionMaskInterface`` of ``transformers`` are tables by name; a
model's config says which entry its attention modules look up. :class:`Kernel` is an entry of this
model alone, under a name of its own, around the entry that the config named before (``sdpa``,
``eager``, ``flash_attention_2``, a kernel of the hub, a user's own). One all-to-all turns ``[B,
heads, s, d]`` into ``[B, heads / sp, S, d]``, that kernel runs on whole sequences with the whole
mask, and a second all-to-all turns the result back (DeepSpeed-Ulysses, arXiv 2309.14509).
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from internsp.autograd import in_backward
from internsp.errors import LayoutError, StructureError
from internsp.hf.around import Around, understood
from internsp.hf.cut import Cut
from internsp.hf.seen import seen_by
from internsp.sp.attention import no_heads
from internsp.sp.exchange import Channel, exchange, start_exchange
from internsp.sp.heads import HeadPlan
from internsp.sp.kernels import group_size
from internsp.sp.mixing import methods
from internsp.sp.ranges import Seen

# What an attention module may hand to its kernel that speaks of whole sequences already.
_OF_THE_WHOLE = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "max_length_q",
                           "max_length_k"})  # fmt: skip
_NUMBERS = itertools.count(1)
_plan = lru_cache(maxsize=64)(HeadPlan.create)


@dataclass(frozen=True)
class _Mask:
    """A mask made for a cut, found again by its memory: a checkpoint hands on another object.

    Attributes:
        shape: None where what is handed on only stands for it.
        seen: what it says, where that is known and asked for.
        rows: makes it, of this rank's part of the queries; where positions are cut.
    """

    cut: Cut
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    seen: Seen | None = None
    rows: Callable[[], Tensor] | None = None

    def whole(self, given: Tensor) -> Tensor | None:
        """The mask as it was made, from ``given``, which a model may have sliced."""
        if self.shape is None:
            return None
        return given.as_strided(self.shape, self.stride, self.offset)


class Masks:
    """The masks of the forwards that live, each with its :class:`Cut`.

    A recompute in backward belongs to a forward that may not be the last one. The mask that it is
    given says which: nothing else reaches every attention of every family.
    """

    def __init__(self) -> None:
        self._known: dict[StorageWeakRef, _Mask] = {}

    def remember(self, mask: Tensor | None, cut: Cut, device: torch.device) -> Tensor:
        """``mask``, or what stands for "the kernel needs none"."""
        if mask is None:
            return self.stand_in(_Mask(cut), device)
        made = _Mask(cut, tuple(mask.shape), mask.stride(), int(mask.storage_offset()))
        return self._keep(mask, made)

    def stand_in(self, made: _Mask, device: torch.device) -> Tensor:
        """What stands for a mask that is not made, or not yet: one element, seen as a whole."""
        cut, one = made.cut, torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        return self._keep(one.expand(cut.batch, 1, cut.length, cut.length), made)

    def _keep(self, mask: Tensor, made: _Mask) -> Tensor:
        for key in [key for key in self._known if key.expired()]:
            del self._known[key]
        self._known[StorageWeakRef(mask.untyped_storage())] = made
        return mask

    def find(self, mask: Any) -> _Mask | None:
        """What was remembered of the memory in which ``mask`` lies."""
        if not isinstance(mask, Tensor):
            return None
        return self._known.get(StorageWeakRef(mask.untyped_storage()))


class Kernel:
    """What one model's attention modules find in place of their kernel.

    Args:
        names: the model's attention modules, with their names.
        kernel: what the config named so far.
        channel: of the ranks that share heads; None: one rank has them all.
        around: of the ranks between which keys and values travel; None: positions are not cut.
    """

    def __init__(
        self,
        names: dict[nn.Module, str],
        kernel: str,
        channel: Channel | None,
        around: Around | None = None,
    ) -> None:
        self.names, self.kernel, self.channel, self.around = names, kernel, channel, around
        self.size, self.rank = (1, 0) if channel is None else (channel.size, channel.rank)
        self.masks = Masks()
        self.current: Cut | None = None
        """The cut of the forward that runs now."""
        self.entered = False
        """A forward of the model runs, cut or not."""
        # The kernel's own name is in it, since models ask whether it has "flash" in it.
        self.key = f"internsp_{next(_NUMBERS)}_{kernel}".replace("|", "_")
        self._register()

    def _register(self) -> None:
        """For good: a config that was copied from this model's may name it after the model's end,
        and finds the plain kernel then."""
        from transformers import AttentionInterface, AttentionMaskInterface

        alive = weakref.ref(self)
        plain = self.kernel

        @torch.compiler.disable
        def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            kernel = alive()
            if kernel is None or module not in kernel.names:
                return plain_kernel(module, plain)(module, *args, **kwargs)
            return kernel.attend(module, *args, **kwargs)

        def mask(*args: Any, **kwargs: Any) -> Any:
            kernel = alive()
            if kernel is None or kernel.current is None:
                return plain_mask(plain)(*args, **kwargs)
            return kernel.make_mask(kernel.current, *args, **kwargs)

        AttentionInterface.register(self.key, attention)
        AttentionMaskInterface.register(self.key, mask)

    def make_mask(
        self,
        cut: Cut,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: Any,
        q_offset: int = 0,
        kv_offset: int = 0,
        attention_mask: Tensor | None = None,
        allow_is_causal_skip: bool = True,
        **options: Any,
    ) -> Tensor:
        """The whole batch's mask, from a call that names this rank's number of queries.

        The model was given a padding mask of the whole batch, all ones where the user gave none, so
        that only the number of queries and packed documents are this rank's: both are put right.

        Raises:
            StructureError: the mask's rule is made of tokens of this rank.
        """
        seen = seen_by(mask_function, cut.documents)
        if (q_length, kv_length, q_offset, kv_offset) != (
            cut.sizes[cut.rank], cut.length, 0, 0
        ) or _of_tokens(mask_function):  # fmt: skip
            raise StructureError(
                f"the model makes an attention mask of its own from {q_length} queries and "
                f"{kv_length} keys, which is not understood where sequences are cut (rank "
                f"{cut.rank} of the sequence group has {cut.sizes[cut.rank]} of {cut.length} "
                "positions): give it a mask [B, 1, S, S], or make the mesh with sequence = 1"
            )
        if cut.packed is not None:
            mask_function = _within_documents(
                mask_function, cut.positions.expand(batch_size, -1), cut.packed
            )
            allow_is_causal_skip = False
        make = partial(
            plain_mask(self.kernel),
            batch_size=batch_size,
            kv_length=cut.length,
            kv_offset=0,
            mask_function=mask_function,
            attention_mask=None if cut.mask is None else attention_mask,
        )
        device = cut.positions.device
        if self.around is not None:
            rows = partial(self.around.rows, cut, make, options)
            return self.masks.stand_in(_Mask(cut, seen=seen, rows=rows), device)
        made = make(
            q_length=cut.length, q_offset=0, allow_is_causal_skip=allow_is_causal_skip, **options
        )
        return self.masks.remember(made, cut, device)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: Any, **options: Any,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """Attention of this rank's queries to all keys.

        Args:
            query: ``[B, heads, s, d]``; ``key``, ``value``: ``[B, key/value heads, s, d]``.
            attention_mask: of :meth:`make_mask`, or the user's ``[B, 1 or heads, S, S]``.

        Returns:
            ``[B, s, heads, d]``, and no attention weights (where the pass is cut).

        Raises:
            StructureError: something that is not understood, with the module's name.
        """
        known = self.masks.find(attention_mask)
        if known is None:
            self._require_whole(module)
            return plain_kernel(module, self.kernel)(  # type: ignore[no-any-return]
                module, query, key, value, attention_mask, **options
            )
        cut, name = known.cut, self.names[module]
        heads, kv_heads = query.shape[1], key.shape[1]
        lengths = {query.shape[2], key.shape[2], value.shape[2]}
        if lengths != {cut.sizes[cut.rank]} or value.shape[1] != kv_heads:
            raise StructureError(
                f"{name} attends from {list(query.shape)} to keys {list(key.shape)} and values "
                f"{list(value.shape)}, but this rank has {cut.sizes[cut.rank]} positions: "
                "attention to other than the model's own tokens cannot be cut"
            )
        plan, around = _plan(heads, kv_heads, self.size), self.around
        sizes = cut.sharing
        pending = [
            start_exchange(
                x.transpose(1, 2), self.channel, sizes, heads_of, to="heads", unit=name, label=role
            )
            for role, x, heads_of in (
                ("q", query, plan.query_cut()), ("k", key, plan.kv_cut()),
                ("v", value, plan.kv_cut()),
            )
        ]  # fmt: skip
        q, k, v = (x.wait() for x in pending)
        mine, stop = plan.query[self.rank]
        if stop == mine:
            out = no_heads(q, k, v)
        elif around is None:
            out = self._run(module, plan, cut, q, k, v, known.whole(attention_mask), options)
        elif known.seen is not None and understood(self.kernel, known.seen, cut.packed, options):
            reads = plan.key_value_of(self.rank)
            out = around.attend(cut, known.seen, reads, q, k, v, options.get("scaling"), name)
        else:
            mask = around.rows_of(cut, known.whole(attention_mask), known.rows, name, self.kernel)
            k, v = (around.gathered(x, cut, name, role) for x, role in ((k, "k"), (v, "v")))
            out = self._run(module, plan, cut, q, k, v, mask, options)
        back = exchange(
            out, self.channel, sizes, plan.query_cut(), to="sequence", unit=name, label="out"
        )
        return back, None

    def _run(
        self, module: nn.Module, plan: HeadPlan, cut: Cut, q: Tensor, k: Tensor, v: Tensor,
        mask: Tensor | None, options: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """The plain kernel on this rank's heads, ``[B, S, heads, d]`` in and out."""
        reads = plan.key_value_of(self.rank)
        group = group_size(reads, k.shape[2])
        if group is None:  # heads that share no key/value head alike: one for each
            index = torch.tensor(reads, device=k.device)
            k, v, group = k.index_select(2, index), v.index_select(2, index), 1
        heads = slice(*plan.query[self.rank])
        if mask is not None and mask.dim() == 4 and mask.shape[1] == plan.heads > 1:
            mask = mask[:, heads]
        own = _OwnHeads(module, self.names[module], plan.heads, heads, group)
        if group > 1 and not hasattr(own, "num_key_value_groups"):
            k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        kernel = plain_kernel(module, self.kernel)
        options = {name: self._whole(own, cut, name, x) for name, x in options.items()}
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = kernel(own, q, k, v, mask, **options)[0]
        return out

    def _whole(self, own: _OwnHeads, cut: Cut, name: str, value: Any) -> Any:
        """An option of the kernel as it is for whole sequences and this rank's heads."""
        if not isinstance(value, Tensor) or not value.dim() or name in _OF_THE_WHOLE:
            return value
        if name == "position_ids" and value.shape[-1] == cut.sizes[cut.rank] and value.dim() == 2:
            return cut.positions.expand(value.shape[0], -1)
        return own._of_heads(name, value)

    def _require_whole(self, module: nn.Module) -> None:
        """A pass that is not cut: every rank computes the whole batch, and it is known to be so."""
        name = self.names[module]
        if self.current is not None and not in_backward():
            raise StructureError(
                f"{name} attends with a mask that was not made by the model's mask function "
                "(AttentionMaskInterface), and so knows this rank's tokens only: make the mesh "
                "with sequence = 1"
            )
        if not self.entered and not in_backward():
            raise LayoutError(
                f"{name} runs outside a forward of the model: sequences are cut at the entry of "
                "the transformers model, so call that, not a part of it"
            )


class _OwnHeads:
    """An attention module as its kernel sees it on a rank that has some of its heads."""

    def __init__(
        self, module: nn.Module, name: str, number: int, heads: slice, groups: int
    ) -> None:
        self._module, self._name, self._number, self._heads = module, name, number, heads
        if hasattr(module, "num_key_value_groups"):
            self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return self._of_heads(name, value) if isinstance(value, Tensor) else value

    def _of_heads(self, name: str, value: Tensor) -> Tensor:
        if value.dim() == 1 and len(value) == self._number:  # such as attention sinks
            return value[self._heads]
        raise StructureError(
            f"{self._name} gives its kernel a tensor {name} {list(value.shape)}, of which it is "
            "not known what it is where sequences are cut: make the mesh with sequence = 1"
        )


def plain_kernel(module: nn.Module, name: str) -> Any:
    """What ``module`` would call if its config said ``name``.

    Raises:
        StructureError: it is ``eager`` and the module's file has no such function.
    """
    home = sys.modules[type(module).__module__]
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    table = getattr(home, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    eager = eager_function(module)
    if name == "eager" and eager is None:
        raise StructureError(
            f"the eager attention of {type(module).__name__} cannot be found: choose another "
            "attn_implementation when the model is made, such as 'sdpa'"
        )
    return table.get_interface(name, eager)


def eager_function(module: nn.Module) -> Any:
    """The function that ``module`` falls back on, which its methods name."""
    for function in methods(type(module)):
        names = function.__code__.co_names
        if "get_interface" in names:
            for name in names:
                if "eager" in name and callable(found := function.__globals__.get(name)):
                    return found
    return None


def plain_mask(name: str) -> Any:
    """The mask function that goes with the kernel ``name``."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return ALL_MASK_ATTENTION_FUNCTIONS[name]


def _within_documents(rule: Any, positions: Tensor, packed: Tensor) -> Any:
    """A mask's rule for packed documents: each sees itself alone, by positions of its own.

    What ``transformers`` does by functions that have other names in each of its versions.

    Args:
        rule: of (row, head, query, key), each an index or a tensor of them.
        positions: ``[B, S]``, of every token in its document.
        packed: ``[B, S]``, the number of every token's document.
    """

    def inside(row: Any, head: Any, query: Any, key: Any) -> Any:
        seen = rule(row, head, positions[row, query], positions[row, key])
        return (packed[row, query] == packed[row, key]) & seen

    return inside


def _of_tokens(function: Any, depth: int = 6) -> bool:
    """Whether a mask's rule holds a tensor with a position dimension (its closures, nested)."""
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        for value in held if isinstance(held, tuple) else (held,):
            if isinstance(value, Tensor) and value.dim() > 1:
                return True
            if depth and callable(value) and _of_tokens(value, depth - 1):
                return True
    return False
