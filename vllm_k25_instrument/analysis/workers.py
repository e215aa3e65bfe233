"""Files in, findings out: one file at a time, and many at once on the cores of this machine or of a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

from vllm_k25_instrument.analysis.capture import CaptureError, Source
from vllm_k25_instrument.analysis.classify import Classifier
from vllm_k25_instrument.analysis.findings import Reduced, StepRange, reduce_capture
from vllm_k25_instrument.analysis.inputs import Input
from vllm_k25_instrument.analysis.key_averages import read_key_averages_of_workers
from vllm_k25_instrument.analysis.nsys import read_nsys
from vllm_k25_instrument.analysis.tables import reduce_table
from vllm_k25_instrument.analysis.torch_trace import read_torch_trace

Advance = Callable[[int], None]
"""Called with numbers of bytes read, which add up to the sizes of the files."""

POLL_S: Final = 0.1

_OURS: Final = "vllm_k25_instrument.analysis.workers"


@dataclass(frozen=True, slots=True)
class Job:
    """One file to analyse, and how."""

    input: Input
    rules: Path | None = None
    only: StepRange | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A file that could not be analysed: the parts of a :class:`CaptureError`, which does not survive pickling."""

    path: Path
    reason: str
    remedy: str = ""

    def error(self) -> CaptureError:
        """The error to raise."""
        return CaptureError(self.path, self.reason, self.remedy)


@dataclass(frozen=True, slots=True)
class Done:
    """What came out of one file: findings of each rank in it, or a failure."""

    path: Path
    kind: Source
    reduced: tuple[Reduced, ...] = ()
    failure: Failure | None = None


def run_job(job: Job, advance: Advance | None = None) -> Done:
    """Read one file and reduce it. Never raises for what is in the file: a failure is an answer."""
    path, kind = job.input.path, job.input.kind
    try:
        classifier = _built_in() if job.rules is None else Classifier.load(job.rules)
        if kind is Source.KEY_AVERAGES:
            tables = read_key_averages_of_workers(path, advance)
            return Done(path, kind, tuple(reduce_table(table, classifier) for table in tables))
        read = read_torch_trace if kind is Source.TORCH_TRACE else read_nsys
        captures = read(path, advance)
        reduced = []
        while captures:  # one at a time, so that the columns of the others can go
            reduced.append(reduce_capture(captures.pop(0), classifier, job.only))
        return Done(path, kind, tuple(reduced))
    except CaptureError as error:
        return Done(path, kind, failure=Failure(error.path, error.reason, error.remedy))
    except OSError as error:
        return Done(path, kind, failure=Failure(path, f"cannot be read: {error.strerror or error}"))
    except MemoryError:
        return Done(path, kind, failure=Failure(path, "does not fit into memory", "analyse fewer ranks at once"))
    except Exception as error:  # a bug of ours must not lose the other ranks
        what = f"internal error ({type(error).__name__}: {error})"
        return Done(path, kind, failure=Failure(path, what, "please report it with the file"))


@cache
def _built_in() -> Classifier:
    """Once per process: a worker reads several files."""
    return Classifier.load()


class Mapper(Protocol):
    """Runs jobs somewhere, and gives their answers in the order of the jobs."""

    def __call__(self, jobs: Sequence[Job], advance: Advance) -> list[Done]: ...


def run_here(jobs: Sequence[Job], advance: Advance) -> list[Done]:
    """One after the other in this process."""
    return [run_job(job, advance) for job in jobs]


def run_on_cores(jobs: Sequence[Job], advance: Advance) -> list[Done]:
    """On the cores that this process may use, a process each, the largest file first. One job runs in this process."""
    workers = min(len(jobs), len(os.sched_getaffinity(0)))
    if workers < 2:
        return run_here(jobs, advance)
    context = _context()
    read_bytes = context.RawArray("q", len(jobs))
    order = sorted(range(len(jobs)), key=lambda n: -_size(jobs[n].input.path))
    done: dict[int, Done] = {}
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_share, initargs=(read_bytes,)) as pool:
        with warnings.catch_warnings():
            # Python warns of the threads of numpy's BLAS, which it cannot tell from others: they survive a fork.
            warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
            waiting: dict[Future[Done], int] = {pool.submit(_run_shared, n, jobs[n]): n for n in order}
        shown = 0
        while waiting:
            finished, _ = wait(waiting, POLL_S, FIRST_COMPLETED)
            for future in finished:
                n = waiting.pop(future)
                done[n] = _answer(future, jobs[n])
            total = sum(read_bytes)
            advance(total - shown)
            shown = total
    return [done[n] for n in range(len(jobs))]


def _context() -> Any:
    """How the workers begin: as copies of this process, which costs nothing, where no thread could hold a lock.

    Else a server forks them, which has first to import everything, as long as it takes to read 80 MB of JSON.
    """
    if threading.active_count() == 1:
        return multiprocessing.get_context("fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", _OURS])
    return context


def _answer(future: Future[Done], job: Job) -> Done:
    try:
        return future.result()
    except BrokenProcessPool:
        failure = Failure(job.input.path, "the process that read it was killed", "is there enough memory?")
        return Done(job.input.path, job.input.kind, failure=failure)


_read_bytes: Any = None


def _share(read_bytes: Any) -> None:
    global _read_bytes  # what a pool's initializer is for
    _read_bytes = read_bytes


def _run_shared(place: int, job: Job) -> Done:
    pending, last = 0, 0.0

    def advance(count: int) -> None:
        nonlocal pending, last
        pending += count
        now = time.monotonic()
        if now - last >= POLL_S:
            _read_bytes[place] += pending
            pending, last = 0, now

    done = run_job(job, advance)
    _read_bytes[place] += pending
    return done


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
