"""A server with the plugin on, an exporter beside it, and readers that never pause: what the scenarios happen to."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.chaos import processes
from tests.chaos.figures import Figures
from tests.chaos.traffic import Traffic
from tests.e2e.conftest import Running
from tests.exposition import assert_exposition_is_sound
from vllm_k25_instrument.model import LOST_REASONS, PHASES
from vllm_k25_instrument.ring import RingReader
from vllm_k25_instrument.totals import Totals

OF_VLLM = "-cpushm_"
"""In the names of its shared memory for all-reduces, which killed workers leave."""
CLI = "vllm_k25_instrument.cli"
SCRAPE_PERIOD = 0.2


class Exporter:
    """A running `vllm-k25 export`."""

    def __init__(self, rings: Path) -> None:
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the process)
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", CLI, "export", str(rings), "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        assert self._process.stdout is not None
        self.is_ending = False
        self.url = self._process.stdout.readline().rpartition(" at ")[2].strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, return the exit status."""
        self.is_ending = True
        self._process.send_signal(number)
        try:
            return self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)  # faulthandler says where its threads are
            self._process.wait(30)
            self._stderr.seek(0)
            raise AssertionError(f"an exporter outlived {number.name}: {self._stderr.read()}") from None
        finally:
            assert self._process.stdout is not None
            self._process.stdout.close()


@dataclass(frozen=True)
class _Counted:
    """The counters of one rank at one moment."""

    steps: int
    sampled: int
    lost: int
    written: int

    @classmethod
    def of(cls, reader: RingReader) -> _Counted:
        totals = reader.totals()
        phases = range(len(PHASES))
        return cls(sum(map(totals.steps, phases)), sum(map(totals.sampled, phases)), _lost(totals), reader.written)


def _lost(totals: Totals) -> int:
    return sum(totals.lost(reason) for reason in range(len(LOST_REASONS)))


class Lab:
    """Keeps the exporter's and vLLM's own /metrics under scrapes all the time."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.rings = running.rings
        self.exporter = Exporter(running.ring_dir)
        self.scrapes = 0
        self.scrape_errors: list[str] = []
        self._stop = threading.Event()
        self._scrapers = [threading.Thread(target=self._scrape, args=(who,)) for who in ("vllm", "exporter")]
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def scrape(self, who: str) -> str:
        """One scrape. Raises OSError where nobody answers."""
        url = f"{self.running.server.url}/metrics" if who == "vllm" else self.exporter.url
        with self._opener.open(url, timeout=60) as answer:
            return str(answer.read().decode())

    def post(self, path: str) -> None:
        """An empty POST to the server. Raises OSError where it is refused."""
        request = urllib.request.Request(f"{self.running.server.url}{path}", data=b"", method="POST")
        with self._opener.open(request, timeout=120) as answer:
            answer.read()

    def _scrape(self, who: str) -> None:
        while not self._stop.wait(SCRAPE_PERIOD):
            exporter = self.exporter
            try:
                assert_exposition_is_sound(self.scrape(who))
                self.scrapes += 1
            except (OSError, ValueError, AssertionError) as error:
                if who == "vllm" or not exporter.is_ending:
                    self.scrape_errors.append(f"{who}: {type(error).__name__}: {error}")

    @property
    def pids(self) -> set[int]:
        return processes.session(self.running.server.pid)

    def _counted(self) -> list[_Counted]:
        """The counters, once nobody counts any more."""
        before = None
        deadline = time.monotonic() + 30
        while (now := [_Counted.of(ring) for ring in self.rings]) != before:
            assert time.monotonic() < deadline, "steps without requests"
            before = now
            time.sleep(0.5)
        return now

    @contextmanager
    def scenario(self, name: str) -> Iterator[tuple[Traffic, Figures]]:
        """Traffic while the block lasts; its figures are complete, and not yet checked, when it ends."""
        figures = Figures(name)
        if not self.exporter.running:
            self.exporter = Exporter(self.running.ring_dir)
        self.scrape_errors.clear()
        before, pids = self._counted(), self.pids
        held = {pid: processes.files(pid) for pid in pids}
        traffic = Traffic(self.running.server)
        with traffic:
            traffic.wait_for(4)
            yield traffic, figures
            traffic.wait_for(4)
        after = self._counted()
        figures.requests, figures.failed = len(traffic.results), traffic.failed
        for ring, was, now in zip(self.rings, before, after, strict=True):
            self._count_samples(figures, ring, was, now)
        figures.leaks += [f"process {pid}" for pid in self.pids - pids]
        figures.leaks += [f"process {pid} is gone" for pid in pids - self.pids]
        for pid in pids:
            figures.leaks += [f"{pid}: {name}" for name in processes.files(pid) - held[pid]]
        assert not self.scrape_errors, self.scrape_errors[:3]
        assert not traffic.errors, traffic.errors

    def _count_samples(self, figures: Figures, ring: RingReader, was: _Counted, now: _Counted) -> None:
        """Every step is a sample in the ring, or is counted as lost by its writer, or by who reads it."""
        every = ring.identity.sample_every
        ring.corrupted = ring.overwritten = 0
        samples = list(ring.samples(since=was.written))
        numbers = Counter(sample.step for sample in samples)
        assert set(numbers.values()) <= {1}, "a step has two samples"
        steps = range(was.steps, now.steps)
        assert set(numbers) <= {step for step in steps if step % every == 0}
        due = sum(step % every == 0 for step in steps)
        counted = now.lost - was.lost + ring.corrupted + ring.overwritten
        figures.steps += len(steps)
        figures.samples += len(samples)
        figures.lost_counted += counted
        figures.lost_uncounted += abs(due - len(samples) - counted)

    def __enter__(self) -> Self:
        for scraper in self._scrapers:
            scraper.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for scraper in self._scrapers:
            scraper.join()
        if self.exporter.running:
            self.exporter.end()

    def stop_server(self) -> list[str]:
        """Stop it as a user would; returns what is left behind but for what vLLM leaves itself."""
        return [what for what in leftovers(self.running, self.running.server.stop) if OF_VLLM not in what]


def leftovers(running: Running, end: Callable[[], None]) -> list[str]:
    """Call `end`; what of the server's processes and shared memory is still there 5 s later. Rings may stay."""
    server = running.server
    pids = processes.session(server.pid)
    shared = {name for name in processes.shared_memory(pids) if not name.startswith(str(running.ring_dir))}
    end()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and (
        processes.session(server.pid) or any(os.path.exists(name) for name in shared)
    ):
        time.sleep(0.1)
    left = [f"process {pid}" for pid in processes.session(server.pid)]
    return left + [name for name in sorted(shared) if os.path.exists(name)]


@contextmanager
def mounted(folder: Path, *command: str) -> Iterator[Path | None]:
    """A file system of its own at `folder`; None where this user may not mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["mount", *command, str(folder)], capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def filled(folder: Path) -> Iterator[None]:
    """No byte is free on the (small, mounted) file system of `folder` while the context lasts."""
    assert os.path.ismount(folder), "only a file system of our own may be filled"
    filler = folder / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass
        yield
    finally:
        filler.unlink()
