"""Capture: what makes a node, and everything that CUDA refuses while a stream is being captured."""

import threading

import pytest

from tests.sim import CudaError
from tests.sim.refusing import refused

UNSUPPORTED = "operation not permitted when stream is capturing"
INVALIDATED = "operation failed due to a previous error during capture"
CAPTURED_EVENT = "operation not permitted on an event last recorded in a capturing stream"


def external(gpu):
    return gpu.Event(enable_timing=True, external=True)


def capture_fails(gpu, forbidden, message, *, mode="global"):
    """`forbidden` is refused with `message` during a capture, which is then lost."""
    graph = gpu.CUDAGraph()
    with refused(CudaError, INVALIDATED), gpu.capture(graph, mode=mode):
        gpu.launch("k", 1)
        with refused(RuntimeError, message):
            forbidden()
        assert gpu.is_current_stream_capturing(), "an invalidated capture still counts as one"
    assert not gpu.is_current_stream_capturing()
    with refused(RuntimeError, "without a preceding successful capture"):
        graph.replay()


# --- what becomes a node ----------------------------------------------------------------------------------


def test_captured_work_does_not_run(gpu):
    x = gpu.allocate(512, "x", 1)
    with gpu.capture() as graph:
        gpu.fill(x, 2, 10)
        gpu.launch("k", 10)
        gpu.copy(x, x, 10)
    gpu.synchronize()
    assert gpu.executions == []
    assert (x.contents, gpu.now) == (1, 0)
    assert [node.kind for node in graph.nodes] == ["memset", "kernel", "memcpy"]
    assert [sorted(node.after) for node in graph.nodes] == [[], [0], [1]]


def test_only_the_stream_that_is_captured_is_capturing(gpu):
    side = gpu.Stream()
    with gpu.capture():
        assert gpu.is_current_stream_capturing()
        with side:
            assert not gpu.is_current_stream_capturing()
        gpu.launch("beside", 10, stream=side)
        gpu.launch("captured", 10)
    assert [run.name for run in gpu.executions] == ["beside"]


def test_an_external_event_becomes_a_node_and_is_not_recorded_by_the_capture(gpu):
    start, end = external(gpu), external(gpu)
    with gpu.capture() as graph:
        start.record()
        gpu.launch("k", 1)
        end.record()
    assert [node.kind for node in graph.nodes] == ["event_record", "kernel", "event_record"]
    assert start.query()
    with refused(CudaError, "invalid resource handle"):
        start.elapsed_time(end)


def test_an_internal_event_becomes_no_node_and_is_no_timestamp(gpu):
    start, end = gpu.Event(enable_timing=True), gpu.Event(enable_timing=True)
    with gpu.capture() as graph:
        start.record()
        gpu.launch("k", 1)
        end.record()
    assert graph.kinds() == {"kernel": 1}
    graph.replay()
    gpu.synchronize()
    for ask in (start.query, start.synchronize, start.wait, lambda: start.elapsed_time(end)):
        with refused(CudaError, "invalid argument"):
            ask()
    start.record()
    assert start.query(), "recorded anew, it is an ordinary event again"


def test_a_forked_stream_that_is_joined_is_part_of_the_graph(gpu):
    side = gpu.Stream()
    with gpu.capture() as graph:
        gpu.launch("fork", 1)
        side.wait_stream(gpu.Stream(state=gpu.current))
        gpu.launch("left", 1)
        gpu.launch("right", 1, stream=side)
        gpu.Stream(state=gpu.current).wait_stream(side)
        gpu.launch("join", 1)
    assert [(node.work.name, sorted(node.after)) for node in graph.nodes] == [
        ("fork", []),
        ("left", [0]),
        ("right", [0]),
        ("join", [1, 2]),
    ]
    assert side.query(), "after the capture the stream is free again"


def test_a_wait_for_an_external_event_becomes_a_node(gpu):
    event = external(gpu)
    event.record()
    with gpu.capture() as graph:
        event.wait()
        gpu.launch("k", 1)
    assert [node.kind for node in graph.nodes] == ["event_wait", "kernel"]


