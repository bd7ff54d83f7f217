"""Layers around a module's ``forward``, which stay around it when a program replaces it.

Libraries of kernels, adapters and trainers put another ``forward`` in place of a module's: on the
instance (``model.forward = types.MethodType(fused, model)``) or on its class. On one process the
new one runs from then on; here it must run in the scope in which weights are read. So the next call
of the module looks whether its ``forward`` is still the one that was wrapped last, and wraps what
it finds. A new ``forward`` may call the one that it has replaced: its layers are around the call
already, and it runs without them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from internsp.base.autograd import NO_TASK, cloned, graph_task, tensors
from internsp.errors import StructureError

Forward = Callable[..., Any]
Layer = Callable[[Forward], Forward]
"""Makes the function around a ``forward``, or compiles it."""

_NAME = "_internsp_wrapping"


def around_compiled(compiled: Forward) -> Forward:
    """``compiled``, called in a way in which torch runs it right (seen with torch 2.13).

    Python's garbage collector is switched off for the call, on all threads: while torch checks the
    guards of compiled code it releases the interpreter lock. If another thread then collects a
    class that these guards refer to (of a model that was thrown away), torch frees guards that it
    is reading, and the process crashes.

    Inputs have arrived: a clone waits. The gradient of an ``AsyncCollectiveTensor``, which layers
    of tensor ranks leave in flight, gets lost in compiled code, or is of another class.
    """

    @wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(map(_in_flight, tensors((args, kwargs)))):
            args, kwargs = cloned((args, kwargs), _in_flight)
        collects = gc.isenabled()
        gc.disable()
        try:
            return compiled(*args, **kwargs)
        finally:
            if collects:
                gc.enable()

    return call


def _in_flight(tensor: Tensor) -> bool:
    return isinstance(tensor, AsyncCollectiveTensor)


class Wrapping:
    """What is around the ``forward`` of one module.

    Attributes:
        forward: the outermost function, which was the module's ``forward`` when last looked at.
        block: the block whose ``forward`` this is, for the error of a call past its hooks; empty
            for other modules, which have no hooks that such a call would leave out.
        compiler: applied to what the layers are around; ``None``: nothing is compiled.
        inside: wrappings of modules in this block, which a call of the block looks at, too. A
            ``forward`` that is replaced while the block's runs reads weights by the block's scope.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._own = module, vars(module)
        self._layers: list[Layer] = []
        self._nests = True
        self._base: Forward = module.forward
        self._of_class: Any = None if "forward" in self._own else type(module).forward
        # Each outermost function, and the class's forward where it is around that.
        self._made: WeakKeyDictionary[Forward, Any] = WeakKeyDictionary()
        self._running: Forward | None = None
        self._called = False
        self.block = ""
        self.compiler: Layer | None = None
        self.inside: list[Wrapping] = []
        self.forward: Forward = self._base
        self._own["_call_impl"] = self._call_function()

    @classmethod
    def of(cls, module: nn.Module) -> Wrapping:
        """The wrapping of ``module``; made if there is none."""
        found = vars(module).get(_NAME)
        if found is None:
            found = vars(module)[_NAME] = cls(module)
        wrapping: Wrapping = found
        return wrapping

    def add(self, layer: Layer, nests: bool = False) -> None:
        """Put ``layer`` around the module's ``forward`` and the layers that it has.

        Args:
            nests: the layer may be around itself, where a new forward calls the one before.
        """
        self._nests = self._nests and nests
        self._layers.append(layer)
        self._wrap()

    def look_inside(self, modules: Iterable[nn.Module]) -> None:
        """Look at the ``forward`` of ``modules`` at each call of this one, not at calls of theirs.

        One look a block takes less time, and compiled code cannot look."""
        self.inside = [Wrapping.of(module) for module in modules]
        for wrapping in self.inside:
            wrapping._own.pop("_call_impl", None)

    def _wrap(self) -> None:
        """Put all layers around ``_base``."""
        base = self._base
        if self._nests:
            forward = self._compiled(base)
            for layer in self._layers:
                forward = layer(forward)
        else:
            forward = self._in_layers(base)
        self._made[forward] = self._of_class
        self.forward = self._own["forward"] = forward

    def _compiled(self, base: Forward) -> Forward:
        return base if self.compiler is None else around_compiled(self.compiler(base))

    def _in_layers(self, base: Forward) -> Forward:
        prepared = self._compiled(base)

        @wraps(base)
        def inside(*args: Any, **kwargs: Any) -> Any:
            outside, self._running = self._running, forward
            try:
                return prepared(*args, **kwargs)
            finally:
                self._running = outside

        layered: Forward = inside
        for layer in self._layers:
            layered = layer(layered)

        @wraps(base)
        def forward(*args: Any, **kwargs: Any) -> Any:
            running = self._running
            if running is not None and running is not forward:
                return base(*args, **kwargs)  # what has replaced it calls it, within the layers
            if self.block and not self._called and graph_task() == NO_TASK:
                raise StructureError(
                    f"the forward of block {self.block} was called directly (block.forward(x)): "
                    "no hook ran, so that its weights were not gathered. Call the block itself, "
                    "block(x)"
                )
            return layered(*args, **kwargs)

        return forward

    def _call_function(self) -> Forward:
        """In place of the module's ``_call_impl``, which reads ``forward`` before any hook runs."""
        module = self._module
        run = type(module)._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            for wrapping in (self, *self.inside):
                found, made = wrapping._own.get("forward"), wrapping._of_class
                if found is not wrapping.forward or (
                    made is not None and made is not type(wrapping._module).forward
                ):
                    wrapping.renew()
            if not self.block:
                return run(module, *args, **kwargs)
            outside, self._called = self._called, True
            try:
                return run(module, *args, **kwargs)
            finally:
                self._called = outside

        return call

    def renew(self) -> None:
        """Wrap the module's ``forward``, or its class's, if it is not the one that was wrapped."""
        found = self._own.get("forward")
        if found is not None and found in self._made:  # the same, or an earlier one was put back
            self.forward, self._of_class = found, self._made[found]
            if self._of_class is None or self._of_class is type(self._module).forward:
                return
            found = None
        if found is None:
            self._own.pop("forward", None)
        self._of_class = type(self._module).forward if found is None else None
        self._base = self._module.forward
        self._wrap()
