"""The tests of ranks on a device: ``INTERNSP_TEST_DEVICE=cuda python -m pytest tests/ranks/...``.

Tests are written for the CPU. With this variable their meshes are of the named device, which all
ranks share, over gloo; tensors and modules that a test makes without naming a device lie there, and
those that the library makes lie where the library puts them. Tests that fork after they have used
a device, read a tensor through numpy, or start commands are not meant for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

NAME = "INTERNSP_TEST_DEVICE"
SELF = Path(__file__).resolve()
ROOT = SELF.parents[2]
TESTS, LAYERS = "tests", "internsp/layers"


class OnDevice(TorchFunctionMode):
    """What a test makes without a device is made on ``device``."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = torch.device(device)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Factories of torch; all else passes."""
        options = kwargs or {}
        draws = options.get("generator")
        if draws is not None and args and isinstance(args[0], torch.Tensor):  # normal_ and others
            if args[0].device.type != draws.device.type:
                return args[0].copy_(func(args[0].to(draws.device), *args[1:], **options))
        makes = func in _device_constructors() and options.get("device") is None
        if not makes or not _made_by_a_test():
            return func(*args, **options)
        if options.get("generator") is None:
            return func(*args, **{**options, "device": self._device})
        grad = options.get("requires_grad", False)  # a generator of the CPU draws there
        drawn = func(*args, **{**options, "requires_grad": False})
        return drawn.to(self._device).requires_grad_(grad)


def _made_by_a_test() -> bool:
    """Whether a test makes it, directly or by torch and other packages; or it is a parameter of one
    of the library's layers."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        place = _place(frame.f_code.co_filename)
        if place is not None:
            return place == TESTS or (place == LAYERS and frame.f_code.co_name == "__init__")
        frame = frame.f_back
    return False


@cache
def _place(file: str) -> str | None:
    """The folder of this project in which a file lies; ``None``: another package's, or this one."""
    path = Path(os.path.realpath(file))
    if path == SELF or "site-packages" in path.parts or ROOT not in path.parents:
        return None
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] == "internsp" else parts[0]


def use_device() -> str:
    """In a rank's process, before its first body: obey the variable; nothing without it.

    Returns:
        The backend of the process group.
    """
    device = os.environ.get(NAME)
    if device is None:
        return "gloo"
    # Not before: tests.support.forked, which tools.mutants starts, must not have it loaded.
    from internsp import model_zoo
    from internsp.mesh import ParallelMesh
    from tests.support import as_nccl

    os.environ |= {"LOCAL_RANK": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

    def named(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            args = tuple(device if each == "cpu" else each for each in args)
            if options.get("device_type") == "cpu":
                options["device_type"] = device
            return function(*args, **options)

        return call

    if device != "cpu":  # where some kernels of a device have no other form
        strict = torch.use_deterministic_algorithms
        torch.use_deterministic_algorithms = lambda mode, **_: strict(mode, warn_only=True)
    ParallelMesh.create = staticmethod(named(ParallelMesh.create))  # type: ignore[method-assign]
    DeviceMesh.__init__ = named(DeviceMesh.__init__)  # type: ignore[method-assign]
    model_zoo.build = partial(model_zoo.build, device=device)
    OnDevice(device).__enter__()
    return as_nccl.install(device)
