"""Whatever is true of a generated trace comes back to the nanosecond, in whatever dress it was written."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traces import BASE_NS, Call, Dress, HostRange, Rank, Work, document, encode
from vllm_k25_instrument.analysis.capture import ActivityKind, Capture
from vllm_k25_instrument.analysis.kineto.columns import ns_of_float_us
from vllm_k25_instrument.analysis.kineto.rows import ns_of_us
from vllm_k25_instrument.analysis.torch_trace import read_torch_trace

KEYS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="@\0"), min_size=1, max_size=30)
NAMES = st.one_of(
    TEXT, st.sampled_from(['a "quoted" \\ name', "}, {", '"}, {"ph": "X"', "[]", "NaN", '"traceEvents": ['])
)

dresses = st.builds(
    Dress,
    absolute=st.booleans(),
    base_first=st.booleans(),
    number=st.sampled_from(["fraction", "short", "text", "exponent"]),
    keys=st.permutations(KEYS).map(tuple),
    shuffle=st.none() | st.integers(0, 99),
    indent=st.none() | st.integers(0, 3),
    ascii=st.booleans(),
    container=st.sampled_from(["object", "nested", "listed"]),
    flows=st.booleans(),
    old_categories=st.booleans(),
    gzip_members=st.integers(0, 3),
    unit=st.sampled_from(["ms", "ns"]),
)

kinds = st.sampled_from(ActivityKind).filter(lambda kind: kind is not ActivityKind.GRAPH)


@st.composite
def ranks(draw: st.DrawFn) -> Rank:
    """Calls one after the other, each with work on one of three streams that may overlap all other work."""
    at = draw(st.integers(1, 7_000_000_000_000_000))
    calls = []
    ranges = []
    for index in range(draw(st.integers(1, 5))):
        at += draw(st.integers(1, 10**6))
        length = draw(st.integers(1, 10**5))
        operator = draw(st.booleans())
        ranges.append(HostRange(f"range {index}", at - 1, length + 2, operator=operator))
        work = tuple(
            Work(
                draw(NAMES),
                at + draw(st.integers(0, 10**7)),
                draw(st.integers(1, 10**7)),
                stream=draw(st.sampled_from([7, 20, 33])),
                kind=draw(kinds),
                bytes=draw(st.integers(0, 2**40)),
            )
            for _ in range(draw(st.integers(0, 6)))
        )
        name = "cudaLaunchKernel" if len(work) == 1 else "cudaGraphLaunch"
        calls.append(Call(name, at, length, work, thread=100))
        at += length + 2
    return Rank(tuple(calls), tuple(ranges), rank=draw(st.integers(0, 7)), world_size=8, device=draw(st.integers(0, 7)))


def read(data: bytes) -> list[Capture]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_bytes(data)
        return read_torch_trace(path)


@settings(max_examples=300, deadline=None)
@given(rank=ranks(), dress=dresses)
def test_a_trace_comes_back_as_it_was(rank: Rank, dress: Dress) -> None:
    captures = read(encode(document([rank], dress), dress))
    (capture,) = captures
    work = capture.activities
    base = BASE_NS if dress.absolute else 0
    found = sorted(
        (
            int(work.start_ns[n]) - base,
            int(work.duration_ns[n]),
            capture.names[work.name[n]],
            int(work.stream[n]),
            int(work.kind[n]),
            int(work.bytes[n]),
            int(capture.launches.start_ns[work.launch[n]]) - base,
            capture.names[capture.annotations.name[work.annotation[n]]],
        )
        for n in range(len(work))
    )
    expected = sorted(
        (
            w.start_ns,
            w.duration_ns,
            w.name,
            w.stream,
            int(w.kind),
            w.bytes if w.kind is not ActivityKind.KERNEL else 0,
            call.start_ns,
            f"range {rank.calls.index(call)}",
        )
        for w, call in rank.work
        if call is not None
    )
    assert found == expected
    assert (np.diff(work.start_ns) >= 0).all()
    assert [int(start) - base for start in capture.launches.start_ns] == [call.start_ns for call in rank.calls]
    assert [int(d) for d in capture.launches.duration_ns] == [call.duration_ns for call in rank.calls]
    assert capture.complete
    assert (capture.rank, capture.world_size) == (rank.rank, 8)
    assert capture.clock_base_ns == (0 if dress.absolute else BASE_NS)


@settings(max_examples=100, deadline=None)
@given(rank=ranks(), dress=dresses)
def test_a_bare_array_is_a_trace_too(rank: Rank, dress: Dress) -> None:
    dress = Dress(**{**dress.__dict__, "container": "array"})
    (capture,) = read(encode(document([rank], dress), dress))
    assert int(capture.activities.duration_ns.sum()) == sum(work.duration_ns for work, _ in rank.work)
    assert capture.clock_base_ns == (0 if dress.absolute else None)


@settings(max_examples=100, deadline=None)
@given(rank=ranks(), dress=dresses, cut=st.floats(0, 1))
def test_a_cut_trace_never_gives_more_than_there_was_nor_passes_for_whole(rank: Rank, dress: Dress, cut: float) -> None:
    dress = Dress(**{**dress.__dict__, "gzip_members": 0, "container": "array", "shuffle": None})
    data = encode(document([rank], dress), dress)
    kept = data[: 3 + int(cut * (len(data) - 4))]
    if not kept.rstrip().endswith(b"]"):
        captures = read(kept)
        assert not any(capture.complete for capture in captures)
        got = sum(len(capture.activities) for capture in captures)
        assert got <= len(rank.work)


@given(ns=st.integers(-(10**18), 9 * 10**18), extra=st.sampled_from(["", "0", "00", "4999", "49"]))
def test_decimal_microseconds_are_read_digit_by_digit(ns: int, extra: str) -> None:
    sign = "-" if ns < 0 else ""
    assert ns_of_us(f"{sign}{abs(ns) // 1000}.{abs(ns) % 1000:03d}{extra}") == ns


@given(ns=st.integers(-(2**43) * 1000 + 1, 2**43 * 1000 - 1))
def test_doubles_of_relative_microseconds_lose_nothing(ns: int) -> None:
    us = float(f"{'-' if ns < 0 else ''}{abs(ns) // 1000}.{abs(ns) % 1000:03d}")
    assert int(ns_of_float_us(np.array([us]))[0]) == ns
