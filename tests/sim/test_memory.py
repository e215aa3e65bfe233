"""Memory: captures allocate from their pool, graphs cost what they cost, and a lost capture leaves its pool stuck."""

import gc

import pytest

from tests.sim import CudaError, SimulatedGpu
from tests.sim.refusing import refused


def captured(gpu, pool=None, nbytes=0):
    buffers = []
    with gpu.capture(pool=pool) as graph:
        gpu.launch("k", 1)
        if nbytes:
            buffers.append(gpu.allocate(nbytes))
    return graph, buffers


def test_memory_is_reserved_when_first_needed_and_cached_when_freed(gpu):
    x = gpu.allocate(1000)
    assert (gpu.memory.allocated, gpu.memory.reserved) == (1000, 1000)
    x.free()
    assert (gpu.memory.allocated, gpu.memory.reserved) == (0, 1000)
    y = gpu.allocate(600)
    assert (gpu.memory.allocated, gpu.memory.reserved) == (1000, 1000)
    del y
    gc.collect()
    gpu.empty_cache()
    assert (gpu.memory.allocated, gpu.memory.reserved) == (0, 0)
    assert gpu.memory.free == gpu.memory.total
    assert gpu.memory.stats()["reserved_bytes.all.peak"] == 1000


def test_a_capture_allocates_from_its_pool_which_lives_as_long_as_its_graphs(gpu):
    pool = gpu.memory.new_pool_id(user_created=True)
    first, buffers = captured(gpu, pool, 1000)
    buffers.clear()
    second, more = captured(gpu, pool, 800)
    assert gpu.memory.reserved == 1000, "the second graph uses what the first one left"
    more.clear()
    gpu.empty_cache()
    assert gpu.memory.reserved == 1000
    del first, second
    gpu.empty_cache()
    assert gpu.memory.reserved == 0


def test_what_is_allocated_beside_the_capture_is_counted(gpu):
    side = gpu.Stream()
    with gpu.capture():
        gpu.launch("k", 1)
        inside = gpu.allocate(100)
        with side:
            outside = gpu.allocate(30)
    assert inside.pool != outside.pool == (0, 0)
    assert gpu.memory.outside_pool_during_capture == 30


def test_a_graph_without_a_pool_gets_one_that_another_graph_may_share(gpu):
    first, kept = captured(gpu, None, 100)
    second, more = captured(gpu, first.pool(), 100)
    assert first.pool() == second.pool()
    assert first.pool()[0] > 0
    assert kept[0].pool == more[0].pool


def test_an_instantiated_graph_takes_memory_until_it_is_reset():
    gpu = SimulatedGpu(graph_bytes=1000, node_bytes=10)
    graph, _ = captured(gpu)
    assert gpu.memory.total - gpu.memory.free == 1010
    graph.reset()
    assert gpu.memory.total == gpu.memory.free


def test_too_much_is_out_of_memory_and_takes_nothing():
    gpu = SimulatedGpu(total_bytes=1000, graph_bytes=600)
    x = gpu.allocate(700)
    with refused(RuntimeError, "CUDA out of memory. Tried to allocate 400 bytes"):
        gpu.allocate(400)
    assert gpu.memory.allocated == 700
    with refused(CudaError, "out of memory"):
        captured(gpu)
    x.free()
    y = gpu.allocate(900)
    assert gpu.memory.reserved == 900, "what was cached has made room"
    y.free()


def test_a_lost_capture_leaves_its_pool_recording_so_that_no_other_capture_can_use_it(gpu):
    pool = gpu.memory.new_pool_id(user_created=True)
    gpu.fail("capture_end")
    with refused(CudaError, "unspecified launch failure"):
        captured(gpu, pool)
    with refused(RuntimeError, "already recording to mempool_id"):
        captured(gpu, pool)
    captured(gpu)


def test_a_pool_whose_last_graph_is_gone_cannot_be_captured_into_while_it_holds_memory(gpu):
    pool = gpu.memory.new_pool_id(user_created=True)
    graph, kept = captured(gpu, pool, 100)
    graph.reset()
    with refused(RuntimeError, "use_count > 0 INTERNAL ASSERT FAILED"):
        captured(gpu, pool)
    kept.clear()
    gpu.empty_cache()
    captured(gpu, pool)


def test_a_failing_instantiation_can_be_asked_for(gpu):
    gpu.fail("instantiate", MemoryError("asked for"))
    with pytest.raises(MemoryError):
        captured(gpu)
