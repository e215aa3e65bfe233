"""Captures out of a section's columns: one per process and device, kernels joined to launches, launches to ranges."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vllm_k25_instrument.analysis.capture import (
    NO_RANK,
    Activities,
    ActivityKind,
    Annotations,
    Capture,
    Int32,
    Int64,
    Launches,
    Source,
)
from vllm_k25_instrument.analysis.kineto.columns import BAD_DURATION, Section
from vllm_k25_instrument.analysis.kineto.owners import (
    NO_OWNER,
    Pid,
    Work,
    coordinates,
    global_ranks,
    latest_launch,
    match_devices,
)
from vllm_k25_instrument.analysis.kineto.ranges import Ranges
from vllm_k25_instrument.analysis.kineto.rows import MISSING, NO_TIME
from vllm_k25_instrument.report.caveats import Caveat, CaveatCode

UNNAMED: Final = "<unnamed kernel>"

_ABSOLUTE_NS: Final = 10**18  # of September 2001: no time since boot or since a base is that late
_HOUR_NS: Final = 3_600 * 10**9
_MINUTE_NS: Final = 60 * 10**9
_WEEK_NS: Final = 7 * 24 * _HOUR_NS
_UNRELIABLE_SHARE: Final = 0.01

_LAUNCHING: Final = re.compile(r"launch(?!host)|memcpy|memset", re.IGNORECASE)
_STARTS_KERNELS: Final = re.compile(r"launch(?!host)", re.IGNORECASE)
_GRAPH: Final = re.compile(r"graphlaunch", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Calls:
    start: Int64
    duration: Int64
    name: Int32
    thread: Int64
    correlation: Int64
    external: Int64


class SectionAssembly:
    """Makes the captures of one section. `notes` and `complete` are what the file as a whole has to say."""

    def __init__(self, section: Section, path: Path, notes: tuple[Caveat, ...], complete: bool) -> None:
        self._path = path
        self._section = section
        self._notes = notes
        self._complete = complete
        self._raw_pids = section.pids.values
        self._pids = [Pid.parse(raw) for raw in self._raw_pids]
        self._threads = _thread_ids(section.tids.values)
        names = section.names.values
        self._names: list[str] = [name or UNNAMED for name in names]
        self._nameless = np.array([not name for name in names], np.bool_)
        self._launching = np.array([bool(_LAUNCHING.search(name or "")) for name in names], np.bool_)
        self._starts_kernels = np.array([bool(_STARTS_KERNELS.search(name or "")) for name in names], np.bool_)
        self._graph = np.array([bool(_GRAPH.search(name or "")) for name in names], np.bool_)
        self._guessed = False
        self._shared = 0

    def captures(self) -> list[Capture]:
        """The captures, by process and device; one without activities where the section has no GPU work."""
        calls, host = self._section.calls, self._section.host
        # (process, device) -> rows of the GPU table. A process is a number of `self._pids`, or NO_OWNER.
        shares: dict[tuple[int, int], NDArray[np.int64]] = {}
        call_pid, host_pid = calls.column("pid"), host.column("pid")
        launching = self._launching[calls.column("name")] if len(calls) else np.empty(0, np.bool_)
        with_calls = np.unique(call_pid[launching]) if launching.any() else np.unique(call_pid)
        candidates = with_calls if len(with_calls) else np.unique(host_pid)
        devices = self._devices()
        for realm in sorted({realm for realm, _, _ in devices}):
            processes = [int(p) for p in candidates if self._pids[p].realm == realm]
            processes.sort(key=self._order)
            mine = sorted((key for key in devices if key[0] == realm), key=lambda key: (self._order(key[1]), key[2]))
            self._share(shares, [(key[2], devices[key]) for key in mine], processes)
        owned = {process for process, _ in shares}
        for process in candidates:
            if int(process) not in owned and (not shares or self._kernel_launches(int(process))):
                shares[int(process), 0] = np.empty(0, np.int64)
        if not shares:
            shares[NO_OWNER, 0] = np.empty(0, np.int64)
        ranks, rank_notes = self._ranks(list(shares))
        biggest = {
            process: max((key for key in shares if key[0] == process), key=lambda key: len(shares[key]))
            for process in {process for process, _ in shares}
        }
        made = []
        for key, rows in sorted(shares.items(), key=lambda share: (share[0][1], self._number(share[0][0]))):
            main = biggest[key[0]] == key
            elsewhere = [other for it, other in shares.items() if it[0] == key[0] and it != key] if main else []
            made.append(self._capture(key, rows, ranks[key[0]], rank_notes, elsewhere if main else None))
        return made

    # --- who owns what ------------------------------------------------------------------------------------

    def _devices(self) -> dict[tuple[str, int, int], NDArray[np.int64]]:
        """(realm, number of the pid, device) -> rows of the GPU table."""
        gpu = self._section.gpu
        if not len(gpu):
            return {}
        pid, device = gpu.column("pid"), gpu.column("device")
        numbers = np.array([p.number for p in self._pids], np.int64)
        device = np.where(device == MISSING, numbers[pid], device)
        found: dict[tuple[str, int, int], NDArray[np.int64]] = {}
        for process in np.flatnonzero(np.bincount(pid)):
            rows = np.flatnonzero(pid == process)
            on_rows = device[rows]
            only = on_rows[0] if (on_rows == on_rows[0]).all() else None  # as in almost every trace
            for on in np.unique(on_rows) if only is None else (only,):
                found[self._pids[process].realm, int(process), int(on)] = (
                    rows if only is not None else rows[on_rows == on]
                )
        return found

    def _share(
        self,
        shares: dict[tuple[int, int], NDArray[np.int64]],
        devices: list[tuple[int, NDArray[np.int64]]],
        processes: list[int],
    ) -> None:
        gpu = self._section.gpu
        pid = gpu.column("pid")

        def give(process: int, device: int, rows: NDArray[np.int64]) -> None:
            if len(rows):
                had = shares.get((process, device))
                shares[process, device] = rows if had is None else np.sort(np.concatenate([had, rows]))

        open_devices = []
        for device, rows in devices:
            # Some writers put the process, not the device, into a kernel's pid.
            writer = int(pid[rows[0]])
            if writer in processes and len(processes) > 1:
                give(writer, device, rows)
            else:
                open_devices.append((device, rows))
        work = [self._work(rows) for _, rows in open_devices]
        launches = [self._launch_work(process) for process in processes]
        owners = match_devices(work, launches)
        self._guessed |= owners.guessed
        idle = [index for index in range(len(processes)) if index not in owners.process]
        for (device, rows), mine, owner in zip(open_devices, work, owners.process, strict=True):
            if owner == NO_OWNER:
                give(NO_OWNER, device, rows)
                continue
            split = self._split(mine, launches, owner, idle)
            for index in np.unique(split):
                give(processes[index], device, rows[split == index])

    def _split(self, work: Work, launches: list[Work], owner: int, idle: list[int]) -> NDArray[np.int64]:
        """The process of each row of a device that several processes of a merged file may share.

        A row whose id only one process launched is that one's. Where several did, it goes to the launch that comes last
        before it, which may be wrong, and is counted.
        """
        owned = np.full(len(work.start), owner, np.int64)
        lag = _lag(work, launches[owner])
        for index in idle:
            other = _lag(work, launches[index])
            both = (other < _NEVER) & (lag < _NEVER)
            self._shared += int(both.sum())
            closer = other < lag
            owned[closer] = index
            lag = np.minimum(lag, other)
        return owned

    def _work(self, rows: NDArray[np.int64]) -> Work:
        gpu = self._section.gpu
        return Work(gpu.column("correlation")[rows], gpu.column("start")[rows])

    def _order(self, process: int) -> int:
        return self._section.appeared.get(self._raw_pids[process], 0)

    def _number(self, process: int) -> int:
        return self._pids[process].number if process != NO_OWNER else -1

    def _launch_work(self, process: int) -> Work:
        calls = self._section.calls
        rows = np.flatnonzero((calls.column("pid") == process) & (calls.column("correlation") != MISSING))
        return Work(calls.column("correlation")[rows], calls.column("start")[rows])

    def _kernel_launches(self, process: int) -> int:
        calls = self._section.calls
        return int((self._starts_kernels[calls.column("name")] & (calls.column("pid") == process)).sum())

    def _ranks(self, keys: list[tuple[int, int]]) -> tuple[dict[int, int], tuple[Caveat, ...]]:
        processes = sorted({process for process, _ in keys})
        said = [self._coordinates(process) for process in processes]
        info = self._section.metadatum("distributedInfo")
        own = info.get("rank") if isinstance(info, dict) else None
        named = global_ranks(said)
        if len(processes) == 1:
            from_name = global_ranks([coordinates(self._path.name)])[0]
            for rank in (own, named[0], from_name):
                if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0:
                    return {processes[0]: rank}, ()
            return {processes[0]: NO_RANK}, ()
        if None not in named and len(set(named)) == len(named):
            return {p: int(r) for p, r in zip(processes, named, strict=True) if r is not None}, ()
        devices = dict(reversed(keys))
        if len(set(devices.values())) == len(processes):
            message = (
                f"{self._path}: the ranks of its {len(processes)} processes are not named: device numbers stand in"
            )
            return devices, (Caveat(CaveatCode.RANK_UNKNOWN, message, len(processes)),)
        message = f"{self._path}: the ranks of its {len(processes)} processes are not named: analyse one file per rank"
        return dict.fromkeys(processes, NO_RANK), (Caveat(CaveatCode.RANK_UNKNOWN, message, len(processes)),)

    def _coordinates(self, process: int) -> dict[str, int]:
        if process == NO_OWNER:
            return {}
        found: dict[str, int] = {}
        for text in (*self._section.process_names.get(self._raw_pids[process], ()), self._pids[process].realm):
            found.update(coordinates(text))
        return found

    # --- one capture --------------------------------------------------------------------------------------

    def _capture(
        self,
        key: tuple[int, int],
        rows: NDArray[np.int64],
        rank: int,
        rank_notes: tuple[Caveat, ...],
        elsewhere: list[NDArray[np.int64]] | None,
    ) -> Capture:
        """The capture of some rows of GPU work.

        Launches that put nothing on the GPU are listed with the process's main device, for which `elsewhere` has the
        rows of its other devices; None for those.
        """
        process, device = key
        notes = [*self._notes, *rank_notes]
        rows = self._sound(rows, notes)
        calls = self._calls_of(process)
        gpu = self._section.gpu
        start = gpu.column("start")[rows]
        launch = latest_launch(Work(gpu.column("correlation")[rows], start), Work(calls.correlation, calls.start))
        joined = np.zeros(len(calls.start), np.bool_)
        joined[launch[launch >= 0]] = True
        kept = joined.copy()
        if elsewhere is not None:
            kept |= self._launching[calls.name]
            for others in elsewhere:
                theirs = latest_launch(self._work(others), Work(calls.correlation, calls.start))
                kept[theirs[(theirs >= 0)]] = False
            kept |= joined
        order = np.flatnonzero(kept)
        order = order[np.argsort(calls.start[order], kind="stable")]
        new_index = np.full(len(calls.start) + 1, -1, np.int64)
        new_index[order] = np.arange(len(order))
        launch = new_index[launch]  # -1 stays -1: the last entry
        launches = Launches(
            start_ns=calls.start[order],
            duration_ns=calls.duration[order],
            name=calls.name[order],
            thread=calls.thread[order],
            is_graph=self._graph[calls.name[order]] if len(order) else np.empty(0, np.bool_),
        )
        annotations, annotation = self._annotate(process, rows, launch, launches, calls.external[order])
        activities = Activities(
            start_ns=start,
            duration_ns=gpu.column("duration")[rows],
            kind=gpu.column("kind")[rows],
            name=gpu.column("name")[rows],
            stream=self._streams(rows),
            launch=launch.astype(np.int32),
            annotation=annotation,
            bytes=np.maximum(gpu.column("bytes")[rows], 0),
        )
        self._note_emptiness(activities, launches, notes)
        nameless = int(self._nameless[activities.name].sum()) if len(activities) else 0
        if nameless:
            notes.append(
                Caveat(CaveatCode.UNNAMED_KERNELS, f"{self._path}: {nameless} rows of GPU work have no name", nameless)
            )
        info = self._section.metadatum("distributedInfo")
        world = info.get("world_size") if isinstance(info, dict) else 0
        return Capture(
            source=Source.TORCH_TRACE,
            path=self._path,
            names=self._names,
            activities=activities,
            launches=launches,
            annotations=annotations,
            rank=rank,
            world_size=world if isinstance(world, int) and world > 0 else 0,
            process=max(self._number(process), 0),
            device=max(device, 0),
            clock_base_ns=self._clock_base(start if len(start) else launches.start_ns),
            complete=self._complete,
            notes=tuple(notes),
        )

    def _sound(self, rows: NDArray[np.int64], notes: list[Caveat]) -> NDArray[np.int64]:
        """The rows with possible times, sorted by start; the others are counted in `notes`."""
        start = self._section.gpu.column("start")[rows]
        duration = self._section.gpu.column("duration")[rows]
        sound = (start != NO_TIME) & (duration != BAD_DURATION) & (duration <= _HOUR_NS)
        sound &= (start > 0) | ((start == 0) & (duration > 0))
        if sound.any():
            middle = int(np.median(start[sound]))
            sound &= (start > middle - _WEEK_NS) & (start < middle + _WEEK_NS)
            usual = sound & (duration <= _MINUTE_NS)
            if usual.any():
                extent = int((start[usual] + duration[usual]).max() - start[usual].min())
                sound &= usual | (duration <= 10 * extent)
        bad = len(rows) - int(sound.sum())
        if bad:
            share = bad / len(rows)
            notes.append(
                Caveat(
                    CaveatCode.BAD_TIMESTAMPS,
                    f"{self._path}: {bad} of {len(rows)} rows of GPU work have impossible times (zero, negative or "
                    "absurd): left out of all sums",
                    bad,
                )
            )
            if share > _UNRELIABLE_SHARE:
                notes.append(
                    Caveat(
                        CaveatCode.UNRELIABLE,
                        f"{self._path}: {share:.1%} of the GPU work has impossible times: do not trust this capture, "
                        "profile fewer steps again",
                        bad,
                    )
                )
        rows, start = rows[sound], start[sound]
        return rows[np.argsort(start, kind="stable")]

    def _calls_of(self, process: int) -> _Calls:
        calls = self._section.calls
        rows = np.flatnonzero((calls.column("pid") == process) & (calls.column("start") != NO_TIME))
        return _Calls(
            start=calls.column("start")[rows],
            duration=np.clip(calls.column("duration")[rows], 0, _WEEK_NS),
            name=calls.column("name")[rows],
            thread=self._threads[calls.column("tid")[rows]],
            correlation=calls.column("correlation")[rows],
            external=calls.column("external")[rows],
        )

    def _streams(self, rows: NDArray[np.int64]) -> Int32:
        stream = self._section.gpu.column("stream")[rows]
        tid = self._section.gpu.column("tid")[rows]
        stream = np.where(stream == MISSING, self._threads[tid], stream) if len(rows) else stream
        return np.clip(stream, -(2**31), 2**31 - 1).astype(np.int32)

    def _annotate(
        self, process: int, rows: NDArray[np.int64], launch: NDArray[np.int64], launches: Launches, external: Int64
    ) -> tuple[Annotations, Int32]:
        """The ranges worth keeping, and the innermost one of each row of work."""
        ranges = self._ranges_of(process)
        by_launch = ranges.with_external(external)
        when = launches.start_ns
        inside = (by_launch >= 0) & _covers(ranges, by_launch, when)
        by_launch = np.where(inside, by_launch, ranges.open_at(when, launches.thread))
        own_external = self._section.gpu.column("external")[rows]
        annotation = np.where(
            launch >= 0,
            by_launch[np.maximum(launch, 0)] if len(by_launch) else -1,
            ranges.with_external(own_external),
        )
        wanted = ~ranges.operator
        wanted[annotation[annotation >= 0]] = True
        kept = np.flatnonzero(ranges.with_ancestors(wanted))
        new_index = np.full(len(ranges) + 1, -1, np.int64)
        new_index[kept] = np.arange(len(kept))
        annotation = new_index[annotation]
        columns: dict[str, NDArray[Any]] = {
            "start_ns": ranges.start[kept],
            "duration_ns": ranges.duration[kept],
            "name": ranges.name[kept],
            "thread": ranges.thread[kept],
            "parent": new_index[ranges.parent[kept]],
        }
        mark = self._section.gpu.column("mark")[rows]
        if (mark != MISSING).any():
            columns, annotation = self._with_marks(columns, annotation, mark, launch, launches, rows)
        return (
            Annotations(
                start_ns=columns["start_ns"],
                duration_ns=columns["duration_ns"],
                name=columns["name"].astype(np.int32),
                thread=columns["thread"],
                parent=columns["parent"].astype(np.int32),
            ),
            annotation.astype(np.int32),
        )

    def _with_marks(
        self,
        columns: dict[str, NDArray[Any]],
        annotation: NDArray[np.int64],
        mark: Int32,
        launch: NDArray[np.int64],
        launches: Launches,
        rows: NDArray[np.int64],
    ) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64]]:
        """Graph-node annotations as ranges: one per name and launch, spanning the launch, inside its range.

        Work with an annotation but no launch gets a range without length at its own start.
        """
        marked = np.flatnonzero(mark != MISSING)
        anchor = np.where(launch[marked] >= 0, launch[marked], -1 - marked)
        code = anchor * len(self._names) + mark[marked]
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        launched = anchor[first] >= 0
        at = np.maximum(anchor[first], 0)
        own_start = self._section.gpu.column("start")[rows[marked[first]]]
        added = {
            "start_ns": own_start,
            "duration_ns": np.zeros_like(own_start),
            "name": mark[marked[first]],
            "thread": np.zeros_like(own_start),
            "parent": annotation[marked[first]],
        }
        if len(launches):
            for name, column in (
                ("start_ns", launches.start_ns),
                ("duration_ns", launches.duration_ns),
                ("thread", launches.thread),
            ):
                added[name] = np.where(launched, column[at], added[name])
        had = len(columns["start_ns"])
        annotation = annotation.copy()
        annotation[marked] = had + inverse
        merged = {name: np.concatenate([column, added[name]]) for name, column in columns.items()}
        order = np.argsort(merged["start_ns"], kind="stable")
        moved = np.full(len(order) + 1, -1, np.int64)
        moved[order] = np.arange(len(order))
        merged = {name: column[order] for name, column in merged.items()}
        merged["parent"] = moved[merged["parent"]]
        return merged, moved[annotation]

    def _ranges_of(self, process: int) -> Ranges:
        host = self._section.host
        duration = host.column("duration")
        rows = np.flatnonzero(
            (host.column("pid") == process)
            & (host.column("start") != NO_TIME)
            & (duration != BAD_DURATION)
            & (duration <= _WEEK_NS)
        )
        return Ranges.of(
            start=host.column("start")[rows],
            duration=duration[rows],
            name=host.column("name")[rows],
            thread=self._threads[host.column("tid")[rows]] if len(rows) else np.empty(0, np.int64),
            external=host.column("external")[rows],
            operator=host.column("operator")[rows],
        )

    def _clock_base(self, start: Int64) -> int | None:
        if len(start) and int(np.median(start)) >= _ABSOLUTE_NS:
            return 0
        base = self._section.metadatum("baseTimeNanoseconds")
        if isinstance(base, str) and base.isascii() and base.isdigit() and len(base) < 20:
            base = int(base)
        return base if isinstance(base, int) and 0 < base < 2**63 else None

    def _note_emptiness(self, activities: Activities, launches: Launches, notes: list[Caveat]) -> None:
        if self._shared:
            notes.append(
                Caveat(
                    CaveatCode.RANK_UNKNOWN,
                    f"{self._path}: {self._shared} rows of GPU work could belong to either of two processes that "
                    "share a device and its correlation ids: analyse one file per rank",
                    self._shared,
                )
            )
        elif self._guessed:
            notes.append(
                Caveat(
                    CaveatCode.RANK_UNKNOWN,
                    f"{self._path}: processes and devices match in every respect, and were paired in the order in "
                    "which they appear: analyse one file per rank",
                )
            )
        kernels = int((activities.kind == ActivityKind.KERNEL).sum())
        if kernels:
            return
        count = int(self._starts_kernels[launches.name].sum()) if len(launches) else 0
        if count:
            notes.append(
                Caveat(
                    CaveatCode.LAUNCHES_WITHOUT_KERNELS,
                    f"{self._path}: {count} launches but 0 kernels: GPU tracing was not active (another CUPTI client "
                    "such as nsys?): profile with torch.profiler alone",
                    count,
                )
            )
        else:
            notes.append(
                Caveat(
                    CaveatCode.NO_GPU_EVENTS,
                    f"no GPU kernel events in {self._path}: profile with CUDA activities on, while requests run",
                )
            )


_NEVER: Final = 2**62


def _lag(work: Work, launches: Work) -> Int64:
    """Time from its launch to each row of work; `_NEVER` where the process has no such launch before it."""
    launch = latest_launch(work, launches)
    if not len(launches.start):
        return np.full(len(work.start), _NEVER, np.int64)
    lag = work.start - launches.start[np.maximum(launch, 0)]
    return np.where((launch >= 0) & (lag >= 0), lag, _NEVER)


def _covers(ranges: Ranges, index: Int32, when: Int64) -> NDArray[np.bool_]:
    if not len(ranges):
        return np.zeros(len(index), np.bool_)
    at = np.maximum(index, 0)
    covered: NDArray[np.bool_] = (ranges.start[at] <= when) & (when < ranges.start[at] + ranges.duration[at])
    return covered


def _thread_ids(values: list[Any]) -> Int64:
    """A thread id per distinct `tid`: its number, or where it is text (or missing) one below all real ones."""
    return np.array(
        [value if isinstance(value, int) else -(2**40) - index for index, value in enumerate(values)], np.int64
    )
