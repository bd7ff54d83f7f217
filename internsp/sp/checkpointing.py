"""Selective activation checkpointing: recompute a block without repeating its all-to-alls.

The results of exchanges and of attention are kept, and of every ``topk`` the indices, so that a
recompute sends each token to the same experts; everything else is recomputed. The context is a pair
of dispatch modes, like torch's ``create_selective_checkpoint_contexts``. torch's raises when
recompute runs an operator that forward did not run, and a block whose weights are all-gathered
again does that.
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
        "internsp_sp::project_qkv",
        "internsp_sp::exchange_qkv",
        "internsp_sp::send_out",
        "internsp_sp::receive_out",
        "internsp_experts::start",
        "internsp_experts::finish",
        "aten::topk",  # its indices alone: models normalize its values in place
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_varlen_forward",
        "flash_attn_3::_flash_attn_forward",
    }
)

_CHOICE = "aten::topk"


def keeps_result(operator: Any) -> bool:
    """Whether selective checkpointing keeps the results of this operator (an ``OpOverload``)."""
    return isinstance(operator, torch._ops.OpOverload) and operator._schema.name in _KEPT


@runtime_checkable
class Offloaded(Protocol):
    """A kept result that has been moved elsewhere, for example to the host."""

    def unpack(self) -> Tensor:
        """Return the tensor, with its values and on its device."""


def checkpoint_context_fn(
    keep: Callable[[Tensor], Offloaded] | None = None,
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """The ``context_fn`` of ``torch.utils.checkpoint.checkpoint``.

    Use it as ``checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_context_fn)``. The
    backward of such a block repeats no exchange and no attention forward. Only non-reentrant
    checkpointing has contexts; a kernel without an operator of its own (see ``keeps_result``) is
    recomputed.

    Args:
        keep: moves a result of more than one dimension elsewhere until recompute needs it;
            ``None``: results stay where they are.
    """
    kept: _Kept = []
    return _Keep(kept, keep), _Replay(kept)


_Kept = list[tuple[Any, Any, list[int]]]
"""In order: an operator, its results, and their versions when they were made."""


class _Mode(TorchDispatchMode):
    """Runs compiled regions unchanged."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self.kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Keep(_Mode):
    """Forward: run everything, and keep the results of the listed operators in order."""

    def __init__(self, kept: _Kept, keep: Callable[[Tensor], Offloaded] | None) -> None:
        super().__init__(kept)
        self.keep = keep
        self.offloading: list[tuple[Any, Tensor, int]] = []

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        # Results are copied while the block runs: a write to one of them may be in the copy.
        offloading, self.offloading = self.offloading, []
        super().__exit__(kind, value, traceback)
        for func, tensor, version in offloading if kind is None else ():
            if tensor._version != version:
                raise _write_error(func)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if keeps_result(func):
            result = out[1] if func._schema.name == _CHOICE else out
            held = tree_map_only(Tensor, partial(self._hold, func), result)
            self.kept.append((func, held, _versions(held)))
        return out

    def _hold(self, func: Any, tensor: Tensor) -> Any:
        alias = _alias(tensor)
        if self.keep is None or not tensor.is_floating_point() or tensor.dim() < 2:
            return alias
        self.offloading.append((func, alias, alias._version))
        return self.keep(alias)


class _Replay(_Mode):
    """Recompute: return the kept results in order, and run everything else."""

    def __enter__(self) -> _Replay:
        # Also where a graph that is kept (retain_graph=True) is recomputed again.
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
                "block must run the same operators both times."
            )
        _, held, versions = self.kept[self.position]
        if _versions(held) != versions:
            raise _write_error(func)
        self.position += 1
        restored = tree_map(_restored, held)
        if name != _CHOICE:
            return restored
        dim = args[2] if len(args) > 2 else -1
        return torch.return_types.topk((args[0].gather(dim, restored), restored))


def _restored(held: Any) -> Any:
    if isinstance(held, Tensor):
        return held.detach()
    return held.unpack() if isinstance(held, Offloaded) else held


def _write_error(operator: Any) -> OrderError:
    return OrderError(
        f"A kept result of {operator._schema.name} was written to in place after it was made. "
        "Write to a clone."
    )


def _alias(x: Tensor) -> Tensor:
    """A detached alias that shares the version counter, so that writes to the original show.

    Inside a dispatch mode, the dispatch key that makes ``detach`` share the counter is off; torch's
    own selective checkpointing turns it on in the same way.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


def _versions(held: Any) -> list[int]:
    found: list[int] = []
    tree_map_only(Tensor, lambda x: found.append(x._version), held)
    return found