def test_an_event_never_recorded_may_be_waited_for(gpu):
    event = gpu.Event()
    with gpu.capture() as graph:
        event.wait()
        gpu.launch("k", 1)
    assert graph.kinds() == {"kernel": 1}
    assert gpu.refusals == []


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_the_capturing_stream_cannot_be_queried_synchronised_or_read_in_any_mode(gpu, mode):
    x = gpu.allocate(512)
    current = lambda: gpu.Stream(state=gpu.current)  # noqa: E731
    for forbidden in (lambda: current().query(), lambda: current().synchronize(), lambda: gpu.read(x)):
        capture_fails(gpu, forbidden, UNSUPPORTED, mode=mode)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_the_device_cannot_be_synchronised_in_any_mode(gpu, mode):
    capture_fails(gpu, gpu.synchronize, UNSUPPORTED, mode=mode)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_an_event_recorded_in_the_capture_cannot_be_asked_in_any_mode(gpu, mode):
    event = gpu.Event(enable_timing=True)

    def ask(question):
        event.record()
        question()

    for question in (event.query, event.synchronize, lambda: event.elapsed_time(event)):
        capture_fails(gpu, lambda question=question: ask(question), CAPTURED_EVENT, mode=mode)


def test_other_events_and_streams_cannot_be_asked_unless_the_capture_is_relaxed(gpu):
    event, side = gpu.Event(enable_timing=True), gpu.Stream()
    event.record()
    questions = (event.query, event.synchronize, lambda: event.elapsed_time(event), side.query, side.synchronize)
    for question in (*questions, gpu.empty_cache):
        for mode in ("global", "thread_local"):
            capture_fails(gpu, question, UNSUPPORTED, mode=mode)
    with gpu.capture(mode="relaxed") as graph:
        for question in questions:
            question()
        gpu.launch("k", 1)
    graph.replay()


def in_another_thread(action):
    errors = []

    def run():
        try:
            action()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_another_threads_question_kills_a_global_capture(gpu):
    event = gpu.Event()
    event.record()
    capture_fails(gpu, lambda: in_another_thread(event.query), UNSUPPORTED)


@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_another_thread_may_ask_beside_a_capture_of_any_other_mode(gpu, mode):
    event = gpu.Event()
    event.record()
    with gpu.capture(mode=mode):
        in_another_thread(event.query)
        gpu.launch("k", 1)
    assert gpu.refusals == []


def test_a_thread_that_made_itself_relaxed_may_ask_beside_a_global_capture(gpu):
    event = gpu.Event()
    event.record()

    def ask():
        with gpu.thread_capture_mode("relaxed"):
            event.query()

    with gpu.capture():
        in_another_thread(ask)
        gpu.launch("k", 1)
    assert gpu.refusals == []


def test_nothing_can_be_added_to_an_invalidated_capture(gpu):
    with refused(CudaError, INVALIDATED), gpu.capture():
        with refused(CudaError, UNSUPPORTED):
            gpu.synchronize()
        for more in (lambda: gpu.launch("k", 1), external(gpu).record, gpu.Event().record):
            with refused(CudaError, INVALIDATED):
                more()
    assert len(gpu.refusals) == 1, "the first breach is the one on record"


def test_waiting_for_work_outside_of_the_capture_is_refused(gpu):
    event = gpu.Event()
    event.record()
    capture_fails(gpu, event.wait, "dependency created on uncaptured work in another stream")


def test_two_captures_cannot_be_merged(gpu):
    first, second = gpu.CUDAGraph(), gpu.CUDAGraph()
    one, two = gpu.Stream(), gpu.Stream()
    with refused(CudaError, INVALIDATED), gpu.capture(first, stream=one):
        gpu.launch("k", 1)
        with refused(CudaError, INVALIDATED), gpu.capture(second, stream=two):
            gpu.launch("k", 1)
            with refused(CudaError, "merge of separate capture sequences"):
                two.wait_stream(one)


