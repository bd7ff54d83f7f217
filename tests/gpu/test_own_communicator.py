"""On a GPU: the communicator of ``examples/own_communicator.py`` gathers into device memory."""

from __future__ import annotations

import copy

import torch

from examples.own_communicator import Synchronous
from internsp import ParallelMesh, WeightParallelConfig, parallelize
from tests.gpu.test_offload import CUDA, same
from tests.support.models import VOCABULARY, Tiny
from tools.bench.model import process_group


def test_the_documents_communicator_trains_as_one_process() -> None:
    torch.manual_seed(0)
    plain = Tiny().double().to(CUDA)
    ours = copy.deepcopy(plain)
    with process_group("nccl" if CUDA.type == "cuda" else "gloo"):
        mesh, made = ParallelMesh.create(weight=1, device_type=CUDA.type), Synchronous()
        parallelize(ours, mesh, WeightParallelConfig(min_shard_elements=1), communicator=made)
        for step in range(2):
            ids = torch.randint(VOCABULARY, (2, 5), device=CUDA)
            for model in (plain, ours):
                model(ids, labels=ids).backward()
            same(plain, ours, "grad")
            for model in (plain, ours):
                torch.optim.SGD(model.parameters(), lr=0.1, foreach=False).step()
                model.zero_grad()
            same(plain, ours, f"after step {step}")
        assert {flat.device for flat in made.flat.values()} == {CUDA}  # type: ignore[attr-defined]
