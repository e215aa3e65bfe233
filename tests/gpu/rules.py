"""Rules that the simulated GPU of the tests keeps, as probes that run on either: on a GPU they tell where it is wrong.

    python tests/gpu/rules.py     one JSON object: probe -> {"expected": ..., "observed": ...}

Probes lose captures on purpose. They run in a process of their own, and every capture has a pool of its own.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.device import CudaGpu

UNSUPPORTED = "operation not permitted when stream is capturing"
INVALIDATED = "operation failed due to a previous error during capture"
CAPTURED_EVENT = "operation not permitted on an event last recorded in a capturing stream"
INVALID_VALUE = "invalid argument"
INVALID_HANDLE = "invalid resource handle"
ILLEGAL_STATE = "the operation cannot be performed in the present state"
FINE = "^$"


class Probe:
    """One rule: `observe` returns what happened, "" if nothing was refused; `expected` is a pattern for it."""

    def __init__(self, observe: Callable[[Any], str], expected: str) -> None:
        self.observe = observe
        self.expected = expected
        self.name = observe.__name__


PROBES: list[Probe] = []


def expects(expected: str) -> Callable[[Callable[[Any], str]], Callable[[Any], str]]:
    def register(observe: Callable[[Any], str]) -> Callable[[Any], str]:
        PROBES.append(Probe(observe, expected))
        return observe

    return register


def refusal(action: Callable[[], Any]) -> str:
    """What `action` was refused with, "" where it was not."""
    try:
        action()
    except Exception as error:
        return str(error)
    return ""


@contextmanager
def capture(mode: str = "global", stream: Any = None, pool: Any = None) -> Iterator[Any]:
    """A capture that is ended whatever happens; errors at its end are in the second item of what it gives."""
    graph = torch.cuda.CUDAGraph()
    state: dict[str, Any] = {"graph": graph, "end": ""}
    with torch.cuda.stream(stream or torch.cuda.Stream()):
        graph.capture_begin(pool=pool or torch.cuda.graph_pool_handle(), capture_error_mode=mode)
        try:
            yield state
        finally:
            state["end"] = refusal(graph.capture_end)


def in_capture(gpu: Any, action: Callable[[], Any], mode: str = "global") -> str:
    """What `action` is refused with inside of a capture, and what the end of that capture is refused with."""
    with capture(mode) as state:
        gpu.spin(1)
        refused = refusal(action)
    return f"{_first_line(refused)} | {_first_line(state['end'])}" if refused or state["end"] else ""


def timing(**options: Any) -> Any:
    return torch.cuda.Event(enable_timing=True, **options)


def recorded(**options: Any) -> Any:
    event = timing(**options)
    event.record()
    event.synchronize()
    return event


def in_thread(action: Callable[[], Any]) -> str:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(refusal(action)))
    thread.start()
    thread.join()
    return found[0]


LOST = rf"{UNSUPPORTED}.* \| .*{INVALIDATED}"


@expects(LOST)
def query_the_capturing_stream(gpu: Any) -> str:
    return in_capture(gpu, lambda: torch.cuda.current_stream().query(), "relaxed")


@expects(LOST)
def synchronize_the_device(gpu: Any) -> str:
    return in_capture(gpu, torch.cuda.synchronize, "relaxed")


@expects(LOST)
def query_another_event_in_a_global_capture(gpu: Any) -> str:
    return in_capture(gpu, recorded().query)


@expects(FINE)
def query_another_event_in_a_relaxed_capture(gpu: Any) -> str:
    return in_capture(gpu, recorded().query, "relaxed")


@expects(LOST)
def query_another_stream_in_a_global_capture(gpu: Any) -> str:
    return in_capture(gpu, torch.cuda.Stream().query)


@expects(LOST)
def synchronize_another_stream_in_a_global_capture(gpu: Any) -> str:
    return in_capture(gpu, torch.cuda.Stream().synchronize)


@expects(LOST)
def read_other_events_in_a_global_capture(gpu: Any) -> str:
    start, end = recorded(), recorded()
    return in_capture(gpu, lambda: start.elapsed_time(end))


@expects(rf"{CAPTURED_EVENT}.* \| .*{INVALIDATED}")
def query_an_event_of_the_capture(gpu: Any) -> str:
    event = timing()

    def ask() -> None:
        event.record()
        event.query()

    return in_capture(gpu, ask, "relaxed")


@expects(INVALID_VALUE)
def query_an_internal_event_after_the_capture(gpu: Any) -> str:
    event = timing()
    with capture():
        gpu.spin(1)
        event.record()
    return refusal(event.query)


@expects(INVALID_VALUE)
def wait_for_an_internal_event_after_the_capture(gpu: Any) -> str:
    event = timing()
    with capture():
        gpu.spin(1)
        event.record()
    return refusal(event.wait)


@expects(FINE)
def an_internal_event_recorded_anew_after_the_capture(gpu: Any) -> str:
    event = timing()
    with capture():
        gpu.spin(1)
        event.record()
    event.record()
    return refusal(event.synchronize)


@expects(FINE)
def query_an_external_event_before_any_replay(gpu: Any) -> str:
    event = timing(external=True)
    with capture():
        gpu.spin(1)
        event.record()
    return "" if event.query() else "not complete"


@expects(INVALID_HANDLE)
def read_external_events_before_any_replay(gpu: Any) -> str:
    start, end = timing(external=True), timing(external=True)
    with capture():
        start.record()
        gpu.spin(1)
        end.record()
    return refusal(lambda: start.elapsed_time(end))


@expects(INVALID_VALUE)
def record_an_external_event_on_a_stream_outside_of_the_capture(gpu: Any) -> str:
    side = torch.cuda.Stream()
    with capture() as state:
        gpu.spin(1)
        refused = refusal(lambda: timing(external=True).record(side))
    return refused + state["end"]


@expects("dependency created on uncaptured work in another stream")
def wait_for_work_outside_of_the_capture(gpu: Any) -> str:
    return in_capture(gpu, recorded().wait)


@expects(FINE)
def wait_for_an_event_never_recorded(gpu: Any) -> str:
    return in_capture(gpu, timing().wait)


@expects("capturing stream has unjoined work")
def a_fork_with_work_that_is_not_joined(gpu: Any) -> str:
    side = torch.cuda.Stream()
    with capture() as state:
        gpu.spin(1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            gpu.spin(1)
    return str(state["end"])


@expects(FINE)
def a_fork_without_work_that_is_not_joined(gpu: Any) -> str:
    side = torch.cuda.Stream()
    with capture() as state:
        gpu.spin(1)
        side.wait_stream(torch.cuda.current_stream())
    return str(state["end"])


@expects("capturing stream has unjoined work")
def an_event_node_behind_the_join(gpu: Any) -> str:
    side, event = torch.cuda.Stream(), timing(external=True)
    with capture() as state:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            gpu.spin(1)
        main.wait_stream(side)
        with torch.cuda.stream(side):
            event.record()
    return str(state["end"])


@expects("merge of separate capture sequences")
def wait_for_another_capture(gpu: Any) -> str:
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    with capture("relaxed", one):
        gpu.spin(1)
        with capture("relaxed", two):
            gpu.spin(1)
            refused = refusal(lambda: two.wait_stream(one))
    return refused


@expects(ILLEGAL_STATE)
def begin_a_capture_in_a_capture(gpu: Any) -> str:
    with capture():
        gpu.spin(1)
        return refusal(
            lambda: torch.cuda.CUDAGraph().capture_begin(
                pool=torch.cuda.graph_pool_handle(), capture_error_mode="global"
            )
        )


@expects("non-default stream")
def capture_the_default_stream(gpu: Any) -> str:
    with torch.cuda.stream(torch.cuda.default_stream()):
        return refusal(lambda: torch.cuda.CUDAGraph().capture_begin())


@expects(LOST)
def another_thread_asks_beside_a_global_capture(gpu: Any) -> str:
    event = recorded()
    with capture() as state:
        gpu.spin(1)
        refused = in_thread(event.query)
    return f"{_first_line(refused)} | {_first_line(state['end'])}" if refused or state["end"] else ""


@expects(FINE)
def another_thread_asks_beside_a_thread_local_capture(gpu: Any) -> str:
    event = recorded()
    with capture("thread_local") as state:
        gpu.spin(1)
        refused = in_thread(event.query)
    return refused + str(state["end"])


@expects("^True$")
def an_invalidated_capture_counts_as_capturing(gpu: Any) -> str:
    with capture():
        gpu.spin(1)
        refusal(torch.cuda.synchronize)
        capturing = torch.cuda.is_current_stream_capturing()
    return str(capturing)


@expects("already recording to mempool_id")
def capture_into_the_pool_of_a_lost_capture(gpu: Any) -> str:
    pool = torch.cuda.graph_pool_handle()
    with capture(pool=pool):
        gpu.spin(1)
        refusal(torch.cuda.synchronize)
    return refusal(lambda: _capture_into(gpu, pool))


@expects(FINE)
def capture_into_the_pool_of_a_lost_capture_that_was_ended_by_hand(gpu: Any) -> str:
    pool = torch.cuda.graph_pool_handle()
    with capture(pool=pool):
        gpu.spin(1)
        refusal(torch.cuda.synchronize)
    torch._C._cuda_endAllocateToPool(0, pool)
    return refusal(lambda: _capture_into(gpu, pool))


@expects(FINE)
def replays_on_two_streams_do_not_overlap(gpu: Any) -> str:
    start, end = timing(external=True), timing(external=True)
    with capture() as state:
        start.record()
        gpu.spin(200)
        end.record()
    before, after = timing(), timing()
    streams = [torch.cuda.Stream() for _ in range(2)]
    state["graph"].replay()
    torch.cuda.synchronize()
    before.record()
    for stream in streams:
        stream.wait_event(before)
        with torch.cuda.stream(stream):
            state["graph"].replay()
        torch.cuda.current_stream().wait_stream(stream)
    after.record()
    after.synchronize()
    both, one = before.elapsed_time(after), start.elapsed_time(end)
    return "" if both >= 1.9 * one else f"two replays took {both:.3f} ms, one of them {one:.3f} ms"


def _capture_into(gpu: Any, pool: Any) -> None:
    with capture(pool=pool) as state:
        gpu.spin(1)
    if state["end"]:
        raise RuntimeError(state["end"])


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def run_probes(gpu: Any) -> dict[str, dict[str, Any]]:
    """Every probe's expectation and what was observed."""
    results: dict[str, dict[str, Any]] = {}
    for probe in PROBES:
        try:
            observed = probe.observe(gpu)
        except Exception as error:
            observed = f"the probe failed: {error}"
        observed = _first_line(observed)
        results[probe.name] = {
            "expected": probe.expected,
            "observed": observed,
            "agrees": re.search(probe.expected, observed) is not None,
        }
    return results


if __name__ == "__main__":
    print(json.dumps(run_probes(CudaGpu())))
