"""A rank's part: two steps of one case, under a memory limit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from internsp import ParallelMesh, SequenceLayout, parallelize
from internsp.app.config import Config
from internsp.app.config.tiles import with_tile_count
from internsp.app.models.factory import build_for_training, fill_parameters
from internsp.app.session.optimizers import make_optimizer
from internsp.optim import step_together
from internsp.pipeline import MicroBatch, Pipeline
from internsp.sp.dispatch import FIXED_BALANCE, fixed_sizes
from tools.bench.memory import free
from tools.longest.cases import Case, Outcome, lack
from tools.longest.limit import Peak, install, limit, return_memory

transformers.logging.set_verbosity_error()

SHORT = 128
"""Tokens of the first step, which creates the optimizer's state before the long step."""
Step = Callable[[int], tuple[float, float]]
"""A step over sequences of the given length: loss (nats per token) and norm of the gradient."""


class Rank:
    """Runs one case; each case needs a new process."""

    def train(self, case: Case, length: int, most: int | None) -> Outcome:
        """A short step and one over ``length`` tokens.

        What libraries allocate once is allocated before the limit is set: threads, connections,
        and MKL's buffers, which grow with the largest product, so that a step of full length runs.

        Args:
            most: bytes allowed for model, optimizer and steps; ``None``: unlimited.
        """
        return_memory()
        install()
        peak = Peak()
        config = Config.model_validate(case.settings(length))
        mesh = ParallelMesh.create(**config.degrees(), device_type="cpu")
        for tokens in (SHORT, length):
            KINDS[case.kind](config, mesh)(tokens)
        free()
        if most is not None:
            limit(most)
        try:
            with peak:
                step = KINDS[case.kind](config, mesh)
                step(SHORT if mesh.pipeline == 1 else length)  # a pipeline has one fixed length
                begin = time.perf_counter()
                loss, norm = step(length)
                seconds = time.perf_counter() - begin
        except (RuntimeError, MemoryError) as error:
            why = f"{type(error).__name__}: {error}"
            if lack(why):  # the other ranks fail because of it and would be reported first
                print(why, flush=True)
                os._exit(1)
            raise
        return Outcome("", loss, norm, peak.most, seconds)


def _ids(row: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + row)
    return torch.randint(0, 257, (1, length), generator=generator)


class Ours:
    """internsp, from a configuration."""

    def __init__(self, config: Config, mesh: ParallelMesh) -> None:
        self.config, self.mesh = config, mesh
        self.model: Any = build_for_training(config)
        self.communicator = parallelize(
            self.model, self.mesh, config.weight_parallel,
            activation_checkpoint=with_tile_count(config, self.mesh.data),
        )  # fmt: skip
        fill_parameters(config, self.model, [self.model], [self.communicator], self.mesh.device)
        self.optimizer = make_optimizer(config, self.communicator, None)

    def __call__(self, length: int) -> tuple[float, float]:
        """See :data:`Step`."""
        train, mesh = self.config.train, self.mesh
        total = torch.zeros((), dtype=torch.float64)
        rows = train.global_batch // (train.micro_batches * mesh.data)
        for part in range(train.micro_batches):
            first = (part * mesh.data + mesh.data_rank) * rows
            ids = torch.cat([_ids(first + row, length) for row in range(rows)])
            layout = SequenceLayout.create(
                ids, rank=mesh.sequence_rank, size=mesh.sequence, ring=mesh.ring, near=mesh.near,
                balance=self.config.sequence.balance,
            )  # fmt: skip
            loss, _ = self.model(
                layout.input_ids, layout=layout, labels=layout.labels, loss_chunk=train.loss_chunk
            )
            (loss / (train.global_batch * (length - 1))).backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return float(total) / (train.global_batch * (length - 1)), float(self.optimizer.grad_norm)


