"""WP-13: compiled blocks see plain tensors, give eager's values and launch eager's collectives."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from internsp.config import ActivationCheckpointConfig
from internsp.errors import ConfigError
from internsp.mesh import ParallelMesh
from tests.support.meshes import mesh_of
from tests.support.models import Block, Tiny, Twin, raises
from tests.support.ranks import ranks

FULL = ActivationCheckpointConfig(mode="full", fraction=0.5)


class Gated(nn.Module):
    """A user-defined module with parameters, one sharded and one replicated."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(width, width) / 3)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x @ self.gate) * self.gain


class Own(Block):
    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.gated = Gated(width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.gated(x)


@ranks(1)
def test_each_blocks_forward_is_what_torch_compile_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[dict[str, Any]] = []
    ran: list[Any] = []

    def compiler(function: Any, **options: Any) -> Any:
        given.append(options)

        def call(*args: Any, **kwargs: Any) -> Any:
            ran.append(function)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(torch, "compile", compiler)
    twin = Twin(Tiny, mesh_of(1), compile=True, gather_before="qkv")
    twin.backward()
    twin.check_gradients("compiled by nothing")
    assert len(given) == len(ran) == len(twin.communicator.blocks) == len(set(map(id, ran)))


@pytest.mark.slow(7)
@pytest.mark.parametrize(
    ("backend", "tolerance"),
    # The same graphs; compiling their C++ takes half a minute.
    [("aot_eager", 1e-10), pytest.param("inductor", 1e-9, marks=pytest.mark.thorough(35))],
)
@ranks(2, timeout=300)
def test_compiled_blocks_equal_eager_with_the_same_messages(backend: str, tolerance: float) -> None:
    compiler = torch.compile

    def counting(function: Any, **options: Any) -> Any:
        return compiler(function, backend=backend, fullgraph=True)

    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=50)
    raises(ConfigError, lambda: Twin(Tiny, mesh, compile=True), "gather_before", "qkv")
    modules = {"gather_before": "qkv", "granularity": "module"}
    raises(ConfigError, lambda: Twin(Tiny, mesh, compile=True, **modules), "granularity", '"block"')
    cases: list[tuple[Any, dict[str, Any], Any]] = [
        (Block, {}, None), (Own, {}, FULL), (Block, {"gather_before": "rolling"}, FULL),
    ]  # fmt: skip
    # Compiling C++ is slow: one case, with one recomputed block and one other.
    layers = 3 if backend == "aot_eager" else 2
    for block, config, checkpoint in cases if backend == "aot_eager" else cases[1:2]:
        messages = []
        for compile_ in (False, True):
            options = {"compile": compile_, "gather_before": "qkv"} | config
            torch.compile = counting  # type: ignore[assignment]
            try:
                twin = Twin(partial(Tiny, block, layers=layers), mesh, checkpoint, **options)
            finally:
                torch.compile = compiler  # type: ignore[assignment]
            pair = (twin.plain, twin.ours)
            optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in pair]
            for step in range(3):
                twin.trace.clear()
                twin.backward()
                twin.check_gradients(f"{config} compiled {compile_}, step {step}", tolerance)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            messages.append(sorted(twin.lines("AG", "RS")))
        assert messages[0] == messages[1], "the same gathers and reductions"


@pytest.mark.thorough(6)
@ranks(2, timeout=300)
def test_classes_collected_by_another_thread_leave_guards_alone_that_are_being_checked() -> None:
    """torch.compile frees the guards of a class that no longer exists, and releases the GIL to
    check them: a process crashed."""
    compiler, go, end = torch.compile, threading.Event(), threading.Event()

    def collect() -> None:
        while go.wait() and not end.is_set():
            go.clear()
            assert [[] for _ in range(300_000)], "more than the collector's thresholds"

    def racing(function: Any, **options: Any) -> Any:
        inner = compiler(function, backend="eager")

        def call(*args: Any) -> Any:
            go.set()
            return inner(*args)

        return call

    def enable(*_: Any) -> None:
        gc.enable()  # only for the next call: the last class is not collected yet

    def local() -> nn.Module:
        class Local(Block):
            pass

        return Tiny(Local, layers=1)

    mesh = ParallelMesh.create(weight=2, device_type="cpu", timeout_seconds=50)
    ctypes.CDLL(None).mallopt(-6, 0xA5)  # M_PERTURB: what is freed is overwritten
    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    torch.compile = racing  # type: ignore[assignment]
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.disable()
    try:
        for number in range(8):
            twin = Twin(local, mesh, compile=True, gather_before="qkv")
            if not number:  # the collector looks at what is new, often
                gc.freeze()
                gc.collect()
                gc.set_threshold(50_000, 0, 0)
                sys.setswitchinterval(10)  # the GIL is not switched unless it is released
            twin.ours.layers[0].register_forward_pre_hook(enable)  # type: ignore[union-attr]
            twin.backward()
            gc.disable()
            twin.check_gradients(f"class {number}")
    finally:
        torch.compile = compiler  # type: ignore[assignment]
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
        gc.enable()
        end.set()
        go.set()
        thread.join()
