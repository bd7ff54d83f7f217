"""Ranks and their named groups: parallel degrees, and the process groups of each axis."""

from internsp.mesh.parallel_mesh import ParallelMesh as ParallelMesh
from internsp.mesh.parallel_mesh import WeightAxis as WeightAxis
from internsp.mesh.sequence import SequenceAxes as SequenceAxes
from internsp.mesh.shape import MeshShape as MeshShape
