"""A ring that cannot be written costs samples, all of them counted, and no step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulated import decode
from tests.unit.test_recorder import Bench
from vllm_k25_instrument.model import LostReason
from vllm_k25_instrument.ring import RingReader, RingWriter


class Refusing:
    """A file system that refuses writes while `refuses` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses = False
        write = RingWriter._write

        def refusing(ring: RingWriter, at: int, data: bytes | bytearray) -> None:
            if self.refuses:
                raise PermissionError(1, "Operation not permitted")
            write(ring, at, data)

        monkeypatch.setattr(RingWriter, "_write", refusing)


@pytest.mark.parametrize("device_is_behind", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_what_cannot_be_written_is_counted_and_the_counters_come_when_they_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_is_behind: bool, every: int
) -> None:
    bench = Bench(tmp_path, sample_every=every)
    disk = Refusing(monkeypatch)
    for number in range(30):
        disk.refuses = 10 <= number < 20
        bench.clock.behind = bench.clock.now if device_is_behind else None  # this step is read in the next one
        assert bench.recorder.begin_step(decode())
        bench.clock.advance(100)
        bench.recorder.end_step()
    bench.clock.behind = None
    bench.recorder.drain()

    reader = RingReader(bench.ring.path)
    numbers = [sample.step for sample in reader.samples()]
    totals = reader.totals()
    assert totals.steps(0) == 30
    assert totals.sampled(0) == len(numbers)
    missing = set(range(0, 30, every)) - set(numbers)
    assert len(missing) == 10 // every
    assert bench.lost(LostReason.ERROR) == len(missing)
    assert {type(error) for _, error in bench.errors} == {PermissionError}
