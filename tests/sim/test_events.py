"""Events: timestamps are the truth, and asking too early, too late or at the wrong time is refused."""

import ctypes

import pytest

from tests.sim import CudaError, SimulatedGpu


def timing(gpu, **options):
    return gpu.Event(enable_timing=True, **options)


def test_the_time_between_two_events_is_the_time_of_the_work_between_them(gpu):
    start, end = timing(gpu), timing(gpu)
    gpu.launch("before", 77)
    start.record()
    gpu.launch("k", 123_457)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) == 0.123457
    assert end.elapsed_time(start) == -0.123457
    assert (start.recorded_ns, end.recorded_ns) == (77, 77 + 123_457)


def test_an_event_is_complete_when_the_gpu_has_passed_it(gpu):
    event = timing(gpu)
    gpu.launch("k", 100)
    event.record()
    assert not event.query()
    gpu.host(99)
    assert not event.query()
    gpu.host(1)
    assert event.query()


def test_an_event_never_recorded_counts_as_complete_and_nobody_waits_for_it(gpu):
    event = timing(gpu)
    assert event.query()
    event.synchronize()
    event.wait()
    assert gpu.now == 0


def test_recording_again_replaces_the_record(gpu):
    start, event = timing(gpu), timing(gpu)
    start.record()
    event.record()
    gpu.launch("k", 50)
    event.record()
    assert not event.query()
    event.synchronize()
    assert start.elapsed_time(event) == 50 / 1e6


def test_an_event_is_recorded_on_the_stream_named_or_else_the_current_one(gpu):
    side = gpu.Stream()
    gpu.launch("k", 100, stream=side)
    on_side, on_current, on_main = timing(gpu), timing(gpu), timing(gpu)
    on_side.record(side)
    with side:
        on_current.record()
    on_main.record()
    gpu.synchronize()
    assert (on_side.recorded_ns, on_current.recorded_ns, on_main.recorded_ns) == (100, 100, 0)


def test_elapsed_time_of_an_event_without_timing_is_refused(gpu):
    start, end = timing(gpu), gpu.Event()
    start.record()
    end.record()
    with pytest.raises(ValueError, match="must be created with argument 'enable_timing=True'"):
        start.elapsed_time(end)


def test_elapsed_time_of_an_event_never_recorded_is_refused(gpu):
    start, end = timing(gpu), timing(gpu)
    start.record()
    with pytest.raises(ValueError, match="must be recorded before"):
        start.elapsed_time(end)
    assert len(gpu.refusals) == 1


def test_elapsed_time_of_an_event_not_yet_complete_is_refused(gpu):
    start, end = timing(gpu), timing(gpu)
    start.record()
    gpu.launch("k", 100)
    end.record()
    with pytest.raises(RuntimeError, match="must be completed before"):
        start.elapsed_time(end)


def test_an_interprocess_event_cannot_have_timing(gpu):
    with pytest.raises(CudaError, match="invalid argument"):
        timing(gpu, interprocess=True).record()


def test_an_external_event_outside_of_any_capture_is_an_ordinary_one(gpu):
    start, end = timing(gpu, external=True), timing(gpu, external=True)
    start.record()
    gpu.launch("k", 100)
    end.record()
    side = gpu.Stream()
    side.wait_event(end)
    gpu.launch("behind", 1, stream=side)
    end.synchronize()
    assert start.elapsed_time(end) == 100 / 1e6
    assert gpu.runs("behind")[0].start_ns == 100


def test_recording_takes_the_time_it_was_given():
    gpu = SimulatedGpu(event_ns=1000)
    start, end = timing(gpu), timing(gpu)
    start.record()
    gpu.launch("k", 100)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) == 1100 / 1e6
    assert gpu.now == 2100


def test_timestamps_have_the_resolution_and_the_precision_asked_for():
    gpu = SimulatedGpu(resolution_ns=512, single_precision=True)
    start, end = timing(gpu), timing(gpu)
    gpu.launch("offset", 500)
    start.record()
    gpu.launch("k", 100_000_000)
    end.record()
    end.synchronize()
    exact = 100_000_500 // 512 * 512 / 1e6
    assert start.elapsed_time(end) == ctypes.c_float(exact).value != exact
    assert end.recorded_ns - start.recorded_ns == 100_000_000
