"""A program's own model, loss, data and optimizer in place of the configured ones."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from internsp.app.config import Config
from internsp.app.data.batches import Batch
from internsp.errors import ConfigError
from internsp.failure.objects import Objects
from internsp.mesh import ParallelMesh
from internsp.optim import ZeroOptimizer
from internsp.sp import SequenceLayout
from internsp.wp.communicator import ISPCommunicator

Data = Callable[[ParallelMesh], Iterable[Tensor | tuple[Tensor, list[list[int]] | None]]]
Loss = Callable[[nn.Module, SequenceLayout], Tensor]


@dataclass(frozen=True)
class Custom:
    """The arguments of :class:`internsp.Trainer`; ``None``: as configured."""

    model: nn.Module | None = None
    loss: Loss | None = None
    optimizer: Callable[[ISPCommunicator], ZeroOptimizer] | None = None
    data: Data | None = None

    def check(self, config: Config) -> None:
        """Check that these objects and the configuration fit together.

        Raises:
            ConfigError: a loss without a model; a custom model with a pipeline or without values; a
                setting that would have no effect on the custom object.
        """
        if self.data is not None and config.train.batch_tokens:
            raise ConfigError(
                "train.batch_tokens: a program's own data determines its batches; set it to 0"
            )
        if self.model is None:
            if self.loss is not None:
                raise ConfigError("Trainer: loss is for a model of your own; give model, too")
            return
        if config.model.dropout:
            raise ConfigError(
                "model.dropout: a model of your own applies its own dropout; set it to 0"
            )
        if config.parallel.pipeline > 1:
            raise ConfigError(
                "Trainer: a model of your own is not split into stages; set parallel.pipeline = 1, "
                "or use internsp.Pipeline in a loop of your own"
            )
        for name, parameter in self.model.named_parameters():
            if hasattr(parameter, "fsdp_pre_all_gather"):
                raise ConfigError(
                    f"Trainer: {name} of your model is a {type(parameter).__name__}, whose class "
                    "alone knows how its values are saved: train it by internsp.parallelize in a "
                    "loop of your own"
                )
        empty = [n for n, p in self.model.named_parameters() if p.is_meta]
        if empty:
            raise ConfigError(
                f"Trainer: {empty[0]} of your model is on the meta device: give it values, the "
                "same on every rank (torch.manual_seed)"
            )

    def checked_optimizer(self, optimizer: Any) -> ZeroOptimizer:
        """The optimizer that the program's function returned; another class is an error."""
        if isinstance(optimizer, ZeroOptimizer):
            return optimizer
        raise ConfigError(
            f"Trainer: optimizer gives {type(optimizer).__name__}, no ZeroOptimizer: return "
            "internsp.ZeroOptimizer(communicator, torch.optim.Adam, lr=...)"
        )

    def checked_loss(self, output: Any) -> Tensor:
        """The value that the program's loss returned; an error if no backward can start from it."""
        if not isinstance(output, Tensor) or output.dim():
            shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ConfigError(
                f"Trainer: loss gives {shape}, no scalar tensor: sum over this rank's tokens "
                '(reduction="sum")'
            )
        if torch.is_grad_enabled() and not output.requires_grad:  # in training
            raise ConfigError("Trainer: loss gives a value without gradients: it was detached")
        return output


