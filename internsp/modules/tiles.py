"""Computes feed-forwards in tiles of positions, so that only one tile's activations live at a time.

A module whose positions do not depend on each other can be computed for a part of the positions
after the other. Forward saves only the input; backward recomputes each tile with a graph of its
own, and frees it before the next tile. The weights are unsharded once for all tiles and have one
gradient each: one gather, one reduction and one call of the hooks, as without tiles. The number of
tiles is a constant of the configuration, so that ranks with different lengths run equally many, and
collectives within a tile match (tiled computation: ALST, arXiv 2506.13996).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from internsp.base.autograd import no_second_derivatives
from internsp.errors import ConfigError, StructureError
from internsp.modules.parameters import Weights, open_weights, weights_behind
from internsp.modules.wrapping import Forward, Wrapping
from internsp.structure.tiles import Tiling

ROWS = 16
"""Tiles start at multiples of this number of positions, and none is shorter, so that matrix
products round as they do without tiles."""

UnshardedParameters = Sequence[tuple[nn.Module, dict[str, Any]]]


def tile_lengths(positions: int, tiles: int) -> list[int]:
    """Positions of each of ``tiles`` tiles; the last tiles may be empty."""
    rows, left = divmod(positions, ROWS)
    each, more = divmod(rows, tiles)
    lengths = [(each + (i < more)) * ROWS for i in range(tiles)]
    lengths[max((i for i, length in enumerate(lengths) if length), default=0)] += left
    return lengths


def tile_all(found: Sequence[Tiling], tiles: int, triggers: Sequence[nn.Module]) -> None:
    """Make each module's forward run in ``tiles`` tiles; call after registering all hooks.

    Args:
        triggers: the prefetch triggers.

    Raises:
        ConfigError: a prefetch trigger is inside a tiled module, and would fire in each tile.
    """
    for each in found:
        inside = [module for module in each.module.modules() if module is not each.module]
        wrong = [name for name, m in each.module.named_modules() if m in inside and m in triggers]
        if wrong:
            raise ConfigError(
                f"activation_checkpoint.tiles: the prefetch trigger {wrong[0]} of {each.name} lies "
                "inside what is computed in tiles, and would fire in each: choose another "
                "weight_parallel.gather_before, such as out_proj, or leave the module out of "
                "activation_checkpoint.tiled_modules"
            )
    for each in found:
        tile(each.module, each.name, tiles)


def tile(module: nn.Module, name: str, tiles: int) -> None:
    """Make ``module``'s forward run in ``tiles`` tiles of its first argument's positions.

    The first argument is ``[..., positions, features]`` and the only tensor. The output is one
    tensor that begins with the same dimensions, and each of its positions depends on the same
    position of the input only.

    Raises:
        StructureError: in the forward, if the module takes or returns something else.
    """

    def tiled(inner: Forward) -> Forward:
        @wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return TiledCall(module, name, tiles, inner)(*args, **kwargs)

        return forward

    Wrapping.of(module).add(tiled)


class TiledCall:
    """One forward of a module in tiles."""

    def __init__(
        self, module: nn.Module, name: str, tiles: int, inner: Callable[..., Any]
    ) -> None:
        self.module, self.name, self.tiles, self.inner = module, name, tiles, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run all tiles; see :func:`tile`."""
        x, self.others, self.options = self._input(args, kwargs)
        self.lengths = tile_lengths(x.shape[-2], self.tiles)
        unsharded, guards = _unshard_weights(self.module)
        self.names = [(module, list(held)) for module, held in unsharded]
        tensors = [held[name] for (_, held), (_, names) in zip(unsharded, self.names, strict=True)
                   for name in names]  # fmt: skip
        self.wanted = [t is not None and t.requires_grad for t in tensors]
        output: Tensor
        if torch.is_grad_enabled() and (x.requires_grad or any(self.wanted)):
            # In a recompute torch may stop when the last tensor is saved: here, before the tiles.
            output = _Tiled.apply(self, _SaveInput.apply(x), *tensors)
        else:
            output = self.run(x, tensors)
        for guard in guards:
            output = guard(output)
        return output

    def _input(self, args: Any, kwargs: Any) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
        others = dict(kwargs)
        x = args[0] if args else others.pop("hidden_states", others.pop("x", None))
        rest = (*args[1:], *others.values())
        if not isinstance(x, Tensor) or x.dim() < 2:
            raise StructureError(
                f"{self.name} is computed in tiles, and its first argument is no tensor "
                "[..., positions, features]: leave it out of activation_checkpoint.tiled_modules"
            )
        if any(isinstance(other, Tensor) for other in rest):
            raise StructureError(
                f"{self.name} is computed in tiles, and takes a second tensor, whose part of "
                "each tile is not known: leave it out of activation_checkpoint.tiled_modules"
            )
        return x, args[1:], others

    def run(self, x: Tensor, tensors: Sequence[Any]) -> Tensor:
        """Run the forward of all tiles without a graph."""
        self.random = _RandomState(x)
        self.cast = _autocast(x)
        output = None
        with torch.no_grad(), _with_parameters(self.names, tensors):
            start = 0
            for part in x.split(self.lengths, -2):
                tile_output = self.run_tile(_as_whole(part))
                if output is None:
                    shape = (*x.shape[:-1], *tile_output.shape[x.dim() - 1 :])
                    output = tile_output.new_empty(shape)
                output.narrow(x.dim() - 2, start, part.shape[-2]).copy_(tile_output)
                start += part.shape[-2]
                del tile_output
        self.random.end_forward()
        assert output is not None, "there is a tile at least"
        return output

    def run_tile(self, part: Tensor) -> Tensor:
        """Run the forward of one tile."""
        output = self.inner(part, *self.others, **self.options)
        if not isinstance(output, Tensor) or output.shape[: part.dim() - 1] != part.shape[:-1]:
            what = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise StructureError(
                f"{self.name} is computed in tiles, and returned {what} for {list(part.shape)}, "
                "where a tensor with the same positions is needed: leave it out of "
                "activation_checkpoint.tiled_modules"
            )
        return output

    def backward(
        self, x: Tensor, tensors: Sequence[Any], gradient: Tensor, of_input: bool
    ) -> list[Tensor | None]:
        """Gradients of the input and of ``tensors``; tiles run in the order of forward."""
        leaves = [
            t.detach().requires_grad_() if want else t
            for t, want in zip(tensors, self.wanted, strict=True)
        ]
        trained = [leaf for leaf, want in zip(leaves, self.wanted, strict=True) if want]
        total = torch.empty_like(x) if of_input else None
        sums: list[Tensor | None] = [None] * len(trained)
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_with_parameters(self.names, leaves))
            stack.enter_context(self.random.replayed())
            start, dim = 0, x.dim() - 2
            for length in self.lengths:
                part = _as_whole(x.narrow(dim, start, length).detach()).requires_grad_(of_input)
                with self.cast():
                    tile_output = self.run_tile(part)
                of_output = gradient.narrow(dim, start, length)
                found = self._gradients(
                    tile_output, of_output, part if of_input else None, trained
                )
                if total is not None:
                    total.narrow(dim, start, length).copy_(found[0])
                _accumulate(sums, found[1:] if of_input else found)
                del tile_output, found
                start += length
        for i, leaf in enumerate(trained):
            each = sums[i]
            sums[i] = None if each is None else each.to(leaf.dtype)
        rest = iter(sums)
        return [total, *(next(rest) if want else None for want in self.wanted)]

    def _gradients(
        self, tile_output: Tensor, gradient: Tensor, part: Tensor | None, trained: Sequence[Tensor]
    ) -> list[Any]:
        wanted = [*([part] if part is not None else []), *trained]
        self._refuse_other_gradients(tile_output, wanted)
        if not tile_output.requires_grad:
            return [torch.zeros_like(t) if t is part else None for t in wanted]
        found = list(torch.autograd.grad(tile_output, wanted, gradient, allow_unused=True))
        if part is not None and found[0] is None:
            found[0] = torch.zeros_like(part)
        return found

    def _refuse_other_gradients(self, tile_output: Tensor, wanted: Sequence[Tensor]) -> None:
        """Refuse an output of a tile that depends on trained tensors other than ``wanted``, since
        their gradients would be lost."""
        known = {id(tensor) for tensor in wanted}
        nodes, seen = [tile_output.grad_fn], set()
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
                    "activation_checkpoint.tiled_modules"
                )
            nodes += [following for following, _ in node.next_functions]


