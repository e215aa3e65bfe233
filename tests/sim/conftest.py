import pytest

from tests.sim import SimulatedGpu


@pytest.fixture
def gpu() -> SimulatedGpu:
    return SimulatedGpu()
