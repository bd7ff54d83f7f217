"""A rank's part: two steps of one case, under a memory limit."""

from __future__ import annotations

import functools
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

from internsp import ParallelMesh, SequenceLayout
from internsp.app.config import Config
from internsp.app.session.own import Custom
from internsp.app.session.session import Session
from internsp.app.train.passes import PipelinedStep, PlainStep
from internsp.sp.dispatch import FIXED_BALANCE
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
        # Threads of process groups are made before the limit: later sessions have the first's mesh.
        ParallelMesh.create = functools.cache(ParallelMesh.create)  # type: ignore[assignment]
        for tokens in (SHORT, length):
            KINDS[case.kind](Config.model_validate(case.settings(tokens)))(tokens)
        free()
        config = Config.model_validate(case.settings(length))
        if most is not None:
            limit(most)
        try:
            with peak:
                step = KINDS[case.kind](config)
                # A pipeline has one fixed length.
                step(SHORT if config.parallel.pipeline == 1 else length)
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
    """internsp: the session of a run, and its forward and backward."""

    def __init__(self, config: Config) -> None:
        self.session = session = Session.create(config, custom=Custom(data=lambda mesh: ()))
        self.passes = PlainStep(session) if session.pipeline is None else PipelinedStep(session)

    def __call__(self, length: int) -> tuple[float, float]:
        """See :data:`Step`."""
        config, mesh = self.session.config, self.session.mesh
        train = config.train
        rows = train.global_batch // (train.micro_batches * mesh.data)
        balance = config.sequence.balance if mesh.pipeline == 1 else FIXED_BALANCE
        layouts = []
        for part in range(train.micro_batches):
            first = (part * mesh.data + mesh.data_rank) * rows
            ids = torch.cat([_ids(first + row, length) for row in range(rows)])
            layouts.append(
                SequenceLayout.create(
                    ids, rank=mesh.sequence_rank, size=mesh.sequence, ring=mesh.ring,
                    near=mesh.near, balance=balance,
                )
            )  # fmt: skip
        tokens = torch.tensor(train.global_batch * (length - 1), dtype=torch.float64)
        total = self.passes.train(layouts, tokens)
        self.session.step()
        dist.all_reduce(total)
        return float(total / tokens), float(self.session.optimizer.grad_norm)


class HuggingFace:
    """The unchanged Llama of transformers, one sequence per rank."""

    def __init__(self, config: Config) -> None:
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


KINDS: dict[str, Callable[[Config], Step]] = {
    "internsp": Ours, "huggingface": HuggingFace, "fsdp2": Sharded,
}  # fmt: skip
