"""Feed-forwards in tiles of positions, so that the activations of one tile live at a time.

What works position by position may be computed a part of the positions after the other. Forward
keeps the input alone; backward computes each tile once more, with a graph of its own, and drops it
before the next. The weights are taken once for all tiles and have one gradient each: one gather,
one reduction and one turn of the hooks, as without tiles. The number of tiles is a constant of the
configuration, so ranks whose lengths differ run as many, and what communicates within a tile meets
(tiled computation: ALST, arXiv 2506.13996).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from internsp.autograd import no_second_derivatives
from internsp.errors import ConfigError, StructureError
from internsp.layers.parameters import Weights, open_weights, weights_behind
from internsp.plan.tiles import Tiling

ROWS = 16
"""Tiles begin at multiples of so many positions, and none is shorter, so that matrix products round
as they do without tiles."""

Opened = Sequence[tuple[nn.Module, dict[str, Any]]]


def tile_lengths(positions: int, tiles: int) -> list[int]:
    """Positions of each of ``tiles`` tiles; the last ones are empty where there are too few."""
    rows, left = divmod(positions, ROWS)
    each, more = divmod(rows, tiles)
    lengths = [(each + (i < more)) * ROWS for i in range(tiles)]
    lengths[max((i for i, length in enumerate(lengths) if length), default=0)] += left
    return lengths


def tile_all(found: Sequence[Tiling], tiles: int, triggers: Sequence[nn.Module]) -> None:
    """Have each module's forward run in ``tiles`` tiles, after hooks and checkpoints are laid.

    Args:
        triggers: modules before whose forward something is gathered.

    Raises:
        ConfigError: one of them lies inside a tiled module, and would fire in each tile.
    """
    for each in found:
        inside = [module for module in each.module.modules() if module is not each.module]
        wrong = [name for name, m in each.module.named_modules() if m in inside and m in triggers]
        if wrong:
            raise ConfigError(
                f"activation_checkpoint.tiles: the prefetch trigger {wrong[0]} of {each.name} lies "
                "inside what is computed in tiles, and would fire in each: choose another "
                "weight_parallel.trigger, such as out_proj, or leave the module out of "
                "activation_checkpoint.tiled"
            )
    for each in found:
        tile(each.module, each.name, tiles)


def tile(module: nn.Module, name: str, tiles: int) -> None:
    """Have ``module``'s forward run in ``tiles`` tiles of its first argument's positions.

    That argument is ``[..., positions, features]``, the only tensor that it takes, and it returns
    one tensor that begins with the same dimensions and whose positions depend on no others.

    Raises:
        StructureError: from its forward, where it takes or returns something else.
    """
    inner = module.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return Tiles(module, name, tiles, inner)(*args, **kwargs)

    module.forward = forward  # type: ignore[method-assign]


class Tiles:
    """One forward of a module in tiles."""

    def __init__(
        self, module: nn.Module, name: str, tiles: int, inner: Callable[..., Any]
    ) -> None:
        self.module, self.name, self.tiles, self.inner = module, name, tiles, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs all tiles; see :func:`tile`."""
        given, self.others, self.options = self._input(args, kwargs)
        self.lengths = tile_lengths(given.shape[-2], self.tiles)
        opened, guards = _open(self.module)
        self.names = [(module, list(held)) for module, held in opened]
        tensors = [held[name] for (_, held), (_, names) in zip(opened, self.names, strict=True)
                   for name in names]  # fmt: skip
        self.wanted = [t is not None and t.requires_grad for t in tensors]
        output: Tensor
        if torch.is_grad_enabled() and (given.requires_grad or any(self.wanted)):
            # In a recompute torch may stop when the last tensor is kept: here, before the tiles.
            output = _Tiled.apply(self, _Kept.apply(given), *tensors)
        else:
            output = self.run(given, tensors)
        for guard in guards:
            output = guard(output)
        return output

    def _input(self, args: Any, kwargs: Any) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
        others = dict(kwargs)
        given = args[0] if args else others.pop("hidden_states", others.pop("x", None))
        rest = (*args[1:], *others.values())
        if not isinstance(given, Tensor) or given.dim() < 2:
            raise StructureError(
                f"{self.name} is computed in tiles, and its first argument is no tensor "
                "[..., positions, features]: leave it out of activation_checkpoint.tiled"
            )
        if any(isinstance(other, Tensor) for other in rest):
            raise StructureError(
                f"{self.name} is computed in tiles, and takes a second tensor, whose part of "
                "each tile is not known: leave it out of activation_checkpoint.tiled"
            )
        return given, args[1:], others

    def run(self, given: Tensor, tensors: Sequence[Any]) -> Tensor:
        """All tiles, no graph."""
        self.random = _Random(given)
        self.cast = _autocast(given)
        output = None
        with torch.no_grad(), _holding(self.names, tensors):
            start = 0
            for part in given.split(self.lengths, -2):
                made = self.one(part)
                if output is None:
                    shape = (*given.shape[:-1], *made.shape[given.dim() - 1 :])
                    output = made.new_empty(shape)
                output.narrow(given.dim() - 2, start, part.shape[-2]).copy_(made)
                start += part.shape[-2]
                del made
        self.random.drawn()
        assert output is not None, "there is a tile at least"
        return output

    def one(self, part: Tensor) -> Tensor:
        """One tile."""
        made = self.inner(part, *self.others, **self.options)
        if not isinstance(made, Tensor) or made.shape[: part.dim() - 1] != part.shape[:-1]:
            what = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
            raise StructureError(
                f"{self.name} is computed in tiles, and made {what} of {list(part.shape)}, where a "
                "tensor with the same positions is needed: leave it out of "
                "activation_checkpoint.tiled"
            )
        return made

    def backward(
        self, given: Tensor, tensors: Sequence[Any], gradient: Tensor, of_input: bool
    ) -> list[Tensor | None]:
        """Gradients of the input and of the tensors, tile by tile in the order of forward."""
        leaves = [
            t.detach().requires_grad_() if want else t
            for t, want in zip(tensors, self.wanted, strict=True)
        ]
        trained = [leaf for leaf, want in zip(leaves, self.wanted, strict=True) if want]
        total = torch.empty_like(given) if of_input else None
        sums: list[Tensor | None] = [None] * len(trained)
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_holding(self.names, leaves))
            stack.enter_context(self.random.again())
            start, dim = 0, given.dim() - 2
            for length in self.lengths:
                part = given.narrow(dim, start, length).detach().requires_grad_(of_input)
                with self.cast():
                    made = self.one(part)
                found = self._gradients(
                    made, gradient.narrow(dim, start, length), part if of_input else None, trained
                )
                if total is not None:
                    total.narrow(dim, start, length).copy_(found[0])
                _add(sums, found[1:] if of_input else found)
                del made, found
                start += length
        for i, leaf in enumerate(trained):
            each = sums[i]
            sums[i] = None if each is None else each.to(leaf.dtype)
        rest = iter(sums)
        return [total, *(next(rest) if want else None for want in self.wanted)]

    def _gradients(
        self, made: Tensor, gradient: Tensor, part: Tensor | None, trained: Sequence[Tensor]
    ) -> list[Any]:
        wanted = [*([part] if part is not None else []), *trained]
        self._refuse_others(made, wanted)
        if not made.requires_grad:
            return [torch.zeros_like(t) if t is part else None for t in wanted]
        found = list(torch.autograd.grad(made, wanted, gradient, allow_unused=True))
        if part is not None and found[0] is None:
            found[0] = torch.zeros_like(part)
        return found

    def _refuse_others(self, made: Tensor, wanted: Sequence[Tensor]) -> None:
        """A gradient that a tile sends past its module would be lost."""
        known = {id(tensor) for tensor in wanted}
        nodes, seen = [made.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if weights_behind(node) is not None or (leaf is not None and id(leaf) not in known):
                raise StructureError(
                    f"{self.name} is computed in tiles, and reads a trained tensor that is none of "
                    "its own parameters, whose gradient would be lost: leave it out of "
                    "activation_checkpoint.tiled"
                )
            nodes += [following for following, _ in node.next_functions]


def _add(sums: list[Tensor | None], parts: Sequence[Tensor | None]) -> None:
    """A tile's gradients, added in fp32 or wider as one product over all positions would."""
    with torch.no_grad():
        for i, part in enumerate(parts):
            total = sums[i]
            if part is None:
                continue
            if total is None:
                sums[i] = part.to(torch.promote_types(part.dtype, torch.float32))
            else:
                total.add_(part)


class _Kept(torch.autograd.Function):
    """The input itself; keeps it for the tiles' backward."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        ctx.save_for_backward(given)
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tiles: Tiles, given: Tensor, *tensors: Any) -> Tensor:
        ctx.tiles, ctx.tensors = tiles, tensors
        # Views of weights stay on the context: their memory is the slot's, whose version is
        # compared before this node runs (WP-14), and a recompute makes no others.
        ctx.input = given.grad_fn
        if ctx.input is None:
            ctx.save_for_backward(given)
        return tiles.run(given, tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        if torch.is_grad_enabled():
            no_second_derivatives()
        (given,) = ctx.saved_tensors if ctx.input is None else ctx.input.saved_tensors
        return None, *ctx.tiles.backward(given, ctx.tensors, gradient, ctx.needs_input_grad[1])


class _Random:
    """The generators as a forward found them, if it drew from them."""

    def __init__(self, given: Tensor) -> None:
        self.cpu: Tensor | None = torch.get_rng_state()
        self.devices, self.states = get_device_states(given)

    def drawn(self) -> None:
        """The forward is over."""
        assert self.cpu is not None
        if not self.devices and _bytes(self.cpu) == _bytes(torch.get_rng_state()):
            self.cpu = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """What it drew is drawn again inside."""
        if self.cpu is None:
            yield
            return
        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self.cpu)
            set_device_states(self.devices, self.states)
            yield


def _bytes(state: Tensor) -> bytes:
    """Past torch's dispatch, so that a plan runs this on tensors without memory."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _autocast(given: Tensor) -> Callable[[], AbstractContextManager[object]]:
    """What makes autocast what it is now."""
    kind = given.device.type
    on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=on)


def _open(module: nn.Module) -> tuple[Opened, list[Callable[[Any], Any]]]:
    """Take the weights of ``module`` and all below it once."""
    opened, guards = [], []
    for each in module.modules():
        held = each._parameters
        if not held:
            continue
        if isinstance(held, Weights):
            if held.copies:
                raise StructureError(
                    f"{held.owner} keeps a parameter twice (as nn.LSTM does) and lies in what is "
                    "computed in tiles: leave it out of activation_checkpoint.tiled"
                )
            if held.scope.recomputed:
                held.before_recomputed()
        found, guard = open_weights(each)
        opened.append((each, found))
        guards.append(guard)
    return opened, guards


@contextmanager
def _holding(
    names: Sequence[tuple[nn.Module, list[str]]], tensors: Sequence[Any]
) -> Iterator[None]:
    """Inside, the modules hold ``tensors`` in the places of their parameters."""
    before = [module._parameters for module, _ in names]
    values = iter(tensors)
    for module, own in names:
        module.__dict__["_parameters"] = {name: next(values) for name in own}
    try:
        yield
    finally:
        for (module, _), held in zip(names, before, strict=True):
            module.__dict__["_parameters"] = held
