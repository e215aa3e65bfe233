"""A simulated GPU for tests, strict about what CUDA forbids; see README.md."""

from tests.sim.errors import CudaError, UndefinedError
from tests.sim.gpu import SimulatedGpu

__all__ = ["CudaError", "SimulatedGpu", "UndefinedError"]