class CustomData:
    """A program's own batches, in place of a :class:`~internsp.app.data.batches.DataSource`.

    One ``next`` gives the rows of one micro-batch for this rank's data rank: int64 ids
    ``[rows, s]``, or a pair of ids and the document starts of each row. All ranks with the same
    data rank (ranks of a sequence group, pipeline stages) must give the same rows, which is checked
    in the first step. A resumed run skips the batches that were used before.

    Args:
        vocabulary: number of the model's ids; ``None``: of a model of one's own it is not known.
    """

    tokenizer = None
    evaluated: Sequence[str] = ()  # a program with its own data evaluates in a callback
    fingerprint = "of a program"

    def __init__(
        self, data: Data, config: Config, mesh: ParallelMesh, vocabulary: int | None
    ) -> None:
        self._config, self._mesh, self._vocabulary = config, mesh, vocabulary
        self._batches = iter(data(mesh))  # once: a list or a DataLoader would begin anew each step
        self._ready: deque[Batch] = deque()
        self._taken = 0  # batches
        self._compared = False
        self.notes: tuple[str, ...] = ()
        self.tokens_of_a_sequence = config.data.sequence_length - 1.0

    def has_batches(self, sequences: int) -> bool:
        """Whether every rank has the batches of the next step. Collective; blocks.

        Args:
            sequences: rows used so far.

        Raises:
            ConfigError: on every rank: a rank's batch is no int64 tensor of the expected rows, or
                in the first step ranks differ that must have the same rows.
        """
        train = self._config.train
        begin = sequences // train.global_batch * train.micro_batches
        for _ in islice(self._batches, max(begin - self._taken, 0)):
            self._taken += 1
        mistake = ""
        for given in islice(self._batches, train.micro_batches - len(self._ready)):
            ids: Any = given
            boundaries: Any = None
            if isinstance(given, tuple) and len(given) == 2:
                ids, boundaries = given
            mistake = mistake or self._mistake(ids, boundaries)
            self._ready.append(Batch(ids, boundaries, [] if mistake else [[] for _ in ids]))
            self._taken += 1
        enough = len(self._ready) == train.micro_batches
        if not self._compared:
            self._compare(mistake)
        worst = torch.tensor([-1.0 if mistake else float(enough)], device=self._mesh.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MIN)
        if worst.item() < 0:  # not only in the first step: a loader's last batch is often shorter
            self._compare(mistake)
        return bool(worst.item())

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The next micro-batch, whose existence :meth:`has_batches` has checked."""
        return self._ready.popleft()

    def epochs(self, taken: int) -> dict[str, float]:
        """Empty: the length of the data is unknown."""
        return {}

    def position_of(self, sequences: int) -> tuple[int, int]:
        """(0, 0): the position in the data is unknown."""
        return 0, 0

    def _mistake(self, ids: Any, boundaries: Any) -> str:
        train = self._config.train
        rows = train.global_batch // (train.micro_batches * self._mesh.data)
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 2:
            return "data gives no int64 tensor [rows, tokens]"
        if len(ids) != rows:
            return (
                f"data gives {len(ids)} rows where global_batch / (micro_batches x data degree) = "
                f"{rows} (a DataLoader's last batch is shorter without drop_last=True)"
            )
        lists = isinstance(boundaries, list) and all(isinstance(row, list) for row in boundaries)
        if boundaries is not None and not (
            lists and all(isinstance(at, Integral) for row in boundaries for at in row)
        ):
            return "data gives document starts that are no list of whole numbers for each row"
        if self._vocabulary is not None and ids.is_cpu and ids.numel():  # on a device it would wait
            least, greatest = (int(found) for found in ids.aminmax())
            if least < 0 or greatest >= self._vocabulary:
                return (
                    f"data gives ids from {least} to {greatest}, but the model has those below "
                    f"model.vocab_size = {self._vocabulary}"
                )
        return ""

    def _compare(self, mistake: str) -> None:
        self._compared = True
        mesh = self._mesh
        digest = hashlib.sha256()
        for batch in self._ready if not mistake else ():
            digest.update(batch.ids.cpu().numpy().tobytes())
        everyone = Objects().gather((mesh.data_rank, digest.hexdigest(), mistake))
        for rank, (_, _, problem) in enumerate(everyone):
            if problem:
                raise ConfigError(f"Trainer: rank {rank}: {problem}")
        first: dict[int, tuple[int, str]] = {}
        for rank, (data_rank, found, _) in enumerate(everyone):
            other, wanted = first.setdefault(data_rank, (rank, found))
            if found != wanted:
                raise ConfigError(
                    f"Trainer: data gives ranks {other} and {rank} other rows, but both compute "
                    "parts of the same sequences: choose them by mesh.data_rank, not by the rank"
                )
