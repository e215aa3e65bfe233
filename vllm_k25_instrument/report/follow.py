"""Following a running server: its rings are read as they grow, and the last seconds are kept as digests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from pathlib import Path

from vllm_k25_instrument.instances import Instance, find_rings, list_instances
from vllm_k25_instrument.liveness import is_held
from vllm_k25_instrument.model import NS_PER_SECOND, StepSample
from vllm_k25_instrument.positions import can_infer
from vllm_k25_instrument.report.breakdown import Source, StepTally
from vllm_k25_instrument.report.digest import GroupKey, StepDigest, digest_step
from vllm_k25_instrument.report.rings import Report
from vllm_k25_instrument.report.ringset import RingSet, look_at
from vllm_k25_instrument.report.slowest import SlowestTally
from vllm_k25_instrument.ring import RingError, RingReader, ring_paths

_FIRST_LOOK = 16
"""Samples read at first from the end of a ring; doubled until the window is full."""


class ServerState(StrEnum):
    """Whether there is something to follow."""

    WAITING = "waiting"  # no ring yet, or only those of servers that are gone while a new one starts
    RUNNING = "running"
    RESTARTING = "restarting"  # the one followed has ended, another has started and has no ring yet
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The last seconds of a server, as of one look at its rings."""

    state: ServerState
    path: Path
    report: Report
    last: StepDigest | None = None
    """The newest sampled step of any rank."""
    last_ns: Mapping[tuple[GroupKey, int], int] = field(default_factory=dict)
    """Duration of the last step of each group and rank, ns."""
    steps_per_second: float | None = None
    """Executed model steps (sampled or not) per second over the window; None where fewer than two were sampled."""
    sampled: int = 0
    lost: int = 0


class _RankFeed:
    """What has been read of one ring, and its digests of the last seconds."""

    def __init__(self, reader: RingReader, rank: int, window_ns: int) -> None:
        self.reader = reader
        self.rank = rank
        self._window_ns = window_ns
        self._next: int | None = None
        self.steps: deque[StepDigest] = deque()

    def read(self) -> None:
        """Take in what has been written since the last time. Raises RingError where the ring has become unreadable."""
        if self._next is None:
            self._next = self.reader.written
            self.steps.extend(self._tail(self._next))
        before = self.reader.overwritten + self.reader.corrupted
        taken = 0
        for sample in self.reader.samples(since=self._next):
            self.steps.append(self._digest(sample))
            taken += 1
            self._forget()
        self._next += taken + self.reader.overwritten + self.reader.corrupted - before
        self._forget()

    def _digest(self, sample: StepSample) -> StepDigest:
        return digest_step(self.rank, sample, infer=can_infer(self.reader.identity.hooks))

    def _forget(self) -> None:
        while self.steps and self.steps[0].start_unix_ns < self.steps[-1].start_unix_ns - self._window_ns:
            self.steps.popleft()

    def _tail(self, end: int) -> list[StepDigest]:
        """The samples of the window before the `end`-th, read backwards: a full ring costs no more than those."""
        oldest = max(0, end - self.reader.layout.slots)
        found: list[StepDigest] = []
        size = _FIRST_LOOK
        while end > oldest:
            first = max(oldest, end - size)
            earlier = [self._digest(s) for s in self._between(first, end)]
            # A sample that is gone makes the slice reach into what was read before.
            found = [step for step in earlier if not found or step.step < found[0].step] + found
            if found and found[0].start_unix_ns < found[-1].start_unix_ns - self._window_ns:
                break
            end, size = first, size * 2
        return found

    def _between(self, first: int, end: int) -> Iterator[StepSample]:
        return islice(self.reader.samples(since=first), end - first)