def test_a_fork_that_is_not_joined_is_refused_at_the_end(gpu):
    side = gpu.Stream()
    with refused(CudaError, "capturing stream has unjoined work"), gpu.capture():
        gpu.launch("k", 1)
        side.wait_stream(gpu.Stream(state=gpu.current))
        gpu.launch("forked", 1, stream=side)
    assert side.query()


def test_an_event_node_behind_the_join_is_unjoined_work(gpu):
    side = gpu.Stream()
    with refused(CudaError, "capturing stream has unjoined work"), gpu.capture():
        side.wait_stream(gpu.Stream(state=gpu.current))
        gpu.launch("forked", 1, stream=side)
        gpu.Stream(state=gpu.current).wait_stream(side)
        with side:
            external(gpu).record()


def test_an_external_record_on_a_stream_outside_of_the_capture_is_refused(gpu):
    side = gpu.Stream()
    with gpu.capture():
        gpu.launch("k", 1)
        with refused(CudaError, "invalid argument"):
            external(gpu).record(side)
        with refused(CudaError, "invalid argument"):
            event = external(gpu)
            event.record()
            event.wait(side)


def test_a_capture_ends_on_the_stream_and_the_thread_where_it_began(gpu):
    graph, stream = gpu.CUDAGraph(), gpu.Stream()
    with stream:
        graph.capture_begin()
        gpu.launch("k", 1)
    with refused(RuntimeError, "must end on the same stream it began on"):
        graph.capture_end()

    def end():
        with stream:
            graph.capture_end()

    with refused(CudaError, "thread-local capture sequence from another thread"):
        in_another_thread(end)
    with refused(CudaError, INVALIDATED):
        end()


def test_a_forked_stream_cannot_end_the_capture(gpu):
    graph, origin, side = gpu.CUDAGraph(), gpu.Stream(), gpu.Stream()
    with origin:
        graph.capture_begin()
        side.wait_stream(origin)
    other = gpu.CUDAGraph()
    with side:
        other._capture_stream = side.state
        with refused(CudaError, "not ended in the same stream as it began"):
            other.capture_end()


def test_the_default_stream_cannot_be_captured(gpu):
    with refused(RuntimeError, "must be captured on a non-default stream"):
        gpu.CUDAGraph().capture_begin()


def test_a_stream_being_captured_cannot_begin_another_capture(gpu):
    with gpu.capture():
        gpu.launch("k", 1)
        with refused(CudaError, "cannot be performed in the present state"):
            gpu.CUDAGraph().capture_begin()


def test_a_capture_that_never_began_cannot_end(gpu):
    with gpu.Stream():
        graph = gpu.CUDAGraph()
        with refused(CudaError, "cannot be performed in the present state"):
            graph.capture_end()


def test_a_graph_that_is_captured_cannot_be_captured_again_before_it_is_reset(gpu):
    with gpu.capture() as graph:
        gpu.launch("k", 1)
    with refused(RuntimeError, "already owns a captured graph"), gpu.Stream():
        graph.capture_begin()
    graph.reset()
    with gpu.capture(graph):
        gpu.launch("k", 1)
    graph.replay()


def test_an_unknown_mode_is_refused(gpu):
    with refused(RuntimeError, "Unknown capture error mode"), gpu.Stream():
        gpu.CUDAGraph().capture_begin(None, "lax")


def test_an_exception_of_the_captured_code_passes_and_leaves_no_capture_behind(gpu):
    with refused(ZeroDivisionError, "of the model's"), gpu.capture():
        gpu.launch("k", 1)
        raise ZeroDivisionError("of the model's")
    assert gpu.captures == []
    gpu.synchronize()


def test_a_fault_in_a_capture_invalidates_it(gpu):
    gpu.fail("launch", after=1)
    with refused(CudaError, INVALIDATED), gpu.capture():
        gpu.launch("a", 1)
        with refused(CudaError, "unspecified launch failure"):
            gpu.launch("b", 1)
    assert gpu.refusals == [], "the fault was the test's, no rule was broken"
