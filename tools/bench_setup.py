"""What it costs a rank of thousands to set up a mesh and a model, where nothing is sent.

    python -m tools.bench_setup

For each number of ranks a process of its own is rank 0 of torch's ``fake`` backend. It makes a
mesh, a parallel model of four blocks and its optimizer. Counted are its process groups, the keys
that it writes to the store, seconds of processor time, and by how much the memory of the process
grows. Objects that ranks exchange (degrees, names) are as many copies of this rank's own, made and
not sent. What a real backend needs for each group, its connections and its own keys, is not in it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from tools.bench.memory import status

PEAK = "VmHWM"  # (``ru_maxrss`` counts the parent's.)
DEGREES: dict[str, dict[str, Any]] = {
    "weight 8": {"weight": 8},
    "weight 64, sequence 8 of ring 2, pipeline 4": {
        "weight": 64, "sequence": 8, "ring": 2, "pipeline": 4
    },
}  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench_setup", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 10240])
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(int(given.one[0]), DEGREES[given.one[1]])))
        return
    print("| degrees | ranks | groups | keys | seconds | MiB |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in DEGREES:
        for ranks in given.ranks:
            found = of(ranks, name)
            print(
                f"| {name} | {ranks:,} | {found['groups']} | {found['keys']} | "
                f"{found['seconds']:.2f} | {found['bytes'] / 2**20:.1f} |"
            )


def measure(ranks: int, degrees: dict[str, Any]) -> dict[str, float]:
    """Set up rank 0 of ``ranks`` in this process."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed import distributed_c10d

    from internsp import ParallelMesh, WeightParallelConfig, ZeroOptimizer, parallelize
    from internsp.config import SequenceConfig

    store, exchange = dist.HashStore(), dist.all_gather_object

    def copies(everyone: list[Any], own: Any, group: Any = None) -> None:
        everyone[:] = [own] * dist.get_world_size(group)

    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(1024, 64) for _ in range(4))})
    dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
    groups, keys, held = len(distributed_c10d._world.pg_map), store.num_keys(), status(PEAK)
    start = time.process_time()
    dist.all_gather_object = copies
    try:
        mesh = ParallelMesh.create(**degrees, device_type="cpu")
        config = WeightParallelConfig(blocks=["layers.*"], gather_before="rolling")
        alone = SequenceConfig(own_attention=True) if mesh.sequence > 1 else None
        communicator = parallelize(model, mesh, config, sequence=alone)
        ZeroOptimizer(communicator, torch.optim.SGD, lr=0.1)
    finally:
        dist.all_gather_object = exchange
    return {
        "groups": len(distributed_c10d._world.pg_map) - groups,
        "keys": store.num_keys() - keys,
        "seconds": time.process_time() - start,
        "bytes": status(PEAK) - held,
    }


def of(ranks: int, name: str) -> dict[str, float]:
    """:func:`measure` in a process of its own."""
    words = [sys.executable, "-m", "tools.bench_setup", "--one", str(ranks), name]
    shown = subprocess.run(words, check=True, text=True, capture_output=True).stdout
    found: dict[str, float] = json.loads(shown)
    return found


if __name__ == "__main__":
    main()
