"""The rows of a step that this rank computes, and their micro-batches.

Which rows a step uses follows from the order of the data, never from the mesh: a global batch, or
as many rows as have ``train.batch_tokens`` tokens to predict. Every rank computes this itself.
"""

from __future__ import annotations

from typing import NamedTuple

from internsp.app.config import Config, TrainConfig
from internsp.app.data.batches import FILLER
from internsp.mesh import ParallelMesh


class StepRows(NamedTuple):
    """The rows of a step.

    Attributes:
        total: number of rows over all ranks.
        micro_batches: this rank's row numbers, in the order of the data, for each micro-batch.
    """

    total: int
    micro_batches: list[list[int]]

    @classmethod
    def of_batch(cls, taken: int, train: TrainConfig, mesh: ParallelMesh) -> StepRows:
        """The next global batch after ``taken`` rows."""
        numbers = range(taken, taken + train.global_batch)
        parts = [micro_batch(index, train, mesh) for index in range(train.micro_batches)]
        return cls(train.global_batch, [list(numbers[part]) for part in parts])

    @classmethod
    def of_tokens(cls, taken: int, count: int, config: Config, mesh: ParallelMesh) -> StepRows:
        """The ``count`` rows after ``taken``, for any ``count``.

        Every rank has the same number of micro-batches, none with more rows than a micro-batch of
        the global batch. Missing rows are filled with rows from which nothing is learned: in a
        pipeline as many as its schedule and the fixed shape of its messages need, with compiled
        blocks as many as avoid a compilation for another shape, else one, so that a rank without a
        row still takes part.
        """
        train = config.train
        most = train.global_batch // (train.micro_batches * mesh.data)
        each, more = divmod(count, mesh.data)
        first = taken + mesh.data_rank * each + min(mesh.data_rank, more)
        own = range(first, first + each + (mesh.data_rank < more))
        number = -(-(each + (more > 0)) // most)
        least = 1
        if mesh.pipeline > 1:
            number = -(-number // train.micro_batches) * train.micro_batches
        if mesh.pipeline > 1 or config.weight_parallel.compile:
            least = most
        parts = [list(own[i * most : (i + 1) * most]) for i in range(number)]
        return cls(count, [part + [FILLER] * (least - len(part)) for part in parts])


def micro_batch(index: int, train: TrainConfig, mesh: ParallelMesh) -> slice:
    """This rank's rows of the global batch in micro-batch ``index``; a configuration's batch is a
    multiple of micro-batches times data ranks."""
    each = train.global_batch // (train.micro_batches * mesh.data)
    first = (index * mesh.data + mesh.data_rank) * each
    return slice(first, first + each)