def _as_whole(part: Tensor) -> Tensor:
    """A tile with strides of its own: a module may view its input, ``x.view(-1, features)``, which
    a part of several rows does not allow."""
    return part.contiguous()


def _accumulate(sums: list[Tensor | None], parts: Sequence[Tensor | None]) -> None:
    """Add a tile's gradients in fp32 or wider, as one product over all positions would."""
    with torch.no_grad():
        for i, part in enumerate(parts):
            total = sums[i]
            if part is None:
                continue
            if total is None:
                sums[i] = part.to(torch.promote_types(part.dtype, torch.float32))
            else:
                total.add_(part)


class _SaveInput(torch.autograd.Function):
    """Returns the input, and saves it for the tiles' backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tiles: TiledCall, x: Tensor, *tensors: Any) -> Tensor:
        ctx.tiles, ctx.tensors = tiles, tensors
        # Views of weights are attributes of the context, not saved tensors: their memory is the
        # slot's, whose version is compared before this node runs (WP-14), and a recompute does not
        # create new views.
        ctx.input = x.grad_fn
        if ctx.input is None:
            ctx.save_for_backward(x)
        return tiles.run(x, tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        if torch.is_grad_enabled():
            no_second_derivatives()
        (x,) = ctx.saved_tensors if ctx.input is None else ctx.input.saved_tensors
        return None, *ctx.tiles.backward(x, ctx.tensors, gradient, ctx.needs_input_grad[1])


class _RandomState:
    """The random generators' states before a forward, if the forward used them."""

    def __init__(self, x: Tensor) -> None:
        self.cpu: Tensor | None = torch.get_rng_state()
        self.devices, self.states = get_device_states(x)

    def end_forward(self) -> None:
        """Drop the states if the forward did not use the generators."""
        assert self.cpu is not None
        if not self.devices and _bytes(self.cpu) == _bytes(torch.get_rng_state()):
            self.cpu = None

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, the generators return the same numbers as in the forward."""
        if self.cpu is None:
            yield
            return
        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self.cpu)
            set_device_states(self.devices, self.states)
            yield


def _bytes(state: Tensor) -> bytes:
    """Read the bytes without torch's dispatcher, so that this works under a plan's fake tensors."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _autocast(x: Tensor) -> Callable[[], AbstractContextManager[object]]:
    """A function that returns a context manager for the present autocast state."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind):  # the meta device, on which a plan runs
        return nullcontext
    on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=on)


def _unshard_weights(module: nn.Module) -> tuple[UnshardedParameters, list[Callable[[Any], Any]]]:
    """Unshard the weights of ``module`` and all modules in it, once."""
    unsharded, guards = [], []
    for each in module.modules():
        held = each._parameters
        if not held:
            continue
        if isinstance(held, Weights):
            if held.copies:
                raise StructureError(
                    f"{held.owner} keeps a parameter twice (as nn.LSTM does) and lies in what is "
                    "computed in tiles: leave it out of activation_checkpoint.tiled_modules"
                )
            if held.scope.recomputed:
                held.before_recomputed()
        found, guard = open_weights(each)
        unsharded.append((each, found))
        guards.append(guard)
    return unsharded, guards


@contextmanager
def _with_parameters(
    names: Sequence[tuple[nn.Module, list[str]]], tensors: Sequence[Any]
) -> Iterator[None]:
    """Inside, the modules hold ``tensors`` as their parameters."""
    before = [module._parameters for module, _ in names]
    values = iter(tensors)
    for module, own in names:
        module.__dict__["_parameters"] = {name: next(values) for name in own}
    try:
        yield
    finally:
        for (module, _), held in zip(names, before, strict=True):
            module.__dict__["_parameters"] = held
