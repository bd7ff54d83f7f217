"""The attention of a ``transformers`` model over a sequence that is sharded over a group.

``AttentionInterface`` and ``AttentionMaskInterface`` of ``transformers`` are tables by name; a
model's config names the entry that its attention modules look up. :class:`SequenceParallelKernel`
is an entry for one model, with its own name, that wraps the entry which the config named before
(``sdpa``, ``eager``, ``flash_attention_2``, a kernel of the hub, a user's own). One all-to-all
turns ``[B, heads, s, d]`` into ``[B, heads / sp, S, d]``, the wrapped kernel runs on whole
sequences with the whole mask, and a second all-to-all turns the output back (DeepSpeed-Ulysses,
arXiv 2309.14509).
"""

from __future__ import annotations

import itertools
import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from internsp.base.autograd import in_backward
from internsp.errors import LayoutError, StructureError
from internsp.sp.attention import no_heads
from internsp.sp.exchange import ExchangeGroup, start_exchange
from internsp.sp.heads import HeadPlan
from internsp.sp.hf.mask_spec import mask_spec_of
from internsp.sp.hf.ring import gather, is_plain_attention, mask_rows, own_mask_rows
from internsp.sp.hf.shard import SequenceShard
from internsp.sp.kernels import match_kv_heads
from internsp.sp.mixing import class_functions
from internsp.sp.ranges import MaskSpec
from internsp.sp.ring import RingGroup, ring_attention

# Kernel options of an attention module that are of whole sequences already.
_WHOLE_SEQUENCE_OPTIONS = frozenset(
    {"cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "max_length_q", "max_length_k"}
)
_NUMBERS = itertools.count(1)
_plan = lru_cache(maxsize=64)(HeadPlan.create)


@dataclass(frozen=True)
class _MaskRecord:
    """A mask and its forward's shard.

    Attributes:
        shape, stride, offset: of the mask in its storage; ``shape`` is None for a placeholder.
        spec: the mask's rule, if it is known and a ring needs it.
        make_rows: makes the mask rows of this rank's queries; only with a ring.
    """

    shard: SequenceShard
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    spec: MaskSpec | None = None
    make_rows: Callable[[], Tensor] | None = None

    def whole(self, given: Tensor) -> Tensor | None:
        """The complete mask, from ``given``, which a model may have sliced; None: a placeholder."""
        if self.shape is None:
            return None
        return given.as_strided(self.shape, self.stride, self.offset)


class MaskRegistry:
    """The masks of forwards whose graphs exist, each with its :class:`SequenceShard`.

    Masks are found by their storage, since activation checkpointing passes on another tensor
    object. A recompute in backward may belong to a forward that is not the last one. The mask
    identifies that forward: no other argument reaches every attention of every family.
    """

    def __init__(self) -> None:
        self._records: dict[StorageWeakRef, _MaskRecord] = {}

    def add(self, mask: Tensor | None, shard: SequenceShard, **of_ring: Any) -> Tensor:
        """Record ``mask`` and return it; without one, or where it is made later, return a
        placeholder: one element, expanded.

        Args:
            of_ring: ``spec`` and ``make_rows`` of the record.
        """
        if mask is None:
            one = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=shard.positions.device)
            given = one.expand(shard.batch_size, 1, shard.length, shard.length)
            made = _MaskRecord(shard, **of_ring)
        else:
            given, offset = mask, int(mask.storage_offset())
            made = _MaskRecord(shard, tuple(mask.shape), mask.stride(), offset)
        for key in [key for key in self._records if key.expired()]:
            del self._records[key]
        self._records[StorageWeakRef(given.untyped_storage())] = made
        return given

    def find(self, mask: Any) -> _MaskRecord | None:
        """The record of the storage of ``mask``, or None."""
        if not isinstance(mask, Tensor):
            return None
        return self._records.get(StorageWeakRef(mask.untyped_storage()))