class Follower:
    """Follows the server at `path`: a ring file, an instance's folder, or a ring directory.

    Of a ring directory the running instance is followed; when it has ended, the next one that runs.
    """

    def __init__(self, path: Path, window_s: float) -> None:
        """`window_s`: how many seconds before the newest step are looked at."""
        self._path = path
        self._window_ns = int(window_s * NS_PER_SECOND)
        self._where: Path | None = None
        self._feeds: dict[Path, _RankFeed] = {}
        self._errors: dict[Path, RingError] = {}
        self._starting = False

    def poll(self) -> Snapshot:
        """Read what is new, and say how things stand. Never raises for a ring that cannot be read."""
        self._choose()
        if self._where is None:
            return Snapshot(ServerState.WAITING, self._path, _report(RingSet(()), []))
        # Asked before reading, so that nothing that the server wrote before its end is missed.
        alive = _alive(self._where)
        self._open_new()
        for path, feed in self._feeds.items():
            try:
                feed.read()
                self._errors.pop(path, None)
            except RingError as error:
                self._errors[path] = error
        rings = look_at((feed.reader for feed in self._feeds.values()), self._errors.values())
        used = set(rings.ranks)
        feeds = sorted((feed for feed in self._feeds.values() if feed.rank in used), key=lambda feed: feed.rank)
        ended = ServerState.RESTARTING if self._starting else ServerState.ENDED
        return self._snapshot(ServerState.RUNNING if alive else ended, rings, feeds)

    def _choose(self) -> None:
        if self._where is not None and _alive(self._where):
            return
        instances = [] if self._path.is_file() or ring_paths(self._path) else list_instances(self._path)
        self._starting = any(instance.alive for instance in instances)
        try:
            best = find_rings(self._path)
        except OSError:
            return
        if best != self._where and (_alive(best) or not self._starting):
            self.close()
            self._where = best

    def _open_new(self) -> None:
        for path in ring_paths(self._where) if self._where is not None else []:
            if path in self._feeds:
                continue
            try:
                reader = RingReader(path)
                self._feeds[path] = _RankFeed(reader, reader.identity.coordinates.global_rank, self._window_ns)
                self._errors.pop(path, None)
            except RingError as error:
                self._errors[path] = error

    def _snapshot(self, state: ServerState, rings: RingSet, feeds: list[_RankFeed]) -> Snapshot:
        newest = max((feed.steps[-1].start_unix_ns for feed in feeds if feed.steps), default=0)
        since = newest - self._window_ns
        steps = {feed.rank: [s for s in feed.steps if s.start_unix_ns >= since] for feed in feeds}
        return Snapshot(
            state=state,
            path=self._where or self._path,
            report=_report(rings, [step for of_rank in steps.values() for step in of_rank]),
            last=max((own[-1] for own in steps.values() if own), key=lambda step: step.start_unix_ns, default=None),
            last_ns={(step.group, rank): step.duration_ns for rank, own in steps.items() for step in own},
            steps_per_second=next((rate for own in steps.values() if (rate := _rate(own)) is not None), None),
            sampled=rings.subject.sampled,
            lost=sum(sum(ring.lost().values()) for ring in rings.rings),
        )

    def close(self) -> None:
        """Let go of all rings."""
        for feed in self._feeds.values():
            feed.reader.close()
        self._feeds.clear()
        self._errors.clear()


def _report(rings: RingSet, steps: list[StepDigest]) -> Report:
    tally = StepTally()
    slowest = SlowestTally(rings.ranks_expected, comparable=rings.comparable)
    for step in steps:
        tally.add(step)
        slowest.add(step)
    breakdown = tally.breakdown(
        source=Source.RING, ranks_found=rings.ranks, ranks_expected=rings.ranks_expected, caveats=rings.caveats()
    )
    keys = dict.fromkeys(group.key for group in breakdown.groups)
    return Report(breakdown, rings.subject, {key: slowest.verdict(key) for key in keys})


def _rate(steps: list[StepDigest]) -> float | None:
    """Executed steps per second from the step numbers and start times of the first and the last sample."""
    if len(steps) < 2:
        return None
    elapsed = steps[-1].start_unix_ns - steps[0].start_unix_ns
    return (steps[-1].step - steps[0].step) * NS_PER_SECOND / elapsed if elapsed > 0 else None


def _alive(where: Path) -> bool:
    return is_held(where) if where.is_file() else Instance(where).alive
