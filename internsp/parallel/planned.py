"""Makes a model parallel whose structure and shardings are given, instead of read by patterns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from internsp.base.trace import Trace
from internsp.config import SequenceConfig, WeightParallelConfig
from internsp.mesh import ParallelMesh
from internsp.modules.supported import require_supported
from internsp.parallel.build import Examined, build
from internsp.parallel.compare import require_same_model
from internsp.structure.assign import ParameterSharding
from internsp.structure.blocks import Structure
from internsp.structure.units import chunk_layout
from internsp.wp.collectives import Collectives
from internsp.wp.communicator import ISPCommunicator


def parallelize_as(
    model: nn.Module,
    mesh: ParallelMesh,
    config: WeightParallelConfig,
    structure: Callable[[], Structure],
    shardings: Sequence[ParameterSharding],
) -> ISPCommunicator:
    """:func:`internsp.parallelize` with a structure and shardings. In place; collective.

    Args:
        structure: makes it; what it raises is raised on all ranks.

    Raises:
        StructureError, ConfigError: see :func:`internsp.parallelize`.
    """

    def examine() -> Examined:
        found, kind = structure(), mesh.device.type
        compiles = config.compile or bool(found.compilers)
        placed = {sharding.parameter for sharding in shardings}
        require_supported(model, compiles=compiles, placed=placed)
        layout = chunk_layout(shardings, found, config, mesh.shape, set(), device=kind)
        return Examined(found, set(), [*shardings], layout, False)

    examined = require_same_model(model, mesh, config, SequenceConfig(), None, False, examine)
    return build(model, mesh, config, None, examined, Trace(), None, Collectives)
