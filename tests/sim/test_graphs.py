"""Replay: a graph runs as a whole, its external events are recorded anew, and a second replay overwrites them."""

from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim import CudaError, SimulatedGpu, UndefinedError
from tests.sim.refusing import refused


def external(gpu):
    return gpu.Event(enable_timing=True, external=True)


def timed_graph(gpu, ns: int | Callable[[], int]):
    """A graph of one kernel with an external event on either side."""
    start, end = external(gpu), external(gpu)
    with gpu.capture() as graph:
        start.record()
        gpu.launch("k", ns)
        end.record()
    return graph, start, end


def test_a_replay_does_what_the_captured_calls_would_have_done(gpu):
    x, eager, replayed = (gpu.allocate(512, name, 5) for name in ("x", "eager", "replayed"))

    def forward(out):
        gpu.launch("a", 10, reads=[x], writes=[out])
        gpu.launch("b", 10, reads=[out, x], writes=[out])

    forward(eager)
    with gpu.capture() as graph:
        forward(replayed)
    graph.replay()
    assert gpu.read(replayed) == gpu.read(eager) != 5
    gpu.fill(x, 6)
    graph.replay()
    assert gpu.read(replayed) != gpu.read(eager)


def test_a_replay_takes_no_host_time_and_runs_behind_its_streams_work(gpu):
    graph, start, end = timed_graph(gpu, 100)
    gpu.launch("before", 50)
    graph.replay()
    gpu.launch("after", 1)
    assert gpu.now == 0
    gpu.synchronize()
    assert [(run.name, run.start_ns) for run in gpu.executions] == [("before", 0), ("k", 50), ("after", 150)]
    assert (start.recorded_ns, end.recorded_ns) == (50, 150)


def test_branches_of_a_graph_run_at_once_and_are_timed_each_on_its_own(gpu):
    side, events = gpu.Stream(), [external(gpu) for _ in range(4)]
    with gpu.capture() as graph:
        main = gpu.Stream(state=gpu.current)
        gpu.launch("fork", 10)
        side.wait_stream(main)
        events[0].record()
        gpu.launch("left", 100)
        events[1].record()
        with side:
            events[2].record()
            gpu.launch("right", 300)
            events[3].record()
        main.wait_stream(side)
        gpu.launch("join", 1)
    graph.replay()
    gpu.synchronize()
    assert [event.recorded_ns for event in events] == [10, 110, 10, 310]
    assert gpu.runs("join")[0].start_ns == 310


def test_each_replay_records_the_external_events_anew(gpu):
    durations = count(100, 100)
    graph, start, end = timed_graph(gpu, lambda: next(durations))
    for expected in (100, 200, 300):
        graph.replay()
        gpu.synchronize()
        assert round(start.elapsed_time(end) * 1e6) == expected


def test_a_second_replay_overwrites_the_events_of_the_first(gpu):
    durations = count(100, 100)
    graph, start, end = timed_graph(gpu, lambda: next(durations))
    graph.replay()
    graph.replay()
    gpu.synchronize()
    assert round(start.elapsed_time(end) * 1e6) == 200
    assert (end.last_record.graph, end.last_record.replay) == (graph.number, 1)


def test_where_the_launch_makes_events_pending_they_cannot_be_read_once_the_second_replay_is_queued():
    gpu = SimulatedGpu(events_pending_from="launch")
    graph, start, end = timed_graph(gpu, 100)
    graph.replay()
    gpu.synchronize()
    gpu.launch("delay", 50)
    graph.replay()
    assert not start.query()
    with refused(RuntimeError, "must be completed"):
        start.elapsed_time(end)


def test_where_the_node_makes_events_pending_a_half_overwritten_pair_looks_complete():
    gpu = SimulatedGpu(events_pending_from="node")
    graph, start, end = timed_graph(gpu, 100)
    graph.replay()
    assert start.query(), "the second event is as if never recorded until its node runs"
    assert end.query()
    with refused(CudaError, "invalid resource handle"):
        start.elapsed_time(end)
    gpu.synchronize()
    gpu.launch("delay", 1000)
    graph.replay()
    gpu.host(1050)
    assert start.query()
    assert end.query()
    assert start.elapsed_time(end) * 1e6 == pytest.approx(100 - 1100), "the start of one replay, the end of another"


def test_replays_of_one_graph_never_overlap_even_on_two_streams(gpu):
    graph, *_events = timed_graph(gpu, 100)
    for stream in (gpu.Stream(), gpu.Stream(), gpu.Stream()):
        with stream:
            graph.replay()
    gpu.synchronize()
    assert [(run.start_ns, run.end_ns, run.replay) for run in gpu.runs("k")] == [
        (0, 100, 0),
        (100, 200, 1),
        (200, 300, 2),
    ]


def test_replays_of_two_graphs_overlap_on_two_streams(gpu):
    for graph, *_events in [timed_graph(gpu, 100), timed_graph(gpu, 100)]:
        with gpu.Stream():
            graph.replay()
    gpu.synchronize()
    assert gpu.now == 100


def test_an_event_wait_node_waits_for_what_the_event_was_recorded_for_before_the_launch(gpu):
    event, side = external(gpu), gpu.Stream()
    event.record()
    with gpu.capture() as graph:
        gpu.launch("free", 1)
        event.wait()
        gpu.launch("waiting", 1)
    gpu.launch("slow", 500, stream=side)
    event.record(side)
    graph.replay()
    gpu.synchronize()
    assert gpu.runs("free")[0].start_ns == 0
    assert gpu.runs("waiting")[0].start_ns == 500


