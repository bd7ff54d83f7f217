"""accelerate's batches and gathers, for each data rank instead of each process (extra ``[hf]``).

The ranks of a sequence group need the same batch, and an evaluation must count its rows once.
"""

from __future__ import annotations

from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from internsp.errors import ConfigError
from internsp.mesh import ParallelMesh


class DataRanks:
    """Replaces two methods of an ``Accelerator``.

    Args:
        seed: seed for shuffling, the same on all ranks, whatever random numbers they have drawn.
    """

    def __init__(self, accelerator: accelerate.Accelerator, mesh: ParallelMesh, seed: int) -> None:
        self.accelerator, self.mesh, self.seed = accelerator, mesh, seed
        # Ranks ascend in a group; data ranks do not if a DeviceMesh has another order.
        grid = mesh.shape.grid[mesh.pipeline_rank].view(mesh.data, mesh.sequence)
        ranks = grid[:, mesh.sequence_rank].tolist()
        self.order = [dist.get_group_rank(mesh.data_group, rank) for rank in ranks]
        accelerator.prepare_data_loader = self._prepare_data_loader
        accelerator.gather = self._gather

    def _prepare_data_loader(self, loader: DataLoader[Any], *_: Any, **__: Any) -> DataLoader[Any]:
        """``Accelerator.prepare_data_loader`` with data ranks as processes."""
        own = self.accelerator
        made: DataLoader[Any] = prepare_data_loader(
            loader,
            own.device,
            num_processes=self.mesh.data,
            process_index=self.mesh.data_rank,
            split_batches=own.split_batches,
            put_on_device=own.device_placement,
            rng_types=own.rng_types.copy(),
            dispatch_batches=False,  # it would send batches to processes, not to data ranks
            even_batches=own.even_batches,
            use_seedable_sampler=True,
            data_seed=self.seed,
            non_blocking=own.non_blocking,
            use_stateful_dataloader=own.use_stateful_dataloader,
        )
        own._dataloaders.append(made)
        return made

    def _gather(self, data: Any) -> Any:
        """``Accelerator.gather``: the rows of each data rank once, in their order. Collective."""
        return recursively_apply(self._gather_tensor, data, error_on_other_type=True)

    def _gather_tensor(self, mine: Tensor) -> Tensor:
        mine = (mine[None] if mine.ndim == 0 else mine).contiguous()
        parts = [torch.empty_like(mine) for _ in self.order]
        dist.all_gather(parts, mine, group=self.mesh.data_group)
        return torch.cat([parts[place] for place in self.order])

    def require_countable(self, dataset: Any) -> None:
        """Check that a data set has a length, by which rows that pad its last batch are dropped.

        Raises:
            ConfigError: it has none.
        """
        if self.mesh.data > 1 and isinstance(dataset, IterableDataset):
            raise ConfigError(
                f"rank {self.mesh.rank}: {type(dataset).__name__} has no length, by which an "
                f"evaluation over data = {self.mesh.data} and sequence = {self.mesh.sequence} "
                "drops the rows that fill its last batch: give evaluate() and predict() a data "
                "set with a length"
            )
