"""The live breakdown of exactly a window: from the rings on this host, or from two scrapes of ``/metrics``."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vllm_k25_instrument.campaign.errors import CampaignError
from vllm_k25_instrument.campaign.files import write_json, write_text
from vllm_k25_instrument.campaign.load import WindowLoad
from vllm_k25_instrument.campaign.samples_file import write_samples
from vllm_k25_instrument.campaign.scrub import is_loopback
from vllm_k25_instrument.campaign.server import Server
from vllm_k25_instrument.instances import Instance, list_instances
from vllm_k25_instrument.model import LOST_REASONS, PHASES, Phase, unpack_columns
from vllm_k25_instrument.report.caveats import CaveatCode
from vllm_k25_instrument.report.ringset import look_at
from vllm_k25_instrument.ring import RingError, RingReader, open_rings, ring_paths

LIVE_FILE: Final = "live.json"
BEFORE: Final = "metrics-before.txt"
AFTER: Final = "metrics-after.txt"
STEPS_METRIC: Final = "vllm_k25_steps_total"

RING: Final = "ring"
METRICS: Final = "metrics"

_DECODE: Final = PHASES.index(Phase.DECODE)
_SAID_OF_SERVERS: Final = frozenset(
    {
        CaveatCode.RING_UNREADABLE,
        CaveatCode.NO_STEPS,
        CaveatCode.HOOK_ERRORS,
        CaveatCode.HOOK_MISSING,
        CaveatCode.HOOK_NEVER_FIRED,
    }
)
"""Caveats of rings that are true of a window too. The others are about what happened since the server started."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """How a ring stood: samples written, samples lost by reason, executed decode steps and their duration."""

    written: int = 0
    lost: tuple[int, ...] = (0,) * len(LOST_REASONS)
    steps: int = 0
    duration_ns: int = 0

    @classmethod
    def of(cls, reader: RingReader) -> _Mark:
        """As it stands now. Raises RingError."""
        totals = reader.totals()
        decode = totals.step_duration(_DECODE)
        lost = tuple(totals.lost(code) for code in range(len(LOST_REASONS)))
        return cls(reader.written, lost, decode.count, decode.sum_ns)


class RingSource:
    """The rings of one server instance on this host."""

    name = RING

    def __init__(self, instance: Path) -> None:
        self.instance = instance
        self._marks: dict[Path, _Mark] = {}

    def begin(self, folder: Path) -> None:
        """Remember how far the rings have been written."""
        self._marks = {}
        with _rings(self.instance) as readers:
            for reader in readers:
                self._marks[reader.path] = _Mark.of(reader)

    def end(self, load: WindowLoad, folder: Path) -> None:
        """Keep the samples of the steps that began within the load's time. Raises CampaignError where there is none."""
        kept = 0
        lost = dict.fromkeys(map(str, LOST_REASONS), 0)
        steps = duration_ns = 0
        with _rings(self.instance) as readers:
            for reader in readers:
                mark, now = self._marks.get(reader.path, _Mark()), _Mark.of(reader)
                packed, details = reader.packed(mark.written, reader.written)
                mine = [data for data in packed if load.begin_unix_ns <= _start(data) <= load.end_unix_ns]
                write_samples(folder, reader.identity, details, mine)
                kept += len(mine)
                steps += now.steps - mark.steps
                duration_ns += now.duration_ns - mark.duration_ns
                for reason, before, after in zip(LOST_REASONS, mark.lost, now.lost, strict=True):
                    lost[reason] = max(lost[reason], after - before)
            rings = look_at(readers)
            caveats = [caveat.to_json_dict() for caveat in rings.caveats() if caveat.code in _SAID_OF_SERVERS]
        write_json(
            folder / LIVE_FILE,
            {
                "source": RING,
                "instance": self.instance.name,
                "sample_every": rings.subject.sample_every,
                "ranks_expected": rings.ranks_expected,
                "decode": {"steps": steps, "duration_ns": duration_ns},
                "lost": {reason: count for reason, count in lost.items() if count},
                "warnings": caveats,
            },
        )
        if not kept:
            raise CampaignError(
                f"no sampled step in the window ({rings.subject.sampling}): set K25_SAMPLE_EVERY=1, or make windows "
                "longer with --requests-per-client and --output-tokens"
            )


def _start(data: bytes) -> int:
    return int(unpack_columns([data])["start_unix_ns"][0])


@contextmanager
def _rings(instance: Path) -> Iterator[list[RingReader]]:
    """The readable rings of an instance. Raises CampaignError where there is none, or one goes bad."""
    readers, errors = open_rings(instance)
    if not readers:
        why = str(errors[0]) if errors else f"{instance}: no ring there any more"
        raise CampaignError(why)
    try:
        yield readers
    except RingError as error:
        raise CampaignError(str(error)) from error
    finally:
        for reader in readers:
            reader.close()


