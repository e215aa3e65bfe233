"""What a worker process gets: a ring, a recorder, the hooks.

Everything starts when vLLM constructs its Worker object, which is what makes a process a worker: a process of its
own under tensor parallelism, the engine's process with one rank, the user's own process in offline use.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_k25_instrument import __version__, markers
from vllm_k25_instrument.hooks.layers import KINDS, layers_of
from vllm_k25_instrument.hooks.patcher import Patcher, version_matches
from vllm_k25_instrument.hooks.point import HookPoint, HookState
from vllm_k25_instrument.hooks.table import HOOK_TABLE, READ_VLLM, TESTED_VLLM
from vllm_k25_instrument.instances import instance_of_engine, launched_together, open_instance
from vllm_k25_instrument.log import logger
from vllm_k25_instrument.model import RankCoordinates, RankIdentity
from vllm_k25_instrument.recorder.cuda import CudaDevice, in_graph_timing_problem
from vllm_k25_instrument.recorder.device import HostClock
from vllm_k25_instrument.recorder.recorder import Recorder
from vllm_k25_instrument.ring import RingLayout, RingWriter, ring_file_name
from vllm_k25_instrument.settings import GraphTiming, Settings


class WorkerInstrument:
    """The instrument of one worker."""

    def __init__(self, settings: Settings, instance: str, worker: Any, *, hooks: bool = True) -> None:
        """`worker`: vLLM's freshly constructed Worker. Without `hooks`, only what vLLM's source marks is timed.

        Raises OSError where the ring cannot be made.
        """
        config = worker.vllm_config
        self._engine = engine_of(config)
        instance = instance_of_engine(settings.ring_dir, instance, self._engine)
        identity = RankIdentity(
            instance=instance,
            pid=os.getpid(),
            coordinates=coordinates_of(config, worker.rank, worker.local_rank),
            model=str(config.model_config.served_model_name or config.model_config.model),
            vllm_version=vllm_version(),
            plugin_version=__version__,
            sample_every=settings.sample_every,
            started_unix_ns=time.time_ns(),
            device=device_kind(),
        )
        folder = open_instance(settings.ring_dir, instance).path
        planned = RingLayout.plan(settings.ring_samples, settings.ring_bytes)
        self.ring = RingWriter(folder / ring_file_name(identity.coordinates.global_rank), identity, planned)
        if self.ring.layout != planned:
            logger.warning(
                "K25: %s is short of space: the ring holds %d samples instead of %d",
                settings.ring_dir,
                self.ring.layout.slots,
                planned.slots,
            )
        self._worker = worker
        self._logged: set[str] = set()
        try:
            self._equip(settings, hooks)
        except BaseException:
            # A living ring without a single step would look like a server that hangs.
            self.ring.path.unlink(missing_ok=True)
            raise

    def _equip(self, settings: Settings, hooks: bool) -> None:
        identity = self.ring.identity
        attached = (
            markers.attach(f"rank={identity.coordinates.global_rank} world_size={identity.coordinates.world_size}")
            if settings.nvtx
            else None
        )
        device: Any = CudaDevice() if identity.device == "cuda" else HostClock()
        self.recorder = Recorder(
            self.ring,
            device,
            sample_every=settings.sample_every,
            on_error=self._on_error,
            markers=attached,
            graph_hint=_only_graph_mode(self._worker.vllm_config),
            on_first_step=self._model_loaded,
        )
        if isinstance(device, CudaDevice):
            self._time_graphs(settings, device)
        self.patcher = Patcher(
            HOOK_TABLE,
            self.recorder,
            vllm_version=identity.vllm_version,
            categories=settings.categories,
            replaces=hooks,
            on_change=self._hooks_changed,
        )

    @property
    def path(self) -> Path:
        return self.ring.path

    def another(self, worker: Any) -> None:
        """VLLM has constructed another worker in this process. There is one recorder, as there is one set of hooks."""
        if engine_of(worker.vllm_config) != self._engine:
            logger.warning(
                "K25: another engine in this process: its steps are recorded as the first one's, in %s", self.path
            )

    def start(self) -> None:
        """Put the hooks in place."""
        self.patcher.install()
        self._hooks_changed()
        identity = self.ring.identity
        say_how_well_known(identity.vllm_version)
        logger.info(
            "K25: instrumenting rank %d, every %d steps, ring %s",
            identity.coordinates.global_rank,
            identity.sample_every,
            self.ring.path,
        )

    def _time_graphs(self, settings: Settings, device: CudaDevice) -> None:
        if settings.graphs is GraphTiming.OFF:
            return
        problem = in_graph_timing_problem()
        if problem:
            logger.warning("K25: CUDA graphs are not timed: %s; their steps have a duration only", problem)
            return
        from vllm_k25_instrument.recorder.graphs import TimedGraphs, all_ranks_agree

        TimedGraphs(
            self.recorder,
            device,
            settings.graphs,
            sizes=settings.graph_sizes,
            agree=all_ranks_agree,
            on_captured=self._twins_captured,
        )

    def _twins_captured(self, nbytes: int, capture_ns: int) -> None:
        self.ring.totals.add_twins(nbytes, capture_ns)
        self.ring.publish()

    def _model_loaded(self) -> None:
        """All that the model needs is imported: look again for what was not there, and say what is missing."""
        runner = getattr(self._worker, "model_runner", None)
        layers = self._find_layers(runner)
        kind = type(runner)
        self.ring.set_identity(
            replace(self.ring.identity, runner=f"{kind.__module__}.{kind.__qualname__}", layers=layers)
        )
        self.patcher.retry()
        self._warn_of_missing_targets()

    def _warn_of_missing_targets(self) -> None:
        """A line per hook that has lost targets: all of them, or some, the others being in use."""
        states = self.patcher.states
        missing: dict[str, list[str]] = {}
        for point, state in states.items():
            if state is HookState.MISSING:
                missing.setdefault(point.name, []).append(point.id)
        for name, targets in missing.items():
            lost_all = self.patcher.states_by_name()[name] == HookState.MISSING
            logger.warning(
                "K25: vLLM %s has no target for hook %s%s (%s is gone); its time will show as unattributed",
                self.ring.identity.vllm_version,
                name,
                "" if lost_all else " in one place",
                ", ".join(targets),
            )

    def _find_layers(self, runner: Any) -> dict[str, int]:
        """How many layers of which kind the model has; {} where it cannot be told."""
        try:
            layers = layers_of(runner)
        except Exception as error:
            logger.warning("K25: the model's layers cannot be counted: %s: %s", type(error).__name__, error)
            return {}
        unknown = {kind: count for kind, count in layers.items() if kind not in KINDS}
        if unknown:
            logger.warning(
                "K25: no hook for %s; their time will show as unattributed",
                ", ".join(f"{count} {kind}" for kind, count in sorted(unknown.items())),
            )
        return layers

    def _hooks_changed(self) -> None:
        states = self.patcher.states_by_name()
        if states != self.ring.identity.hooks:
            self.ring.set_identity(replace(self.ring.identity, hooks=states))

    def _on_error(self, point: HookPoint | None, error: Exception) -> None:
        """An error in our own code: counted, logged once, and the hook goes quiet. Never raises."""
        try:
            where = point.id if point is not None else "recorder"
            if point is not None:
                self.ring.totals.add_hook_error(point.index)
                self.patcher.quiet(point)
            if where not in self._logged:
                self._logged.add(where)
                logger.error("K25: error in %s; it goes quiet, vLLM is not affected", where, exc_info=error)
        except Exception:
            logger.exception("K25: error while handling an error")


def coordinates_of(config: Any, rank: int, local_rank: int) -> RankCoordinates:
    """A worker's coordinates from vLLM's configuration.

    vLLM numbers ranks with tensor parallelism innermost, then prefill-context parallelism, then pipeline
    (`parallel_state.initialize_model_parallel`); each data-parallel replica counts from 0 for itself. The replicas of a
    model without experts are engines of their own: vLLM tells each that there is one of them, rank 0, and leaves only
    its index (`ParallelConfig.reconfigure_for_independent_dp_rank`), so that `dp_size` is at least what that implies.
    """
    parallel = config.parallel_config
    tp_size = parallel.tensor_parallel_size
    pp_size = parallel.pipeline_parallel_size
    pcp_size = getattr(parallel, "prefill_context_parallel_size", 1)
    dp = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
    dp_size = max(parallel.data_parallel_size, dp + 1)
    replica = tp_size * pp_size * pcp_size
    in_replica = rank % replica
    tp = in_replica % tp_size
    return RankCoordinates(
        global_rank=dp * replica + in_replica,
        local_rank=local_rank,
        tp=tp,
        pp=in_replica // (tp_size * pcp_size),
        dp=dp,
        ep=dp * tp_size * pcp_size + in_replica % (tp_size * pcp_size)
        if getattr(parallel, "enable_expert_parallel", False)
        else -1,
        tp_size=tp_size,
        pp_size=pp_size,
        dp_size=dp_size,
    )


def engine_of(config: Any) -> str:
    """What the workers of one engine and its data-parallel replicas have in common, and no other engine has."""
    if launched_together():  # each process has made its own configuration; there is one engine
        return "torchrun"
    # Ray's data-parallel replicas append their number.
    return re.sub(r"_dp\d+$", "", str(getattr(config, "instance_id", "")))


def say_how_well_known(version: str) -> None:
    """A warning of a vLLM whose sources nobody has looked at; a line of one that the suite does not run against."""
    if not version_matches(version, READ_VLLM):
        logger.warning(
            "K25: vLLM %s is not known to vllm-k25-instrument %s (%s is); hooks whose targets are gone are left out",
            version or "of unknown version",
            __version__,
            READ_VLLM,
        )
    elif not version_matches(version, TESTED_VLLM):
        logger.info("K25: the targets in vLLM %s are known; the test suite runs against %s", version, TESTED_VLLM)


def device_kind() -> str:
    """Whose clock this process's steps are timed by: ``cuda`` on NVIDIA and AMD GPUs, else ``host``."""
    from vllm.platforms import current_platform

    return "cuda" if current_platform.is_cuda_alike() else "host"


def _only_graph_mode(config: Any) -> str:
    """``none`` where vLLM will not use CUDA graphs at all, else "" (it is decided step by step)."""
    mode = getattr(getattr(config, "compilation_config", None), "cudagraph_mode", None)
    return "none" if getattr(mode, "name", "") == "NONE" else ""


def vllm_version() -> str:
    """The installed vLLM's version, "" where it cannot be told."""
    try:
        from vllm.version import __version__ as version

        return str(version)
    except Exception:
        return ""
