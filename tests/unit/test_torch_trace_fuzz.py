"""Mutated traces end in captures that hang together or in one line, never in a traceback.

``K25_FUZZ_RUNS`` sets how many are tried (each with its own seed, named in the failure).
"""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from tests.traces import Call, Dress, HostRange, Rank, Work, decode_rank, document, encode, k25_rank
from vllm_k25_instrument.analysis.capture import ActivityKind, Capture, CaptureError
from vllm_k25_instrument.analysis.torch_trace import read_torch_trace

RUNS = int(os.environ.get("K25_FUZZ_RUNS", "1000"))
GROUP = 100

SNIPPETS = [
    b"NaN", b"Infinity", b"-1", b"1e999", b"null", b"{}", b"[]", b"[[", b"]]", b"}}", b'"', b"\\", b"\\u", b"\\ud800",
    b"\xff\xfe", b"\0", b",", b":", b'{"traceEvents": [', b'"traceEvents": [', b'{"ph": "X", "cat": "kernel"},',
    b"99999999999999999999", b"-9223372036854775808", b"1.7976931348623157e308", b'"ts": "x"', b"\xed\xa0\x80", b"}, {",
]  # fmt: skip


def seeds() -> list[bytes]:
    rng = random.Random(0)
    mixed = Rank(
        tuple(
            Call(
                "cudaLaunchKernel",
                1_000 * n,
                500,
                (Work(f"k{n}", 1_000 * n + 400, 70, 7 + n % 3, ActivityKind(n % 3)),),
            )
            for n in range(1, 9)
        ),
        tuple(HostRange(f"aten::op{n}", 1_000 * n - 100, 900, operator=n % 2 == 0) for n in range(1, 9)),
        pid=200,
        device=1,
        world_size=2,
        rank=1,
    )
    marked = Rank((Call("cudaGraphLaunch", 5, 9, tuple(Work("k", 10 * n, 5, mark=f"m{n}") for n in range(1, 4))),))
    dresses = [
        Dress(),
        Dress(absolute=True, indent=1),
        Dress(container="nested", number="short", shuffle=3),
        Dress(container="listed", number="exponent"),
        Dress(container="array", keys=("args", "dur", "ts", "tid", "pid", "name", "cat", "ph")),
        Dress(number="text", old_categories=True, base_first=False),
    ]
    made = [encode(document([rank], dress), dress) for dress in dresses for rank in (decode_rank(), mixed, marked)]
    made += [
        encode(document([decode_rank(), mixed])),
        encode(document([decode_rank(), mixed], prefixes=["[TP00]", "[TP01]"])),
    ]
    made.append(b"".join(k25_rank(1, kernels=rng.randrange(5, 20), operators=3)))
    return made


def mutate(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 12))):
        at = rng.randrange(len(out) + 1)
        end = min(len(out), at + rng.choice((1, 3, 20, 200, 2_000)))
        how = rng.randrange(9)
        if how == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del out[at:end]
        elif how == 2:
            out[at:at] = rng.choice(SNIPPETS)
        elif how == 3:
            out[at:end] = rng.choice(SNIPPETS)
        elif how == 4:
            del out[at:]
        elif how == 5:
            out[at:at] = out[at:end] * rng.choice((1, 2, 30))
        elif how == 6:
            other = rng.choice(others)
            start = rng.randrange(len(other))
            out[at:end] = other[start : start + rng.randrange(400)]
        elif how == 7:
            out[at:end] = rng.randbytes(end - at)
        else:
            out = bytearray(_without_keys(rng, bytes(out)))
    return bytes(out)


def _without_keys(rng: random.Random, data: bytes) -> bytes:
    """Keys dropped, values swapped for others, rows exchanged: JSON that stays JSON."""
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        return data
    values = [None, True, -1, 0, 1e308, 10**30, "x", "", [], {}, {"a": [1]}, float("nan")]

    def shake(value: object, depth: int = 0) -> object:
        if isinstance(value, dict):
            kept = {k: shake(v, depth + 1) for k, v in value.items() if rng.random() > 0.01}
            for key in list(kept):
                if rng.random() < 0.01:
                    kept[key] = rng.choice(values)
            return kept
        if isinstance(value, list) and depth < 8:
            shaken = [shake(one, depth + 1) for one in value]
            if len(shaken) > 1 and rng.random() < 0.3:
                one, other = rng.randrange(len(shaken)), rng.randrange(len(shaken))
                shaken[one], shaken[other] = shaken[other], shaken[one]
            return shaken
        return value

    return json.dumps(shake(whole)).encode()


def check(capture: Capture) -> None:
    work, launches, spans = capture.activities, capture.launches, capture.annotations
    columns = (work.duration_ns, work.kind, work.name, work.stream, work.launch, work.annotation, work.bytes)
    assert all(len(column) == len(work) for column in columns)
    assert (np.diff(work.start_ns) >= 0).all()
    assert (work.duration_ns >= 0).all()
    assert (work.duration_ns <= 3_600 * 10**9).all()
    assert (work.bytes >= 0).all()
    assert ((work.launch >= -1) & (work.launch < len(launches))).all()
    assert ((work.annotation >= -1) & (work.annotation < len(spans))).all()
    assert ((spans.parent >= -1) & (spans.parent < len(spans))).all()
    assert (np.diff(launches.start_ns) >= 0).all()
    assert (np.diff(spans.start_ns) >= 0).all()
    for table in (work, launches, spans):
        assert ((table.name >= 0) & (table.name < len(capture.names))).all()
    assert int((work.start_ns[-1] - work.start_ns[0]) if len(work) else 0) <= 15 * 24 * 3_600 * 10**9
    for note in capture.notes:
        assert "\n" not in note.message
        note.message.encode()
    for name in capture.names:
        name.encode()


@pytest.mark.parametrize("group", range(-(-RUNS // GROUP)))
def test_mutated_traces_end_in_captures_or_in_one_line(group: int, tmp_path: Path) -> None:
    originals = seeds()
    path = tmp_path / "rank-0.json"
    for seed in range(group * GROUP, (group + 1) * GROUP):
        rng = random.Random(seed)
        data = rng.choice(originals)
        if rng.random() < 0.15:
            data = mutate(rng, gzip.compress(data), originals)
        else:
            data = mutate(rng, data, originals)
            if rng.random() < 0.1:
                data = gzip.compress(data)
        path.write_bytes(data)
        try:
            for capture in read_torch_trace(path):
                check(capture)
        except CaptureError as error:
            if "\n" in str(error) or not str(error).startswith(str(path)):
                pytest.fail(f"seed {seed}: {error!r}")
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