class MetricsSource:
    """Two scrapes of our metrics, around a window. They hold sums and counts: no percentiles, no gaps between steps."""

    name = METRICS

    def __init__(self, server: Server) -> None:
        self._server = server

    def begin(self, folder: Path) -> None:
        """The scrape before. Raises CampaignError, ServerGoneError."""
        write_text(folder / BEFORE, self._scrape())

    def end(self, load: WindowLoad, folder: Path) -> None:
        """The scrape after."""
        write_text(folder / AFTER, self._scrape())
        write_json(folder / LIVE_FILE, {"source": METRICS, "warnings": []})

    def _scrape(self) -> str:
        text = self._server.metrics()
        if text is None:
            raise CampaignError(f"{self._server.url}/metrics is not there any more")
        return text


class NoSource:
    """Nothing live. vLLM's own metrics are kept all the same: they tell whether requests had to queue."""

    name = ""

    def __init__(self, server: Server) -> None:
        self._server = server

    def begin(self, folder: Path) -> None:
        """The scrape before, where there are metrics."""
        self._keep(folder / BEFORE)

    def end(self, load: WindowLoad, folder: Path) -> None:
        """The scrape after."""
        self._keep(folder / AFTER)
        write_json(folder / LIVE_FILE, {"source": "", "warnings": []})

    def _keep(self, path: Path) -> None:
        text = self._server.metrics()
        if text is not None:
            write_text(path, text)


LiveSource = RingSource | MetricsSource | NoSource


def decode_steps(ring_dir: Path) -> dict[Path, int]:
    """Executed decode steps of each living instance below `ring_dir` (or of the one that it is)."""
    found: dict[Path, int] = {}
    for instance in [Instance(ring_dir)] if ring_paths(ring_dir) else list_instances(ring_dir):
        if not instance.alive:
            continue
        readers, _ = open_rings(instance.path)
        try:
            steps = [reader.totals().steps(_DECODE) for reader in readers]
        except RingError:
            steps = []
        finally:
            for reader in readers:
                reader.close()
        if steps:
            found[instance.path] = max(steps)
    return found


def is_this_host(host: str) -> bool:
    """Whether a host is this machine: loopback, its own name, or one of its addresses."""
    if is_loopback(host) or host in (socket.gethostname(), socket.getfqdn()):
        return True
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return any(_is_own(str(address)) for address in addresses)


def _is_own(address: str) -> bool:
    """An address can be bound to on the machine that has it, and on no other."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def choose_source(
    server: Server, ring_dir: Path, before: Mapping[Path, int], least: int, metrics: str | None
) -> tuple[LiveSource, str]:
    """Where the live breakdown comes from, and why from there, after a warm-up of at least `least` decode steps.

    `before` are the decode steps of the instances before the warm-up, `metrics` the server's ``/metrics`` after it.
    Rings are taken only where the warm-up has moved them: another server's would tell of another load.
    """
    exported = metrics is not None and STEPS_METRIC in metrics
    reason = "the server is on another machine"
    if is_this_host(server.host):
        after = decode_steps(ring_dir)
        moved = [path for path, steps in after.items() if steps - before.get(path, 0) >= least]
        if len(moved) == 1:
            return RingSource(moved[0]), f"rings of instance {moved[0].name}"
        if len(moved) > 1:
            reason = f"{len(moved)} servers worked during the warm-up: name the rings of this one with --rings"
        elif after:
            reason = f"no ring in {ring_dir} moved with the load: these are another server's, name its own with --rings"
        else:
            reason = f"no living server has rings in {ring_dir}"
    if exported:
        return MetricsSource(server), f"differences of {server.url}/metrics, without percentiles and gaps ({reason})"
    return NoSource(server), (
        f"no live breakdown: {reason}, and its /metrics has none of ours: start the server with K25_INSTRUMENT=1"
    )


def parents_of(pid: int) -> Iterable[int]:
    """A process and those above it, as far as this machine shows them."""
    while pid > 1:
        yield pid
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            return
        pid = int(fields[1])


def worker_pid(instance: Path) -> int | None:
    """The process id of a worker of this instance; None where it is not to be had."""
    readers, _ = open_rings(instance)
    try:
        return next((reader.identity.pid for reader in readers), None)
    except RingError:
        return None
    finally:
        for reader in readers:
            reader.close()


def tensor_parallel(instance: Path) -> int | None:
    """The size of this instance's tensor-parallel group; None where that is not to be had."""
    readers, _ = open_rings(instance)
    try:
        return next((reader.identity.coordinates.tp_size for reader in readers), None)
    except RingError:
        return None
    finally:
        for reader in readers:
            reader.close()


def read_live(folder: Path) -> dict[str, Any]:
    """``live.json`` of a window, empty where it has none. Raises CampaignError where it is damaged."""
    import json

    path = folder / LIVE_FILE
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CampaignError(f"{path}: cannot be read: {error}") from error
    return document if isinstance(document, dict) else {}


def own_ring_directory() -> Path:
    """Where servers of this user have their rings, as the settings say."""
    from vllm_k25_instrument.settings import SettingsError, load_settings

    try:
        return load_settings().ring_dir
    except SettingsError as error:
        raise CampaignError(str(error)) from error