class Staged:
    """internsp's pipeline, from a configuration, for sequences of one length."""

    def __init__(self, config: Config, mesh: ParallelMesh) -> None:
        self.config, self.mesh = config, mesh
        self.pipeline: Pipeline | None = None

    def _make(self, length: int) -> Pipeline:
        config, mesh, train = self.config, self.mesh, self.config.train
        model: Any = build_for_training(config)
        rows = train.global_batch // (train.micro_batches * mesh.data)
        own = fixed_sizes(length, mesh.sequence_axes)[mesh.sequence_rank]
        found = Pipeline.create(
            model, mesh, config.weight_parallel, schedule=config.pipeline.schedule,
            chunks=config.pipeline.chunks, micro_batches=train.micro_batches,
            activation_checkpoint=with_tile_count(config, mesh.data),
            shape=(rows, own, config.model.hidden_size), criterion=self._judged,
        )  # fmt: skip
        fill_parameters(config, model, list(found.chunks), found.communicators, mesh.device)
        self.optimizers = [make_optimizer(config, each, None) for each in found.communicators]
        return found

    def _judged(self, output: Tensor, batch: MicroBatch) -> Tensor:
        self.total += output.detach()
        return output / self.divisor

    def __call__(self, length: int) -> tuple[float, float]:
        """See :data:`Step`."""
        train, mesh = self.config.train, self.mesh
        self.total = torch.zeros((), dtype=torch.float64)
        self.divisor = train.global_batch * (length - 1)
        self.pipeline = self.pipeline or self._make(length)
        rows = train.global_batch // (train.micro_batches * mesh.data)
        batches = []
        for part in range(train.micro_batches):
            first = (part * mesh.data + mesh.data_rank) * rows
            layout = SequenceLayout.create(
                torch.cat([_ids(first + row, length) for row in range(rows)]),
                rank=mesh.sequence_rank, size=mesh.sequence, ring=mesh.ring, near=mesh.near,
                balance=FIXED_BALANCE,
            )  # fmt: skip
            options = {"layout": layout, "labels": layout.labels, "loss_chunk": train.loss_chunk}
            batches.append(MicroBatch((layout.input_ids,), options))
        self.pipeline.step(batches)
        step_together(self.optimizers, log=False)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        dist.all_reduce(self.total)
        return float(self.total) / self.divisor, float(self.optimizers[0].grad_norm)


def _ours(config: Config, mesh: ParallelMesh) -> Step:
    return Ours(config, mesh) if mesh.pipeline == 1 else Staged(config, mesh)


class HuggingFace:
    """The unchanged Llama of transformers, one sequence per rank."""

    def __init__(self, config: Config, mesh: ParallelMesh) -> None:
        given = config.model
        torch.manual_seed(0)
        sizes = LlamaConfig(
            vocab_size=given.vocab_size, hidden_size=given.hidden_size,
            num_hidden_layers=given.layers, num_attention_heads=given.heads,
            num_key_value_heads=given.heads, intermediate_size=given.intermediate_size or 0,
            max_position_embeddings=1 << 20, use_cache=False, attn_implementation="sdpa",
        )  # fmt: skip
        self.model: Any = LlamaForCausalLM(sizes).train()
        self.prepare(config.activation_checkpoint.mode != "none")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.optimizer.lr)

    def prepare(self, checkpoints: bool) -> None:
        """Called before the optimizer is made."""
        if checkpoints:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def __call__(self, length: int) -> tuple[float, float]:
        """See :data:`Step`."""
        ids = _ids(dist.get_rank(), length)
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach()), float(getattr(norm, "full_tensor", lambda: norm)())


class Sharded(HuggingFace):
    """The same, with blocks and root sharded by FSDP2, and blocks checkpointed by torch."""

    def prepare(self, checkpoints: bool) -> None:
        """See :meth:`HuggingFace.prepare`."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.model.model.layers:
            if checkpoints:
                checkpoint(block)
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):  # gloo cannot average
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)


KINDS: dict[str, Callable[[Config, ParallelMesh], Step]] = {
    "internsp": _ours, "huggingface": HuggingFace, "fsdp2": Sharded,
}  # fmt: skip
