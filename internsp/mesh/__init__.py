"""Ranks and their named groups: parallel degrees, and the process groups of each axis."""

from internsp.mesh.parallel_mesh import ParallelMesh, WeightAxis
from internsp.mesh.sequence import SequenceAxes
from internsp.mesh.shape import MeshShape

__all__ = ["MeshShape", "ParallelMesh", "SequenceAxes", "WeightAxis"]