class SequenceParallelKernel:
    """The ``AttentionInterface`` entry of one model, which calls the model's own kernel.

    Args:
        names: the model's attention modules, with their names.
        kernel: the implementation that the config named before.
        group: the ranks that share heads; None: each rank has all heads.
        ring: the ring over which positions are sharded; None: no ring.
    """

    def __init__(
        self,
        names: dict[nn.Module, str],
        kernel: str,
        group: ExchangeGroup | None,
        ring: RingGroup | None = None,
    ) -> None:
        self.names, self.plain_name, self.group, self.ring = names, kernel, group, ring
        self.size, self.rank = (1, 0) if group is None else (group.size, group.rank)
        self.masks = MaskRegistry()
        self.shard: SequenceShard | None = None
        """The shard of the forward that is running; None if it is not sharded."""
        self.in_forward = False
        """Whether a forward of the model is running, sharded or not."""
        # Contains the kernel's own name, since models test whether "flash" is in the name.
        self.registered_name = f"internsp_{next(_NUMBERS)}_{kernel}".replace("|", "_")
        self._register()

    def _register(self) -> None:
        """Register the entry with ``transformers``, permanently.

        A config copied from this model's may still name the entry when the model is gone; the entry
        then calls the plain kernel.
        """
        from transformers import AttentionInterface, AttentionMaskInterface

        alive = weakref.ref(self)
        plain = self.plain_name

        @torch.compiler.disable
        def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            kernel = alive()
            if kernel is None or module not in kernel.names:
                return plain_kernel(module, plain)(module, *args, **kwargs)
            return kernel.attend(module, *args, **kwargs)

        def mask(*args: Any, **kwargs: Any) -> Any:
            kernel = alive()
            if kernel is None or kernel.shard is None:
                return plain_mask(plain)(*args, **kwargs)
            return kernel.make_mask(kernel.shard, *args, **kwargs)

        AttentionInterface.register(self.registered_name, attention)
        AttentionMaskInterface.register(self.registered_name, mask)

    def make_mask(
        self,
        shard: SequenceShard,
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
        """Make the mask of the whole batch, from a call with this rank's number of queries.

        The model was given a padding mask of the whole batch (all ones if the user gave none), so
        that only the number of queries and the packed documents are those of this rank; both are
        replaced by those of the batch.

        Raises:
            StructureError: the mask's rule depends on this rank's tokens.
        """
        spec = mask_spec_of(mask_function, shard.documents)
        if (q_length, kv_length, q_offset, kv_offset) != (
            shard.sizes[shard.rank], shard.length, 0, 0
        ) or _holds_token_tensor(mask_function):  # fmt: skip
            raise StructureError(
                f"the model makes an attention mask of its own from {q_length} queries and "
                f"{kv_length} keys, which is not understood where sequences are cut (rank "
                f"{shard.rank} of the sequence group has {shard.sizes[shard.rank]} of "
                f"{shard.length} positions): give it a mask [B, 1, S, S], or make the mesh with "
                "sequence = 1"
            )
        if shard.packed is not None:
            # transformers has functions for this, whose names differ between its versions.
            documents, positions = shard.packed, shard.positions.expand(batch_size, -1)
            rule, allow_is_causal_skip = mask_function, False

            def mask_function(row: Any, head: Any, query: Any, key: Any) -> Any:
                seen = rule(row, head, positions[row, query], positions[row, key])
                return (documents[row, query] == documents[row, key]) & seen

        make = partial(
            plain_mask(self.plain_name),
            batch_size=batch_size,
            kv_length=shard.length,
            kv_offset=0,
            mask_function=mask_function,
            attention_mask=None if shard.mask is None else attention_mask,
        )
        if self.ring is not None:
            make_rows = partial(mask_rows, self.ring, shard, make, options)
            return self.masks.add(None, shard, spec=spec, make_rows=make_rows)
        made = make(
            q_length=shard.length, q_offset=0, allow_is_causal_skip=allow_is_causal_skip, **options
        )
        return self.masks.add(made, shard)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: Any, **options: Any,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """Attention of this rank's queries to all keys.

        Args:
            query: ``[B, heads, s, d]``; ``key``, ``value``: ``[B, key/value heads, s, d]``.
            attention_mask: from :meth:`make_mask`, or the user's ``[B, 1 or heads, S, S]``.

        Returns:
            ``[B, s, heads, d]``, and no attention weights (if the forward is sharded).

        Raises:
            StructureError: shapes or options that are not supported; names the module.
        """
        known = self.masks.find(attention_mask)
        if known is None:
            self._require_unsharded(module)
            return plain_kernel(module, self.plain_name)(  # type: ignore[no-any-return]
                module, query, key, value, attention_mask, **options
            )
        shard, name = known.shard, self.names[module]
        heads, kv_heads = query.shape[1], key.shape[1]
        lengths = {query.shape[2], key.shape[2], value.shape[2]}
        if lengths != {shard.sizes[shard.rank]} or value.shape[1] != kv_heads:
            raise StructureError(
                f"{name} attends from {list(query.shape)} to keys {list(key.shape)} and values "
                f"{list(value.shape)}, but this rank has {shard.sizes[shard.rank]} positions: "
                "attention to other than the model's own tokens cannot be cut"
            )
        plan, ring = _plan(heads, kv_heads, self.size), self.ring
        sizes = shard.sharing
        pending = [
            start_exchange(
                x.transpose(1, 2), self.group, sizes, plan.ranges(role), to="heads", unit=name,
                label=role,
            )
            for role, x in (("q", query), ("k", key), ("v", value))
        ]  # fmt: skip
        q, k, v = (x.wait() for x in pending)
        mine, stop = plan.query[self.rank]
        if stop == mine:
            out = no_heads(q, k, v)
        elif ring is None:
            out = self._run(module, plan, shard, q, k, v, known.whole(attention_mask), options)
        elif known.spec is not None and is_plain_attention(
            self.plain_name, known.spec, shard.packed, options
        ):
            given, kv_index = options.get("scaling"), plan.kv_index(self.rank)
            scale = 1 / math.sqrt(q.shape[3]) if given is None else given
            around = ring.ring(shard.ring_ranges, known.spec, kv_index, scale)
            out = ring_attention(around, q, k, v, name)
        else:
            whole = known.whole(attention_mask)
            mask = own_mask_rows(ring, shard, whole, known.make_rows, name, self.plain_name)
            k, v = (gather(ring, x, shard, name, role) for x, role in ((k, "k"), (v, "v")))
            out = self._run(module, plan, shard, q, k, v, mask, options)
        back = start_exchange(
            out, self.group, sizes, plan.ranges("q"), to="sequence", unit=name, label="out"
        ).wait()
        return back, None

    def _run(
        self, module: nn.Module, plan: HeadPlan, shard: SequenceShard,
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """Call the plain kernel on this rank's heads, ``[B, S, heads, d]`` in and out."""
        k, v, group = match_kv_heads(k, v, plan.kv_index(self.rank))
        heads = slice(*plan.query[self.rank])
        if mask is not None and mask.dim() == 4 and mask.shape[1] == plan.heads > 1:
            mask = mask[:, heads]
        own = _HeadSubset(module, self.names[module], plan.heads, heads, group)
        if group > 1 and not hasattr(own, "num_key_value_groups"):
            k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        kernel = plain_kernel(module, self.plain_name)
        options = {name: self._full_option(own, shard, name, x) for name, x in options.items()}
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = kernel(own, q, k, v, mask, **options)[0]
        return out

    def _full_option(self, own: _HeadSubset, shard: SequenceShard, name: str, value: Any) -> Any:
        """A kernel option for whole sequences and this rank's heads."""
        if not isinstance(value, Tensor) or not value.dim() or name in _WHOLE_SEQUENCE_OPTIONS:
            return value
        if (
            name == "position_ids"
            and value.shape[-1] == shard.sizes[shard.rank]
            and value.dim() == 2
        ):
            return shard.positions.expand(value.shape[0], -1)
        return own._select_heads(name, value)

    def _require_unsharded(self, module: nn.Module) -> None:
        """Check that this forward is not sharded: every rank computes the whole batch."""
        name = self.names[module]
        if self.shard is not None and not in_backward():
            raise StructureError(
                f"{name} attends with a mask that was not made by the model's mask function "
                "(AttentionMaskInterface), and so knows this rank's tokens only: make the mesh "
                "with sequence = 1"
            )
        if not self.in_forward and not in_backward():
            raise LayoutError(
                f"{name} runs outside a forward of the model: sequences are cut at the entry of "
                "the transformers model, so call that, not a part of it"
            )


class _HeadSubset:
    """Stands for an attention module in its kernel's call, on a rank that has some of the heads."""

    def __init__(
        self, module: nn.Module, name: str, number: int, heads: slice, groups: int
    ) -> None:
        self._module, self._name, self._number, self._heads = module, name, number, heads
        if hasattr(module, "num_key_value_groups"):
            self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return self._select_heads(name, value) if isinstance(value, Tensor) else value

    def _select_heads(self, name: str, value: Tensor) -> Tensor:
        if value.dim() == 1 and len(value) == self._number:  # such as attention sinks
            return value[self._heads]
        raise StructureError(
            f"{self._name} gives its kernel a tensor {name} {list(value.shape)}, of which it is "
            "not known what it is where sequences are cut: make the mesh with sequence = 1"
        )


def plain_kernel(module: nn.Module, name: str) -> Any:
    """The kernel that ``module`` would call if its config named ``name``.

    Raises:
        StructureError: ``name`` is ``eager``, and the module's file has no such function.
    """
    source_module = sys.modules[type(module).__module__]
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    table = getattr(source_module, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    eager = eager_function(module)
    if name == "eager" and eager is None:
        raise StructureError(
            f"the eager attention of {type(module).__name__} cannot be found: choose another "
            "attn_implementation when the model is made, such as 'sdpa'"
        )
    return table.get_interface(name, eager)


def eager_function(module: nn.Module) -> Any:
    """The eager attention function that a method of ``module`` names, or None."""
    for function in class_functions(type(module)):
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


def _holds_token_tensor(function: Any, depth: int = 6) -> bool:
    """Whether a mask's rule, or a nested closure, holds a tensor with a position dimension."""
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        for value in held if isinstance(held, tuple) else (held,):
            if isinstance(value, Tensor) and value.dim() > 1:
                return True
            if depth and callable(value) and _holds_token_tensor(value, depth - 1):
                return True
    return False
