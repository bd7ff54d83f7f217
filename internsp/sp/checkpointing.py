"""Selective activation checkpointing: recompute a block without repeating its all-to-alls.

Results of the exchange and of attention are kept; everything else is recomputed. This is a pair of
dispatch modes, as torch's own ``create_selective_checkpoint_contexts`` is, but torch's raises when
recompute runs an operator that forward did not, and a block whose weights are gathered again does
just that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from internsp.errors import OrderError

_KEPT = frozenset(
    {
        "internsp_sp::start",
        "internsp_sp::finish",
        "internsp_sp::ring",
        "internsp_sp::heads_in_parts",
        "internsp_sp::given_in_parts",
        "internsp_sp::deliver",
        "internsp_sp::collect",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_varlen_forward",
        "flash_attn_3::_flash_attn_forward",
    }
)


def keeps_result(operator: Any) -> bool:
    """Whether selective checkpointing keeps the results of this operator (an ``OpOverload``)."""
    return isinstance(operator, torch._ops.OpOverload) and operator._schema.name in _KEPT


@runtime_checkable
class Held(Protocol):
    """A result that is kept elsewhere."""

    def take(self) -> Tensor:
        """It, as it was."""


def checkpoint_context_fn(
    keep: Callable[[Tensor], Held] | None = None,
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """What ``torch.utils.checkpoint.checkpoint`` takes as ``context_fn``.

    Use it as ``checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_context_fn)``. The
    backward of such a block repeats no exchange and no attention forward. Only non-reentrant
    checkpointing has contexts; a kernel without an operator of its own (see ``keeps_result``) is
    recomputed.

    Args:
        keep: where results of more than one dimension go, and come back from; ``None``: they stay.
    """
    kept: list[tuple[Any, Any, list[int]]] = []
    return _Keep(kept, keep), _Replay(kept)


class _Keep(TorchDispatchMode):
    """Forward: run everything, remember the results of kept operators in order."""

    def __init__(
        self,
        kept: list[tuple[Any, Any, list[int]]],
        keep: Callable[[Tensor], Held] | None = None,
    ) -> None:
        super().__init__()
        self.kept, self.keep = kept, keep
        self.leaving: list[tuple[Any, Tensor, int]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions run as they are."""
        return True

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        # What leaves is copied beside the block's own work: a write until here may be in it.
        leaving, self.leaving = self.leaving, []
        super().__exit__(kind, value, traceback)
        for func, tensor, version in leaving if kind is None else ():
            if tensor._version != version:
                raise _written(func)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if keeps_result(func):
            held = tree_map_only(Tensor, partial(self._hold, func), out)
            self.kept.append((func, held, _versions(held)))
        return out

    def _hold(self, func: Any, tensor: Tensor) -> Any:
        alias = _same_counter(tensor)
        if self.keep is None or not tensor.is_floating_point() or tensor.dim() < 2:
            return alias
        self.leaving.append((func, alias, alias._version))
        return self.keep(alias)


class _Replay(TorchDispatchMode):
    """Recompute: give the remembered results in order, run everything else."""

    def __init__(self, kept: list[tuple[Any, Any, list[int]]]) -> None:
        super().__init__()
        self.kept = kept
        self.position = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions run as they are."""
        return True

    def __enter__(self) -> _Replay:
        # A graph that is kept (retain_graph=True) is recomputed again from its start.
        self.position = 0
        return super().__enter__()  # type: ignore[return-value]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not keeps_result(func):
            return func(*args, **(kwargs or {}))
        name = func._schema.name
        if self.position >= len(self.kept) or self.kept[self.position][0] is not func:
            raise OrderError(
                f"Recompute of a checkpointed block calls {name} where its forward did not. A "
                "block must run the same operators both times; use checkpointing mode 'full'."
            )
        _, held, versions = self.kept[self.position]
        if _versions(held) != versions:
            raise _written(func)
        self.position += 1
        return tree_map(_given, held)


def _given(held: Any) -> Any:
    if isinstance(held, Tensor):
        return held.detach()
    return held.take() if isinstance(held, Held) else held


def _written(operator: Any) -> OrderError:
    return OrderError(
        f"A kept result of {operator._schema.name} was written to in place after it was made. "
        "Write to a clone, or use checkpointing mode 'full'."
    )


def _same_counter(x: Tensor) -> Tensor:
    """An alias that notices writes to the original. Inside a dispatch mode the key that makes
    ``detach`` share the version counter is switched off; torch's own checkpoint does this too."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


def _versions(held: Any) -> list[int]:
    found: list[int] = []
    tree_map_only(Tensor, lambda x: found.append(x._version), held)
    return found