def test_an_event_node_costs_what_recording_costs():
    gpu = SimulatedGpu(event_ns=1000)
    graph, start, end = timed_graph(gpu, 100)
    graph.replay()
    gpu.synchronize()
    assert gpu.now == 2100
    assert round(start.elapsed_time(end) * 1e6) == 1100


def test_an_eager_record_while_the_replay_is_under_way_is_overwritten_by_it():
    gpu = SimulatedGpu(events_pending_from="node")
    graph, _start, end = timed_graph(gpu, 100)
    gpu.launch("delay", 50)
    graph.replay()
    side = gpu.Stream()
    end.record(side)
    assert end.recorded_ns == 0
    gpu.synchronize()
    assert end.recorded_ns == 150


# --- what is refused --------------------------------------------------------------------------------------


def test_a_graph_never_captured_or_already_reset_cannot_be_replayed(gpu):
    with refused(RuntimeError, "without a preceding successful capture"):
        gpu.CUDAGraph().replay()
    graph, *_events = timed_graph(gpu, 1)
    graph.reset()
    with refused(RuntimeError, "without a preceding successful capture"):
        graph.replay()
    with refused(RuntimeError, "without a preceding successful capture"):
        graph.pool()


def test_a_graph_whose_events_are_gone_cannot_be_replayed(gpu):
    graph, start, end = timed_graph(gpu, 1)
    graph.replay()
    del start
    with refused(UndefinedError, "has been destroyed"):
        graph.replay()
    assert end is not None


def test_a_replay_inside_a_capture_is_not_simulated(gpu):
    graph, start, end = timed_graph(gpu, 1)
    with gpu.capture():
        gpu.launch("k", 1)
        with refused(UndefinedError, "child graph"):
            graph.replay()
    assert start.query()
    assert end.query()


def test_the_captured_graph_can_be_looked_at_where_it_is_kept(gpu, tmp_path):
    kept = gpu.CUDAGraph(keep_graph=True)
    with refused(RuntimeError, "until capture_end"):
        kept.raw_cuda_graph()
    with gpu.capture(kept):
        gpu.launch("k", 1)
        gpu.launch("k", 1)
    assert kept.raw_cuda_graph()
    with refused(RuntimeError, "until instantiate"):
        kept.raw_cuda_graph_exec()
    kept.replay()
    assert kept.raw_cuda_graph_exec()
    kept.instantiate()
    kept.debug_dump(str(tmp_path / "kept.dot"))
    assert (tmp_path / "kept.dot").read_text().count("kernel") == 2

    dropped, _, _ = timed_graph(gpu, 1)
    with refused(RuntimeError, "keep_graph=true"):
        dropped.raw_cuda_graph()
    with refused(RuntimeError, "only when keep_graph=true"):
        dropped.instantiate()
    with pytest.warns(UserWarning, match="debug not enabled"):
        dropped.debug_dump(str(tmp_path / "dropped.dot"))


def test_in_debug_mode_a_graph_can_be_dumped(gpu, tmp_path):
    gpu.CUDAGraph().enable_debug_mode()
    graph, _, _ = timed_graph(gpu, 1)
    graph.debug_dump(str(tmp_path / "graph.dot"))
    assert (tmp_path / "graph.dot").read_text().count("event_record") == 2


def test_an_empty_graph_is_warned_of_and_can_be_replayed(gpu):
    with pytest.warns(UserWarning, match="The CUDA Graph is empty"), gpu.capture() as graph:
        pass
    graph.replay()


def test_instantiating_before_the_capture_has_ended_is_refused(gpu):
    with refused(RuntimeError, "must have been called before calling instantiate"):
        gpu.CUDAGraph(keep_graph=True).instantiate()


# --- any graph --------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    work=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 500)), min_size=1, max_size=12),
    replays=st.lists(st.integers(0, 1500), min_size=1, max_size=5),
    event_ns=st.sampled_from([0, 1, 1000]),
    pending_from=st.sampled_from(["launch", "node"]),
)
def test_in_any_graph_every_pair_of_events_tells_its_kernels_time(work, replays, event_ns, pending_from):
    gpu = SimulatedGpu(event_ns=event_ns, events_pending_from=pending_from)
    pairs = [(external(gpu), external(gpu)) for _ in work]
    sides = [gpu.Stream(), gpu.Stream()]
    with gpu.capture() as graph:
        origin = gpu.Stream(state=gpu.current)
        for side in sides:
            side.wait_stream(origin)
        for index, (lane, ns) in enumerate(work):
            with [origin, *sides][lane]:
                pairs[index][0].record()
                gpu.launch(f"k{index}", ns)
                pairs[index][1].record()
        for side in sides:
            origin.wait_stream(side)
    for pause in replays:
        graph.replay()
        gpu.host(pause)
    gpu.synchronize()
    for index, (start, end) in enumerate(pairs):
        last = gpu.runs(f"k{index}")[-1]
        assert last.replay == len(replays) - 1
        assert start.recorded_ns == last.start_ns
        assert end.recorded_ns == last.end_ns + event_ns
        assert round(start.elapsed_time(end) * 1e6) == work[index][1] + event_ns
    assert gpu.refusals == []
