"""The cost of position-based dropout in a block of the model zoo, compared with torch's dropout.

Run ``python -m tools.bench_dropout [--device cpu] [--dtype float32] [--rounds 9]``. The three
variants run in turn, forward and backward, with one computing thread, measured in processor time
(on a device in wall-clock time). Prints the median of each, and the bytes per element that are
saved for backward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from internsp import model_zoo
from internsp.config.model import ModelConfig
from internsp.layers.dropout import Dropout, block_keys, row_keys, token_keys
from internsp.layers.rotary import rotary_tables
from internsp.sp import SequenceLayout


class _Torch(Dropout):
    """torch's dropout, whose masks come from the generator's state."""

    def forward(self, x: Tensor, keys: Tensor | None, site: int = 0) -> Tensor:
        return torch.nn.functional.dropout(x, self.share)


def measure(
    device: torch.device, dtype: torch.dtype, rows: int, length: int, hidden: int, rounds: int
) -> dict[str, float]:
    """Median seconds of a block's forward and backward, by kind of dropout."""
    config = ModelConfig(hidden_size=hidden, heads=hidden // 64, layers=1, dropout=0.1)
    block = model_zoo.build(config, device, dtype).layers[0]
    kinds = {"nothing": Dropout(0.0), "torch": _Torch(0.1), "by position": Dropout(0.1)}
    layout = SequenceLayout.create(torch.zeros(rows, length, dtype=torch.int64)).to(device)
    tokens = token_keys(row_keys(0, range(rows)).to(device), layout.index)
    rotary = rotary_tables(layout.positions, 64, dtype=dtype)
    x = torch.randn(rows, length, hidden, device=device, dtype=dtype, requires_grad=True)

    def work() -> None:
        block(x, rotary, layout, block_keys(tokens, 1)).sum().backward()

    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds + 1):
        for name, kind in kinds.items():
            block.dropout = kind
            found[name].append(_timed(work, device))
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def _timed(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cpu":  # processor time is not affected by other programs on the machine
        start = time.process_time()
        work()
        return time.process_time() - start
    torch.accelerator.synchronize(device)
    start = time.perf_counter()
    work()
    torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def kept(shape: tuple[int, ...]) -> float:
    """Bytes per element that a forward saves for backward."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(shape, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = Dropout(0.1)(x, token_keys(row_keys(0, range(shape[0])), torch.arange(shape[1])))
    assert out.grad_fn is not None
    return sum(saved.values()) / x.numel()


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(
        torch.device(options.device), getattr(torch, options.dtype), options.rows, options.length,
        options.hidden, options.rounds,
    )  # fmt: skip
    plain = found["nothing"]
    for name, seconds in found.items():
        more = f", {seconds / plain - 1:+.1%}" if name != "nothing" else ""
        print(f"a block that drops {name:<11}  {seconds * 1e3:8.2f} ms{more}")
    print(f"kept for backward: {kept((2, 64, 1024)):g} bytes an element")


if __name__ == "__main__":
    main()
