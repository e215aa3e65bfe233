"""Streams run beside each other and the host on one exact clock."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim import CudaError, SimulatedGpu


def test_a_launch_takes_no_host_time_and_the_gpu_works_while_the_host_does(gpu):
    gpu.launch("a", 100)
    assert gpu.now == 0
    gpu.host(60)
    assert not gpu.Stream(state=gpu.default).query()
    gpu.host(40)
    assert gpu.Stream(state=gpu.default).query()


def test_work_of_one_stream_runs_in_order_and_that_of_two_streams_at_once(gpu):
    side = gpu.Stream()
    gpu.launch("a", 100)
    gpu.launch("b", 10)
    gpu.launch("c", 30, stream=side)
    assert [(run.name, run.start_ns, run.end_ns) for run in gpu.executions] == [
        ("a", 0, 100),
        ("b", 100, 110),
        ("c", 0, 30),
    ]


def test_work_starts_no_earlier_than_it_was_launched(gpu):
    gpu.host(500)
    gpu.launch("a", 1)
    assert gpu.runs("a")[0].start_ns == 500


def test_synchronize_waits_for_its_stream_only_and_the_device_for_all(gpu):
    side = gpu.Stream()
    gpu.launch("short", 10)
    gpu.launch("long", 1000, stream=side)
    gpu.Stream(state=gpu.default).synchronize()
    assert gpu.now == 10
    gpu.synchronize()
    assert gpu.now == 1000


def test_a_stream_that_waits_for_another_one_runs_behind_what_that_had_then(gpu):
    side = gpu.Stream()
    gpu.launch("before", 100)
    side.wait_stream(gpu.Stream(state=gpu.default))
    gpu.launch("after", 100)
    gpu.launch("side", 5, stream=side)
    assert gpu.runs("side")[0].start_ns == 100


def test_the_current_stream_is_each_threads_own_and_its_handles_are_equal_not_identical(gpu):
    import threading

    side = gpu.Stream()
    seen = []
    with side:
        thread = threading.Thread(target=lambda: seen.append(gpu.current))
        thread.start()
        thread.join()
        assert gpu.current is side.state
    assert seen == [gpu.default]
    assert gpu.Stream(state=side.state) == side
    assert gpu.Stream(state=side.state) is not side
    assert hash(gpu.Stream(state=side.state)) == hash(side)
    assert gpu.Stream() != side


def test_memory_changes_when_the_kernel_ends_not_when_it_is_launched(gpu):
    x = gpu.allocate(512, "x", 1)
    gpu.fill(x, 9, 100)
    gpu.host(99)
    assert x.contents == 1
    gpu.host(1)
    assert x.contents == 9


def test_reading_on_the_host_waits_for_the_stream(gpu):
    x = gpu.allocate(512, "x", 1)
    gpu.fill(x, 9, 100)
    assert (gpu.read(x), gpu.now) == (9, 100)


def test_what_a_kernel_writes_tells_its_name_its_inputs_and_their_order(gpu):
    x, y = gpu.allocate(512, "x", 1), gpu.allocate(512, "y", 2)
    out = [gpu.allocate(512) for _ in range(4)]
    gpu.launch("k", 1, reads=[x, y], writes=[out[0]])
    gpu.launch("k", 9, reads=[x, y], writes=[out[1]])
    gpu.launch("k", 1, reads=[y, x], writes=[out[2]])
    gpu.launch("other", 1, reads=[x, y], writes=[out[3]])
    gpu.synchronize()
    assert out[0].contents == out[1].contents
    assert len({buffer.contents for buffer in out}) == 3
    gpu.copy(x, out[0])
    assert gpu.read(x) == out[0].contents


def test_unordered_work_on_one_buffer_is_a_race_and_ordered_work_is_none(gpu):
    x, side = gpu.allocate(512, "x"), gpu.Stream()
    gpu.launch("writer", 100, writes=[x])
    gpu.launch("reader", 10, reads=[x], stream=side)
    gpu.synchronize()
    assert [(race.buffer, race.name) for race in gpu.races] == [("x", "reader")]

    gpu.races.clear()
    gpu.launch("writer", 100, writes=[x])
    side.wait_stream(gpu.Stream(state=gpu.default))
    gpu.launch("reader", 10, reads=[x], stream=side)
    gpu.synchronize()
    assert gpu.races == []


def test_a_fault_that_a_test_asked_for_comes_once_at_its_place(gpu):
    gpu.fail("launch", after=1)
    gpu.launch("a", 1)
    with pytest.raises(CudaError, match="unspecified launch failure"):
        gpu.launch("b", 1)
    gpu.launch("c", 1)
    assert [run.name for run in gpu.executions] == ["a", "c"]
    assert gpu.refusals == []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("launch"), st.integers(0, 3), st.integers(0, 1000)),
            st.tuples(st.just("wait"), st.integers(0, 3), st.integers(0, 3)),
            st.tuples(st.just("host"), st.integers(0, 500), st.just(0)),
        ),
        max_size=40,
    )
)
def test_in_any_schedule_streams_keep_their_order_and_waits_are_kept(schedule):
    gpu = SimulatedGpu()
    streams = [gpu.Stream() for _ in range(4)]
    finished = [0] * 4  # when each stream's last work ends, by the schedule alone
    now = 0
    for action, first, second in schedule:
        if action == "launch":
            finished[first] = max(now, finished[first]) + second
            gpu.launch("k", second, stream=streams[first])
            assert gpu.executions[-1].end_ns == finished[first]
        elif action == "wait":
            # An event recorded on an idle stream is passed at once, which is never before the host's now.
            finished[second] = max(now, finished[second])
            finished[first] = max(finished[first], finished[second])
            streams[first].wait_stream(streams[second])
        else:
            now += first
            gpu.host(first)
    gpu.synchronize()
    assert gpu.now == max(now, *finished)
    assert gpu.refusals == []
